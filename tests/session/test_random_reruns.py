"""Random programs whose plans discard whatever can be made again, in core and out of core, equal to the last bit.

To see one again: `python -m tests.session.program_reruns --seed N`.
"""

from __future__ import annotations

import pytest

from tests.session.program_runs import run_many

NUM_PROGRAMS = 24
RUNNER = "tests.session.program_reruns:run_seed"


def test_random_programs_with_reruns() -> None:
    run_many(range(NUM_PROGRAMS), runner=RUNNER).check(NUM_PROGRAMS)


def test_scratch_above_all_residencies() -> None:
    """What stays in memory beside a plan is not in the way of what its re-runs take for themselves."""
    run_many(range(4027, 4028), runner=RUNNER).check(1)


def test_what_was_not_written_yet_may_differ() -> None:
    """Memory from `torch.empty` that is discarded before its first use has no bytes to compare."""
    run_many(range(4149, 4150), runner=RUNNER).check(1)


def test_an_operand_that_is_no_variable_this_time() -> None:
    """A re-run reads a copy of what was a variable in other steps, and has become small or another library's."""
    run_many(range(1025, 1026), runner=RUNNER).check(1)


@pytest.mark.slow
def test_many_more_random_programs_with_reruns() -> None:
    run_many(range(100_000, 103_000), runner=RUNNER).check(3000)
