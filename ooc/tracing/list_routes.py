"""Keeps the parts of a list op on the route that the whole list takes.

On CUDA a `_foreach_*` op has two routes: one kernel for many tensors, or a loop of one op for each, and it picks by the
whole list: one tensor with another dtype or other strides than it should have sends all of them through the loop. Cut
in parts, the parts without such a tensor would take the kernel, whose bits may be others.

[Note: fast route] The conditions are those of torch's `ForeachUtils.h`: all tensors of all lists have the dtype and the
device of the first, are dense, and have the sizes and strides of the first list's tensor at their index. Scalars decide
by dtype alone, so equally for the whole and its parts. `_foreach_copy_` does not ask for one dtype, but its bits are
the same on both routes. The loop is what torch registers for all devices (CompositeExplicitAutograd).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LoopedOp", "same_route"]

_LOOP = torch._C.DispatchKey.CompositeExplicitAutograd


class LoopedOp:
    """A list op by its loop, posing as an operator overload: what the recorder and the dispatcher ask of one."""

    def __init__(self, func: Any) -> None:
        self.func = func
        self._op = functools.partial(func._op_dk, _LOOP)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)

    def __str__(self) -> str:
        return f"{self.func} (looped)"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._op(*args, **kwargs)


def same_route(func: Any, lists: Sequence[Sequence[Tensor]]) -> Any:
    """What to call for parts of these lists instead of `func`, so that each goes the way of the whole."""
    if not lists or not lists[0] or lists[0][0].device.type != "cuda" or _takes_kernel(lists):
        return func
    return _looped(func)


@functools.cache
def _looped(func: Any) -> Any:
    """One object for each op, since a plan compares by identity. The op itself where torch has no loop."""
    has_loop = torch._C._dispatch_has_kernel_for_dispatch_key(func._schema.name + _overload(func), _LOOP.name)
    return LoopedOp(func) if has_loop else func


def _overload(func: Any) -> str:
    name = func._schema.overload_name
    return f".{name}" if name else ""


def _takes_kernel(lists: Sequence[Sequence[Tensor]]) -> bool:
    first = lists[0][0]
    for index, wanted in enumerate(lists[0]):
        for tensors in lists:
            tensor = tensors[index]
            if (
                tensor.dtype != first.dtype
                or tensor.device != first.device
                or tensor.layout is not torch.strided
                or tensor.shape != wanted.shape
                or tensor.stride() != wanted.stride()
                or not (tensor.is_contiguous() or _is_dense(tensor))
            ):
                return False
    return True


def _is_dense(tensor: Tensor) -> bool:
    """Whether some order of its dimensions is contiguous."""
    step = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != step:
            return False
        step *= length
    return True
