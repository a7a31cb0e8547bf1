"""`auto`: our own policy, in its first form.

Three decisions, each one pass (the gaps are those of `scheduler.chains`):

1. *Which* gaps are away. While some tick holds more than the budget, take the gap over that tick
   that relieves the most time over budget for each byte moved.
2. *When* bytes move, if memory were free. Writes go out in the order in which the bytes become
   final; loads come in as late as the in-link allows, in reverse order of need.
3. *How much* of that fits. A chosen gap first counts as away for all of its length; then releases
   are put off until their writes are done, and loads are brought forward, as far as the
   memory of each tick allows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

from scheduler.budget import IntArray, pins_of, require_budget
from scheduler.chains import Away, Chain, Gap, PositionTicks, chains_of, residencies_of
from scheduler.plan import Machine, Residency
from scheduler.trace import Trace

FloatArray = npt.NDArray[np.float64]


def schedule(trace: Trace, machine: Machine, *, wrap: bool = True) -> tuple[Residency, ...]:
    """Keep what fits, move what does not, and hide the moves.

    Args:
        trace: The step.
        machine: Budget and rates.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.

    Raises:
        BudgetTooSmall: An op needs more at once than the budget.
    """
    require_budget(trace, machine, pins_of(trace))
    if not trace.ops:
        return residencies_of(chains_of(trace, machine, wrap=wrap), (), trace)
    chains = chains_of(trace, machine, wrap=wrap)
    selection = _Selection(trace, machine, chains)
    selection.choose()
    return residencies_of(chains, _Placement(trace, machine, selection).place(), trace)


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


class _Selection:
    """Which gaps are away."""

    def __init__(self, trace: Trace, machine: Machine, chains: tuple[Chain, ...]) -> None:
        self.trace = trace
        self.machine = machine
        self.chains = chains
        self.gaps: list[Gap] = [gap for chain in chains for gap in chain.gaps]
        self.chosen = [gap.forced for gap in self.gaps]
        self.occupancy = Occupancy(trace.num_ticks)
        for chain in chains:
            if chain.pins or not chain.starts_away:
                self.occupancy.add(chain.start_tick, chain.stop_tick, chain.num_chunks)
        for gap in self.gaps:
            if gap.forced:
                self.occupancy.add(gap.start_tick, gap.stop_tick, -gap.num_chunks)
        self.start = np.array([gap.start_tick for gap in self.gaps], dtype=np.int64)
        self.stop = np.array([gap.stop_tick for gap in self.gaps], dtype=np.int64)
        self.open = np.array([not gap.forced for gap in self.gaps], dtype=np.bool_)

    def choose(self) -> None:
        """Choose gaps until no tick holds more than the budget."""
        weight = _tick_durations(self.trace)
        while True:
            over = self.occupancy.held - self.machine.num_chunks
            tick = int(over.argmax())
            if over[tick] <= 0:
                return
            best = self._best_over(tick, np.cumsum(np.tile(weight * (over > 0), 2)))
            gap = self.gaps[best]
            self.chosen[best], self.open[best] = True, False
            self.occupancy.add(gap.start_tick, gap.stop_tick, -gap.num_chunks)

    def _best_over(self, tick: int, relief: FloatArray) -> int:
        """The gap over `tick` that covers the most time over budget."""
        folded = tick + self.trace.num_ticks
        covers = (self.start <= tick) & (tick < self.stop) | (self.start <= folded) & (folded < self.stop)
        candidates = np.flatnonzero(covers & self.open)
        padded = np.concatenate([[0.0], relief])
        score = padded[self.stop[candidates]] - padded[self.start[candidates]]
        return int(candidates[np.argmax(score)])


def _tick_durations(trace: Trace) -> FloatArray:
    """Each tick's share of its op's time; ticks between ops count a little, so that ties have an order."""
    weight = np.full(trace.num_ticks, 1.0)
    for op in trace.ops:
        weight[op.start_tick : op.stop_tick] += op.duration_ns / (op.stop_tick - op.start_tick)
    return weight


class _Placement:
    """When the chosen gaps begin and end."""

    def __init__(self, trace: Trace, machine: Machine, selection: _Selection) -> None:
        self.machine = machine
        self.num_ops = len(trace.ops)
        self.occupancy = selection.occupancy
        self.chains = selection.chains
        self.gaps = [gap for gap, chosen in zip(selection.gaps, selection.chosen, strict=True) if chosen]
        self.ticks = PositionTicks(trace)
        durations = [op.duration_ns for op in trace.ops] * 2
        self.time = np.concatenate([[0], np.cumsum(durations)]).tolist()  # start of each position
        self.release_ticks = [self.ticks.release(p) for p in range(2 * self.num_ops + 1)]
        self.load_ticks = [self.ticks.load(p) for p in range(2 * self.num_ops)]

    def place(self) -> list[Away]:
        """Decisions for the chosen gaps."""
        releases = self._place_releases()
        loads = self._place_loads(releases)
        return [
            Away(gap=gap, release=release, load=load)
            for gap, release, load in zip(self.gaps, releases, loads, strict=True)
        ]

    def _is_dirty(self, gap: Gap, previous_writes: int | None) -> bool:
        return previous_writes is None or gap.num_writes > previous_writes

    def _place_releases(self) -> list[int]:
        """Put releases off until the writes are done, while the memory lasts."""
        releases = [gap.earliest_release for gap in self.gaps]
        free_ns = 0.0
        for index in sorted(range(len(self.gaps)), key=lambda i: (self.gaps[i].earliest_release, i)):
            gap = self.gaps[index]
            if (gap.start_tick == 0 and gap.forced) or gap.start_tick >= gap.stop_tick:
                continue
            ready_ns = self.time[gap.earliest_release]
            free_ns = max(free_ns, ready_ns) + self._write_ns(gap)
            wanted = bisect_left(self.time, free_ns, hi=2 * self.num_ops)
            last = bisect_right(self.release_ticks, gap.stop_tick - 1) - 1
            if gap.latest_load is not None:
                last = min(last, gap.latest_load)
            release = max(min(wanted, last), gap.earliest_release)
            limit = self.machine.num_chunks - gap.num_chunks
            full = self.occupancy.first_over(gap.start_tick, self.release_ticks[release], limit)
            if full is not None:
                release = bisect_right(self.release_ticks, full) - 1
            releases[index] = max(release, gap.earliest_release)
            self.occupancy.add(gap.start_tick, self.release_ticks[releases[index]], gap.num_chunks)
        return releases

    def _place_loads(self, releases: list[int]) -> list[int | None]:
        """Bring loads forward to where the in-link must start them, while the memory lasts."""
        loads: list[int | None] = [gap.latest_load for gap in self.gaps]
        limit_ns = float("inf")
        with_load = [i for i, gap in enumerate(self.gaps) if gap.latest_load is not None]
        for index in sorted(with_load, key=lambda i: (-(self.gaps[i].latest_load or 0), i)):
            gap, latest = self.gaps[index], self.gaps[index].latest_load or 0
            limit_ns = min(limit_ns, self.time[latest]) - self._load_ns(gap)
            wanted = min(max(bisect_right(self.time, limit_ns) - 1, releases[index]), latest)
            limit = self.machine.num_chunks - gap.num_chunks
            full = self.occupancy.last_over(self.load_ticks[wanted], gap.stop_tick, limit)
            load = wanted if full is None else bisect_right(self.load_ticks, full)
            loads[index] = load
            self.occupancy.add(self.load_ticks[load], gap.stop_tick, gap.num_chunks)
        return loads

    def _write_ns(self, gap: Gap) -> float:
        return self.machine.latency_ns + gap.nbytes / self.machine.evict_bytes_per_s * 1e9

    def _load_ns(self, gap: Gap) -> float:
        return self.machine.latency_ns + gap.nbytes / self.machine.load_bytes_per_s * 1e9
