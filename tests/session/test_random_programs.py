"""Thousands of random programs, in core and under a session, equal to the last bit.

Programs run in child processes, so that a crash names its seed. To see one again, and have it shrunk:
`python -m tests.session.program_runs --seed N`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.session.program_runs import Tally, run_many
from tests.session.programs import generate

NUM_PROGRAMS = 1600
"""With those of views, loops, unions, segments, re-runs and of the fake device more than 2,000 are run by default."""
NUM_PROCESSES = 2


def _run(first: int, count: int) -> Tally:
    """Run seeds `[first, first + count)` in a few processes and add up what they did."""
    parts = [range(first + k, first + count, NUM_PROCESSES) for k in range(NUM_PROCESSES)]
    total = Tally()
    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        for tally in threads.map(run_many, parts):
            total.num_run += tally.num_run
            total.num_steady += tally.num_steady
            total.num_steady_planned += tally.num_steady_planned
            total.modes.update(tally.modes)
            total.failures.update(tally.failures)
    return total


def _check(tally: Tally, count: int) -> None:
    report = "\n".join(f"seed {seed}: {failure}" for seed, failure in list(tally.failures.items())[:5])
    assert not tally.failures, f"{len(tally.failures)} of {tally.num_run} programs failed\n{report}"
    assert tally.num_run == count
    # Comparing is worth something only where plans are played, and left.
    assert tally.num_steady_planned > tally.num_steady / 2, tally
    assert tally.modes["planned"] > count / 2 and tally.modes["off_plan"] > count / 10, tally.modes


def test_random_programs() -> None:
    _check(_run(0, NUM_PROGRAMS), NUM_PROGRAMS)


@pytest.mark.slow
def test_many_more_random_programs() -> None:
    _check(_run(100_000, 10 * NUM_PROGRAMS), 10 * NUM_PROGRAMS)


def test_generation_depends_on_the_seed_alone() -> None:
    assert [generate(seed) for seed in range(20)] == [generate(seed) for seed in range(20)]
    assert generate(1) != generate(2)
