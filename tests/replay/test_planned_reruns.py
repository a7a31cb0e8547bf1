"""What a plan has discarded can be made again at any moment, from what is there at that moment."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.replay.planned_reruns import PlannedReruns
from scheduler.budget import smallest_num_chunks
from scheduler.plan import Discarded, Machine, Plan, Recomputed, occupied_ticks
from scheduler.planning import BudgetTooSmall, make_plan
from scheduler.trace import Trace
from tests.scheduler import recompute_traces
from tests.scheduler.random_traces import random_trace, replayable
from tests.session.program_reruns import with_discards
from tests.thinned import thinned

CHUNK = 1 << 14
MODELS = {
    "residual": recompute_traces.residual(),
    "dense": recompute_traces.dense(),
    "recurrent": recompute_traces.recurrent(20),
    "tree": recompute_traces.tree(),
    "unrolled": recompute_traces.unrolled(4),
}


def reruns_of(plan: Plan, trace: Trace) -> PlannedReruns:
    """The plan's re-runs, without anything that needs memory."""
    variables = [PlanVariable(index=index, trace=trace) for index in range(len(trace.variables))]
    residencies = []
    for planned in plan.residencies:
        residency = ExecutableResidency(variable=variables[planned.variable], planned=planned, segments=[])
        residencies.append(residency)
        residency.variable.residencies.append(residency)
    return PlannedReruns(plan, trace, residencies)


def check_every_moment(plan: Plan, trace: Trace) -> int:
    """Before each op, ask for all that is discarded then. How many variables were asked for in all."""
    reruns = reruns_of(plan, trace)
    stays = {
        v: sorted((r for r in plan.residencies if r.variable == v), key=lambda r: occupied_ticks(r, trace))
        for v in range(len(trace.variables))
    }
    num_asked = 0
    for index, op in enumerate(trace.ops):
        tick = op.start_tick

        def is_alive(v: int, tick: int = tick) -> bool:
            start, stop = trace.lifetime(v)
            return start < tick < stop

        discarded = {
            v
            for v in stays
            if is_alive(v)
            for one, other in pairwise(stays[v])
            if isinstance(one.stop, Discarded)
            and isinstance(other.start, Recomputed)
            and occupied_ticks(one, trace)[1] <= tick <= occupied_ticks(other, trace)[0]
            and occupied_ticks(other, trace)[0] < trace.lifetime(v)[1]
        }
        ghosts = {
            r.variable
            for r in plan.residencies
            if isinstance(r.start, Recomputed)
            and not is_alive(r.variable)
            and occupied_ticks(r, trace)[0] < tick < occupied_ticks(r, trace)[1]
        }
        if not discarded:
            continue
        num_asked += len(discarded)
        ops = reruns.missing_ops(
            sorted(discarded),
            index,
            lambda v: (is_alive(v) and v not in discarded) or v in ghosts,  # noqa: B023
        )
        assert ops is not None, f"before op {index}, {discarded} cannot be made"
        assert set(ops) <= set(reruns.recipes_of) and max(ops) < index
    return num_asked


@thinned("name,policy", list(MODELS), ["sublinear", "dtr", "melon", "capuchin"])
def test_policies(name: str, policy: str) -> None:
    trace = MODELS[name]
    least = smallest_num_chunks(trace, Machine(chunk_nbytes=CHUNK, num_chunks=1))
    most = -(-trace.peak_nbytes() // CHUNK)
    num_asked = 0
    for share in (0.3, 0.6):
        machine = Machine(
            chunk_nbytes=CHUNK,
            num_chunks=least + int((most - least) * share),
            load_bytes_per_s=1e6,
            evict_bytes_per_s=1e6,
        )
        try:
            plan = make_plan(trace, machine, policy)
        except BudgetTooSmall:
            continue
        num_asked += check_every_moment(plan, trace)
    if policy in ("dtr", "melon"):
        assert num_asked > 0


@pytest.mark.parametrize("seed", range(25))
def test_random_steps(seed: int) -> None:
    """With ops that may run again and ops that may not, in-place ops, ghosts and many discards."""
    rng = random.Random(seed)
    trace = replayable(random_trace(seed, num_ops=20), share=0.8, rng=rng)
    least = smallest_num_chunks(trace, Machine(chunk_nbytes=8, num_chunks=1))
    machine = Machine(chunk_nbytes=8, num_chunks=least + rng.randrange(least + 1))
    check_every_moment(with_discards(make_plan(trace, machine, "auto", thorough=False), trace, seed), trace)


def test_random_steps_discard_enough() -> None:
    """The check above is worth something only if much is asked for."""
    num_asked = 0
    for seed in range(100, 108):
        trace = replayable(random_trace(seed, num_ops=20))
        least = smallest_num_chunks(trace, Machine(chunk_nbytes=8, num_chunks=1))
        machine = Machine(chunk_nbytes=8, num_chunks=2 * least)
        plan = with_discards(make_plan(trace, machine, "auto", thorough=False), trace, seed)
        num_asked += check_every_moment(plan, trace)
    assert num_asked > 50
