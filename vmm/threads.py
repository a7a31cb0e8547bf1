"""Names of our threads, as debuggers and profilers show them (Nsight Systems, perf, top -H, gdb)."""

from __future__ import annotations

import ctypes
import threading

__all__ = ["is_foreign_thread", "name_this_thread"]

_PR_SET_NAME = 15
_MOST_BYTES = 15
"""The kernel keeps no more."""


def name_this_thread(name: str) -> None:
    """Give the calling thread a name in the operating system; before 3.14 Python gives its threads none.

    Raises:
        ValueError: The name is longer than 15 bytes, which the kernel would cut.
    """
    encoded = name.encode()
    if len(encoded) > _MOST_BYTES:
        raise ValueError(f"thread name {name!r}: {len(encoded)} bytes, at most {_MOST_BYTES}")
    ctypes.CDLL(None).prctl(_PR_SET_NAME, encoded, 0, 0, 0)


def is_foreign_thread() -> bool:
    """Whether Python did not start the calling thread: a library's own (Gloo's, say), which calls back into Python."""
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return thread is None or isinstance(thread, threading._DummyThread)
