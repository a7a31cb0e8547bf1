"""Fewer remaps in a finished colouring: exchange two chunks' holders where that joins more than it parts.

Chunk by chunk, a colouring is a timetable: each chunk has a row of holders around the step. Take two
rows. Their holders fall into clusters that do not overlap in time with the rest of either row, and the
holders of a cluster can change rows with each other without anybody else noticing (a Kempe chain of
the interval graph). A place of a variable that has one chunk in one residency and another in the next
costs a remap; exchanging the cluster of either may end it, and may part others. Exchanges that
part fewer than they join are made, over and over; those that change nothing are made a limited number
of times, because they lead out of dead ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ROUNDS = 16
_MOST_IDLE = 3
_MOST_UNITS = 200
_MOST_PIECES = 2 * _MOST_UNITS + 1
"""So many pieces belong to more than the most units."""
_MAX_TRIALS = 30_000
"""A trial takes 50 to 100 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A residency's claim on its chunks, in ticks from the cut.

    Attributes:
        start, stop: When it holds them; `stop` may lie beyond the step's length by less than the length.
        chunks: One for each place of the variable.
        family: Holders with one reservation, whose chunks should agree place by place.
    """

    start: int
    stop: int
    family: int
    chunks: npt.NDArray[np.int64]


def exchange_chunks(holders: Sequence[Holder], num_ticks: int, *, cyclic: bool) -> list[npt.NDArray[np.int64]]:
    """Chunks for the same holders with as many remaps or fewer, and the same sharing rules kept.

    Args:
        holders: No two hold a chunk at the same time.
        num_ticks: Length of the step.
        cyclic: Whether the last holder of a family is followed by its first.

    Returns:
        Chunks for each holder. Deterministic.
    """
    table = _Table(holders, num_ticks, cyclic=cyclic)
    table.improve()
    return table.chunks()


@dataclass(frozen=True, slots=True, kw_only=True)
class _InVain:
    """A trial that changed nothing: it would end the same way until one of its two rows changes.

    Attributes:
        rows: The two rows, and how often each had changed.
        gain: Of the better exchange; None if there was none.
    """

    rows: tuple[tuple[int, int], tuple[int, int]]
    gain: int | None


class _Table:
    """Rows of pieces. A *unit* is one place of one holder; pieces are its stretches, two if it crosses the cut."""

    def __init__(self, holders: Sequence[Holder], num_ticks: int, *, cyclic: bool) -> None:
        self._holders = holders
        self._num_ticks = num_ticks
        self._first_unit = [0]
        for holder in holders:
            self._first_unit.append(self._first_unit[-1] + len(holder.chunks))
        self.row = [int(c) for holder in holders for c in holder.chunks]
        self.start = [h.start for h in holders for _ in h.chunks]
        self.stop = [h.stop for h in holders for _ in h.chunks]
        num_rows = max(self.row, default=-1) + 1
        self._rows: list[list[tuple[int, int, int]]] = [[] for _ in range(num_rows)]
        for unit, row in enumerate(self.row):
            self._rows[row].extend(self._pieces(unit))
        for pieces in self._rows:
            pieces.sort()
        self._num_changes = [0] * num_rows
        self._in_vain: dict[int, _InVain] = {}
        self._links(cyclic)

    def _pieces(self, unit: int) -> Iterator[tuple[int, int, int]]:
        start, stop = self.start[unit], self.stop[unit]
        yield start, min(stop, self._num_ticks), unit
        if stop > self._num_ticks:
            yield 0, stop - self._num_ticks, unit

    def _links(self, cyclic: bool) -> None:
        """Who comes before and after each unit in the same place of its family; -1 for nobody."""
        self.before = [-1] * len(self.row)
        self.after = [-1] * len(self.row)
        families: dict[int, list[int]] = {}
        for index, holder in enumerate(self._holders):
            families.setdefault(holder.family, []).append(index)
        for members in families.values():
            members.sort(key=lambda i: self._holders[i].start)
            following = [*members[1:], members[0]] if cyclic and len(members) > 1 else members[1:]
            for one, other in zip(members, following, strict=False):
                for place in range(len(self._holders[one].chunks)):
                    first, second = self._first_unit[one] + place, self._first_unit[other] + place
                    self.after[first], self.before[second] = second, first

    def broken(self) -> list[int]:
        """Units whose successor has another chunk."""
        return [u for u, other in enumerate(self.after) if other >= 0 and self.row[u] != self.row[other]]

    def improve(self) -> None:
        """Exchange until it no longer helps, or has taken long enough. Every other round also takes even exchanges."""
        num_trials = num_idle = 0
        found = self.broken()
        for round_index in range(_ROUNDS):
            for unit in found:
                if self.row[unit] != self.row[self.after[unit]]:
                    num_trials += 1
                    self._try(unit, self.after[unit], allows_even=round_index % 2 == 1)
            before, found = len(found), self.broken()
            num_idle = 0 if len(found) < before else num_idle + 1
            if not found or num_idle == _MOST_IDLE or num_trials > _MAX_TRIALS:
                return

    def _try(self, unit: int, other: int, *, allows_even: bool) -> None:
        """Make the better of the two exchanges that join a unit and its successor, if it is good enough."""
        rows = self.row[unit], self.row[other]
        now = rows, (self._num_changes[rows[0]], self._num_changes[rows[1]])
        tried = self._in_vain.get(unit)
        if tried is not None and tried.rows == now and (tried.gain is None or tried.gain < 0 or not allows_even):
            return
        best: tuple[int, set[int]] | None = None
        for moved, stays in ((other, unit), (unit, other)):
            cluster = self._cluster(rows, moved)
            if cluster is None or stays in cluster:
                continue
            gain = self._gain(cluster, rows)
            if best is None or gain > best[0]:
                best = gain, cluster
        if best is not None and best[0] >= (0 if allows_even else 1):
            self._exchange(best[1], rows)
        else:
            self._in_vain[unit] = _InVain(rows=now, gain=None if best is None else best[0])

    def _cluster(self, rows: tuple[int, int], unit: int) -> set[int] | None:
        """The units of two rows that must change rows together with `unit`; None if they are many."""
        found = {unit}
        todo = list(self._pieces(unit))
        done: list[tuple[int, int]] = []
        while todo:
            first, last, _ = todo.pop()  # a stretch that grows until nothing of either row reaches over its ends
            if any(start <= first and last <= stop for start, stop in done):
                continue
            ends = [(self._rows[row], i, i) for row in rows for i in (bisect_left(self._rows[row], (first,)),)]
            grows = True
            while grows:
                grows = False
                for which, (pieces, low, high) in enumerate(ends):
                    start, stop = low, high
                    lowest, highest = max(low - _MOST_PIECES, 0), min(high + _MOST_PIECES, len(pieces))
                    while low > lowest and pieces[low - 1][1] > first:
                        low -= 1
                        first = min(first, pieces[low][0])
                    while high < highest and pieces[high][0] < last:
                        if pieces[high][1] > last:
                            last = pieces[high][1]
                        high += 1
                    if start - low == _MOST_PIECES or high - stop == _MOST_PIECES:
                        return None
                    if (low, high) == (start, stop):
                        continue
                    grows = True
                    ends[which] = pieces, low, high
                    for _, reach, who in (*pieces[low:start], *pieces[stop:high]):
                        last = max(last, reach)
                        if who not in found:
                            found.add(who)
                            if self.stop[who] > self._num_ticks:
                                todo.extend(self._pieces(who))
            if len(found) > _MOST_UNITS:
                return None
            done.append((first, last))
        return found

    def _gain(self, cluster: set[int], rows: tuple[int, int]) -> int:
        """Remaps fewer if the cluster's units change rows."""
        one, two = rows
        row = self.row
        gain = 0
        for unit in cluster:
            here = row[unit]
            there = two if here == one else one
            for other in (self.before[unit], self.after[unit]):
                if other >= 0 and other not in cluster:
                    gain += (row[other] == there) - (row[other] == here)
        return gain

    def _exchange(self, cluster: set[int], rows: tuple[int, int]) -> None:
        one, two = rows
        for row in rows:
            self._num_changes[row] += 1
        first, second = self._rows[one], self._rows[two]
        self._rows[one] = sorted([p for p in first if p[2] not in cluster] + [p for p in second if p[2] in cluster])
        self._rows[two] = sorted([p for p in second if p[2] not in cluster] + [p for p in first if p[2] in cluster])
        for unit in cluster:
            self.row[unit] = two if self.row[unit] == one else one

    def chunks(self) -> list[npt.NDArray[np.int64]]:
        """The present row of each place of each holder."""
        rows = np.array(self.row, dtype=np.int64)
        return [rows[a:b] for a, b in zip(self._first_unit, self._first_unit[1:], strict=False)]
