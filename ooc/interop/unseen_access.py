"""Functions of torch's that read or write a tensor's memory without an op, on all of the tensors that they are given.

`Tensor.apply_`, `map_` and `map2_` write element by element; a storage that grows copies itself, or is filled from a
file; `print` shows what is at the addresses; `torch.tensor`, all other constructors, and lists as indices ask each
single element in a list of tensors for its number (`__float__`), with dispatch modes excluded. No dispatch mode sees
any of that. Within a planned step these addresses may show another variable's bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from ooc.dispatch.guest_ops import is_guest


class Lender(Protocol):
    """What they need of `Exports`; see there."""

    def address(self, tensor: Any) -> int: ...
    def owns(self, address: int) -> bool: ...
    def reading(self, address: int) -> contextlib.AbstractContextManager[None]: ...
    def still(self) -> contextlib.AbstractContextManager[None]: ...


def replacements() -> list[tuple[Any, str, Callable[[Any, Any], Any]]]:
    """The functions to replace: owner, name, and what makes the replacement."""
    tensor, storage = torch.Tensor, torch.UntypedStorage
    return [
        *((tensor, name, _make_touching) for name in ("apply_", "map_", "map2_", "__repr__")),
        *((owner, "set_rng_state", _make_touching) for owner in (torch, torch.random)),
        *((tensor, name, _make_scalar) for name in ("__float__", "__int__", "__index__", "__bool__", "__complex__")),
        *((storage, name, _make_storage_touching) for name in ("resize_", "byteswap", "_set_from_file")),
    ]


def storage_pointer(storage: Any) -> int:
    """The address of a storage on the CPU, else 0."""
    if storage.device.type != "cpu":
        return 0
    pointer: int = torch._C.StorageBase.data_ptr(storage)
    return pointer


def _make_touching(lender: Lender, original: Any) -> Any:
    def touching(*args: Any, **kwargs: Any) -> Any:
        found = dict.fromkeys(lender.address(tensor) for tensor in _tensors((*args, *kwargs.values())))
        found.pop(0, None)
        if not found:
            return original(*args, **kwargs)
        with _held(lender, found):
            return original(*args, **kwargs)

    return touching


def _make_scalar(lender: Lender, original: Any) -> Any:
    """Replace a function that gives a tensor's one number: by an op that a mode sees, but where modes are excluded."""
    is_excluded, python_key = torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.Python

    def scalar(self: torch.Tensor) -> Any:
        if not is_excluded(python_key) or not (address := lender.address(self)):
            return original(self)
        with _held(lender, [address]):
            return original(self)

    return scalar


def _make_storage_touching(lender: Lender, original: Any) -> Any:
    def touching(self: Any, *args: Any) -> Any:
        pointer = storage_pointer(self)
        if not lender.owns(pointer) or args[:1] == (0,):  # what shrinks to nothing copies nothing
            return original(self, *args)
        with _held(lender, [pointer]):
            return original(self, *args)

    return touching


@contextlib.contextmanager
def _held(lender: Lender, addresses: Iterable[int]) -> Iterator[None]:
    """What is at these addresses shows its bytes, and may be written, for the length of a call."""
    with contextlib.ExitStack() as stack:
        if is_guest():
            stack.enter_context(lender.still())
        else:
            for address in addresses:
                stack.enter_context(lender.reading(address))
        yield


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
