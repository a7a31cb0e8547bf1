"""Random programs over the fake CUDA driver: in core and out, equal to the last bit, and without a race."""

from __future__ import annotations

import faulthandler
from dataclasses import replace
from typing import Any

import pytest

from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import fixed_speed, programs_over
from tests.session import programs
from tests.session.program_runs import run_many

PLAIN = [seed for seed in range(72) if not programs.generate(seed).debug][:24]
DEBUG = [seed for seed in range(70) if programs.generate(seed).debug]


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_runs.run_seed`, on the fake. Its file cannot fail: the host memory holds all."""
    faulthandler.enable(2)  # nobody serves a fault here: say where it was, in the child's own output
    program = replace(programs.generate(seed), delay_ns=0, fail_call=0)
    device = FakeCudaDevice(seed=seed, eagerness=(seed % 5) / 6)

    with programs_over(device), fixed_speed():
        outcome = programs.run_in_session(program, programs.run_in_core(program))
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks}


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(PLAIN[::2], id="plain"),
        pytest.param(DEBUG[::2], id="debug"),
        pytest.param(PLAIN[1::2], id="plain, more", marks=pytest.mark.slow),
        pytest.param(DEBUG[1::2], id="debug, more", marks=pytest.mark.slow),
    ],
)
def test_random_programs(seeds: list[int]) -> None:
    tally = run_many(seeds, runner=f"{__name__}:{run_seed.__name__}")
    tally.check(len(seeds))
    assert tally.num_steady_planned > tally.num_steady / 2, tally
    assert tally.modes["planned"] > len(seeds) / 2
