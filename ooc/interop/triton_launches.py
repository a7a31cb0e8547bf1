"""Launches of Triton kernels (`kernel[grid](...)`) as opaque ops: no dispatch mode sees them.

While a session is open, the methods by which Triton launches a kernel are replaced: each launch is one op of the step,
as if the kernel had been declared by `ooc.opaque`. Its tensor arguments are loaded and pinned, and count as written.
Inside an op that torch does see (`torch.library.triton_op`, `custom_op`) a launch is a part of that op.

What is replaced: `run` of a kernel (and of one that is interpreted), where decorators as `autotune` end, too; and what
indexing a compiled kernel by a grid returns. [Note: Triton's interface] These names are the same from Triton 2.1 to
3.5; one that is missing is left out. Triton itself has not run here: tests have a stand-in, the GPU gate a kernel.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ooc.interop.opaque_ops import OpaqueOp, run_opaque

__all__ = ["TritonLaunches"]

_log = logging.getLogger(__name__)

_LAUNCHERS = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.interpreter", "InterpretedFunction"))
_COMPILED = ("triton.compiler.compiler", "CompiledKernel")
_OP = "_ooc_op"


class TritonLaunches:
    """Replaces Triton's launching methods while a session is open.

    Args:
        imports: Import Triton if it is installed, since a program may do so later. Else only if it is imported already.
    """

    def __init__(self, *, imports: bool) -> None:
        self._imports = imports
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __repr__(self) -> str:
        return f"<TritonLaunches, {len(self._replaced)} methods replaced>"

    def open(self) -> None:
        """Replace what there is. Without Triton: nothing."""
        if self._imports and importlib.util.find_spec("triton") is not None:
            try:
                importlib.import_module("triton")
            except Exception as error:  # noqa: BLE001 - a broken installation raises whatever it likes
                _log.warning("triton is installed and cannot be imported (%s): its launches are not seen", error)
        for module, name in _LAUNCHERS:
            kind: Any = getattr(sys.modules.get(module), name, None)
            if hasattr(kind, "run"):
                self._replace(kind, "run", _launching(kind.run))
        compiled: Any = getattr(sys.modules.get(_COMPILED[0]), _COMPILED[1], None)
        if hasattr(compiled, "__getitem__"):
            self._replace(compiled, "__getitem__", _indexing(compiled.__getitem__))

    def close(self) -> None:
        """Put them back, where nobody has replaced ours. Idempotent."""
        while self._replaced:
            owner, name, ours, before = self._replaced.pop()
            if getattr(owner, name) is ours:
                setattr(owner, name, before)

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        self._replaced.append((owner, name, ours, getattr(owner, name)))
        setattr(owner, name, ours)


class LaunchOp(OpaqueOp):
    """The launches of one kernel, as one kind of op."""

    def __init__(self, kernel: Any) -> None:
        super().__init__(functools.partial(_launch_now, kernel), name=f"triton.{_name_of(kernel)}")


def _launching(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("warmup"):  # compiles, and launches nothing
            return run(kernel, *args, **kwargs)
        return _launch(kernel, run, args, kwargs)

    return launched


def _indexing(getitem: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(getitem)
    def indexed(kernel: Any, grid: Any) -> Any:
        runner = getitem(kernel, grid)

        @functools.wraps(runner)
        def launched(*args: Any, **kwargs: Any) -> Any:
            return _launch(kernel, lambda _, *args, **kwargs: runner(*args, **kwargs), args, kwargs)

        return launched

    return indexed


def _launch(kernel: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Launch as an opaque op: always the same for a kernel, so that plans know it again."""
    op = vars(kernel).get(_OP)
    if op is None:
        op = vars(kernel)[_OP] = LaunchOp(kernel)
    return run_opaque(op, (run, tuple(_held_tensors((*args, *kwargs.values()))), *args), kwargs)


def _launch_now(kernel: Any, run: Callable[..., Any], _held: Any, *args: Any, **kwargs: Any) -> Any:
    return run(kernel, *args, **kwargs)


def _held_tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors that Triton's own wrappers hold (`reinterpret`, descriptors); the dispatcher finds the others."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _held_tensors(value)
        elif not isinstance(value, torch.Tensor):
            base = getattr(value, "base", None)
            if isinstance(base, torch.Tensor):
                yield base


def _name_of(kernel: Any) -> str:
    function = getattr(kernel, "fn", kernel)
    return str(getattr(function, "__qualname__", None) or getattr(kernel, "name", None) or type(kernel).__name__)
