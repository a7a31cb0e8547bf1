"""What recorded sequences teach: they are named, remembered for guesses, and planned, as far as the time allows."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ooc.dispatch.op_runner import OpRunner
from ooc.memory.residency import ResidencyManager
from ooc.replay.first_sightings import name_of
from ooc.replay.learning_budget import LearningBudget
from ooc.replay.sequences import Sequences
from ooc.replay.union_plans import UnionPlans
from ooc.telemetry.steps import StepLog
from ooc.telemetry.why import UnplannedSteps
from ooc.tracing.pieces import cuts, split
from ooc.tracing.recorder import RecordedStep, StepRecorder
from scheduler.plan import Machine

_log = logging.getLogger(__name__)


class Learned(NamedTuple):
    """What a recording turned out to be."""

    key: str | None
    """Of the last sequence in it; None if it is incomplete."""
    is_new: bool
    """Whether there was something in it like nothing before."""
    is_one: bool = True
    """Whether it was one sequence, and not several, one after the other."""
    is_repeated: bool = False
    """Whether it has come just so before, has no plan, and may be learned for that."""


class Learner:
    """Learns for one session, on its thread.

    Args:
        runner: Recorded the sequences, and tells why their plans were left.
        budget: How much of the time learning may take.
    """

    def __init__(
        self,
        *,
        runner: OpRunner,
        manager: ResidencyManager,
        sequences: Sequences,
        unions: UnionPlans,
        budget: LearningBudget,
        steps: StepLog,
        why: UnplannedSteps,
    ) -> None:
        self._runner = runner
        self._executor = runner.executor
        self._manager = manager
        self._sequences = sequences
        self._unions = unions
        self._budget = budget
        self._steps = steps
        self._why = why
        self._has_failed = False

    def __repr__(self) -> str:
        return f"<Learner of {self._sequences!r}>"

    def learn(self, recorder: StepRecorder, *, in_segments: bool, in_pieces: bool) -> Learned:
        """Learn what was recorded since the last border. A fault of ours ends that, and not the user's training.

        Args:
            recorder: Has taken in all that the native table noted; not cut.
            in_segments: Whether steps are planned by their segments.
            in_pieces: Whether a recording without gradients may be one batch after another.
        """
        if not self._has_failed:
            try:
                return self._learn(recorder, in_segments=in_segments, in_pieces=in_pieces)
            except Exception:  # noqa: BLE001
                _log.exception(
                    "a fault in the planner; nothing more is learned, what has no plan runs on demand. Please report it"
                )
                self._has_failed = True
        self._sequences.note_end(None)
        return Learned(None, is_new=False)

    def _learn(self, recorder: StepRecorder, *, in_segments: bool, in_pieces: bool) -> Learned:
        may_learn = self._budget.may_learn(num_ops=recorder.num_ops) and recorder.is_compared
        if not may_learn and self._budget.everything_fits:
            self._why.note_all_fits()
            key: str | None = self._sequences.key_of(recorder.signature())
            self._sequences.note_end(key)
            return Learned(key, is_new=False)
        self._runner.settle_times()
        recording = recorder.finish(self._manager.records)
        recording.note_origins(self._manager.records)
        if self._manager.counters.evicted_nbytes:
            self._manager.foresight.remember(recording.uses)
        entered = self._sequences.active_key if recorder.num_replayed else None
        is_repeated = not may_learn and self._sequences.is_repeated(recording, is_kept=recorder.is_compared)
        may_repeat = is_repeated and self._budget.may_learn(is_repeated=True)
        if may_learn or (may_repeat and recorder.is_compared):
            with self._budget.spending(is_repeated=is_repeated):
                may_unite = may_learn and not self._budget.everything_fits
                found = self._learn_from(recording, in_pieces=in_pieces, may_unite=may_unite)
        else:  # too much of the time went by with that
            key = self._sequences.key_of(recording.signature) or name_of(recording)
            found = Learned(key, self._sequences.is_new(key))
            self._sequences.note_end(key)
            self._why.note_unlearned(recording, key)
        is_settled = found.key is not None and self._sequences.has_plan(found.key)
        if may_repeat and not is_settled and found.key not in self._sequences.unplannable:
            found = found._replace(is_repeated=True)
        if in_segments:
            bailout = self._executor.bailout_reason if recorder.num_replayed else ""
            self._why.note_segment(recording, num_ops=recorder.num_ops - recorder.num_replayed, bailout=bailout)
        return found._replace(is_new=found.is_new or entered not in (None, found.key))

    def _learn_from(self, recording: RecordedStep, *, in_pieces: bool, may_unite: bool) -> Learned:
        key, is_new = None, False
        found = cuts(recording) if in_pieces and not recording.grad_mode else []
        for piece in split(recording, found) if found else [recording]:
            key = self._unions.note(piece, self._machine, may_unite=may_unite)
            is_new = is_new or self._sequences.is_new(key)
            self._sequences.note_end(key)
            self._why.note_period(piece, key)
        return Learned(key, is_new, is_one=not found)

    def _machine(self) -> Machine:
        """The machine that plans are made for: its pool is the session's, less the workspaces of libraries."""
        manager = self._manager
        num_kept = sum(manager.chunks_of(record.nbytes) for record in manager.workspaces())
        num_chunks = max(manager.num_chunks - num_kept, 1)
        with self._budget.uncounted():
            return self._steps.machine(num_chunks, manager.chunk_nbytes, manager.store)
