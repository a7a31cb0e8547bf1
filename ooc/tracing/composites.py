"""Composite ops, made of others alone, in inference mode.

Torch takes them apart before they come to a dispatch mode, but not in inference mode, where they come whole. As one op
they would run with all that they make in memory, and be other ops than those without inference. So they are taken apart
here, as ooc/dispatch/native/boxed.cpp does where it can be built.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

_Key = torch._C.DispatchKey
BELOW_MODES = torch._C._dispatch_keyset_full_after(_Key.Python)
"""The dispatch keys of what runs below a mode."""


def keys_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """The dispatch keys of the tensors among an op's arguments; None: there are none."""
    found = [torch._C._dispatch_keys(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return functools.reduce(operator.or_, found) if found else None


def comes_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op came whole that is made of others alone. Not on tensors of a class that dispatches for itself."""
    if not torch.is_inference_mode_enabled() or not _is_composite(func):
        return False  # nearly always
    keys = keys_of(args, kwargs)
    if keys is None or keys.has(_Key.Python) or torch._C._functorch.maybe_current_level() is not None:
        return False
    return is_made_of_others(func, (keys & BELOW_MODES).highestPriorityTypeId().name)


def is_made_of_others(func: Any, key: str) -> bool:
    """Whether what torch has for an op on tensors of this dispatch key is made of other ops alone."""
    return _is_composite(func) and not (key.startswith("Nested") or _has_kernel(func, key))


def take_apart(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, mode: TorchDispatchMode, outside: int | None
) -> Any:
    """Run it, with the ops that it is made of coming to the mode, which is off now.

    `outside`: the dispatch keys that were off where it came from (`Dispatcher.outside_keys`).
    """
    with ExitStack() as stack:
        if outside is None:
            stack.enter_context(torch._C._RestorePythonTLSSnapshot())
        else:
            included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C.DispatchKeySet
            stack.enter_context(torch._C._ForceDispatchKeyGuard(included, excluded.from_raw_repr(outside)))
        stack.enter_context(_on(mode))
        return func._op_dk(_Key.CompositeImplicitAutograd, *args, **kwargs)


@contextmanager
def _on(mode: TorchDispatchMode) -> Iterator[None]:
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()


@functools.cache
def _is_composite(func: Any) -> bool:
    own = "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
    if not (isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel(func.name())):
        return False  # `prim::device` has none at all
    return [_has_kernel(func, key) for key in own] == [True, False, False]


@functools.cache
def _has_kernel(func: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
