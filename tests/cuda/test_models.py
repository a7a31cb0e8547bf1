"""Models over the fake CUDA driver: bit for bit as in core, without a race, and without stopping the host."""

from __future__ import annotations

import pytest
import torch

from ooc import models
from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CudaSession, fixed_speed, stopping_calls
from tests.harness import Recipe, assert_equal, num_steps_by_mode, run_in_core, run_out_of_core
from tests.session.test_bitwise import BUDGETS, budget_nbytes_of

MODELS = (
    "conv_stack",
    "unet",
    "lstm",
    "gpt",
    "encoder",
    "tied_frozen",
    "densenet121",
    "pix2pix_hd",
    "deeplab_v3",
    "gpt_1b",
)


BRIEF = [
    ("conv_stack", "half", True, "auto"),
    pytest.param("conv_stack", "smallest", False, "auto", marks=pytest.mark.slow),
    pytest.param("unet", "smallest", False, "auto", marks=pytest.mark.slow),
    ("lstm", "quarter", False, "window"),
    ("encoder", "quarter", True, "window"),
    ("pix2pix_hd", "quarter", False, "auto"),
    ("gpt_1b", "smallest", False, "window"),
]
"""Run by default, some by a policy that plans sooner; `pytest -m slow` runs all, by `auto`."""


@pytest.mark.parametrize(("model", "budget", "debug", "policy"), BRIEF)
def test_models(model: str, budget: str, debug: bool, policy: str) -> None:
    _check(Recipe(workload=model), budget, debug=debug, policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize("debug", [False, True], ids=["standing", "debug"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("model", MODELS)
def test_all_models(model: str, budget: str, debug: bool) -> None:
    _check(Recipe(workload=model), budget, debug=debug)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("adamw", marks=pytest.mark.slow),
        pytest.param("adamw_foreach", marks=pytest.mark.slow),
        "adamw_fused",
    ],
)
def test_optimizers(optimizer: str) -> None:
    _check(Recipe(workload="gpt", optimizer=optimizer), "quarter", policy="window")


@pytest.mark.parametrize(("seed", "eagerness"), [(1, 0.0), (2, 0.9), pytest.param(3, 0.0, marks=pytest.mark.slow)])
def test_whatever_the_device_does_first(seed: int, eagerness: float) -> None:
    _check(Recipe(workload="conv_stack"), "quarter", seed=seed, eagerness=eagerness)


def _check(
    recipe: Recipe, budget: str, *, debug: bool = False, seed: int = 0, eagerness: float = 0.3, policy: str = "auto"
) -> None:
    device = FakeCudaDevice(seed=seed, eagerness=eagerness, host_budget=256 << 20)
    budget_nbytes = budget_nbytes_of(recipe, budget)
    with fixed_speed():
        run = run_out_of_core(
            recipe, budget_nbytes, lambda nbytes: CudaSession(nbytes, device=device, debug=debug, policy=policy)
        )
    assert_equal(run_in_core(recipe), run)
    modes = num_steps_by_mode(run)
    assert modes.get("planned", 0) >= 3, f"steps by mode: {modes}; {run.report['unplannable']}"
    assert run.report["peak_nbytes"] <= budget_nbytes
    if budget == "quarter":
        assert device.fake.num_calls["cuMemcpyHtoDAsync"] > 10


@pytest.mark.parametrize(("model", "share"), [("conv_stack", 0.7), ("conv_stack", 0.5)])
def test_a_planned_step_never_stops_the_host(model: str, share: float) -> None:
    """From one step's start to the next one's: waits are the streams' business, and nothing is mapped anew."""
    found, moved = _stopping_calls(model, share)
    assert found[-1] == found[-2] == ("planned", 0, {}), found
    assert moved > 6


@pytest.mark.parametrize(("model", "share"), [("conv_stack", 0.4)])
def test_where_chunks_change_the_host_waits_once_for_each_variable(model: str, share: float) -> None:
    """A variable that comes back to other chunks costs an unmap, which needs the host to have seen the last use."""
    found, _ = _stopping_calls(model, share)
    mode, num_remapped, calls = found[-1]
    assert mode == "planned"
    assert num_remapped > 0
    assert set(calls) <= {"cuEventSynchronize", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"}
    assert 0 < calls["cuEventSynchronize"] <= calls["cuMemUnmap"] <= num_remapped


def _stopping_calls(model: str, share: float) -> tuple[list[tuple[str, int, dict[str, int]]], int]:
    """Per step its mode, its remapped chunks and its stopping calls; and how many copies the last one made."""
    device = FakeCudaDevice(seed=3)
    workload = models.get(model, "small")
    budget_nbytes = int(budget_nbytes_of(Recipe(workload=model), "peak") * share)
    found = []
    with fixed_speed(), CudaSession(budget_nbytes, device=device, recompute=False) as session:
        torch.manual_seed(0)
        network = workload.build()
        optimizer = workload.make_optimizer(network, None)
        for index in range(6):
            before = device.fake.num_calls.copy()
            with session.step():
                optimizer.zero_grad(set_to_none=True)
                workload.loss(network, workload.make_batch(index)).backward()
                optimizer.step()
            row = session.steps.rows[-1]
            found.append((row.mode, row.num_remapped_chunks, stopping_calls(before, device.fake.num_calls)))
        moved = sum(device.fake.num_calls[name] - before[name] for name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"))
        del network, optimizer
    return found, moved
