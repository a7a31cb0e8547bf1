"""Python's collections of garbage put off, where hundreds of thousands of objects are made and none is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """No search for reference cycles in the block, on any thread: each would go through all that was made so far."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
