"""What an executor does at each op: the plan's residencies, turned into work by op index.

Everything here follows from the plan alone. The simulator plays these lists; an executor can too.
Residencies are named by their index in `Plan.residencies`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from scheduler.budget import first_op_to_end_after
from scheduler.plan import Born, Evicted, Kept, Loaded, Plan, occupied_ticks
from scheduler.trace import Trace


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
    """

    loads: tuple[tuple[int, ...], ...]
    births: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    waits_for: tuple[tuple[int, ...], ...]
    kept_from: dict[int, int]


def step_actions(plan: Plan, trace: Trace) -> StepActions:
    """The work of each op under `plan`, which must be coloured and legal."""
    num_ops = len(trace.ops)
    uses = _uses(plan, trace)
    first_use: dict[int, int] = {}
    for index, own in enumerate(uses):
        for r in own:
            first_use.setdefault(r, index)
    loads: list[list[int]] = [[] for _ in range(num_ops)]
    births: list[list[int]] = [[] for _ in range(num_ops)]
    writes: list[list[int]] = [[] for _ in range(num_ops)]
    released: dict[int, int] = {}
    for index, stay in enumerate(plan.residencies):
        if isinstance(stay.start, Loaded):
            loads[stay.start.before_op].append(index)
        elif isinstance(stay.start, Born) and num_ops:
            births[first_op_to_end_after(trace, occupied_ticks(stay, trace)[0])].append(index)
        if isinstance(stay.stop, Evicted):
            writes[stay.stop.write_op].append(index)
            released[index] = stay.stop.release_op
    return StepActions(
        loads=tuple(tuple(sorted(own, key=lambda r: (first_use.get(r, num_ops), r))) for own in loads),
        births=tuple(tuple(own) for own in births),
        uses=uses,
        writes=tuple(tuple(sorted(own, key=lambda r: (released[r], r))) for own in writes),
        waits_for=_waits_for(plan, trace),
        kept_from=_kept_from(plan, trace),
    )


def _uses(plan: Plan, trace: Trace) -> tuple[tuple[int, ...], ...]:
    stops: list[list[int]] = [[] for _ in trace.variables]
    stays: list[list[int]] = [[] for _ in trace.variables]
    for index, r in enumerate(plan.residencies):
        stays[r.variable].append(index)
        stops[r.variable].append(occupied_ticks(r, trace)[1])
    return tuple(
        tuple(stays[u.variable][bisect_left(stops[u.variable], op.start_tick + 1)] for u in op.uses) for op in trace.ops
    )


def _kept_from(plan: Plan, trace: Trace) -> dict[int, int]:
    ends = {trace.variables[r.variable].becomes: i for i, r in enumerate(plan.residencies) if isinstance(r.stop, Kept)}
    return {i: ends[r.variable] for i, r in enumerate(plan.residencies) if isinstance(r.start, Kept)}


def _waits_for(plan: Plan, trace: Trace) -> tuple[tuple[int, ...], ...]:
    occupant = np.full(plan.machine.num_chunks, -1, dtype=np.int64)
    chunks = [np.array(r.chunk_indices(), dtype=np.int64) for r in plan.residencies]
    evicted = [isinstance(r.stop, Evicted) for r in plan.residencies]
    last_stay: dict[int, int] = {}
    found: list[tuple[int, ...]] = [()] * len(plan.residencies)
    for period in range(2 if trace.cyclic else 1):
        if period:  # over the boundary, a variable goes on as its heir
            last_stay = {
                heir: last_stay[v]
                for v, variable in enumerate(trace.variables)
                if (heir := variable.becomes) is not None and v in last_stay
            }
        for index, r in enumerate(plan.residencies):
            if not isinstance(r.start, Kept):
                before = {int(i) for i in np.unique(occupant[chunks[index]])}
                if isinstance(r.start, Loaded) and r.variable in last_stay:
                    before.add(last_stay[r.variable])
                found[index] = tuple(i for i in sorted(before) if i >= 0 and evicted[i])
            occupant[chunks[index]] = index
            last_stay[r.variable] = index
    return tuple(found)
