"""Random programs whose steps differ in sizes, or in what they run at all, over the fake CUDA driver.

python -m tests.session.program_runs --runner tests.cuda.device_programs:run_seed --seed 0 --count 60
"""

from __future__ import annotations

import faulthandler
from dataclasses import replace
from typing import Any

from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import fixed_speed, programs_over
from tests.session import programs
from tests.session.program_unions import eager_unions, with_unlike_steps


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_unions.run_seed`, on the fake. Its file cannot fail: the host memory holds all."""
    faulthandler.enable(2)  # nobody serves a fault here: say where it was, in the child's own output
    program = replace(with_unlike_steps(seed, may_vary=seed % 2 == 1), delay_ns=0, fail_call=0)
    device = FakeCudaDevice(seed=seed, eagerness=(seed % 5) / 6)

    with programs_over(device), fixed_speed():
        expected = programs.run_in_core(program)
        with eager_unions() as found:
            outcome = programs.run_in_session(program, expected)
    return {"modes": (*outcome.modes, *found.elements()), "num_chunks": outcome.num_chunks}
