"""What sessions are compared with gives the same bits: remapping each time, best-fit placement; and aliased memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import ooc.replay.plan_maker
from benchmarks.gpu.ablations import RemappingFakeDevice, contiguous_plan
from benchmarks.gpu.child import Order
from benchmarks.gpu.gate import Processes
from scheduler.plan import Machine, PlanError
from scheduler.planning import make_plan
from scheduler.verify import verify
from tests import forked
from tests.cuda.cases import CudaSession, fixed_speed
from tests.cuda.forked_gate import ForkedProcesses
from tests.harness import Recipe, assert_equal, num_steps_by_mode, run_in_core, run_out_of_core
from tests.scheduler.random_traces import random_trace
from tests.session.test_bitwise import budget_nbytes_of

ROOT = Path(__file__).parents[2]
POLICIES = (
    "on_demand",
    "vdnn",
    "auto",
    *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("lms", "window")),
)


def _run(policy: str, device: RemappingFakeDevice | None = None, budget: str = "half") -> None:
    recipe = Recipe(workload="conv_stack")
    chosen = device if device is not None else RemappingFakeDevice(seed=5)
    with fixed_speed():
        run = run_out_of_core(
            recipe,
            budget_nbytes_of(recipe, budget),
            lambda nbytes: CudaSession(nbytes, device=chosen, policy=policy),
        )
    assert_equal(run_in_core(recipe), run)
    assert num_steps_by_mode(run).get("planned", 0) >= 3, run.report["unplannable"]


@pytest.mark.parametrize("policy", POLICIES)
def test_remapping_each_time_gives_the_same_bits_without_a_race(policy: str) -> None:
    device = RemappingFakeDevice(seed=5)
    _run(policy, device)
    assert device.fake.num_calls["cuMemMap"] > 1000


@pytest.mark.parametrize(("policy", "budget"), [("window", "peak"), ("auto", "half")])
def test_best_fit_gives_the_same_bits(policy: str, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def plan(*args: object, **options: object) -> object:
        plans.append(contiguous_plan(*args, **options))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr(ooc.replay.plan_maker, "make_plan", plan)
    _run(policy, budget=budget)
    assert plans
    assert all(len(r.chunks) == 1 for made in plans for r in made.residencies)


def test_best_fit_plans_lie_in_single_pieces_and_sometimes_evict_more() -> None:
    num_found = num_smaller = 0
    for seed in range(30):
        trace = random_trace(seed, num_ops=24)
        peak = make_plan(trace, Machine(chunk_nbytes=8, num_chunks=10_000), "on_demand").predicted["peak_nbytes"]
        machine = Machine(chunk_nbytes=8, num_chunks=max(peak // 8 * 3 // 4, 1))
        try:
            plan = contiguous_plan(trace, machine, "on_demand")
        except PlanError:
            continue
        verify(plan, trace)
        assert all(len(r.chunks) == 1 for r in plan.residencies)
        assert plan.machine == machine
        num_found += 1
        num_smaller += len([note for note in plan.notes if "needs" in note]) > 1
    assert num_found > 5
    assert num_smaller > 0


def test_best_fit_says_what_it_tried() -> None:
    with pytest.raises(PlanError, match="best fit finds no room in 1 chunks"):
        contiguous_plan(random_trace(1), Machine(chunk_nbytes=8, num_chunks=1), "on_demand")


def test_large_tensors_share_one_piece_of_memory() -> None:
    """Twenty tensors of a megabyte in four: the last four hold what was written, small ones and our own all of it."""
    script = """
import torch
from benchmarks.gpu.aliased import open_aliased
MIB = 1 << 20
with open_aliased(4 * MIB, fake=True) as memory:
    assert not torch._C._is_multithreading_enabled(), "a backward pass runs on a thread of its own, as in no session"
    with memory.own_memory():
        own = torch.full((MIB // 4,), 7.0)
    small = torch.full((100,), 5.0)
    found = [torch.full((MIB // 4,), float(i)) for i in range(20)]
    assert [int(t[0]) for t in found[-4:]] == [16, 17, 18, 19]
    assert [int(t[-1]) for t in found[:4]] == [16, 17, 18, 19]
    assert (own == 7).all() and (small == 5).all()
    addresses = {t.data_ptr() for t in found}
    assert len(addresses) == 20 and memory.aliased_nbytes >= 20 * MIB
    del found
    again = [torch.empty(MIB // 4) for _ in range(20)]
    assert {t.data_ptr() for t in again} == addresses, "an address that is free is used again"
    larger = torch.zeros(6 * MIB // 4)  # more than there is
    del again, larger
assert torch._C._is_multithreading_enabled()
print(memory)
"""
    command = [sys.executable, "-c", script]
    done = forked.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def digests_in_core() -> list[str]:
    """Of the parameters after each step."""
    order = Order(workload="conv_stack", preset="small", digests=True, num_steps=6)
    return [s["digest"] for s in ForkedProcesses(limit_s=600, fake=True).train(order)["steps"]]


@pytest.mark.parametrize("placement", [pytest.param("remapped", marks=pytest.mark.slow), "best_fit"])
def test_the_gate_measures_them(placement: str, digests_in_core: list[str]) -> None:
    found = ForkedProcesses(limit_s=600, fake=True).train(
        Order(
            workload="conv_stack",
            preset="small",
            digests=True,
            num_steps=6,
            variant="ours",
            budget_nbytes=3 << 20,
            policy="window",
            placement=placement,  # type: ignore[arg-type]
        )
    )
    assert "error" not in found, found
    assert [s["digest"] for s in found["steps"]] == digests_in_core
    last = found["steps"][-1]
    assert last["mode"] == "planned"
    assert found["num_races"] == 0
    assert 0 < found["live_nbytes"] <= found["occupied_nbytes"] <= 3 << 20
    if placement == "remapped":  # each load and birth is an unmap, a map and an access; few of them stop the host
        num_unmaps = last["mapping_calls"]["cuMemUnmap"]
        assert num_unmaps == last["mapping_calls"]["cuMemSetAccess"] > 20
        assert last["stopping_calls"]["cuEventSynchronize"] < num_unmaps / 2


def test_computation_alone_is_measured() -> None:
    shell = Processes(limit_s=600, fake=True)
    order = Order(workload="conv_stack", preset="small", variant="aliased", budget_nbytes=2 << 20, num_steps=4)
    found = shell.train(order)
    assert "error" not in found, found
    assert found["aliased_nbytes"] > found["peak_nbytes"] == 2 << 20
    assert len(found["steps"]) == 4
