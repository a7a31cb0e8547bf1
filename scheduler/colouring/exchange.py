"""Fewer remaps in a finished colouring: exchange two chunks' holders where that joins more than it parts.

Chunk by chunk, a colouring is a timetable: each chunk has a row of holders around the step. Take two
rows. Their holders fall into clusters that do not overlap in time with the rest of either row, and the
holders of a cluster can change rows with each other without anybody else noticing (a Kempe chain of
the interval graph). A place of a variable that has one chunk in one residency and another in the next
costs a remap; exchanging the cluster of either may end it, and may part others. Exchanges that
part fewer than they join are made, over and over; those that change nothing are made a limited number
of times, because they lead out of dead ends.

`scheduler/native/exchange.cpp` says the same in C++ (`scheduler.colouring.native`), with the same exchanges in the same
order, as the tests hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scheduler.colouring import native

_ROUNDS = 16
_MOST_IDLE = 3
_MOST_UNITS = 200
_MOST_PIECES = 2 * _MOST_UNITS
"""More pieces belong to more than the most units."""
_MAX_TRIALS = 30_000
"""A trial takes 10 to 50 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A residency's claim on its chunks, in ticks from the cut.

    Attributes:
        start, stop: When it holds them, from a tick of the step on; `stop` may lie beyond the step's length, by `start`
            at most. It may lie beyond the start of who holds them next, too: a wish that is not met, of which only the
            rest counts.
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
        holders: No two start to hold a chunk before the other one must have left it.
        num_ticks: Length of the step.
        cyclic: Whether the last holder of a family is followed by its first.

    Returns:
        Chunks for each holder. Deterministic.
    """
    found = native.exchange(
        [h.start for h in holders],
        [h.stop for h in holders],
        [h.family for h in holders],
        [h.chunks for h in holders],
        num_ticks=num_ticks,
        cyclic=cyclic,
        rounds=_ROUNDS,
        most_idle=_MOST_IDLE,
        most_units=_MOST_UNITS,
        most_trials=_MAX_TRIALS,
    )
    if found is not None:
        return found
    table = _Table(holders, num_ticks, cyclic=cyclic)
    table.improve()
    return table.chunks()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    """What must change rows together.

    Attributes:
        units: Of both rows.
        spans: The stretches of ticks that they hold, of which each row's pieces lie within or outside.
    """

    units: set[int]
    spans: list[tuple[int, int]]


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
        self._rows: list[list[tuple[int, int, int]]] = []
        units: list[list[int]] = [[] for _ in range(num_rows)]
        for unit in sorted(range(len(self.row)), key=self.start.__getitem__):
            units[self.row[unit]].append(unit)
        for own in units:
            self._part(own)
            self._rows.append(sorted(piece for unit in own for piece in self._pieces(unit)))
        # Of each row a bit for each tick: whether one piece holds the row both before it and from it on, so that
        # nothing can be cut there.
        self._uncut = [sum((1 << stop) - (2 << start) for start, stop, _ in pieces) for pieces in self._rows]
        self._all_ticks = (2 << num_ticks) - 1
        self._num_changes = [0] * num_rows
        self._in_vain: dict[int, _InVain] = {}
        self._links(cyclic)

    def _part(self, units: list[int]) -> None:
        """Cut off what a row's units, in order of start, wish to hold although the next one holds it already."""
        for unit, other in pairwise(units):
            self.stop[unit] = min(self.stop[unit], self.start[other])
        if units:
            self.stop[units[-1]] = min(self.stop[units[-1]], self.start[units[0]] + self._num_ticks)

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
        best: tuple[int, _Cluster] | None = None
        for moved, stays in ((other, unit), (unit, other)):
            cluster = self._cluster(rows, moved, stays)
            if cluster is None:
                continue
            gain = self._gain(cluster.units, rows)
            if best is None or gain > best[0]:
                best = gain, cluster
        if best is not None and best[0] >= (0 if allows_even else 1):
            self._exchange(best[1], rows)
        else:
            self._in_vain[unit] = _InVain(rows=now, gain=None if best is None else best[0])

    def _cluster(self, rows: tuple[int, int], unit: int, stays: int) -> _Cluster | None:
        """The units of two rows that change rows together with `unit`; None if they are many, or `stays` is one."""
        first, second = self._rows[rows[0]], self._rows[rows[1]]
        cuts = self._all_ticks ^ (self._uncut[rows[0]] | self._uncut[rows[1]])
        units: set[int] = {unit}
        spans: list[tuple[int, int]] = []
        todo = list(self._pieces(unit))
        while todo:
            start, stop, _ = todo.pop()
            if any(low <= start and stop <= high for low, high in spans):
                continue
            low = (cuts & ((2 << start) - 1)).bit_length() - 1
            later = cuts >> stop
            high = stop + (later & -later).bit_length() - 1
            if low <= self.start[stays] < high:
                return None
            spans.append((low, high))
            found = []
            for pieces in (first, second):
                found += pieces[bisect_left(pieces, (low,)) : bisect_left(pieces, (high,))]
            if len(found) > _MOST_PIECES:
                return None
            for _, _, who in found:
                if who not in units:
                    units.add(who)
                    if self.stop[who] > self._num_ticks:
                        todo.extend(self._pieces(who))
            if len(units) > _MOST_UNITS:
                return None
        return None if stays in units else _Cluster(units=units, spans=spans)

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

    def _exchange(self, cluster: _Cluster, rows: tuple[int, int]) -> None:
        one, two = rows
        for row in rows:
            self._num_changes[row] += 1
        units, first, second = cluster.units, self._rows[one], self._rows[two]
        self._rows[one] = sorted([p for p in first if p[2] not in units] + [p for p in second if p[2] in units])
        self._rows[two] = sorted([p for p in second if p[2] not in units] + [p for p in first if p[2] in units])
        for low, high in cluster.spans:
            differ = (self._uncut[one] ^ self._uncut[two]) & ((1 << high) - (1 << low))
            self._uncut[one] ^= differ
            self._uncut[two] ^= differ
        for unit in units:
            self.row[unit] = two if self.row[unit] == one else one

    def chunks(self) -> list[npt.NDArray[np.int64]]:
        """The present row of each place of each holder."""
        rows = np.array(self.row, dtype=np.int64)
        return [rows[a:b] for a, b in zip(self._first_unit, self._first_unit[1:], strict=False)]
