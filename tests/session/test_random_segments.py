"""Random programs planned piece by piece, in core and under a session, equal to the last bit.

`python -m tests.session.program_runs --runner tests.session.program_segments:run_seed --seed 0 --count 300` runs more.
"""

from __future__ import annotations

import pytest

from tests.session.program_runs import Tally, run_many

LONG = [13, 15]
"""As long as all others together."""
SEEDS = [seed for seed in range(18) if seed not in LONG]
RUNNER = "tests.session.program_segments:run_seed"
PAUSES = "tests.session.program_pauses:run_seed"


def _check(tally: Tally, count: int) -> None:
    tally.check(count)
    assert tally.modes["planned"] > count / 2, tally.modes  # comparing is worth something only where plans are replayed


def test_random_programs_in_segments() -> None:
    _check(run_many(SEEDS, runner=RUNNER), len(SEEDS))


def test_random_programs_in_segments_that_nobody_looks_for_at_times() -> None:
    _check(run_many(SEEDS, runner=PAUSES), len(SEEDS))


@pytest.mark.slow
def test_many_more_random_programs_in_segments() -> None:
    _check(run_many([*LONG, *range(100_000, 102_000)], runner=RUNNER), len(LONG) + 2000)


@pytest.mark.slow
def test_more_random_programs_in_segments_that_nobody_looks_for_at_times() -> None:
    _check(run_many([*SEEDS, *LONG], runner=PAUSES), len(SEEDS) + len(LONG))
