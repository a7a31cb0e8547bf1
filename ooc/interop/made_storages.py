"""Storages that torch makes without an op: copies of storages (`copy.deepcopy`), `torch.UntypedStorage(nbytes)`.

Their memory comes from torch's built-in allocator, whatever allocator is set: it would be outside of the budget. While
a session is open they are made by an op, so that large ones are variables like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def replacements() -> list[tuple[Any, str, Callable[[Any, Any], Any]]]:
    """The functions to replace: owner, name, and what makes the replacement."""
    storage = torch.UntypedStorage
    return [(storage, "clone", _make_cloning), (storage, "__new__", _make_new)]


def _make_cloning(_exports: Any, original: Any) -> Any:
    def clone(self: torch.UntypedStorage) -> Any:
        made = _made(self.nbytes()) if self.device.type == "cpu" and type(self) is torch.UntypedStorage else None
        return original(self) if made is None else made.copy_(self, False)

    return clone


def _make_new(_exports: Any, original: Any) -> Any:
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        is_size = len(args) == 1 and type(args[0]) is int and not kwargs and cls is torch.UntypedStorage
        made = _made(args[0]) if is_size else None
        return original(cls, *args, **kwargs) if made is None else made

    return new


def _made(nbytes: int) -> torch.UntypedStorage | None:
    """A new storage, made by an op. None if that has given something else (a fake one)."""
    storage = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
    return storage if storage.device.type == "cpu" and storage.nbytes() == nbytes else None
