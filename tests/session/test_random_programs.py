"""Thousands of random programs, in core and under a session, equal to the last bit.

Programs run in child processes, so that a crash names its seed. To see one again, and have it shrunk:
`python -m tests.session.program_runs --seed N`.
"""

from __future__ import annotations

import pytest

from tests.session.program_runs import Tally, run_many
from tests.session.programs import generate

NUM_PROGRAMS = 1600
"""With those of views, loops, unions, segments, re-runs and of the fake device more than 2,000 are run by default."""
NUM_AT_ONCE = 100
"""In one test: pytest's processes share them, and none takes so long that it is thought to hang, however slow it is."""


def _check(tally: Tally, count: int) -> None:
    tally.check(count)
    # Comparing is worth something only where plans are played, and left.
    assert tally.num_steady_planned > tally.num_steady / 2, tally
    assert tally.modes["planned"] > count / 2 and tally.modes["off_plan"] > count / 10, tally.modes


_MORE = range(100_000, 100_000 + 10 * NUM_PROGRAMS, NUM_AT_ONCE)


@pytest.mark.parametrize(
    "first",
    [*range(0, NUM_PROGRAMS, NUM_AT_ONCE), *(pytest.param(first, marks=pytest.mark.slow) for first in _MORE)],
)
def test_random_programs(first: int) -> None:
    _check(run_many(range(first, first + NUM_AT_ONCE)), NUM_AT_ONCE)


def test_generation_depends_on_the_seed_alone() -> None:
    assert [generate(seed) for seed in range(20)] == [generate(seed) for seed in range(20)]
    assert generate(1) != generate(2)
