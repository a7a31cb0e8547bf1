"""Named ranges for NVIDIA's profilers, where the package nvtx is installed; else nothing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["NamedRange", "marked", "name_stream", "names_ops"]

_DOMAIN = "ooc"


def _load() -> Any:
    try:
        return importlib.import_module("nvtx")
    except ImportError:
        return None


_nvtx: Any = _load()
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def marked(name: str) -> AbstractContextManager[Any]:
    """The block as a range of the host's timeline, under this name."""
    if _nvtx is None:
        return _NOTHING
    found: AbstractContextManager[Any] = _nvtx.annotate(name, domain=_DOMAIN)
    return found


def name_stream(handle: int, name: str) -> bool:
    """Let profilers show a stream of the driver's under this name. Whether somebody was told.

    The package nvtx names ranges and nothing else. The call is in NVIDIA's library libnvToolsExt, which CUDA had
    until version 12; where that is not installed a stream stays a number in the profiler.
    """
    library = _tools_library()
    if library is None:
        return False
    library.nvtxNameCuStreamA(ctypes.c_void_p(handle), name.encode())
    return True


@functools.cache
def _tools_library() -> Any:
    try:
        library = ctypes.CDLL("libnvToolsExt.so.1")
        library.nvtxNameCuStreamA.restype = None
    except (OSError, AttributeError):
        return None
    return library


def names_ops() -> bool:
    """Whether each op is to be a range: where the variable `OOC_NVTX` is 1, since it costs something with each op."""
    return _nvtx is not None and os.environ.get("OOC_NVTX") == "1"


class NamedRange:
    """A range of the host's timeline that begins and ends in different functions. One at a time.

    Args:
        name: Of every range that is begun.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: Any = None

    def __repr__(self) -> str:
        return f"<NamedRange {self._name!r}{', open' if self._open is not None else ''}>"

    def begin(self) -> None:
        """A range begins; one that is open ends first."""
        self.end()
        if _nvtx is not None:
            self._open = _nvtx.start_range(self._name, domain=_DOMAIN)

    def end(self) -> None:
        """The range that is open ends, if there is one. Idempotent."""
        if self._open is not None:
            _nvtx.end_range(self._open)
            self._open = None
