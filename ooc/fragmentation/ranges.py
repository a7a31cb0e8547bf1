"""What was mapped before a trace began: ranges of addresses, from those at its end backwards."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Range:
    start: int
    stop: int
    pool: object
    about: Any


class Ranges:
    """Disjoint ranges by address; neighbours of one pool are one range.

    `about` is what the caller wants to know of a range; of two that join, that of the one that was there stays.
    """

    def __init__(self) -> None:
        self._ranges: list[_Range] = []

    def add(self, start: int, nbytes: int, pool: object, about: Any) -> bool:
        """Returns whether the addresses were free."""
        at = self._after(start)
        before = self._ranges[at - 1] if at else None
        after = self._ranges[at] if at < len(self._ranges) else None
        stop = start + nbytes
        if nbytes <= 0 or (before is not None and before.stop > start) or (after is not None and after.start < stop):
            return False
        if after is not None and after.start == stop and after.pool == pool:
            after.start = start
            if before is not None and before.stop == start and before.pool == pool:
                before.stop = after.stop
                del self._ranges[at]
        elif before is not None and before.stop == start and before.pool == pool:
            before.stop = stop
        else:
            self._ranges.insert(at, _Range(start, stop, pool, about))
        return True

    def take(self, start: int, nbytes: int) -> bool:
        """Take a part out. Returns whether all of it was in one range."""
        at = self._after(start) - 1
        if at < 0:
            return False
        found, stop = self._ranges[at], start + nbytes
        if nbytes <= 0 or stop > found.stop:
            return False
        parts = [
            _Range(low, high, found.pool, found.about)
            for low, high in ((found.start, start), (stop, found.stop))
            if low < high
        ]
        self._ranges[at : at + 1] = parts
        return True

    def items(self) -> list[tuple[int, int, Any]]:
        """`(start, bytes, about)`, by address."""
        return [(r.start, r.stop - r.start, r.about) for r in self._ranges]

    def _after(self, address: int) -> int:
        return bisect_right(self._ranges, address, key=lambda r: r.start)
