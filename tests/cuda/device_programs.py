"""Random programs whose steps differ in sizes, or in what they run at all, over the fake CUDA driver.

python -m tests.session.program_runs --runner tests.cuda.device_programs:run_seed --seed 0 --count 60
"""

from __future__ import annotations

import faulthandler
from dataclasses import replace
from typing import Any

import pytest

import ooc
from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CudaSession, fixed_speed
from tests.session import programs
from tests.session.program_unions import eager_unions, with_unlike_steps


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_unions.run_seed`, on the fake. Its file cannot fail: the host memory holds all."""
    faulthandler.enable(2)  # nobody serves a fault here: say where it was, in the child's own output
    program = replace(with_unlike_steps(seed, may_vary=seed % 2 == 1), delay_ns=0, fail_call=0)
    device = FakeCudaDevice(seed=seed, eagerness=(seed % 5) / 6)

    def make_session(*, budget: int, chunk_nbytes: int, **options: Any) -> ooc.Session:
        assert chunk_nbytes == programs.CHUNK_NBYTES
        return CudaSession(budget, device=device, **options)

    with pytest.MonkeyPatch.context() as patch, fixed_speed():
        patch.setattr(programs, "make_session", make_session)
        expected = programs.run_in_core(program)
        with eager_unions() as found:
            outcome = programs.run_in_session(program, expected)
    return {"modes": (*outcome.modes, *found.elements()), "num_chunks": outcome.num_chunks}
