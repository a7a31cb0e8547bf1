"""What every policy's plan must satisfy, on random traces."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.policies import POLICIES
from scheduler.trace import Trace
from tests.scheduler.random_traces import TIMES, random_machine, random_trace

policies = pytest.mark.parametrize("policy", sorted(POLICIES))
seeds = st.integers(min_value=0, max_value=2**32 - 1)


def some_case(seed: int) -> tuple[Trace, Machine]:
    """A trace of up to 20 ops, and a budget between the least possible and everything."""
    rng = random.Random(seed)
    trace = random_trace(seed, num_ops=rng.randint(1, 20))
    machine = random_machine(seed, 0)
    least = smallest_num_chunks(trace, machine)
    most = sum(machine.chunks_of(v.nbytes) for v in trace.variables)
    return trace, replace(
        machine, num_chunks=rng.choice([least, least + (most - least) // 5, rng.randint(least, most)])
    )


def plan_or_none(trace: Trace, machine: Machine, policy: str) -> Plan | None:
    """The plan; None where the policy, by its own rules, needs more than the least possible budget."""
    try:
        return make_plan(trace, machine, policy)  # verifies
    except BudgetTooSmall:
        assert policy not in ("auto", "on_demand"), "these plan wherever a plan exists"
        return None


@policies
@settings(max_examples=20 * TIMES, deadline=None)
@given(seed=seeds)
def test_every_plan_is_legal_within_budget_and_above_the_bounds(policy: str, seed: int) -> None:
    trace, machine = some_case(seed)
    plan = plan_or_none(trace, machine, policy)
    if plan is None:
        return
    assert plan.predicted["peak_nbytes"] <= machine.budget_nbytes
    for bounded in ("duration_ns", "loaded_nbytes", "evicted_nbytes"):
        assert plan.predicted[bounded] >= plan.bounds[bounded]
    busy_ns = trace.duration_ns + plan.predicted.get("relocate_ns", 0)
    assert plan.predicted["duration_ns"] == busy_ns + plan.predicted["stall_ns"]


@policies
@settings(max_examples=5 * TIMES, deadline=None)
@given(seed=seeds)
def test_same_input_same_plan_and_json_round_trip(policy: str, seed: int) -> None:
    trace, machine = some_case(seed)
    plan = plan_or_none(trace, machine, policy)
    if plan is None:
        return
    again = make_plan(Trace.from_json(trace.to_json()), machine, policy)
    assert again.to_json() == plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("policy", ["auto", "on_demand"])
@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_nothing_moves_where_everything_fits(policy: str, seed: int) -> None:
    trace = random_trace(seed, num_ops=10, cyclic=True)
    heirs = [(v, trace.variables[v.becomes]) for v in trace.variables if v.becomes is not None]
    if any(heir is not v and trace.lifetime(trace.variables.index(heir))[1] > (v.birth_tick or 0) for v, heir in heirs):
        return  # a double buffer is away at the boundary, whatever the budget
    machine = random_machine(seed, 0)
    plan = make_plan(trace, replace(machine, num_chunks=1_000_000), policy)
    assert plan.predicted["loaded_nbytes"] == plan.predicted["evicted_nbytes"] == 0
    assert plan.predicted["stall_ns"] == plan.predicted["num_remapped_chunks"] == 0


def needs_of_ops(trace: Trace, machine: Machine) -> list[int]:
    """For each op, the most chunks that its operands and its own allocations hold at any of its ticks."""
    needs = []
    for op in trace.ops:
        own = {u.variable for u in op.uses}
        own |= {i for i, v in enumerate(trace.variables) if op.start_tick <= (v.birth_tick or -1) < op.stop_tick}
        alive_at = [
            sum(
                machine.chunks_of(trace.variables[v].nbytes)
                for v in own
                if trace.lifetime(v)[0] <= tick < trace.lifetime(v)[1]
            )
            for tick in range(op.start_tick, op.stop_tick)
        ]
        needs.append(max(alive_at))
    return needs


@pytest.mark.parametrize("policy", ["auto", "on_demand"])
@settings(max_examples=25 * TIMES, deadline=None)
@given(seed=seeds)
def test_feasible_exactly_if_each_op_fits(policy: str, seed: int) -> None:
    trace = random_trace(seed, num_ops=8, between_ops=False, not_evictable=False)
    machine = random_machine(seed, 0)
    needs = needs_of_ops(trace, machine)
    make_plan(trace, replace(machine, num_chunks=max(needs)), policy)
    if max(needs) == 0:
        return
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(trace, replace(machine, num_chunks=max(needs) - 1), policy)
    error = caught.value
    assert needs[error.op_index] == max(needs)
    assert error.op_name == trace.ops[error.op_index].name
    assert error.needed_nbytes == error.smallest_budget_nbytes == max(needs) * machine.chunk_nbytes
    assert error.budget_nbytes == error.needed_nbytes - machine.chunk_nbytes
    assert sum(machine.chunks_of(nbytes) for _, nbytes in error.operands) == max(needs)


def test_the_error_says_what_where_and_what_to_do() -> None:
    trace = random_trace(1, num_ops=6, not_evictable=False)
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(trace, Machine(chunk_nbytes=16, num_chunks=1))
    message = str(caught.value)
    error = caught.value
    assert f"op {error.op_index} ({error.op_name}" in message
    assert f"{error.needed_nbytes} bytes at once; the budget is 16 bytes" in message
    assert "operands: " in message
    assert f"budget >= {error.smallest_budget_nbytes} bytes" in message
    assert isinstance(error, PlanError)


def test_unknown_policies_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'guess'; there are auto, .*on_demand.*, window"):
        make_plan(random_trace(0), Machine(chunk_nbytes=1, num_chunks=100), "guess")


_PLAN_IN_A_FRESH_PROCESS = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from tests.scheduler.random_traces import TIMES, random_trace
from scheduler.plan import Machine
from scheduler.planning import BudgetTooSmall, make_plan
from scheduler.policies import POLICIES
assert "torch" not in sys.modules and "vmm" not in sys.modules and "ooc" not in sys.modules
text = ""
for seed in range(5):
    for policy in sorted(POLICIES):
        try:
            text += make_plan(random_trace(seed), Machine(chunk_nbytes=4, num_chunks=80), policy).to_json()
        except BudgetTooSmall as refusal:
            text += str(refusal)
print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_plans_without_torch_and_the_same_under_any_hash_seed() -> None:
    here = Path(__file__).resolve()
    digests = set()
    for hash_seed in ("0", "1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", _PLAN_IN_A_FRESH_PROCESS, str(here.parent)],
            cwd=here.parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("num_chunks", [0, 1000])
def test_the_search_for_cycles_goes_on_as_before(enabled: bool, num_chunks: int) -> None:
    trace = random_trace(3)
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with nullcontext() if num_chunks else pytest.raises(BudgetTooSmall):
            make_plan(trace, random_machine(3, num_chunks), "on_demand")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
