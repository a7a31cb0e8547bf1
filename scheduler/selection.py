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
        self.occupancy = Occupancy(trace.num_ticks)
        for chain in chains:
            if chain.pins or not chain.starts_away:
                self.occupancy.add(chain.start_tick, chain.stop_tick, chain.num_chunks)
        self.start = np.array([gap.start_tick for gap in self.gaps], dtype=np.int64)
        self.stop = np.array([gap.stop_tick for gap in self.gaps], dtype=np.int64)
        self.size = np.array([gap.num_chunks for gap in self.gaps], dtype=np.int64)
        for gap in self.gaps:
            if gap.forced:
                self.occupancy.add(gap.start_tick, gap.stop_tick, -gap.num_chunks)

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

    def choose(self, limit: IntArray, *, by_length: bool) -> None:
        """Choose gaps until no tick holds more than its `limit`, which the pins alone must not exceed.

        Always for the tick that is furthest over its limit, the gap that covers the most time over
        the limit. Unless `by_length`, a gap counts less if it frees more than that tick needs.
        """
        weight = _tick_durations(self.trace)
        while True:
            over = self.occupancy.held - limit
            tick = int(over.argmax())
            if over[tick] <= 0:
                return
            excess = _NO_MATTER if by_length else int(over[tick])
            best = self._best_over(tick, excess, np.cumsum(np.tile(weight * (over > 0), 2)))
            gap = self.gaps[best]
            self.chosen[best] = True
            self.occupancy.add(gap.start_tick, gap.stop_tick, -gap.num_chunks)

    def _best_over(self, tick: int, excess: int, relief: FloatArray) -> int:
        """The gap over `tick` that covers the most time over the limit."""
        folded = tick + self.trace.num_ticks
        covers = ((self.start <= tick) & (tick < self.stop)) | ((self.start <= folded) & (folded < self.stop))
        candidates = np.flatnonzero(covers & ~self.chosen)
        padded = np.concatenate([[0.0], relief])
        covered = padded[self.stop[candidates]] - padded[self.start[candidates]]
        useful = np.minimum(1.0, excess / self.size[candidates])
        return int(candidates[np.argmax(covered * useful)])


class Occupancy:
    """Chunks held at each tick of the step, with unrolled intervals folded onto it."""

    def __init__(self, num_ticks: int) -> None:
        self.num_ticks = num_ticks
        self.held: IntArray = np.zeros(num_ticks, dtype=np.int64)

    def add(self, start_tick: int, stop_tick: int, num_chunks: int) -> None:
        """Hold `num_chunks` more in `[start_tick, stop_tick)`, at most two steps long."""
        for start, stop in self._fold(start_tick, stop_tick):
            self.held[start:stop] += num_chunks

    def first_over(self, start_tick: int, stop_tick: int, limit: int) -> int | None:
        """The first unrolled tick of the interval at which more than `limit` is held."""
        offset = start_tick
        for start, stop in self._fold(start_tick, stop_tick):
            over = self.held[start:stop] > limit
            if over.any():
                return offset + int(over.argmax())
            offset += stop - start
        return None

    def last_over(self, start_tick: int, stop_tick: int, limit: int) -> int | None:
        """The last unrolled tick of the interval at which more than `limit` is held."""
        offset = stop_tick
        for start, stop in reversed(self._fold(start_tick, stop_tick)):
            over = self.held[start:stop] > limit
            if over.any():
                return offset - 1 - int(over[::-1].argmax())
            offset -= stop - start
        return None

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
