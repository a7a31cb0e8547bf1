"""Random programs at another length in each step, in core and under a session, equal to the last bit.

`python -m tests.session.program_runs --runner tests.session.elastic_programs:run_seed --seed 0 --count 300` runs more.
"""

from __future__ import annotations

from tests.session.program_runs import run_many

NUM_PROGRAMS = 12


def test_random_programs_of_any_length() -> None:
    tally = run_many(range(NUM_PROGRAMS), runner="tests.session.elastic_programs:run_seed")
    tally.check(NUM_PROGRAMS)
    assert tally.modes["planned"] > tally.modes["off_plan"], tally.modes  # comparing is worth something only then
