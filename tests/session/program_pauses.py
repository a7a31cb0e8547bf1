"""Random programs in segments, in some periods of which nobody looks for what begins, as where all fits.

There the clock decides; here a draw for each period does, in any memory.

python -m tests.session.program_runs --runner tests.session.program_pauses:run_seed --seed 0 --count 60
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

from ooc.replay.learning_budget import LearningBudget
from tests.session import program_segments


@contextmanager
def drawn_pauses(seed: int) -> Iterator[None]:
    """All fits in some periods, and in some of these nobody looks."""
    random, begin = Random(seed), LearningBudget.begin_period
    fits = False

    def begin_period(self: LearningBudget) -> None:
        nonlocal fits
        begin(self)
        fits = random.random() < 0.4
        self.watches = not fits or random.random() < 0.5

    with (
        mock.patch.object(LearningBudget, "begin_period", begin_period),
        mock.patch.object(LearningBudget, "everything_fits", property(lambda _: fits)),
    ):
        yield


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_runs.run_seed`."""
    with drawn_pauses(seed):
        return program_segments.run_seed(seed)
