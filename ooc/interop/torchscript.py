"""TorchScript's own access to memory: it serialises, and traces, below the dispatcher.

The serialiser reads a module's tensors in C++. Tracing runs the program, but what it runs is only noted where no
dispatch mode is on: under one, a traced convolution is a constant. Neither says which variables it will use, so all of
them are exported meanwhile, and modes are off (`Exports.everything`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

_SAVING = ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile")
_TRACING = ("_create_function_from_trace", "_create_function_from_trace_with_dict", "_create_graph_by_tracing")
_TRACING_METHODS = ("_create_method_from_trace", "_create_method_from_trace_with_dict")


class EverythingLender(Protocol):
    """What is needed of `Exports`; see there."""

    def everything(self) -> contextlib.AbstractContextManager[None]: ...


def replacements() -> list[tuple[Any, str, Callable[[Any, Any], Any]]]:
    """The functions to replace: owner, name, and what makes the replacement. Those that this torch has."""
    native = torch._C
    wanted: list[tuple[Any, tuple[str, ...]]] = [
        (native.ScriptModule, (*_SAVING, *_TRACING_METHODS)),
        (native.ScriptFunction, _SAVING),
        (native.Graph, ("_export_onnx",)),
        (native, _TRACING),
    ]
    return [(owner, name, _make_reaching) for owner, names in wanted for name in names if hasattr(owner, name)]


def _make_reaching(lender: EverythingLender, original: Any) -> Any:
    def reaching(*args: Any, **kwargs: Any) -> Any:
        with lender.everything():
            return original(*args, **kwargs)

    return reaching
