"""What every recomputing policy's plan must satisfy, on random traces and on steps in the shape of real models."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.cost.bounds import lower_bounds
from scheduler.plan import Discarded, Evicted, Loaded, Machine, Plan, PlanError, Recomputed
from scheduler.planning import make_plan
from scheduler.policies import POLICIES
from scheduler.policies.sublinear import turning_op
from scheduler.reruns import ReplayGraph
from scheduler.trace import Op, Trace, Use, Variable
from tests.scheduler.model_traces import conv_net, resnet50, transformer
from tests.scheduler.random_traces import TIMES, random_machine, random_trace, replayable
from tests.thinned import thinned

MIB = 1 << 20
SWAPPING = ("capuchin", "poet")
RECOMPUTING = ("capuchin", "checkmate", "dtr", "melon", "poet", "sublinear")
policies = pytest.mark.parametrize("policy", RECOMPUTING)
seeds = st.integers(min_value=0, max_value=2**32 - 1)


def some_case(seed: int) -> tuple[Trace, Machine]:
    """A random trace in which most ops may be run again, and a budget between the least possible and everything."""
    rng = random.Random(seed)
    trace = replayable(random_trace(seed, num_ops=rng.randint(1, 20)), share=rng.choice([0.6, 0.9, 1.0]), rng=rng)
    machine = random_machine(seed, 0)
    least = smallest_num_chunks(trace, machine)
    most = sum(machine.chunks_of(v.nbytes) for v in trace.variables)
    some = [least, least + (most - least) // 5, least + (most - least) // 2, rng.randint(least, most)]
    return trace, replace(machine, num_chunks=rng.choice(some))


def plan_or_none(trace: Trace, machine: Machine, policy: str) -> Plan | None:
    """The plan; None where the policy has none, which must be for a reason."""
    try:
        return make_plan(trace, machine, policy)  # verifies
    except PlanError as error:
        refusal = error
    if isinstance(refusal, BudgetTooSmall):
        assert policy not in SWAPPING
        assert refusal.smallest_budget_nbytes > machine.budget_nbytes
    else:  # the circle cannot be coloured, whatever is released
        assert "no chunk assignment" in str(refusal)
        assert any(not v.evictable for v in trace.variables)
    return None


@policies
@settings(max_examples=30 * TIMES, deadline=None)
@example(
    seed=115901511
)  # an op that may not run again changes a variable after it was brought back: no need to write it
@given(seed=seeds)
def test_every_plan_is_legal_within_budget_and_above_the_bounds(policy: str, seed: int) -> None:
    trace, machine = some_case(seed)
    plan = plan_or_none(trace, machine, policy)
    if plan is None:
        return
    assert plan.predicted["peak_nbytes"] <= machine.budget_nbytes
    for bounded in ("duration_ns", "loaded_nbytes", "evicted_nbytes"):
        assert plan.predicted[bounded] >= plan.bounds[bounded]
    told = plan.predicted
    busy_ns = trace.duration_ns + told["stall_ns"] + told.get("recompute_ns", 0) + told.get("relocate_ns", 0)
    assert plan.predicted["duration_ns"] == busy_ns
    assert Plan.from_json(plan.to_json()) == plan
    assert make_plan(Trace.from_json(trace.to_json()), machine, policy).to_json() == plan.to_json()


@policies
@settings(max_examples=30 * TIMES, deadline=None)
@given(seed=seeds)
def test_nothing_is_run_again_unless_the_trace_allows_it(policy: str, seed: int) -> None:
    trace, machine = some_case(seed)
    plan = plan_or_none(replayable(trace, share=0.0), machine, policy)
    assert plan is None or not plan.recomputes


@pytest.mark.parametrize("policy", ["checkmate", "dtr", "melon", "sublinear"])
@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_recomputation_alone_moves_nothing_that_need_not_move(policy: str, seed: int) -> None:
    """Only what starts or ends in the store is moved: in a step taken alone, each variable at most once a way."""
    trace, machine = some_case(seed)
    plan = plan_or_none(trace, machine, policy)
    if plan is None:
        return
    carried = [v for v, variable in enumerate(trace.variables) if variable.birth_tick is None]
    loads = [r.variable for r in plan.residencies if isinstance(r.start, Loaded)]
    assert len(loads) == len(set(loads))
    assert set(loads) <= set(carried)
    for r in plan.residencies:
        if isinstance(r.stop, Evicted):
            assert r.stop.release_op == len(trace.ops)


@settings(max_examples=60, deadline=None)
@given(seed=seeds)
def test_what_has_not_expired_can_be_made_again_whatever_else_was_discarded(seed: int) -> None:
    """`expiry` promises this; check it against the closure, with everything gone that can be made again."""
    trace, _ = some_case(seed)
    graph = ReplayGraph(trace)
    for v, variable in enumerate(trace.variables):
        if graph.maker[v] is None or variable.death_tick is None:
            continue
        for before_op in range((graph.maker[v] or 0) + 1, len(trace.ops)):
            tick = trace.ops[before_op].start_tick

            def is_there(u: int, tick: int = tick, before_op: int = before_op) -> bool:
                start, stop = trace.lifetime(u)
                return start <= tick < stop and graph.expiry(u, before_op) < 0

            if graph.expiry(v, before_op) >= before_op:
                assert graph.ops_for([v], before_op, is_there) is not None


# -- worked out by hand --------------------------------------------------------------------------


def line(*, num_forward: int, durations: list[int] | None = None) -> Trace:
    """x_0 -> x_1 -> ... by one op each, then read back from the last to the first. All variables are one chunk."""
    durations = durations or [100] * num_forward
    num_ops = 2 * num_forward
    ops, variables = [], []
    for i in range(num_forward):
        uses = [Use(variable=i - 1, reads=True, writes=False)] if i else []
        uses.append(Use(variable=i, reads=False, writes=True))
        ops.append(_op(i, durations[i], uses))
        back = num_ops - 1 - i
        variables.append(Variable(nbytes=MIB, birth_tick=10 * i + 1, death_tick=10 * back + 9, label=f"x{i}"))
    for i in reversed(range(num_forward)):
        ops.append(_op(num_ops - 1 - i, 100, [Use(variable=i, reads=True, writes=False)]))
    return Trace(ops=tuple(ops), variables=tuple(variables), num_ticks=10 * num_ops, cyclic=True)


def _op(index: int, duration_ns: int, uses: list[Use]) -> Op:
    return Op(
        name=f"op{index}",
        start_tick=10 * index,
        stop_tick=10 * index + 9,
        duration_ns=duration_ns,
        uses=tuple(uses),
        replayable=True,
    )


def machine_of(num_chunks: int, **rates: float) -> Machine:
    return Machine(chunk_nbytes=MIB, num_chunks=num_chunks, latency_ns=0, **rates)  # type: ignore[arg-type]


def discarded(plan: Plan) -> set[int]:
    return {r.variable for r in plan.residencies if isinstance(r.stop, Discarded)}


def test_melon_discards_the_largest_triangle_per_second() -> None:
    """At op 3 one of x0, x1 must go (x2 is its input); x1 is freed for less time, but is ten times as quick to make."""
    slow_first = line(num_forward=4, durations=[1000, 100, 100, 100])
    plan = make_plan(slow_first, machine_of(3), "melon")
    assert discarded(plan) == {1}
    again = next(r.start for r in plan.residencies if isinstance(r.start, Recomputed))
    assert again == Recomputed(6, (1,))
    assert plan.predicted["recompute_ns"] == 100
    quick_first = line(num_forward=4, durations=[100, 1000, 100, 100])
    assert discarded(make_plan(quick_first, machine_of(3), "melon")) == {0}


def test_dtr_discards_what_is_cheap_large_and_stale() -> None:
    assert discarded(make_plan(line(num_forward=4, durations=[100, 100, 100, 100]), machine_of(3), "dtr")) == {0}
    assert discarded(make_plan(line(num_forward=4, durations=[20_000, 100, 100, 100]), machine_of(3), "dtr")) == {1}


def test_sublinear_keeps_the_checkpoints_and_makes_segments_again_at_once() -> None:
    """Segments of three ops: x2, x5 and x8 end one each, the others of the first two go."""
    trace = line(num_forward=9)
    plan = make_plan(trace, machine_of(7), "sublinear", segment_num_ops=3)
    assert turning_op(trace) == 8
    assert discarded(plan) == {0, 1, 3, 4}  # the last segment is needed at once
    reruns = {r.start.before_op: r.start.ops for r in plan.residencies if isinstance(r.start, Recomputed)}
    assert reruns == {13: (3, 4), 16: (0, 1)}


def test_capuchin_swaps_what_hides_and_recomputes_what_would_show() -> None:
    trace = line(num_forward=6, durations=[10_000_000] * 6)
    quick = make_plan(trace, machine_of(4, load_bytes_per_s=1e12, evict_bytes_per_s=1e12), "capuchin")
    assert not quick.recomputes
    assert quick.predicted["evicted_nbytes"] > 0
    slow = make_plan(trace, machine_of(4, load_bytes_per_s=1e6, evict_bytes_per_s=1e6), "capuchin")
    assert slow.recomputes
    assert slow.predicted["evicted_nbytes"] == 0


@thinned("policy,make", RECOMPUTING, [conv_net, resnet50, transformer])
def test_recomputing_plans_of_models(policy: str, make: Callable[[], Trace]) -> None:
    trace = replayable(make())
    machine = Machine(chunk_nbytes=2 * MIB, num_chunks=1)
    in_core = lower_bounds(trace, machine)["in_core_nbytes"]
    half = replace(machine, num_chunks=in_core // 2 // machine.chunk_nbytes)
    coarse = {"num_nodes": 60, "num_stages": 10} if policy in ("checkmate", "poet") else {}
    plan = make_plan(trace, half, policy, **coarse)
    assert plan.predicted["peak_nbytes"] <= half.budget_nbytes
    if policy in SWAPPING:
        assert plan.predicted["duration_ns"] < 1.1 * trace.duration_ns
    else:
        assert plan.predicted["evicted_nbytes"] == 0
        assert trace.duration_ns < plan.predicted["duration_ns"] < 2 * trace.duration_ns


def test_the_error_names_a_budget_that_works() -> None:
    trace = replayable(transformer())
    machine = Machine(chunk_nbytes=2 * MIB, num_chunks=200)
    for policy in ("dtr", "melon", "sublinear"):
        with pytest.raises(BudgetTooSmall) as caught:
            make_plan(trace, machine, policy, **({"segment_num_ops": 6} if policy == "sublinear" else {}))
        works = replace(machine, num_chunks=caught.value.smallest_budget_nbytes // machine.chunk_nbytes)
        make_plan(trace, works, policy, **({"segment_num_ops": 6} if policy == "sublinear" else {}))


def test_checkmate_recomputes_no_more_than_the_greedy_policies() -> None:
    trace, machine = line(num_forward=8), machine_of(4)
    least = make_plan(trace, machine, "checkmate").predicted["recompute_ns"]
    assert 0 < least <= make_plan(trace, machine, "melon").predicted["recompute_ns"]
    assert least <= make_plan(trace, machine, "dtr").predicted["recompute_ns"]


def test_poet_pages_or_recomputes_whichever_its_objective_asks_for() -> None:
    trace = line(num_forward=6, durations=[10_000_000] * 6)
    machine = machine_of(4, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)  # a transfer takes a tenth of an op
    cheap_compute = make_plan(trace, machine, "poet", objective="energy", compute_w=0.001, load_w=50.0, evict_w=50.0)
    assert cheap_compute.recomputes
    assert cheap_compute.predicted["evicted_nbytes"] == 0
    cheap_paging = make_plan(trace, machine, "poet", objective="energy", compute_w=50.0, load_w=0.001, evict_w=0.001)
    assert not cheap_paging.recomputes
    assert cheap_paging.predicted["evicted_nbytes"] > 0
    fast = make_plan(trace, machine, "poet")
    assert not fast.recomputes


def test_programs_say_how_they_ended_unless_they_are_solved() -> None:
    trace, machine = line(num_forward=6, durations=[10_000_000] * 6), machine_of(4)
    assert make_plan(trace, machine, "poet").notes == ()
    (rounded,) = make_plan(trace, machine, "poet", exact=False).notes
    assert re.fullmatch(r"the program \(\d+ nodes in \d+ stages\): rounded from .* \(gap \d+\.\d%\).*", rounded)
    (alone,) = make_plan(trace, machine, "poet", num_nodes=2, num_stages=1).notes  # merged ops need more than ops
    assert "planned without the program" in alone
    assert "no schedule fits" in alone
    assert "furthest next use is paged" in alone
    plan = make_plan(trace, machine, "poet", exact=False)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_solver_that_runs_out_of_time_says_its_gap_or_that_it_has_nothing() -> None:
    trace = replayable(conv_net(num_blocks=4))
    machine = Machine(chunk_nbytes=MIB, num_chunks=160, load_bytes_per_s=2e8, evict_bytes_per_s=2e8)
    (note,) = make_plan(trace, machine, "poet", time_limit_s=1e-4).notes
    assert "the search was up" in note
    assert "its limit in seconds struck" in note


def test_poet_says_what_is_wrong_with_its_parameters() -> None:
    trace, machine = line(num_forward=3), machine_of(4)
    with pytest.raises(ValueError, match="there are 'time' and 'energy'"):
        make_plan(trace, machine, "poet", objective="money")
    with pytest.raises(ValueError, match="needs compute_w, load_w and evict_w"):
        make_plan(trace, machine, "poet", objective="energy")
    with pytest.raises(ValueError, match="num_nodes is 0"):
        make_plan(trace, machine, "poet", num_nodes=0)


# -- auto ------------------------------------------------------------------------------------------


@settings(max_examples=16 * TIMES, deadline=None)
@given(seed=seeds)
def test_auto_recomputes_only_where_it_is_told_to_and_never_gets_slower_by_it(seed: int) -> None:
    trace, machine = some_case(seed)
    moving = make_plan(trace, machine, "auto", thorough=False)
    assert not moving.recomputes
    mixed = make_plan(trace, machine, "auto", thorough=False, recompute=True)  # verifies
    assert mixed.predicted["peak_nbytes"] <= machine.budget_nbytes
    for bounded in ("duration_ns", "loaded_nbytes", "evicted_nbytes"):
        assert mixed.predicted[bounded] >= mixed.bounds[bounded]
    is_faster = mixed.predicted["duration_ns"] <= moving.predicted["duration_ns"]
    assert is_faster or mixed.predicted["num_remapped_chunks"] < moving.predicted["num_remapped_chunks"]
    unmarked = make_plan(replayable(trace, share=0.0), machine, "auto", thorough=False, recompute=True)
    assert unmarked.residencies == moving.residencies


@settings(max_examples=5 * TIMES, deadline=None)
@given(seed=seeds)
@example(seed=1031)  # `checkmate` falls short of chunks, and does better than all others when planned for fewer
@example(seed=14450)  # the best over the border is an estimate, and worse when coloured
def test_auto_that_may_recompute_is_legal_and_never_slower_than_any_policy(seed: int) -> None:
    trace, machine = some_case(seed)
    auto = make_plan(trace, machine, "auto", recompute=True)  # verifies
    assert auto.predicted["peak_nbytes"] <= machine.budget_nbytes
    for policy in sorted(POLICIES):
        plan = plan_or_none(trace, machine, policy)
        assert plan is None or auto.step_ns <= plan.step_ns


def test_auto_exchanges_gaps_of_a_plan_that_recomputes_already() -> None:
    """What the re-runs of a plan read must stay. This budget's best candidate was a policy's that recomputes."""
    trace = replayable(conv_net(num_blocks=4))
    machine = Machine(chunk_nbytes=MIB, num_chunks=160, load_bytes_per_s=2e8, evict_bytes_per_s=2e8)
    auto = make_plan(trace, machine, "auto", recompute=True, exact=False)
    assert auto.step_ns < make_plan(trace, machine, "dtr").step_ns


@pytest.mark.parametrize("make", [conv_net, transformer])
def test_auto_recomputes_where_the_links_are_slow(make: Callable[[], Trace]) -> None:
    trace = replayable(make())
    slow = Machine(chunk_nbytes=2 * MIB, num_chunks=1, load_bytes_per_s=5e8, evict_bytes_per_s=5e8)
    half = replace(slow, num_chunks=lower_bounds(trace, slow)["in_core_nbytes"] // 2 // slow.chunk_nbytes)
    moving = make_plan(trace, half, "auto", thorough=False)
    mixed = make_plan(trace, half, "auto", thorough=False, recompute=True)
    assert mixed.predicted["recompute_ns"] > 0
    assert mixed.predicted["duration_ns"] < 0.97 * moving.predicted["duration_ns"]
    for policy in ("capuchin", "melon", "dtr"):
        assert mixed.predicted["duration_ns"] <= make_plan(trace, half, policy).predicted["duration_ns"]
    fast = replace(half, load_bytes_per_s=5e10, evict_bytes_per_s=5e10)
    assert not make_plan(trace, fast, "auto", thorough=False, recompute=True).recomputes
