"""Random programs no two of whose steps are alike, in core and under a session, equal to the last bit.

`python -m tests.session.program_runs --runner tests.session.program_unions:run_seed --seed 0 --count 300` runs more.
"""

from __future__ import annotations

import pytest

from tests.session.program_runs import Tally, run_many

LONG = [6]
"""As long as all others together."""
SEEDS = [seed for seed in range(13) if seed not in LONG]
RUNNER = "tests.session.program_unions:run_seed"


def _check(tally: Tally, count: int) -> None:
    tally.check(count)
    assert tally.modes["omissions"] > 2 * count, tally.modes  # comparing is worth something only where ops are left out
    assert tally.modes["stand-ins"] > count, tally.modes


def test_random_programs_of_unlike_steps() -> None:
    _check(run_many(SEEDS, runner=RUNNER), len(SEEDS))


@pytest.mark.slow
def test_many_more_random_programs_of_unlike_steps() -> None:
    _check(run_many([*LONG, *range(100_000, 102_000)], runner=RUNNER), len(LONG) + 2000)
