"""Random programs that hold arrays over tensors' memory and write through them, equal to the last bit.

To see one again: `python -m tests.session.program_views --seed N --verbose`.
"""

from __future__ import annotations

import pytest

from tests.session.program_runs import run_many

NUM_PROGRAMS = 90
NUM_WITH_RERUNS = 16


@pytest.mark.parametrize(("runner", "count"), [("run_seed", NUM_PROGRAMS), ("run_recomputing", NUM_WITH_RERUNS)])
def test_random_programs_with_views(runner: str, count: int) -> None:
    tally = run_many(range(count), runner=f"tests.session.program_views:{runner}")
    tally.check(count)
    assert tally.modes["planned"] > count / 2, tally.modes  # comparing is worth something only where plans are played


@pytest.mark.slow
def test_many_more_random_programs_with_views() -> None:
    run_many(range(100_000, 103_000), runner="tests.session.program_views:run_seed").check(3000)
