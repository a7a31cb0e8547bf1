"""Steps whose sizes differ share one plan on a device, too: programs of tests/replay/test_elastic.py over the fake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CudaSession, fixed_speed
from tests.cuda.device_programs import run_seed
from tests.replay import test_elastic as programs
from tests.session.program_runs import run_many
from vmm.device_store import DeviceStore

pytestmark = pytest.mark.usefixtures("one_thread")

Program = Callable[[Callable[[], Any], list[int]], list[Any]]


def run(
    program: Program, lengths: list[int], *, budget_nbytes: int = 2 << 20, debug: bool = False, seed: int = 0
) -> CudaSession:
    """In core and in a session, equal to the last bit and without a race. The closed session."""
    torch.manual_seed(0)
    expected = program(contextlib.nullcontext, lengths)
    torch.manual_seed(0)
    device = FakeCudaDevice(seed=seed, eagerness=0.2)
    with fixed_speed(), CudaSession(budget_nbytes, device=device, debug=debug) as session:
        assert program(session.step, lengths) == expected
    return session


def modes_of(session: CudaSession) -> list[str]:
    return [row.mode for row in session.steps.rows]


@pytest.mark.parametrize("debug", [False, True])
def test_batches_of_any_length_are_planned(debug: bool) -> None:
    lengths = [100, 130, 61, 83, 150, 45, 99, 120, 33, 155, 70, 141, 87, 52]
    modes = modes_of(run(programs.train, lengths, debug=debug))
    assert modes[3:].count("planned") >= len(modes[3:]) - 3, modes


@pytest.mark.parametrize(
    "program",
    [programs.with_failures, programs.with_evaluation, programs.accumulated, programs.one_that_differs],
)
def test_sizes_that_change_within_other_programs(program: Program) -> None:
    run(program, programs.LENGTHS, seed=3)


def test_transfers_move_the_bytes_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot has room for the largest that a plan may bring; what moves is what is there."""
    moved: list[tuple[int, int]] = []
    write = DeviceStore.write

    def noted(self: DeviceStore, slot: Any, segments: Any, after: Any = ()) -> Any:
        moved.append((slot.nbytes, sum(nbytes for _, nbytes in segments)))
        return write(self, slot, segments, after)

    monkeypatch.setattr(DeviceStore, "write", noted)
    session = run(programs.train, [99, 160, 100, 160, 159, 161, 70, 70, 70, 160])
    assert "planned" in modes_of(session)
    assert any(nbytes < room for room, nbytes in moved), moved
    assert sum(nbytes for _, nbytes in moved) == session.counters()["evicted_nbytes"]


def test_what_outlives_its_session_has_its_own_size() -> None:
    """Its plan held more for it; the rest is given up while the device may still be at work."""
    device = FakeCudaDevice(eagerness=0.0)
    model = nn.Linear(256, 512)
    kept: list[Tensor] = []
    with fixed_speed(), CudaSession(2 << 20, device=device) as session:
        for index, length in enumerate([100, 160, 90, 120, 110, 100, 130]):
            with session.step():
                out = model(torch.full((length, 256), 0.01 * (index + 1)))
                kept = [out.detach() * factor for factor in range(10)]  # 2.6 MB, so that some are away
                del out
        assert session.steps.rows[-1].mode == "planned"
    expected = model(torch.full((130, 256), 0.07)).detach()
    for factor, found in enumerate(kept):
        assert torch.equal(found, expected * factor), factor


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(list(range(5)), id="some"),
        pytest.param(list(range(5, 80)), id="more", marks=pytest.mark.slow),
    ],
)
def test_random_programs_of_unlike_steps(seeds: list[int]) -> None:
    tally = run_many(seeds, runner=f"{run_seed.__module__}:{run_seed.__name__}")
    tally.check(len(seeds))
