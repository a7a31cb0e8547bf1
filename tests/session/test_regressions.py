"""Programs that once failed, shrunk to what is needed; each failed before its fix.

Found by tests/session/programs.py, in which their statements are explained.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.session.program_failures import fails
from tests.session.program_statements import Statement as S
from tests.session.programs import Program, Step

_PROGRAM = Program(
    seed=0,
    bodies=(),
    num_inside=(),
    steps=(),
    num_registers=3,
    parameters=(),
    modules=(),
    optimizer="sgd",
    inputs=(),
    check_every=1,
    check_inside=False,
    by_optimizer=False,
    policy="auto",
    window_nbytes=1 << 16,
    num_chunks=23,
    threshold_nbytes=4096,
)

# Variable 21 is born in the step and becomes variable 2 of the next one; they share a reservation. On entering the
# plan it was mapped to the first chunks of the unborn, while the successor's bytes lay in others: wrong numbers.
ENTER_MAPPED_THE_UNBORN = replace(
    _PROGRAM,
    seed=10,
    bodies=(
        (
            S("parameter", 1, 1, 2, 1967, 160),
            S("matmul", 2, 1, 0, 2659, 80),
            S("parameter", 0, 0, 0, 4068, 154),
            S("cat", 1, 0, 2, 1175, 91),
            S("transpose", 0, 1, 0, 357, 169),
            S("backward", 1, 1, 1, 1296, 199),
        ),
    ),
    num_inside=(6,),
    steps=(Step(body=0),) * 5,
    parameters=(16384,),
    optimizer="adamw_fused",
)

# The first event of a step is the free of a variable of the step before: its life ended at tick 0, where it began.
FREED_FIRST_OF_ALL = replace(
    _PROGRAM,
    seed=34,
    bodies=((S("delete", 7, 1, 1, 2300, 212), S("parameter", 7, 7, 6, 2970, 67)),),
    num_inside=(2,),
    steps=(Step(body=0),) * 3,
    num_registers=8,
    parameters=(5000,),
    check_inside=True,
    policy="on_demand",
    num_chunks=75,
    threshold_nbytes=1024,
)

# A successor that only the cycle collector frees: it took the reservation along that it shared with the variable
# born in the step, which then had none.
SHARED_RESERVATION_OUTLIVED = replace(
    _PROGRAM,
    seed=194,
    bodies=((S("norms", 2, 0, 1, 845, 107), S("cycle", 3, 2, 1, 788, 112)),),
    num_inside=(1,),
    steps=(Step(body=0),) * 5,
    num_registers=4,
    num_chunks=18,
)

# A variable that no op has named (another thread's) was to become one that may be evicted: no legal plan.
UNSEEN_BECOMES_SEEN = replace(
    _PROGRAM,
    seed=159,
    bodies=((S("set", 7, 3, 6, 3873, 30), S("thread", 7, 7, 4, 43, 48)),),
    num_inside=(2,),
    steps=(Step(body=0),) * 4,
    num_registers=9,
    check_every=0,
    policy="window",
    window_nbytes=1 << 20,
    num_chunks=74,
    threshold_nbytes=300,
)

# What another thread allocates in each step, and no op has named, crosses the step boundary: it cannot be evicted,
# so no plan is legal. The planner made one with a residency of no chunks and raised into the user's step.
UNSEEN_LEAVES_THE_CYCLE = replace(
    _PROGRAM,
    seed=7006,
    bodies=((S("thread", 5, 1, 0, 1415, 168), S("parameter", 2, 7, 6, 800, 93)),),
    num_inside=(2,),
    steps=(Step(body=0),) * 4,
    num_registers=8,
    parameters=(1024,),
    check_every=0,
    policy="window",
    window_nbytes=1 << 20,
    threshold_nbytes=300,
)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(ENTER_MAPPED_THE_UNBORN, id="enter-mapped-the-unborn"),
        pytest.param(FREED_FIRST_OF_ALL, id="freed-first-of-all"),
        pytest.param(SHARED_RESERVATION_OUTLIVED, id="shared-reservation-outlived"),
        pytest.param(UNSEEN_BECOMES_SEEN, id="unseen-becomes-seen"),
        pytest.param(UNSEEN_LEAVES_THE_CYCLE, id="unseen-leaves-the-cycle"),
    ],
)
def test_program(program: Program) -> None:
    assert fails(program) == ""
