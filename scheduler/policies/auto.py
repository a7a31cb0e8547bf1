"""`auto`: our own policy, in its first form.

Three decisions, each one pass (the gaps are those of `scheduler.chains`):

1. *Which* gaps are away. While some tick holds more than the budget, take the gap over that tick
   that relieves the most time over budget for each byte moved.
2. *When* bytes move, if memory were free. Writes go out in the order in which the bytes become
   final; loads come in as late as the in-link allows, in reverse order of need.
3. *How much* of that fits. A chosen gap first counts as away for all of its length; then releases
   are put off until their writes are done, and loads are brought forward, as far as the
   memory of each tick allows.

Where the best of that still stalls, the other swapping policies' plans are candidates too, and so are plans
made for somewhat less memory than there is: both are legal here, and a greedy choice is not always the best.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from types import ModuleType

import numpy as np
import numpy.typing as npt

from scheduler.budget import BudgetTooSmall, IntArray, pinned_chunks, pins_of, require_budget, smallest_num_chunks
from scheduler.chains import Chain, Gap, chains_of, residencies_of
from scheduler.colouring import Shortage
from scheduler.evaluate import Evaluation, evaluate
from scheduler.plan import Machine, Residency
from scheduler.policies import lms, nntrainer, on_demand, vdnn, window
from scheduler.policies._placement import Placement
from scheduler.policies._recompute import with_reruns
from scheduler.trace import Trace

FloatArray = npt.NDArray[np.float64]

# What is tried, one after another until nothing stalls: the share of the budget that the choice of gaps leaves
# free for what is on its way in or out, and whether a gap's length alone decides. Found on the synthetic steps of
# tests/scheduler/model_traces.py and on recorded ones, at rates that make them stall. Weighing the choice by bytes
# to be moved was tried and stalls more: it prefers short stays of parameters, whose loads then crowd together.
_CANDIDATES = ((0.0, False), (0.25, False), (0.1, False), (0.0, True), (0.45, False))

_NO_MATTER = 1 << 60

# Placements per choice, each with the times that the one before it was simulated to have.
_ROUNDS = 3

# Choices in a row without improvement after which the search ends.
_MOST_IN_VAIN = 2

# A bound on the search, in ops simulated: a few seconds on one core of 2026.
_MOST_OPS_SIMULATED = 40_000

# Stalls below this share of the step are not worth another candidate of ours, nor a look at the others' plans.
_NO_STALL = 0.002
_NO_STALL_AT_ALL = 0.00002

# The others, the likely winners first, and the most ops of a step for which they are asked: they search their own
# parameters by simulation. On recorded steps `window` was ahead by up to 0.2 % where little moves, `lms` by less.
_OTHERS = ((window, 16_000), (on_demand, 4_000), (lms, 4_000), (vdnn, 4_000), (nntrainer, 2_000))

# Of the fastest candidates so many are coloured for good, as long as they are within this factor of the fastest.
_MOST_FINALS = 4
_CLOSE = 1.005

# Times that differ by a smaller share are the same, and fewer remaps decide; a plan without any may be slower by
# _NO_STALL.
_SAME = 0.0001

# Recorded steps of ResNet-50 and GPT need no remaps when planned for this share of the pool, and hardly stall for it.
_SLACK = 0.92

# Budgets for which plans are made beside the real one: the least that works times powers of 2 ** _GRID, the next
# _NUM_GRID below the real one. They depend on the step alone, so that a budget profits from what a smaller one found.
_GRID = 0.125
_NUM_GRID = 2
_MOST_OPS_FOR_GRID = 4_000


def schedule(
    trace: Trace, machine: Machine, *, wrap: bool = True, thorough: bool = True, recompute: bool = False
) -> tuple[Residency, ...]:
    """Keep what fits, move what does not, and hide the moves.

    Args:
        trace: The step.
        machine: Budget and rates.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        thorough: Whether to look at other policies' plans, too, and at plans for much less memory. It
            takes several times as long; while a training run waits, it is not worth that.
        recompute: Whether ops may be run again where that pays. Off, because the executor does not play
            such plans yet.

    Raises:
        BudgetTooSmall: An op needs more at once than the budget.
    """
    proposal = _moves_only(trace, machine, wrap=wrap, thorough=thorough)
    return with_reruns(proposal, trace, machine, wrap=wrap) if recompute else proposal


def _moves_only(trace: Trace, machine: Machine, *, wrap: bool, thorough: bool) -> tuple[Residency, ...]:
    pins = pins_of(trace)
    require_budget(trace, machine, pins)
    chains = chains_of(trace, machine, wrap=wrap)
    if not trace.ops:
        return residencies_of(chains, (), trace)
    pinned = pinned_chunks(trace, machine, pins)
    search = _Search(trace, machine, chains, pinned)
    search.try_choices()
    if not thorough:
        return _best_with_slack(search)
    for num_chunks in _smaller_budgets(trace, machine):
        if search.is_perfect:
            break
        smaller = _Search(trace, replace(machine, num_chunks=num_chunks), chains, pinned)
        smaller.try_choices()
        if smaller.best is not None:
            search.consider(smaller.best.proposal)
    for policy, most_ops in _OTHERS:
        if search.is_perfect or len(trace.ops) > most_ops:
            break
        search.try_other(policy, wrap=wrap)
    return search.fastest_proposal


def _best_with_slack(search: _Search) -> tuple[Residency, ...]:
    """The best choice; or one made for a little less memory, if its colouring saves more than it stalls."""
    best, machine = search.best, search.machine
    if best is None or not best.num_remapped_chunks:
        return search.best_proposal
    slack = _Search(
        search.trace, replace(machine, num_chunks=int(machine.num_chunks * _SLACK)), search.chains, search.pinned
    )
    slack.try_choices()
    proposals = [own.proposal for own in (best, slack.best) if own is not None]
    finals = [evaluate(proposal, search.trace, machine, is_final=True) for proposal in proposals]
    return min((f for f in finals if not isinstance(f, Shortage)), key=lambda f: f.rank, default=best).proposal


def _smaller_budgets(trace: Trace, machine: Machine) -> list[int]:
    """The next grid points below the budget, in chunks, largest first."""
    least = max(smallest_num_chunks(trace, machine), 1)
    if machine.num_chunks <= least or len(trace.ops) > _MOST_OPS_FOR_GRID:
        return []
    top = math.ceil(math.log2(machine.num_chunks / least) / _GRID) - 1
    return [math.ceil(least * 2 ** (step * _GRID)) for step in range(top, max(top - _NUM_GRID, -1), -1)]


class _Search:
    """Candidates, and the best one so far."""

    def __init__(self, trace: Trace, machine: Machine, chains: tuple[Chain, ...], pinned: IntArray) -> None:
        self.trace = trace
        self.machine = machine
        self.chains = chains
        self.pinned = pinned
        self.best: Evaluation | None = None
        self.fallback: tuple[Residency, ...] = ()
        self.considered: list[Evaluation] = []
        self.num_tried = 0
        self.num_in_vain = 0  # choices in a row that did not improve on the best
        self.most_tried = max(_MOST_OPS_SIMULATED // len(trace.ops), _ROUNDS)

    @property
    def is_over(self) -> bool:
        """Whether another candidate could not save a time worth the search, or the search took long enough."""
        if self.num_tried >= self.most_tried or self.num_in_vain >= _MOST_IN_VAIN:
            return True
        return self.best is not None and self._is_good(self.best)

    @property
    def is_perfect(self) -> bool:
        """Whether no other plan could be faster by anything that counts."""
        limit_ns = (1 + _NO_STALL_AT_ALL) * self.trace.duration_ns
        return any(found.rank[0] <= limit_ns for found in self._candidates)  # remaps count, too

    @property
    def _candidates(self) -> list[Evaluation]:
        return self.considered if self.best is None else [self.best, *self.considered]

    @property
    def fastest_proposal(self) -> tuple[Residency, ...]:
        """The fastest of the best choice and of what was considered; remaps decide between equals.

        The first few are coloured as the finished plan will be: that can change their order by a little.
        """
        first = sorted(self._candidates, key=lambda found: found.simulation.duration_ns)[:_MOST_FINALS]
        limit_ns = first[0].simulation.duration_ns * _CLOSE if first else 0
        first += [min(self._candidates, key=lambda found: found.rank)] if first else []
        close = [found.proposal for found in first if found.simulation.duration_ns <= limit_ns]
        if len(close) < 2:
            return close[0] if close else self.fallback
        finals = [evaluate(proposal, self.trace, self.machine, is_final=True) for proposal in close]
        coloured = [found for found in finals if not isinstance(found, Shortage)]
        if not coloured:
            return first[0].proposal
        fastest_ns = min(found.simulation.duration_ns for found in coloured)
        same = [
            found
            for found in coloured
            if found.simulation.duration_ns <= fastest_ns * (1 + (_SAME if found.num_remapped_chunks else _NO_STALL))
        ]
        return min(same, key=lambda found: (found.num_remapped_chunks, found.simulation.duration_ns)).proposal

    def try_choices(self) -> None:
        """Our own candidates, until another one is not worth its time."""
        for reserve, by_length in _CANDIDATES:
            self.try_choice(reserve, by_length=by_length)
            if self.is_over:
                break

    def try_other(self, policy: ModuleType, *, wrap: bool) -> None:
        """Look at another policy's plan."""
        own = {"wrap": wrap} if policy is not window else {}
        try:
            found = policy.tune(self.trace, self.machine, own) if policy is not on_demand else own
            self.consider(policy.schedule(self.trace, self.machine, **found))
        except BudgetTooSmall:
            return

    def consider(self, proposal: tuple[Residency, ...]) -> None:
        """Note a proposal that is not one of ours for this budget."""
        outcome = evaluate(proposal, self.trace, self.machine)
        if not isinstance(outcome, Shortage):
            self.considered.append(outcome)

    def _is_good(self, outcome: Evaluation) -> bool:
        no_stall = outcome.simulation.stall_ns <= _NO_STALL * self.trace.duration_ns
        return no_stall and not outcome.num_remapped_chunks

    @property
    def best_proposal(self) -> tuple[Residency, ...]:
        """The best candidate's residencies."""
        return self.fallback if self.best is None else self.best.proposal

    def try_choice(self, reserve: float, *, by_length: bool) -> None:
        """Choose as if the budget were smaller by `reserve`, then place within the whole budget."""
        kept = int(self.machine.num_chunks * (1 - reserve))
        selection = Selection(self.trace, self.chains)
        selection.choose(np.maximum(self.pinned, kept), by_length=by_length)
        op_start_ns = list(accumulate((op.duration_ns for op in self.trace.ops), initial=0))
        for _ in range(_ROUNDS):
            placement = Placement(
                self.trace, self.machine, self.chains, selection.gaps_chosen, selection.occupancy.held, op_start_ns
            )
            proposal = residencies_of(self.chains, placement.place(), self.trace)
            outcome = evaluate(proposal, self.trace, self.machine)
            if isinstance(outcome, Shortage):
                self.fallback = proposal
                return
            self.num_tried += 1
            if self.best is not None and outcome.rank >= self.best.rank:
                self.num_in_vain += 1
                return
            self.best = outcome
            self.num_in_vain = 0
            if self.is_over:
                return
            op_start_ns = [*outcome.simulation.op_start_ns, outcome.simulation.duration_ns]


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


def _tick_durations(trace: Trace) -> FloatArray:
    """Each tick's share of its op's time; ticks between ops count a little, so that ties have an order."""
    weight = np.full(trace.num_ticks, 1.0)
    for op in trace.ops:
        weight[op.start_tick : op.stop_tick] += op.duration_ns / (op.stop_tick - op.start_tick)
    return weight
