"""Steps of 10,000 ops are planned by short cuts; here every step counts as long, so that random ones take them."""

from __future__ import annotations

import functools
from bisect import bisect_right
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from benchmarks.planning_time import recurrent
from scheduler import budget, chains, selection
from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.colouring import colouring
from scheduler.colouring.uncoloured import likely_holders_before
from scheduler.cost import evaluate
from scheduler.cost.bounds import lower_bounds
from scheduler.cost.evaluate import estimate
from scheduler.plan import Born, Dies, Evicted, Machine, Plan, Residency
from scheduler.planning import make_plan
from scheduler.policies import _search, window
from scheduler.trace import Op, Trace, Use, Variable
from tests.scheduler.model_traces import conv_net, transformer
from tests.scheduler.random_traces import TIMES, random_machine, random_trace


@pytest.fixture
def _all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_search, "_MOST_OPS_SEARCHED", 0)
    monkeypatch.setattr(window, "_MOST_OPS_COLOURED", 0)
    monkeypatch.setattr(colouring, "MANY_TO_COLOUR", 0)
    monkeypatch.setattr(evaluate, "MANY_TO_COLOUR", 0)
    monkeypatch.setattr(selection, "_MOST_AS_ONE", 0)
    monkeypatch.setattr(selection, "_STRETCH", 4)
    monkeypatch.setattr(selection, "_NEAR", 3)


@pytest.mark.usefixtures("_all_are_long")
@pytest.mark.parametrize("policy", ["auto", "window"])
def test_short_cuts_lead_to_legal_plans_above_the_bounds(policy: str) -> None:
    num_remapped = 0
    for seed in range(30 * TIMES):
        trace = random_trace(seed, num_ops=14, not_evictable=seed % 3 == 0)
        machine = random_machine(seed, 0)
        machine = replace(machine, num_chunks=int(smallest_num_chunks(trace, machine) * (1, 1.3, 1.8)[seed % 3]))
        own = {"thorough": False} if policy == "auto" else {}
        try:
            plan = make_plan(trace, machine, policy, **own)  # verifies
        except BudgetTooSmall:
            assert policy == "window"
            continue
        assert plan.predicted["peak_nbytes"] <= machine.budget_nbytes
        assert plan.predicted["duration_ns"] >= plan.bounds["duration_ns"]
        assert make_plan(trace, machine, policy, **own) == plan
        num_remapped += plan.predicted["num_remapped_chunks"]
    assert num_remapped


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_short_cuts_cost_little(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for trace in (conv_net(num_blocks=8), transformer(layers=3)):
        machine = Machine(chunk_nbytes=1 << 20, num_chunks=1)
        least = smallest_num_chunks(trace, machine)
        machine = replace(machine, num_chunks=max(least, int(trace.peak_nbytes() * share) >> 20))
        with monkeypatch.context() as patch:
            patch.setattr(_search, "_MOST_OPS_SEARCHED", 0)
            quick = make_plan(trace, machine, "auto", thorough=False)
        searched = make_plan(trace, machine, "auto", thorough=False)
        assert quick.step_ns <= 1.1 * searched.step_ns


def test_while_training_waits_auto_is_no_slower_than_capuchin() -> None:
    """Its own choices did not stall, so that nobody else was asked: their remaps took 0.6 % of the step more."""
    trace = recurrent(600)
    machine = Machine(chunk_nbytes=2 << 20, num_chunks=1)
    nbytes = int(lower_bounds(trace, machine)["in_core_nbytes"] * 0.3)
    machine = replace(machine, num_chunks=nbytes // machine.chunk_nbytes)
    other = make_plan(trace, machine, "capuchin", recompute=False)
    assert make_plan(trace, machine, "auto", thorough=False).step_ns <= other.step_ns


def test_of_a_long_step_auto_asks_capuchin_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked only those that were quick then; here its own choices and theirs are slower than `capuchin`'s."""
    monkeypatch.setattr(_search, "_MOST_OPS_SEARCHED", 0)
    monkeypatch.setattr(_search, "_MOST_OPS_FOR_OTHERS", 0)
    trace = transformer(layers=2, gradients_kept=True)
    machine = Machine(chunk_nbytes=1 << 20, num_chunks=1, load_bytes_per_s=4e9, evict_bytes_per_s=4e9)
    machine = replace(machine, num_chunks=smallest_num_chunks(trace, machine))
    other = make_plan(trace, machine, "capuchin", recompute=False).step_ns
    assert make_plan(trace, machine, "auto").step_ns <= other
    monkeypatch.setattr(_search, "_MOST_OPS_FOR_QUICK", 0)
    assert make_plan(trace, machine, "auto").step_ns > other, "this step no longer tells whether others are asked"


@pytest.mark.usefixtures("_all_are_long")
def test_of_a_long_step_auto_asks_capuchin_while_training_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own choices stalled no more, but needed 256 remaps against 200."""
    trace = recurrent(600)
    machine = Machine(chunk_nbytes=2 << 20, num_chunks=1)
    nbytes = int(lower_bounds(trace, machine)["in_core_nbytes"] * 0.3)
    machine = replace(machine, num_chunks=nbytes // machine.chunk_nbytes)
    other = make_plan(trace, machine, "capuchin", recompute=False).step_ns
    assert make_plan(trace, machine, "auto", thorough=False).step_ns <= other
    monkeypatch.setattr(_search, "_MOST_OPS_FOR_QUICK", 0)
    monkeypatch.setattr(_search, "_MOST_OPS_FOR_OTHERS", 0)
    assert make_plan(trace, machine, "auto", thorough=False).step_ns > other, "this step no longer tells"


def test_who_comes_waits_for_what_has_been_written_for_longest() -> None:
    """Three variables are evicted one after another; the fourth needs more than what died leaves free."""
    variables = tuple(
        Variable(nbytes=2, birth_tick=10 * index + 1, death_tick=None if index < 3 else 10 * index + 9)
        for index in range(5)
    )
    ops = tuple(
        Op(
            name=f"op{index}",
            start_tick=10 * index,
            stop_tick=10 * index + 10,
            duration_ns=100,
            uses=(Use(variable=index, reads=False, writes=True),),
        )
        for index in range(5)
    )
    trace = Trace(ops=ops, variables=variables, num_ticks=50, cyclic=False)
    residencies = tuple(
        Residency(variable=v, start=Born(), stop=Evicted(write_op=v, release_op=v + 1) if v < 3 else Dies())
        for v in range(5)
    )
    machine = Machine(chunk_nbytes=1, num_chunks=4, load_bytes_per_s=1e9, evict_bytes_per_s=1e7, latency_ns=0)
    plan = Plan(trace_fingerprint="", policy="", machine=machine, residencies=residencies)
    assert likely_holders_before(plan, trace) == [(2, 0), (3, 1)]  # 4 finds what 3 left, which nobody writes
    # Each write takes 200 ns, one after another: op 2 waits for the first until 300 ns, op 3 for the second until 500.
    assert estimate(residencies, trace, machine).op_start_ns == (0, 100, 300, 500, 600)


def padded(trace: Trace, num_ops: int) -> Trace:
    """The same step with ops that touch nothing after each of its own, `num_ops` in all at least."""
    more = -(-num_ops // len(trace.ops)) - 1
    stops = [op.stop_tick for op in trace.ops]

    def later(tick: int) -> int:
        return tick + bisect_right(stops, tick) * more

    ops: list[Op] = []
    for index, op in enumerate(trace.ops):
        start, stop = op.start_tick + index * more, op.stop_tick + index * more
        ops.append(replace(op, start_tick=start, stop_tick=stop))
        idle = Op(name="idle", start_tick=stop, stop_tick=stop + 1, duration_ns=1, uses=())
        ops += [replace(idle, start_tick=stop + k, stop_tick=stop + k + 1) for k in range(more)]
    variables = tuple(
        replace(
            variable,
            birth_tick=None if variable.birth_tick is None else later(variable.birth_tick),
            death_tick=None if variable.death_tick is None else later(variable.death_tick),
        )
        for variable in trace.variables
    )
    return replace(trace, ops=tuple(ops), variables=variables, num_ticks=later(trace.num_ticks))


def test_above_2_500_ops_the_others_are_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer of 2,755 ops got a plan slower than `capuchin`'s, which was not asked for more than 2,500."""
    trace = padded(conv_net(num_blocks=5), 2_600)
    assert len(trace.ops) > 2_500
    machine = Machine(
        chunk_nbytes=1 << 20,
        num_chunks=int(trace.peak_nbytes() * 0.5) >> 20,
        load_bytes_per_s=3e8,
        evict_bytes_per_s=3e8,
    )
    names = ("capuchin", "on_demand", "window")
    others = {name: make_plan(trace, machine, name) for name in names}
    asked = []
    for name in names:
        module = getattr(_search, name)
        schedule = module.schedule

        def watched(*arguments: Any, name: str = name, schedule: Any = schedule, **more: Any) -> Any:
            asked.append(name)
            return schedule(*arguments, **more)

        functools.update_wrapper(watched, schedule)
        monkeypatch.setattr(module, "schedule", watched)
    plan = make_plan(trace, machine, "auto")
    assert set(asked) == set(names)
    assert plan.step_ns <= min(other.step_ns for other in others.values())


def test_pins_and_chains_are_worked_out_once_a_plan_and_then_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count(module: ModuleType, name: str) -> None:
        own = getattr(module, name)

        def counted(*given: object) -> object:
            calls.append(name)
            return own(*given)

        monkeypatch.setattr(module, name, counted)

    count(budget, "_pins_of")
    count(chains, "_chains_of")
    trace = random_trace(5, num_ops=12, cyclic=True)
    machine = random_machine(5, 0)
    machine = replace(machine, num_chunks=smallest_num_chunks(trace, machine))
    calls.clear()
    make_plan(trace, machine, "auto", thorough=False)
    assert sorted(calls) == ["_chains_of", "_pins_of"]
    budget.pins_of(trace)
    budget.pins_of(trace)
    assert calls.count("_pins_of") == 3, "a trace that is kept for long must not keep them"
