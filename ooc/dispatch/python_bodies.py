"""Ops whose kernels are Python functions (`torch.library`): what such a function uses beside its arguments.

It may name any tensor: a global table, a weight of its module. While an op runs our mode is off, so nobody would see
that, and the tensor may be away. So another mode is on within the function. The ops in it run as they would without,
and are none of the step's; but a variable that is neither an argument, nor was made in there, is given out
(`ooc.interop.exports`) before the first op on it: from then on its address shows its bytes at any time.

Not seen: kernels in C++ that use tensors which they are not given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ooc.dispatch.extension import leave_unnoticed
from ooc.replay.dispatcher import Dispatcher
from ooc.tracing.composites import BELOW_MODES, keys_of
from ooc.tracing.op_semantics import REGION_NAMESPACE

_KEYS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CPU", "CUDA", "Python")
"""Those of kernels that run below a dispatch mode, and compute."""
_TORCHS_OWN = frozenset({"prims", "rngprims", "debug_mode_ops", "c10d", "export", "_native", REGION_NAMESPACE})
"""Namespaces in which torch itself has Python functions. They use what they are given."""

_OF_NO_TENSOR = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@functools.cache
def has_python_body(func: Any) -> bool:
    """Whether a kernel of an op is a Python function of the program's."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace in _TORCHS_OWN or not isinstance(func, torch._ops.OpOverload):
        return False
    name = schema.name.replace("::", "/") + (f".{schema.overload_name}" if schema.overload_name else "")
    return any(f"{name}/{key}" in torch.library._impls for key in _KEYS)


class BodyMode(TorchDispatchMode):
    """Is on while an op's Python function runs; entered right before the op is called.

    Args:
        func: The op.
        known: Addresses of its operands.
        addresses: Which variables an op's arguments or results are of.
        give_out: Called with the address of each other variable that is used.
    """

    def __init__(
        self,
        func: Any,
        known: set[int],
        *,
        addresses: Callable[..., list[int]],
        give_out: Callable[[int], object],
    ) -> None:
        super().__init__()
        _leave_unnoticed()
        self._func = func
        self._known = known
        self._addresses = addresses
        self._give_out = give_out
        self._is_within = False

    def __torch_dispatch__(
        self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_within:
            return self._run(func, args, kwargs)
        if func is not self._func:
            return func(*args, **kwargs)  # the session's own, before the op begins
        self._is_within = True
        with self:
            return func.redispatch(_keys(args, kwargs), *args, **kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of the function."""
        for address in self._addresses(*args, *kwargs.values()):
            if address not in self._known:
                self._give_out(address)
                self._known.add(address)
        if has_python_body(func):
            inner = BodyMode(func, self._known, addresses=self._addresses, give_out=self._give_out)
            with inner:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._known.update(self._addresses(result))
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The function compiles what it would without the mode."""
        return True


@functools.cache
def _leave_unnoticed() -> None:
    leave_unnoticed(BodyMode)


def run_watched(
    run: Run,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dispatcher: Dispatcher,
    give_out: Callable[[int], object],
) -> Any:
    """Run an op with a Python function for a kernel, by `run`, which calls it."""
    known = set(dispatcher.operands(*args, *kwargs.values()))
    with BodyMode(func, known, addresses=dispatcher.operands, give_out=give_out):
        return run(func, args, kwargs)


def _keys(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dispatch keys of a call, below modes."""
    keys = keys_of(args, kwargs)
    return (keys if keys is not None else _OF_NO_TENSOR) & BELOW_MODES
