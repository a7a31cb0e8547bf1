"""What an executor does at each op: the plan's residencies, turned into work by op index.

Everything here follows from the plan alone. The simulator plays these lists; an executor can too.
Residencies are named by their index in `Plan.residencies`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from scheduler.budget import first_op_to_end_after
from scheduler.colouring.uncoloured import likely_holders_before
from scheduler.plan import Born, Evicted, Kept, Loaded, Plan, Recomputed, Residency, occupied_ticks
from scheduler.reruns import reruns_of
from scheduler.trace import Trace

_Spans = list[tuple[int, int]]  # `occupied_ticks` of a plan's residencies, which are asked for often


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunWork:
    """What is run again right before an op.

    Attributes:
        ops: In order.
        duration_ns: Their time.
        sources: Residencies that it reads; their loads must be done.
        made: Residencies that begin with it.
        scratch_waits_for: Evicted residencies whose writes must be done before its scratch is filled.
    """

    ops: tuple[int, ...]
    duration_ns: int
    sources: tuple[int, ...]
    made: tuple[int, ...]
    scratch_waits_for: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderWork:
    """What is copied within memory between two steps.

    Attributes:
        nbytes: Of the chunks that are copied.
        waits_for: Residencies of the step that ends whose writes must be done first: a target's last holders, and
            what was written early out of chunks that become a target.
        loads: Residencies whose loads must be done first: they are copied.
    """

    nbytes: int = 0
    waits_for: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepActions:
    """Work by op index, and what must wait for what.

    Attributes:
        loads: For each op, residencies whose load is issued right before it, the first needed first.
        births: For each op, residencies that are born in it, or between the op before and it.
        uses: For each op, the residency of each of its `uses`, in order.
        writes: For each op, residencies whose write starts right after it, the first released first.
        waits_for: For each residency, the evicted residencies whose writes must be done before its
            chunks may be filled: the last occupants of its chunks, and, for a load, the
            eviction that wrote its bytes. In a cyclic trace they may lie in the step before.
        kept_from: For a residency that starts kept, the one that it continues.
        reruns: What is run again right before an op, after the loads issued there.
        border: What is copied before the first op, and before any load.
    """

    loads: tuple[tuple[int, ...], ...]
    births: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    waits_for: tuple[tuple[int, ...], ...]
    kept_from: dict[int, int]
    reruns: dict[int, RerunWork]
    border: BorderWork


def step_actions(plan: Plan, trace: Trace) -> StepActions:
    """The work of each op under `plan`, which must be legal.

    What waits for what follows from the chunks; without them (of a plan that is not coloured yet) it is a guess.
    """
    num_ops = len(trace.ops)
    spans = [occupied_ticks(r, trace) for r in plan.residencies]
    uses = _uses(plan, trace, spans)
    waits_for, scratch_waits_for = _waits_for(plan, trace, spans)
    reruns = _reruns(plan, trace, spans, scratch_waits_for)
    first_use: dict[int, int] = {r: index for index, work in sorted(reruns.items(), reverse=True) for r in work.sources}
    for index, own in enumerate(uses):
        for r in own:
            if first_use.setdefault(r, index) > index:
                first_use[r] = index
    loads: list[list[int]] = [[] for _ in range(num_ops)]
    births: list[list[int]] = [[] for _ in range(num_ops)]
    writes: list[list[int]] = [[] for _ in range(num_ops)]
    released: dict[int, int] = {}
    for index, stay in enumerate(plan.residencies):
        if isinstance(stay.start, Loaded):
            loads[stay.start.before_op].append(index)
        elif isinstance(stay.start, Born) and num_ops:
            births[first_op_to_end_after(trace, spans[index][0])].append(index)
        if isinstance(stay.stop, Evicted):
            over_border = stay.stop.write_op < 0  # in the step before: after the same op of this one for the next
            writes[stay.stop.write_op % num_ops].append(index)
            released[index] = stay.stop.release_op + over_border * num_ops
    return StepActions(
        loads=tuple(tuple(sorted(own, key=lambda r: (first_use.get(r, num_ops), r))) for own in loads),
        births=tuple(tuple(own) for own in births),
        uses=uses,
        writes=tuple(tuple(sorted(own, key=lambda r: (released[r], r))) for own in writes),
        waits_for=waits_for,
        kept_from=_kept_from(plan, trace),
        reruns=reruns,
        border=_border_work(plan, trace),
    )


def _uses(plan: Plan, trace: Trace, spans: _Spans) -> tuple[tuple[int, ...], ...]:
    at = _StayFinder(plan, trace, spans)
    return tuple(tuple([at.find(u.variable, op.start_tick) for u in op.uses]) for op in trace.ops)


class _StayFinder:
    """Finds a variable's residency by tick."""

    def __init__(self, plan: Plan, trace: Trace, spans: _Spans) -> None:
        self.stops: list[list[int]] = [[] for _ in trace.variables]
        self.stays: list[list[int]] = [[] for _ in trace.variables]
        for index, r in enumerate(plan.residencies):
            self.stays[r.variable].append(index)
            self.stops[r.variable].append(spans[index][1])

    def find(self, variable: int, tick: int) -> int:
        """The first residency that lasts beyond `tick`."""
        return self.stays[variable][bisect_left(self.stops[variable], tick + 1)]


def _reruns(
    plan: Plan, trace: Trace, spans: _Spans, scratch_waits_for: dict[int, tuple[int, ...]]
) -> dict[int, RerunWork]:
    made: dict[int, list[int]] = {}
    for index, r in enumerate(plan.residencies):
        if isinstance(r.start, Recomputed):
            made.setdefault(r.start.before_op, []).append(index)
    if not made:
        return {}
    at = _StayFinder(plan, trace, spans)
    return {
        rerun.before_op: RerunWork(
            ops=rerun.ops,
            duration_ns=rerun.duration_ns,
            sources=tuple(at.find(v, trace.ops[rerun.before_op].start_tick) for v in rerun.sources),
            made=tuple(made[rerun.before_op]),
            scratch_waits_for=scratch_waits_for.get(rerun.before_op, ()),
        )
        for rerun in reruns_of(plan.residencies, trace, plan.machine)
    }


def _kept_from(plan: Plan, trace: Trace) -> dict[int, int]:
    ends = {trace.variables[r.variable].becomes: i for i, r in enumerate(plan.residencies) if isinstance(r.stop, Kept)}
    return {i: ends[r.variable] for i, r in enumerate(plan.residencies) if isinstance(r.start, Kept)}


def _border_work(plan: Plan, trace: Trace) -> BorderWork:
    if not plan.border_copies:
        return BorderWork()
    early = _written_early(plan, trace)
    last = np.full(plan.machine.num_chunks, -1, dtype=np.int64)
    for index, stay in enumerate(plan.residencies):  # in order of start
        for first, count in stay.chunks:
            last[first : first + count] = early.get(index, index)
    targets = np.concatenate([np.arange(c.target, c.target + c.num_chunks) for c in plan.border_copies])
    sources = {c for copy in plan.border_copies for c in range(copy.source, copy.source + copy.num_chunks)}
    holders = [int(index) for index in np.unique(last[targets]) if index >= 0]
    ends = (i for i, stay in enumerate(plan.residencies) if isinstance(stay.stop, Kept))
    return BorderWork(
        nbytes=len(targets) * plan.machine.chunk_nbytes,
        waits_for=tuple(i for i in holders if isinstance(plan.residencies[i].stop, Evicted)),
        loads=tuple(i for i in ends if not sources.isdisjoint(plan.residencies[i].chunk_indices())),
    )


def _written_early(plan: Plan, trace: Trace) -> dict[int, int]:
    """Residencies that a copy leaves while they are written over the border, each with the one whose write that is."""
    if not plan.border_copies:
        return {}
    return {
        end: start
        for start, end in _kept_from(plan, trace).items()
        if _is_written_early(plan.residencies[start]) and plan.residencies[start].chunks != plan.residencies[end].chunks
    }


def _is_written_early(stay: Residency) -> bool:
    return isinstance(stay.stop, Evicted) and stay.stop.write_op < 0


def _waits_for(
    plan: Plan, trace: Trace, spans: _Spans
) -> tuple[tuple[tuple[int, ...], ...], dict[int, tuple[int, ...]]]:
    """For each residency, and for the scratch of each re-run, the writes that must be done first."""
    num_stays = len(plan.residencies)
    evicted = np.array([isinstance(r.stop, Evicted) for r in plan.residencies], dtype=np.bool_)
    found: list[list[int]] = [[] for _ in range(num_stays + len(plan.scratch))]
    is_coloured = any(r.chunks for r in plan.residencies)
    pairs = _occupants_before(plan, trace, spans) if is_coloured else likely_holders_before(plan, trace)
    early = _written_early(plan, trace)
    for holder, last in pairs:
        before = early.get(last, last)
        if before < num_stays and evicted[before]:  # a re-run has waited; whoever comes after it need not
            found[holder].append(before)
    last_stay: dict[int, int] = {}
    if trace.cyclic:  # over the boundary, a variable goes on as its heir
        final = {r.variable: index for index, r in enumerate(plan.residencies)}
        becomes = ((v, variable.becomes) for v, variable in enumerate(trace.variables))
        last_stay = {heir: final[v] for v, heir in becomes if heir is not None and v in final}
    for index, r in enumerate(plan.residencies):
        if isinstance(r.start, Kept):
            found[index] = []
        elif isinstance(r.start, Loaded) and r.variable in last_stay:
            written = last_stay[r.variable]
            if evicted[written] and written not in found[index]:
                found[index] = sorted([*found[index], written])
        last_stay[r.variable] = index
    in_scratch = {room.before_op: tuple(found[num_stays + i]) for i, room in enumerate(plan.scratch)}
    return tuple(tuple(own) for own in found[:num_stays]), in_scratch


def _occupants_before(plan: Plan, trace: Trace, spans: _Spans) -> list[tuple[int, int]]:
    """Pairs of holders, in order: one, and another that held one of its chunks last before it.

    Holders are residencies, then scratch rooms, by index. In a cyclic trace the first holder of a chunk comes after
    its last one.
    """
    num_stays = len(plan.residencies)
    starts = [(start, 1, index) for index, (start, _) in enumerate(spans)]
    rooms = [(trace.ops[room.before_op].start_tick, 0, num_stays + i) for i, room in enumerate(plan.scratch)]
    order = [holder for _, _, holder in sorted([*starts, *rooms])] if rooms else list(range(num_stays))
    holders = [*(r.chunks for r in plan.residencies), *(room.chunks for room in plan.scratch)]
    runs = np.array([(holder, *run) for holder in order for run in holders[holder]], dtype=np.int64).reshape(-1, 3)
    if not len(runs):
        return []
    who, first, count = runs.T
    ends = np.cumsum(count)
    chunk = np.repeat(first - (ends - count), count) + np.arange(ends[-1])
    by_chunk = np.argsort(chunk, kind="stable")
    holder, chunk = np.repeat(who, count)[by_chunk], chunk[by_chunk]
    before = np.roll(holder, 1)
    is_first = np.ones(len(chunk), dtype=np.bool_)
    is_first[1:] = chunk[1:] != chunk[:-1]
    if trace.cyclic:
        before[is_first] = holder[np.roll(is_first, -1)]
    else:
        holder, before = holder[~is_first], before[~is_first]
    pairs = np.unique(holder * len(holders) + before)
    return list(zip((pairs // len(holders)).tolist(), (pairs % len(holders)).tolist(), strict=True))
