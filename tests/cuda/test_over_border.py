"""Writes that cross the border of a step over the fake CUDA driver: bits, and no race, whatever the order of copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from ooc.testing.fake_device import FakeCudaDevice
from scheduler.plan import Plan
from tests.cuda.cases import CHUNK_NBYTES, CudaSession, fixed_speed
from tests.session.continuation import Trainer, assert_arrays_equal
from tests.session.program_border import forced_over_border
from tests.session.program_relocation import forced_relocation

NUM_STEPS = 8
BUDGET = 28 * CHUNK_NBYTES


@pytest.mark.parametrize(("seed", "eagerness"), [(0, 0.1), (1, 0.9)])
@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("forced", [forced_over_border, forced_relocation])
def test_bits_are_those_of_the_run_in_core(
    seed: int, eagerness: float, is_changed: bool, forced: Callable[[], AbstractContextManager[list[Plan]]]
) -> None:
    def change(trainer: Trainer, index: int) -> None:
        if is_changed and index == NUM_STEPS - 3:
            with torch.no_grad():
                trainer.model[0].weight.mul_(0.5)

    reference, expected = Trainer(), []
    for index in range(NUM_STEPS):
        expected.append(reference.step(index))
        change(reference, index)
    final = reference.snapshot()
    device = FakeCudaDevice(seed=seed, eagerness=eagerness)
    with fixed_speed(), forced() as plans, CudaSession(BUDGET, device=device) as session:
        trainer, losses = Trainer(), []
        for index in range(NUM_STEPS):
            with session.step():
                losses.append(trainer.step(index))
            change(trainer, index)
        assert any(plan.writes_over_border for plan in plans)
        is_copied = forced is forced_relocation
        assert any(plan.border_copies for plan in plans) == is_copied == (session.steps.rows[-1].relocated_nbytes > 0)
        assert session.steps.rows[-1].mode == "planned"
        assert losses == expected
        assert_arrays_equal(final, trainer.snapshot())
