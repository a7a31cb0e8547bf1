"""What the ops go through that a kernel calls: as in an op's own run, so when it is run again.

An op runs with the dispatch keys on that were on where it came from (native/outside.h): within autocast a kernel that
is made of products has them cast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

_DEVICE_TYPES = "cpu", "cuda"


def _raw(name: str) -> int:
    raw: int = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[name]).raw_repr()
    return raw


_AUTOCAST = {device_type: _raw(f"Autocast{device_type.upper()}") for device_type in _DEVICE_TYPES}


class InnerKeys(NamedTuple):
    """The device types for which what a kernel calls is cast, each with the type that it is cast to.

    Falsy where nothing is, which is almost always.
    """

    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @classmethod
    def now(cls) -> InnerKeys:
        """Those of the op that is about to run. To be asked where it is called."""
        excluded = torch._C._dispatch_tls_local_exclude_set().raw_repr()
        on = [device_type for device_type, raw in _AUTOCAST.items() if not excluded & raw]
        return cls(tuple((device_type, torch.get_autocast_dtype(device_type)) for device_type in on))

    def __bool__(self) -> bool:
        return bool(self.autocast)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """For the time of the block, where autocast is off."""
        if not self:
            yield
            return
        raw = torch._C._dispatch_tls_local_exclude_set().raw_repr()
        for device_type, _ in self.autocast:
            raw &= ~_AUTOCAST[device_type]
        excluded = torch._C.DispatchKeySet.from_raw_repr(raw)
        before = [(device_type, torch.get_autocast_dtype(device_type)) for device_type, _ in self.autocast]
        is_cached = torch.is_autocast_cache_enabled()
        try:
            for device_type, dtype in self.autocast:
                torch.set_autocast_dtype(device_type, dtype)
            torch.set_autocast_cache_enabled(False)  # it would keep what nobody clears
            with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
                yield
        finally:
            torch.set_autocast_cache_enabled(is_cached)
            for device_type, dtype in before:
                torch.set_autocast_dtype(device_type, dtype)
