"""Books over ranges of whole numbers: which are free, and what each part of a line holds.

`FreeRanges` serves everything that hands out ranges: chunks of the pool, addresses of the arena,
extents of the store's file. `Layout` records what each part of a line of addresses is mapped to,
which is also how many mappings the kernel keeps for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["FreeRanges", "Layout", "Piece", "Run"]

V = TypeVar("V")


class Run(NamedTuple):
    """Neighbouring chunks `[first, first + length)`. Compares equal to the plain pair."""

    first: int
    length: int


class FreeRanges:
    """The free parts of `[start, stop)`, merged where they touch.

    Taking is best fit: the shortest free range that is long enough, the lowest of several. All
    operations are O(log n) searches plus a memory move in a list of n free ranges.
    """

    def __init__(self, start: int, stop: int) -> None:
        if stop < start:
            raise ValueError(f"[{start}, {stop}) is not a range")
        self._start = start
        self._stop = start
        self._starts: list[int] = []
        self._stops: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._total = 0
        self.extend(stop)

    def __repr__(self) -> str:
        return (
            f"<FreeRanges [{self._start}, {self._stop}): {self._total} free in {len(self._starts)} ranges, "
            f"largest {self.largest}>"
        )

    @property
    def total(self) -> int:
        """Sum of the free ranges' lengths."""
        return self._total

    @property
    def largest(self) -> int:
        """Length of the longest free range; 0 if nothing is free."""
        return self._by_length[-1][0] if self._by_length else 0

    @property
    def stop(self) -> int:
        """Where the domain ends."""
        return self._stop

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The free ranges `(start, stop)` in order."""
        return tuple((start, self._stops[start]) for start in self._starts)

    def extend(self, stop: int) -> None:
        """Move the end of the domain up to `stop`; what is added is free."""
        if stop < self._stop:
            raise ValueError(f"the domain ends at {self._stop}; it cannot end at {stop}")
        old, self._stop = self._stop, stop
        if stop > old:
            self.give(old, stop - old)

    def is_free(self, start: int, length: int = 1) -> bool:
        """Whether all of `[start, start + length)` is free."""
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and start + length <= self._stops[self._starts[index]]

    def take(self, length: int) -> int | None:
        """Take `length` from the best fitting free range. Its start, or None if none is long enough."""
        if length <= 0:
            raise ValueError(f"length={length}: must be positive")
        index = bisect_left(self._by_length, (length, self._start))
        if index == len(self._by_length):
            return None
        start = self._by_length[index][1]
        self._cut(start, start, start + length)
        return start

    def take_longest(self) -> tuple[int, int]:
        """Take the whole of the longest free range, the lowest of several; `(start, length)`."""
        if not self._by_length:
            raise ValueError("nothing is free")
        length = self._by_length[-1][0]
        start = self._by_length[bisect_left(self._by_length, (length, self._start))][1]
        self._cut(start, start, start + length)
        return start, length

    def take_at(self, start: int, length: int) -> bool:
        """Take exactly `[start, start + length)`. False, with nothing changed, if it is not all free."""
        if length <= 0:
            raise ValueError(f"length={length}: must be positive")
        index = bisect_right(self._starts, start) - 1
        if index < 0 or start + length > self._stops[self._starts[index]]:
            return False
        self._cut(self._starts[index], start, start + length)
        return True

    def give(self, start: int, length: int) -> None:
        """Make `[start, start + length)` free.

        Raises:
            ValueError: It is outside the domain, or part of it is free already. Nothing changed.
        """
        stop = start + length
        if length <= 0 or start < self._start or stop > self._stop:
            raise ValueError(f"[{start}, {stop}) is not a range inside [{self._start}, {self._stop})")
        index = bisect_left(self._starts, start)
        previous = self._starts[index - 1] if index else None
        following = self._starts[index] if index < len(self._starts) else None
        for other in (previous, following):
            if other is not None and other < stop and self._stops[other] > start:
                raise ValueError(f"[{start}, {stop}) is already free in [{other}, {self._stops[other]})")
        self._total += length
        if following == stop:
            stop = self._stops[following]
            self._drop(following)
        if previous is not None and self._stops[previous] == start:
            start = previous
            self._drop(previous)
        self._add(start, stop)

    def _cut(self, outer: int, start: int, stop: int) -> None:
        """Take `[start, stop)` out of the free range that starts at `outer`."""
        outer_stop = self._stops[outer]
        self._drop(outer)
        if outer < start:
            self._add(outer, start)
        if stop < outer_stop:
            self._add(stop, outer_stop)
        self._total -= stop - start

    def _add(self, start: int, stop: int) -> None:
        insort(self._starts, start)
        self._stops[start] = stop
        insort(self._by_length, (stop - start, start))

    def _drop(self, start: int) -> None:
        stop = self._stops.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (stop - start, start))]


class Piece(NamedTuple, Generic[V]):
    """A part `[start, stop)` of a line that holds one value."""

    start: int
    stop: int
    value: V


class Layout(Generic[V]):
    """A line `[start, stop)` cut into pieces of equal value, never two neighbours with the same.

    Give mapped parts a value that is equal for neighbours exactly where the kernel would keep
    them as one mapping; then `num_pieces` is the number of mappings.
    """

    def __init__(self, start: int, stop: int, value: V) -> None:
        if stop <= start:
            raise ValueError(f"[{start}, {stop}) holds nothing")
        self._stop = stop
        self._starts = [start]
        self._values = [value]

    @property
    def num_pieces(self) -> int:
        """How many pieces the line is cut into."""
        return len(self._starts)

    def pieces(self, start: int, stop: int) -> list[Piece[V]]:
        """What `[start, stop)` holds, in order, cut at its ends."""
        self._check(start, stop)
        index = bisect_right(self._starts, start) - 1
        found = []
        while start < stop:
            end = self._starts[index + 1] if index + 1 < len(self._starts) else self._stop
            end = min(end, stop)
            found.append(Piece(start, end, self._values[index]))
            start = end
            index += 1
        return found

    def is_one(self, start: int, stop: int, value: V) -> bool:
        """Whether all of `[start, stop)` holds this value."""
        index = bisect_right(self._starts, start)
        return self._values[index - 1] == value and (index == len(self._starts) or stop <= self._starts[index])

    def assign(self, pieces: Iterable[Piece[V]]) -> None:
        """Let each piece hold its value."""
        for start, stop, value in pieces:
            self._assign(start, stop, value)

    def _assign(self, start: int, stop: int, value: V) -> None:
        self._check(start, stop)
        starts, values = self._starts, self._values
        low = bisect_left(starts, start)
        high = bisect_left(starts, stop, low)
        new_starts: list[int] = []
        new_values: list[V] = []
        if low == 0 or values[low - 1] != value:
            new_starts.append(start)
            new_values.append(value)
        if high < len(starts) and starts[high] == stop:
            if values[high] == value:
                high += 1  # the next piece becomes part of this one
        elif stop < self._stop and values[high - 1] != value:
            new_starts.append(stop)  # what is left of the piece that held `stop`
            new_values.append(values[high - 1])
        starts[low:high] = new_starts
        values[low:high] = new_values

    def _check(self, start: int, stop: int) -> None:
        if not self._starts[0] <= start < stop <= self._stop:
            raise ValueError(f"[{start}, {stop}) is not a range inside [{self._starts[0]}, {self._stop})")
