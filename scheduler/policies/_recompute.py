"""Recomputation where it pays: the last step of `auto`, on top of a plan that only moves bytes.

A gap whose bytes are written out and loaded again may instead be discarded and recomputed. That takes compute
and relieves both links; so it pays where ops wait for transfers and the op that makes the bytes is quick for their
size. Gaps are exchanged in the order of bytes kept off the links per nanosecond of compute, many at first and fewer
and fewer while the simulation does not agree, and only what makes the simulated step faster stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from scheduler.budget import BudgetTooSmall
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import Evaluation, estimate, evaluate
from scheduler.plan import Discarded, Dropped, Evicted, Loaded, Machine, Recomputed, Residency, occupied_ticks
from scheduler.policies import capuchin
from scheduler.policies._greedy import Facts, Stuck
from scheduler.policies._mixed_walk import MUCH_STALL, mixed
from scheduler.policies._remat_search import fewest_reruns
from scheduler.reruns import ReplayGraph, reruns_of
from scheduler.residency_builder import ordered, with_last_copies
from scheduler.trace import Trace

# A re-run of more ops than this costs more than the transfers of any one variable.
_MOST_OPS = 16

# A bound on the search, in ops simulated, and in candidate plans.
_MOST_OPS_SIMULATED = 40_000
_MOST_TRIED = 24

# What is estimated to lose so many times as much time as the best is not coloured. Up to 1.1 times, some were the best.
_HOPELESS = 1.5

# Stalls below this share of the step are not worth a search.
_NO_STALL = 0.00002

# Shares of the memory that the fewest re-runs are looked for in, one after another, while remaps take more than this
# share of the step. Tried on the recorded Inception-v4 and on the shapes of tests/scheduler/recompute_traces.py.
_HARDLY_REMAPPED = 0.001
_SLACK = (0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9)
_SLACK_OF_LONG = (0.97,)
_MOST_OPS_FOR_SLACK = 3_000

# Below this share of the step, what is lost is not worth improving such walks, in half of the time for such plans: on
# recorded steps of seven models at 60 and 40 % of their peaks the plan was the same without, with a store of 2 GB/s.
_VERY_MUCH_STALL = 1.0

# The most ops of a step for which the plans of the recomputing policies are looked at, too; and that of fewest re-runs.
_MOST_OPS_FOR_OTHERS = 2_000
_MOST_OPS_FOR_FEWEST = 10_000


def with_reruns(best: Evaluation, trace: Trace, *, wrap: bool) -> Evaluation:
    """The fastest of: the best plan without re-runs, it with some of its gaps recomputed, what recomputing policies do,
    and what walks that may do both do.

    What runs again for longer than all of the best so far is not even coloured, which takes longer than to find it.
    """
    if not any(op.replayable for op in trace.ops) or _is_perfect(best, trace):
        return best
    climbs = best.duration_ns - trace.duration_ns >= _VERY_MUCH_STALL * trace.duration_ns
    best = exchanged(best, trace)
    machine, limit_ns = best.plan.machine, best.duration_ns - trace.duration_ns
    fewest: list[tuple[Residency, ...]] = []
    if len(trace.ops) <= _MOST_OPS_FOR_FEWEST:
        fewest = fewest_reruns(trace, machine, wrap=wrap, limit_ns=limit_ns)
    others = _others(trace, machine, wrap=wrap) if len(trace.ops) <= _MOST_OPS_FOR_OTHERS else ()
    both = mixed(trace, machine, wrap=wrap, climbs=climbs) if limit_ns >= MUCH_STALL * trace.duration_ns else ()
    for other in chain(fewest, both, others):
        if trace.duration_ns + reruns_ns(other, trace, machine) >= best.duration_ns:
            continue
        best = _evaluated_if_faster(with_last_copies(other, trace), best, trace) or best
    return best


def with_slack(found: Sequence[Evaluation], trace: Trace, *, wrap: bool) -> Evaluation | None:
    """The fewest re-runs for somewhat less memory, where remaps cost what some more re-runs may save.

    In memory that is full at many moments there is hardly a choice of chunks, so what comes back lies elsewhere. With
    3 % of the memory left free a recorded Inception-v4 at 70 % of its peak remapped nothing, for 0.5 % more re-runs.

    Args:
        found: The fewest re-runs for all of the memory, evaluated.
        trace, wrap: As of `fewest_reruns`.

    Returns:
        The fastest of `found` and others, coloured as the finished plan will be; None if `found` hardly remaps.
    """
    best = min(found, key=lambda own: own.rank, default=None)
    if best is None or _hardly_remaps(best, trace):
        return None
    machine = best.plan.machine
    finals = [own for one in found for own in _finals([one.proposal], trace, machine)]
    best = min(finals, key=lambda own: own.rank, default=best)
    chosen: Machine | None = None
    for share in _SLACK if len(trace.ops) <= _MOST_OPS_FOR_SLACK else _SLACK_OF_LONG:
        if _hardly_remaps(best, trace):
            break
        smaller = replace(machine, num_chunks=int(machine.num_chunks * share))
        limit_ns = best.duration_ns - trace.duration_ns
        fewest = fewest_reruns(trace, smaller, wrap=wrap, limit_ns=limit_ns, climbs=False)
        for own in _finals(fewest[:1], trace, machine):
            finals.append(own)
            if own.rank < best.rank:
                best, chosen = own, smaller
    if chosen is not None:
        limit_ns = best.duration_ns - trace.duration_ns
        finals.extend(_finals(fewest_reruns(trace, chosen, wrap=wrap, limit_ns=limit_ns)[:1], trace, machine))
    return min(finals, key=lambda own: own.rank, default=None)


def _finals(proposals: Sequence[tuple[Residency, ...]], trace: Trace, machine: Machine) -> Iterator[Evaluation]:
    for proposal in proposals:
        outcome = evaluate(proposal, trace, machine, is_final=True)
        if not isinstance(outcome, Shortage):
            yield outcome


def _hardly_remaps(outcome: Evaluation, trace: Trace) -> bool:
    return outcome.duration_ns - outcome.simulation.duration_ns <= _HARDLY_REMAPPED * trace.duration_ns


def reruns_ns(proposal: tuple[Residency, ...], trace: Trace, machine: Machine) -> int:
    """Time of all that runs again: no plan with these residencies takes less than that and the step's own."""
    return sum(rerun.duration_ns for rerun in reruns_of(proposal, trace, machine))


def exchanged(best: Evaluation, trace: Trace) -> Evaluation:
    """The same with some of its gaps recomputed, or as it is if that is not faster."""
    exchange = _Exchange(trace, best.plan.machine, best)
    exchange.search()
    return exchange.best


def _evaluated_if_faster(proposal: tuple[Residency, ...], best: Evaluation, trace: Trace) -> Evaluation | None:
    """The proposal, if it takes less time than the best. Most do not, which the simulation without chunks tells."""
    machine = best.plan.machine
    lost_ns = estimate(proposal, trace, machine).duration_ns - trace.duration_ns
    if lost_ns > _HOPELESS * (best.duration_ns - trace.duration_ns):
        return None
    outcome = evaluate(proposal, trace, machine)
    return None if isinstance(outcome, Shortage) or outcome.rank >= best.rank else outcome


def _is_perfect(outcome: Evaluation, trace: Trace) -> bool:
    return outcome.rank[0] <= (1 + _NO_STALL) * trace.duration_ns


def _others(trace: Trace, machine: Machine, *, wrap: bool) -> Iterator[tuple[Residency, ...]]:
    """What `capuchin` proposes, if it finds something; the others that recompute move nothing, and re-run more."""
    try:
        yield capuchin.propose(Facts(trace, machine), wrap=wrap, recompute=True)
    except (BudgetTooSmall, Stuck):
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """The last gaps of a variable's life, from residency `position` of its own on."""

    variable: int
    position: int
    moved_nbytes: int
    recompute_ns: int

    @property
    def order(self) -> tuple[float, int, int]:
        return -self.moved_nbytes / max(self.recompute_ns, 1), self.variable, self.position


class _Exchange:
    """A proposal, and what of it has been exchanged.

    Attributes:
        best: The best evaluation so far.
        claimed: For each variable, ticks at which a re-run reads it from the pool.
    """

    def __init__(self, trace: Trace, machine: Machine, best: Evaluation) -> None:
        self.trace = trace
        self.machine = machine
        self.best = best
        self.graph = ReplayGraph(trace)
        self.use_ops = [[op for op, _ in uses] for uses in trace.uses_by_variable()]
        self.claimed: dict[int, set[int]] = {}
        for rerun in reruns_of(best.proposal, trace, machine):
            for source in rerun.sources:
                self.claimed.setdefault(source, set()).add(trace.ops[rerun.before_op].start_tick)

    def search(self) -> None:
        """Exchange as much as pays."""
        waiting = sorted(self._candidates(), key=lambda c: c.order)
        size = len(waiting)
        tries = min(_MOST_TRIED, max(_MOST_OPS_SIMULATED // max(len(self.trace.ops), 1), 2))
        while waiting and tries and not _is_perfect(self.best, self.trace):
            tries -= 1
            size = min(size, len(waiting))
            if self._try(waiting[:size]):
                done = {c.variable for c in waiting[:size]}
                waiting = [c for c in waiting[size:] if c.variable not in done]
            elif size > 1:
                size //= 2
            else:
                waiting = waiting[1:]

    def _stays(self) -> dict[int, list[Residency]]:
        found: dict[int, list[Residency]] = {}
        for r in self.best.proposal:
            found.setdefault(r.variable, []).append(r)
        return found

    def _candidates(self) -> list[_Candidate]:
        found = []
        for v, stays in self._stays().items():
            variable = self.trace.variables[v]
            if variable.birth_tick is None or variable.death_tick is None or not self.graph.may_ever_return(v):
                continue
            for position in range(len(stays) - 1):
                loads = sum(isinstance(r.start, Loaded) for r in stays[position + 1 :])
                writes = sum(isinstance(r.stop, Evicted) for r in stays[position:])
                own_ns = sum(self.trace.ops[op].own_ns for op in self.graph.writers[v])
                if loads:
                    found.append(
                        _Candidate(
                            variable=v,
                            position=position,
                            moved_nbytes=variable.nbytes * (loads + writes),
                            recompute_ns=own_ns * loads,
                        )
                    )
        return found

    def _try(self, candidates: Sequence[_Candidate]) -> bool:
        """Exchange all of these that can be, if that is faster."""
        claimed = {v: set(ticks) for v, ticks in self.claimed.items()}
        stays = self._stays()
        changed = False
        for candidate in sorted(candidates, key=lambda c: (c.order, c.position)):
            new = self._exchanged(stays[candidate.variable], candidate.position, stays, claimed)
            if new is not None:
                stays[candidate.variable] = new
                changed = True
        if not changed:
            return False
        proposal = ordered((r for own in stays.values() for r in own), self.trace)
        outcome = _evaluated_if_faster(proposal, self.best, self.trace)
        if outcome is None:
            return False
        self.best, self.claimed = outcome, claimed
        return True

    def _exchanged(
        self,
        own: list[Residency],
        position: int,
        stays: dict[int, list[Residency]],
        claimed: dict[int, set[int]],
    ) -> list[Residency] | None:
        """The variable's stays with all gaps after `position` recomputed; None if that cannot be."""
        v, found = own[0].variable, own[:position]
        last = own[position]
        reads: dict[int, set[int]] = {}
        for following in own[position + 1 :]:
            uses = self._uses_in(following)
            if not isinstance(following.start, Loaded) or not uses or not isinstance(last.stop, Evicted | Dropped):
                return None
            ops = self.graph.ops_for([v], uses[0], _Residents(stays, self.trace, v, uses[0]), most_ops=_MOST_OPS)
            if ops is None:
                return None
            rerun = self.graph.rerun(uses[0], ops, [v], self.machine)
            for source in rerun.sources:
                reads.setdefault(source, set()).add(self.trace.ops[uses[0]].start_tick)
            stop = self._discarded(last) if isinstance(last.stop, Evicted) or _lacks_copy(last) else last.stop
            if stop is None:
                return None
            found.append(replace(last, stop=stop))
            last = replace(following, start=Recomputed(uses[0], ops))
        if isinstance(last.stop, Evicted | Dropped):
            return None
        found.append(last)
        spans = [occupied_ticks(r, self.trace) for r in found]
        if any(not any(a <= tick < b for a, b in spans) for tick in claimed.get(v, ())):
            return None
        for source, ticks in reads.items():
            claimed.setdefault(source, set()).update(ticks)
        return found

    def _uses_in(self, stay: Residency) -> list[int]:
        start, stop = occupied_ticks(stay, self.trace)
        ops = self.trace.ops
        return [op for op in self.use_ops[stay.variable] if ops[op].stop_tick > start and ops[op].start_tick < stop]

    def _discarded(self, stay: Residency) -> Discarded | None:
        """The stop without a write, right after the stay's last use."""
        uses = self._uses_in(stay)
        return Discarded(after_op=uses[-1]) if uses else None


def _lacks_copy(stay: Residency) -> bool:
    """Whether a stay that was to be dropped began with a re-run, so that the store has no copy to count on."""
    return isinstance(stay.start, Recomputed)


class _Residents:
    """Whether a variable is in the pool when an op starts, under a proposal."""

    def __init__(self, stays: dict[int, list[Residency]], trace: Trace, wanted: int, before_op: int) -> None:
        self.stays = stays
        self.trace = trace
        self.wanted = wanted
        self.tick = trace.ops[before_op].start_tick

    def __call__(self, variable: int) -> bool:
        if variable == self.wanted:
            return False
        for stay in self.stays.get(variable, ()):
            start, stop = occupied_ticks(stay, self.trace)
            if start <= self.tick < stop:
                same_rerun = isinstance(stay.start, Recomputed) and start == self.tick
                return not same_rerun
        return False
