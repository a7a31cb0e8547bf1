"""Decides whether steps are planned whole or in segments: whole as long as whole steps come again.

A plan for a whole step fetches ahead across everything in it. But where each step has another number of micro-batches,
or of a closure's calls, no step is like an earlier one, and its segments are.

A step that is planned whole may come in pieces all the same: to a loop that has a plan, an average of the weights is
added, which has one of its own from then on. If it always comes so, the whole of it is planned anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

_WINDOW = 6
_MOST_NEW = 4
"""Of the last `_WINDOW` steps so many were new or left their plan: from now on segments are planned."""
_NUM_FIRST = 3
"""The first steps of any program are new, and do not count: the model is made, then the optimizer's state."""
_MANY_PASSES = 4
_MOST_NEW_BY_PASSES = 2
"""Where steps have so many backward passes, or each another number of them, a pass comes again where a step does not.
So after so many such steps in a row, beyond the first, that were new or left their plan, segments are planned: LBFGS
runs its closure 20 times a step by default, and nobody waits for the seventh of these."""
_MOST_AWAITED = 32
"""So many steps at most a union waits for its plan before steps are cut all the same."""
_NUM_EQUAL = 8
"""After so many steps in a row of the same segments, whole steps are planned again; each time it takes twice as many
new ones to go back. So they are after so many in a row of the same pieces; each time it takes twice as many."""


class WholeUnions(NamedTuple):
    """What there is of unions of whole steps (`ooc.replay.unions`).

    Attributes:
        num_begun: So far, of any kind. After one of whole steps was begun, steps stay whole for some time: it remains
            to be seen what that plans.
        exist: There is one of whole steps.
        await_plan: One of these has no plan yet: it is being made beside training.
    """

    num_begun: int = 0
    exist: bool = False
    await_plan: bool = False


_NO_UNIONS = WholeUnions()


class _Run:
    """How many in a row were equal."""

    def __init__(self) -> None:
        self._latest: Hashable = None
        self._length = 0

    def note(self, item: Hashable) -> int:
        """How many there are with this one."""
        self._length = self._length + 1 if item == self._latest else 1
        self._latest = item
        return self._length

    def end(self) -> None:
        """The next one is the first."""
        self._length = 0


class Segmentation:
    """Whether segments are planned, from what became of the steps so far.

    Attributes:
        is_on: Whether they are.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._num_steps = self._num_unions = self._begun = self._tried_until = 0
        self._most_new = _MOST_NEW
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._segments, self._pieces = _Run(), _Run()
        self._num_passes = 0  # backward passes in the latest step that had any
        self._num_new_by_passes = 0  # in a row
        self._num_counted = 0  # of the segments that will end in the present step: those that were the last one's
        self._most_alike = _NUM_EQUAL

    def __repr__(self) -> str:
        return f"<Segmentation {'on' if self.is_on else 'off'}>"

    def note_whole(self, *, is_new: bool, num_passes: int = 1, unions: WholeUnions = _NO_UNIONS) -> None:
        """Note a step that could be planned whole.

        Args:
            is_new: It ran on demand, and was not like one before.
            num_passes: Backward passes in it.
            unions: The unions that there are.
        """
        self._num_steps += 1
        if unions.num_begun > self._num_unions:
            self._num_unions, self._begun = unions.num_begun, self._num_steps
            self._tried_until = self._begun + _WINDOW
        elif unions.await_plan:
            self._tried_until = min(self._num_steps, self._begun + _MOST_AWAITED) + _WINDOW
        if self._num_steps > _NUM_FIRST:
            self._recent.append(is_new)
        if num_passes:  # else it is what came before the first step, or an evaluation
            is_by_passes = num_passes >= _MANY_PASSES or num_passes != self._num_passes
            is_counted = is_new and is_by_passes and self._num_passes > 0
            self._num_new_by_passes = self._num_new_by_passes + 1 if is_counted else 0
            self._num_passes = num_passes
        is_varied = sum(self._recent) >= self._most_new or (
            self._num_new_by_passes >= _MOST_NEW_BY_PASSES and self._most_new == _MOST_NEW
        )
        is_tried = unions.exist and self._num_steps < self._tried_until
        if is_varied and not is_tried:
            self.is_on = True
            self._segments.end()

    def note_segments(self, keys: Sequence[str | None], complete: str | None = None) -> None:
        """Note a step that consisted of these segments.

        Args:
            keys: Of those that ended in it.
            complete: That of a plan which is played to its end, and will be the first to end in the next step, when an
                op comes that it has not. It is this step's: what runs on demand ends with its own.
        """
        string = (*keys[self._num_counted :], *(() if complete is None else (complete,)))
        self._num_counted = 0 if complete is None else 1
        if self._segments.note(string) >= _NUM_EQUAL:
            self.is_on = False
            self._num_counted = 0
            self._segments.end()
            self._most_new *= 2
            self._recent = deque(maxlen=max(_WINDOW, self._most_new * 3 // 2))

    def note_pieces(self, keys: Sequence[str | None]) -> bool:
        """Note of what a step consisted that was to be planned whole. Whether it is to be joined into one sequence."""
        num_alike = self._pieces.note(tuple(keys))
        if len(keys) < 2 or None in keys or num_alike < self._most_alike:
            return False
        self._most_alike *= 2
        self._pieces.end()
        return True
