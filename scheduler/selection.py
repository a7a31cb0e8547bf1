"""Which gaps are away: the choice that `auto` and `capuchin` share.

A selection knows what every tick would hold, and takes gaps until none holds too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from scheduler.budget import IntArray
from scheduler.chains import Chain, Gap
from scheduler.plan import Residency, occupied_ticks
from scheduler.trace import Trace

FloatArray = npt.NDArray[np.float64]

_NO_MATTER = 1 << 60

# Ticks within their limit are forgotten when they are more than an eighth: often enough to be quick, and seldom
# enough to cost nothing.
_FORGET_BELOW = 7 / 8

# Positions of a stretch whose gaps are looked up together: the worst tick is often near the one before.
_NEAR = 256

# Weights that are summed together: about the root of the number of ticks of a long step. Up to so many are one sum.
_STRETCH = 256
_MOST_AS_ONE = 1 << 15


class Selection:
    """Which gaps are away.

    Attributes:
        gaps: All gaps of all chains; `chosen` says which are away.
        occupancy: Chunks held with the chosen gaps away at full length.
    """

    def __init__(self, trace: Trace, chains: tuple[Chain, ...]) -> None:
        self.trace = trace
        self.chains = chains
        self.gaps: list[Gap] = [gap for chain in chains for gap in chain.gaps]
        self.chosen = np.array([gap.forced for gap in self.gaps], dtype=np.bool_)
        self.start = np.array([gap.start_tick for gap in self.gaps], dtype=np.int64)
        self.stop = np.array([gap.stop_tick for gap in self.gaps], dtype=np.int64)
        self.size = np.array([gap.num_chunks for gap in self.gaps], dtype=np.int64)
        alive = [chain for chain in chains if chain.pins or not chain.starts_away]
        self.occupancy = Occupancy(trace.num_ticks)
        self.occupancy.add_all(
            np.array([chain.start_tick for chain in alive], dtype=np.int64),
            np.array([chain.stop_tick for chain in alive], dtype=np.int64),
            np.array([chain.num_chunks for chain in alive], dtype=np.int64),
        )
        forced = self.chosen
        self.occupancy.add_all(self.start[forced], self.stop[forced], -self.size[forced])

    @property
    def gaps_chosen(self) -> list[Gap]:
        """The gaps that are away."""
        return [gap for gap, chosen in zip(self.gaps, self.chosen.tolist(), strict=True) if chosen]

    def choose_as(self, proposal: Iterable[Residency]) -> None:
        """Choose the gaps in which `proposal` has the bytes away for some time."""
        stays: dict[int, list[tuple[int, int]]] = {}
        for residency in proposal:
            stays.setdefault(residency.variable, []).append(occupied_ticks(residency, self.trace))
        for index, gap in enumerate(self.gaps):
            if not self.chosen[index] and not self._is_resident(gap, stays):
                self.chosen[index] = True
                self.occupancy.add(gap.start_tick, gap.stop_tick, -gap.num_chunks)

    def _is_resident(self, gap: Gap, stays: Mapping[int, list[tuple[int, int]]]) -> bool:
        chain, whole = self.chains[gap.chain], self.trace.num_ticks
        parts = [(chain.variable, gap.start_tick, min(gap.stop_tick, whole))]
        parts.append((chain.heir, max(gap.start_tick, whole) - whole, gap.stop_tick - whole))
        return all(
            any(a <= start and stop <= b for a, b in stays.get(v, ())) for v, start, stop in parts if start < stop
        )

    def choose(self, limit: IntArray, *, by_length: bool, price: float = 0.0) -> None:
        """Choose gaps until no tick holds more than its `limit`, which the pins alone must not exceed.

        Always for the tick that is furthest over its limit, the gap that covers the most time over
        the limit. Unless `by_length`, a gap counts less if it frees more than that tick needs.

        Args:
            limit: Chunks, for each tick.
            by_length: See above.
            price: What a transfer costs beyond its bytes, in chunks: with it, few large gaps are away rather than many
                small ones.
        """
        crowd = _Crowd(self, limit, price)
        while True:
            worst, excess = crowd.worst()
            if excess <= 0:
                return
            best = crowd.best_gap_over(worst, _NO_MATTER if by_length else excess)
            gap = self.gaps[best]
            self.chosen[best] = True
            self.occupancy.add(gap.start_tick, gap.stop_tick, -gap.num_chunks)


class _Crowd:
    """The ticks that hold too much, and the gaps that would relieve them: what `Selection.choose` works on.

    A gap only takes chunks away, so a tick that is within its limit never comes back, nor does a gap over none of the
    ticks that are left. Both are forgotten now and then: their shares of every sum are zero, so no sum changes.
    Positions count the ticks that are left, on an axis of two steps.
    """

    def __init__(self, selection: Selection, limit: IntArray, price: float) -> None:
        self._selection = selection
        self._price = price
        over = selection.occupancy.held - limit
        self._ticks = np.flatnonzero(over > 0)
        self._over = over[self._ticks]
        self._weight = _tick_durations(selection.trace)[self._ticks]
        self._gaps = np.flatnonzero(~selection.chosen)
        self._count()

    def worst(self) -> tuple[int, int]:
        """The position that is furthest over its limit, and by how many chunks; none are left if by none."""
        if self._num_left < _FORGET_BELOW * len(self._ticks):
            self._forget()
        if not len(self._over):
            return 0, 0
        position = int(self._over.argmax())
        return position, int(self._over[position])

    def best_gap_over(self, position: int, excess: int) -> int:
        """Take the gap over `position` that covers the most time over the limit; returns its index."""
        candidates = self._gaps_over(position)
        covered = self._relief.before(self._last[candidates]) - self._relief.before(self._first[candidates])
        size = self._size[candidates]
        useful = np.minimum(size, excess) / (size + self._price)
        best = int(candidates[np.argmax(covered * useful)])
        self._take(best)
        return int(self._gaps[best])

    def _gaps_over(self, position: int) -> IntArray:
        """The gaps over `position`, by index; first those over any position near it, which are asked for often."""
        near = position // _NEAR
        if near not in self._near:
            found = np.zeros(len(self._first), dtype=np.bool_)
            for start in (near * _NEAR, near * _NEAR + len(self._ticks)):
                found |= (self._first < start + _NEAR) & (start < self._last)
            self._near[near] = np.flatnonzero(found)
        gaps = self._near[near]
        first, last = self._first[gaps], self._last[gaps]
        folded = position + len(self._ticks)
        covers = ((first <= position) & (position < last)) | ((first <= folded) & (folded < last))
        over: IntArray = gaps[covers]
        return over

    def _take(self, index: int) -> None:
        first, last, whole = int(self._first[index]), int(self._last[index]), len(self._ticks)
        parts = ((first, min(last, whole)), (max(first - whole, 0), last - whole))
        cleared = []
        for start, stop in ((start, stop) for start, stop in parts if start < stop):
            over = self._over[start:stop]
            counted = over > 0
            over -= self._size[index]
            relieved = np.flatnonzero(counted & (over <= 0))
            if len(relieved):
                self._num_left -= len(relieved)
                cleared += [relieved + start, relieved + (start + whole)]
        if cleared:
            self._relief.clear(np.concatenate(cleared))
        self._first[index] = self._last[index] = 0  # chosen: over no position any more

    def _forget(self) -> None:
        left = self._over > 0
        self._ticks, self._over, self._weight = self._ticks[left], self._over[left], self._weight[left]
        self._gaps = self._gaps[self._first < self._last]
        self._count()

    def _count(self) -> None:
        selection = self._selection
        self._num_left = len(self._ticks)
        self._relief = _Sums(np.tile(self._weight, 2))  # time over the limit before each position
        positions = np.concatenate([self._ticks, self._ticks + selection.trace.num_ticks])
        self._first = np.searchsorted(positions, selection.start[self._gaps])
        self._last = np.searchsorted(positions, selection.stop[self._gaps])
        useful = self._first < self._last
        self._gaps, self._first, self._last = self._gaps[useful], self._first[useful], self._last[useful]
        self._size = selection.size[self._gaps]
        self._near: dict[int, IntArray] = {}


class _Sums:
    """Sums of the weights before each position, while weights become zero one by one.

    Those of a long step are kept in stretches, so that a change costs a stretch and not the whole.
    """

    def __init__(self, weights: FloatArray) -> None:
        self._length = _STRETCH if len(weights) > _MOST_AS_ONE else len(weights) + 1
        num_stretches = len(weights) // self._length + 1  # one position more than there are weights
        self._weights = np.zeros((num_stretches, self._length))
        self._weights.ravel()[: len(weights)] = weights
        self._within = np.zeros((num_stretches, self._length))
        self._before = np.zeros(num_stretches)
        self._add_up(np.arange(num_stretches))

    def before(self, positions: IntArray) -> FloatArray:
        """The sum of the weights before each of `positions`."""
        found: FloatArray = self._within.ravel()[positions] + self._before[positions // self._length]
        return found

    def clear(self, positions: IntArray) -> None:
        """Weights at `positions` become zero."""
        self._weights.ravel()[positions] = 0.0
        if len(self._weights) == 1:
            first = int(positions.min())
            within, weights = self._within[0, first:], self._weights[0, first:]
            within[:] = np.cumsum(np.concatenate([within[:1], weights[:-1]]))
        else:
            self._add_up(np.flatnonzero(np.bincount(positions // self._length)))

    def _add_up(self, stretches: IntArray) -> None:
        self._within[stretches, 1:] = np.cumsum(self._weights[stretches, :-1], axis=1)
        np.cumsum(self._within[:-1, -1] + self._weights[:-1, -1], out=self._before[1:])


class Occupancy:
    """Chunks held at each tick of the step, with unrolled intervals folded onto it."""

    def __init__(self, num_ticks: int) -> None:
        self.num_ticks = num_ticks
        self.held: IntArray = np.zeros(num_ticks, dtype=np.int64)

    def add(self, start_tick: int, stop_tick: int, num_chunks: int) -> None:
        """Hold `num_chunks` more in `[start_tick, stop_tick)`, at most two steps long."""
        for start, stop in self._fold(start_tick, stop_tick):
            self.held[start:stop] += num_chunks

    def add_all(self, start_ticks: IntArray, stop_ticks: IntArray, num_chunks: IntArray) -> None:
        """Hold more in many intervals at once, each as in `add`."""
        change = np.zeros(2 * self.num_ticks + 1, dtype=np.int64)
        np.add.at(change, start_ticks, num_chunks)
        np.add.at(change, stop_ticks, -num_chunks)
        self.held += np.cumsum(change)[:-1].reshape(2, self.num_ticks).sum(axis=0)

    def _fold(self, start_tick: int, stop_tick: int) -> list[tuple[int, int]]:
        parts = []
        while start_tick < stop_tick:
            base = start_tick // self.num_ticks * self.num_ticks
            end = min(stop_tick, base + self.num_ticks)
            parts.append((start_tick - base, end - base))
            start_tick = end
        return parts


def _tick_durations(trace: Trace) -> FloatArray:
    """Each tick's share of its op's time; ticks between ops count a little, so that ties have an order."""
    weight = np.full(trace.num_ticks, 1.0)
    for op in trace.ops:
        weight[op.start_tick : op.stop_tick] += op.duration_ns / (op.stop_tick - op.start_tick)
    return weight
