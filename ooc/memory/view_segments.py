"""A variable's bytes as ranges of the linear view of the pool."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence


def view_segments(
    view_address: int, chunk_nbytes: int, runs: Sequence[tuple[int, int]], nbytes: int
) -> list[tuple[int, int]]:
    """The first `nbytes` of these chunks, as `(address, bytes)`."""
    found = []
    left = nbytes
    for first, count in runs:
        if left <= 0:  # of an elastic plan's chunks, those behind the bytes that are there
            break
        length = min(left, count * chunk_nbytes)
        found.append((view_address + first * chunk_nbytes, length))
        left -= length
    return found


def checksum(segments: Sequence[tuple[int, int]]) -> int:
    """A checksum of bytes in host memory."""
    total = 0
    for address, nbytes in segments:
        total = zlib.crc32((ctypes.c_char * nbytes).from_address(address), total)
    return total
