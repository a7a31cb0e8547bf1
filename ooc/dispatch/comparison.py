"""`Comparison`: whether what is recorded is compared with other recordings, and planned."""

from __future__ import annotations

from ooc.dispatch.extension import sum_in_place
from ooc.replay.learning_budget import LearningBudget
from ooc.tracing.recording import StepRecording

_MOST_AWAITED = 64
"""So many recordings are compared at most until what has come before comes again; other segments come in between."""


class Comparison:
    """Decides as each recording begins, and tells native code.

    What learning needs of an op (its line and its node, whether it may run again) is a good part of what an op costs on
    demand. So it is left out while the session rests, and where too much of the time has gone by with learning already.

    Args:
        recording: The session's.
        budget: How much of the time learning may take.

    Attributes:
        is_at_rest: Nothing of this period is planned or learned. Then torch may sum up gradients in place, too: which
            op comes depends on the way that others took.
    """

    def __init__(self, recording: StepRecording, budget: LearningBudget) -> None:
        self._recording = recording
        self._budget = budget
        self.is_at_rest = False
        self._num_awaited = 0  # recordings to be compared for what has come before
        self._is_wanted = True

    def __repr__(self) -> str:
        return f"<Comparison: {'at rest' if self.is_at_rest else 'wanted' if self._is_wanted else 'not wanted'}>"

    def rest(self, rests: bool) -> None:
        """Let the period that begins be one of rest, or not."""
        if rests != self.is_at_rest:
            self.is_at_rest = rests
            sum_in_place(rests)
            self._tell()

    def begin(self) -> None:
        """A sequence of ops begins: whether anything is to be learned from it, should it run on demand."""
        self._is_wanted = self._num_awaited > 0 or self._budget.may_learn()
        self._num_awaited = max(self._num_awaited - 1, 0)
        self._tell()

    def note_repeated(self, *, is_learned: bool) -> None:
        """What was recorded has come just so before, and has no plan. If it was not compared, it is the next time."""
        self._num_awaited = 0 if is_learned else _MOST_AWAITED

    def _tell(self) -> None:
        self._recording.compare(self._is_wanted and not self.is_at_rest)
