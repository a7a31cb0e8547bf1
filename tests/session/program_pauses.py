"""Random programs in segments, in some periods of which nobody looks for what begins, or rests, as where all fits.

And from some recordings nothing may be learned, nor compared, as where too much of the time has gone by with that.

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
    """All fits in some periods, in some of these nobody looks, and some are of rest; at times nothing is learned."""
    random, end, begin = Random(seed), LearningBudget.end_period, LearningBudget.begin_period
    fits = False

    def end_period(self: LearningBudget, **counts: int) -> None:
        nonlocal fits
        end(self, **counts)
        fits = random.random() < 0.5
        self.rests = fits and random.random() < 0.5

    def begin_period(self: LearningBudget) -> None:
        begin(self)
        self.watches = not self.rests and (not fits or random.random() < 0.5)

    def may_learn(_: LearningBudget, *, is_repeated: bool = False, **__: int) -> bool:
        return random.random() < (0.9 if is_repeated else 0.7)

    with (
        mock.patch.object(LearningBudget, "may_learn", may_learn),
        mock.patch.object(LearningBudget, "end_period", end_period),
        mock.patch.object(LearningBudget, "begin_period", begin_period),
        mock.patch.object(LearningBudget, "everything_fits", property(lambda _: fits)),
    ):
        yield


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_runs.run_seed`."""
    with drawn_pauses(seed):
        return program_segments.run_seed(seed)
