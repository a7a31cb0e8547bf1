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

from itertools import accumulate

import numpy as np
import numpy.typing as npt

from scheduler.budget import IntArray, pins_of, require_budget
from scheduler.chains import Chain, Gap, chains_of, residencies_of
from scheduler.colouring import Shortage
from scheduler.evaluate import Evaluation, evaluate
from scheduler.plan import Machine, Residency
from scheduler.policies._placement import Placement
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
    best: Evaluation | None = None
    op_start_ns = list(accumulate((op.duration_ns for op in trace.ops), initial=0))
    for _ in range(3):
        aways = Placement(trace, machine, chains, selection.gaps_chosen, selection.occupancy.held, op_start_ns).place()
        proposal = residencies_of(chains, aways, trace)
        outcome = evaluate(proposal, trace, machine)
        if isinstance(outcome, Shortage):
            return proposal if best is None else best.proposal
        if best is None or outcome.rank < best.rank:
            best = outcome
        op_start_ns = [*outcome.simulation.op_start_ns, outcome.simulation.duration_ns]
    assert best is not None
    return best.proposal


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

    @property
    def gaps_chosen(self) -> list[Gap]:
        """The gaps that are away."""
        return [gap for gap, chosen in zip(self.gaps, self.chosen, strict=True) if chosen]

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
