"""Named ranges for NVIDIA's profilers, where the package nvtx is installed; else nothing."""

from __future__ import annotations

import contextlib
import importlib
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["marked"]

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
