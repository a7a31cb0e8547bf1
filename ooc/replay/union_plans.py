"""Plans for unions of steps: what is learned from steps that are like no other, and what came of their plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ooc.memory.record import VariableRecord
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.learning_budget import LearningBudget
from ooc.replay.segmentation import WholeUnions
from ooc.replay.sequences import Sequences
from ooc.replay.unions import Unions
from ooc.tracing.recorder import RecordedStep
from scheduler.plan import Machine

_log = logging.getLogger(__name__)


class UnionPlans:
    """Lets recorded steps join unions, whose plans `Sequences` keeps as it does those of any sequence.

    These are steps whose ops were like no others', and those that come where another one was expected.

    Args:
        sequences: Learns the steps that are like others.
        budget: How much of the time that may take, and whether it has paid so far.
    """

    def __init__(self, sequences: Sequences, budget: LearningBudget) -> None:
        self._sequences = sequences
        self._budget = budget
        self._unions = Unions(sequences.draws)
        self._is_on = True  # until a fault of the planner's

    def __repr__(self) -> str:
        return f"<UnionPlans: {self._unions!r}>"

    def of_whole_steps(self) -> WholeUnions:
        """What there is of unions of whole steps."""
        keys = self._unions.keys(is_segment=False)
        return WholeUnions(self._unions.num_begun, bool(keys), any(not self._sequences.has_plan(key) for key in keys))

    def note(self, recording: RecordedStep, machine: Callable[[], Machine], *, may_unite: bool = True) -> str:
        """Note a step that ran on demand, as `Sequences.note` does; one that is like no other joins a union.

        With `may_unite` False none does: where everything fits, no union's plan would be entered.
        """
        self._sequences.retire_drawn()
        older_than, is_segment = self._unions.note(recording), self._sequences.is_segmented
        has_unions = may_unite and bool(self._unions.keys(is_segment=is_segment))
        key = self._join(recording, older_than, None, machine) if has_unions else None
        if key is not None:
            return key
        is_unforeseen = self._sequences.active_key is not None  # another one was expected
        is_unlike = self._sequences.key_of(recording.signature) is None
        key = self._sequences.note(recording, machine)
        if may_unite and (is_unforeseen or (is_unlike and self._sequences.is_new(key))):
            return self._join(recording, older_than, key, machine) or key
        return key

    def _join(
        self, recording: RecordedStep, older_than: int, key: str | None, machine: Callable[[], Machine]
    ) -> str | None:
        """Add a step to the union that it belongs to, and have that planned. Its key, if there is one."""
        if not self._is_on or not self._budget.may_join():
            return None
        try:
            with self._budget.joining():
                return self._join_union(recording, older_than, key, machine)
        except Exception:  # noqa: BLE001 - it must not end the user's training
            _log.exception("a fault in the planner; steps that differ are planned no more. Please report it")
            self._is_on = False
            return None

    def _join_union(
        self, recording: RecordedStep, older_than: int, key: str | None, machine: Callable[[], Machine]
    ) -> str | None:
        sequences = self._sequences
        found = self._unions.join(recording, older_than, is_segment=sequences.is_segmented, key=key)
        if found is None:
            self._give_up_forgotten()
            return None
        key, union = found
        has_news = union.num_latest_new > 0
        if sequences.active_key == key and (has_news or sequences.covers(key)):
            self._unions.note_left(key, has_news=has_news)
        if self._unions.of(key) is not None:
            sequences.note_union(key, union, recording, machine)
            if key in sequences.unplannable:
                self._unions.give_up(key)
        self._give_up_forgotten()
        return key if self._unions.of(key) is not None else None

    def _give_up_forgotten(self) -> None:
        while self._unions.forgotten:
            self._sequences.give_up(self._unions.forgotten.pop())

    def note_played(self, executable: ExecutablePlan) -> None:
        """Note that a plan was replayed to its end. It may have been given up then."""
        self._unions.note_played(self._sequences.key_of_plan(executable), executable.omitted)
        self._give_up_forgotten()

    def note_refused(self, executable: ExecutablePlan) -> None:
        """Note that a plan waits for variables that will not come back."""
        key = self._sequences.key_of_plan(executable)
        if key is not None:
            self._unions.give_up(key)
            self._give_up_forgotten()

    def prepare(self, executable: ExecutablePlan, records: Mapping[int, VariableRecord]) -> None:
        """Name the places of birth of what is alive as a plan does that is about to be entered, so that it finds it."""
        key = self._sequences.key_of_plan(executable)
        union = self._unions.of(key) if key is not None else None
        if union is None:
            return
        for record in records.values():
            variable = union.born_at(record.birthplace) if record.birthplace is not None else None
            if variable is not None and variable.index < len(executable.variables):
                record.birthplace = executable.variables[variable.index].origin
