"""Opaque ops: functions that the dispatcher cannot see into, each call of which a session treats as one op.

The operands of a raw pybind extension, or of a Triton or ctypes kernel launched without `torch.library`, are
invisible to a dispatch mode, so a plan could have evicted one of them. `opaque(fn)` declares such a function. Under a
session a call of it is one op: the tensors among its arguments are loaded and pinned for its length, all of them count
as written, and the call is traced, planned and checked like any ATen op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.utils._python_dispatch import _disable_current_modes

from ooc.interop.exports import within_op
from ooc.tracing.op_semantics import UnknownSchema

P = ParamSpec("P")
R = TypeVar("R")

_run_in_session: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None
"""Runs an opaque op as an op of the open session; None without a session."""


def set_runner(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None) -> None:
    """Let `run` run opaque ops from now on; None: run them as plain functions."""
    global _run_in_session
    _run_in_session = run


class OpaqueOp:
    """A function with the interface of an operator overload, as far as recorder and dispatcher use it."""

    namespace = "ooc_opaque"

    def __init__(self, fn: Callable[..., Any], *, name: str = "") -> None:
        self.fn = fn
        self.name = name or f"{fn.__module__}.{getattr(fn, '__qualname__', repr(fn))}"
        self._schema = UnknownSchema(f"ooc_opaque::{self.name}")

    def __str__(self) -> str:
        return f"ooc_opaque.{self.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._op(*args, **kwargs)

    def _op(self, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), within_op():  # what it dispatches is part of this op
            return self.fn(*args, **kwargs)


def opaque(fn: Callable[P, R]) -> Callable[P, R]:
    """Declare a function that touches its tensor arguments behind the dispatcher's back.

    Tensors are found in the arguments, and in tuples, lists and dicts among them; what the function
    reaches by other ways (a global, an attribute of an object) it must be given as an argument, or
    the caller must hold by `session.resident(tensor)`.

    Args:
        fn: Any callable. Works as a decorator. Without an open session it is called as it is.
    """
    op = OpaqueOp(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_opaque(op, args, kwargs)  # type: ignore[no-any-return]

    return call


def run_opaque(op: OpaqueOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an opaque op as an op of the open session; without one, as the plain function that it is."""
    if _run_in_session is None:
        return op.fn(*args, **kwargs)
    return _run_in_session(op, args, kwargs)
