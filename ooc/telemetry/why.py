"""Says why a step was not planned, or left its plan: for people who wonder why it is slow.

A step that runs on demand is compared with the one before it: at the first op that is another, or of another size, they
part. Only some steps are compared, since that takes a good part of the time in which they are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ooc.tracing.recorder import OpRecord, RecordedStep, StepRecorder
from ooc.units import format_nbytes
from vmm.torch_cpu import ALLOC, Event

_MOST_COMPARED = 32

Cause = Literal["", "first", "again", "sizes", "ops", "left", "refused", "segment", "unplannable", "fits", "unknown"]
"""Kinds of reasons; empty where the step was planned. first: no step came before it; again: it was as the one before,
and is planned from now on; sizes: the same ops on other sizes; ops: other ops; left: it left its plan; refused: a plan
could not be entered; segment: a part of it is not planned; unplannable: no plan can be made;
fits: nothing has to move, so there is no need of a plan; unknown: not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one step was not planned.

    Attributes:
        cause: Its kind.
        text: In words, with the op, its place, and what was expected. Empty for a planned step.
    """

    cause: Cause = ""
    text: str = ""


class UnplannedSteps:
    """Finds the reason of each step in turn.

    Args:
        unplannable: Sequences that cannot be planned, with the reason.
    """

    def __init__(self, unplannable: Mapping[str, str]) -> None:
        self._unplannable = unplannable
        self._before: RecordedStep | None = None
        self._refusal = ""
        self._entered = ""
        self._fits = False
        self._num_compared = 0

    def __repr__(self) -> str:
        return f"<UnplannedSteps: {self._num_compared} compared>"

    def note_period(self, recording: RecordedStep, key: str) -> None:
        """A step that ran on demand has been recorded and learned as `key`."""
        self._before = recording
        self._refusal = self._unplannable.get(key, "")

    def note_refusal(self, reason: str) -> None:
        """The plan for the step that begins could not be entered."""
        self._entered = reason

    def note_all_fits(self) -> None:
        """Nothing is learned from the step that has ended: everything fits."""
        self._fits = True

    def explain(self, recorder: StepRecorder | None, *, was_planned: bool, bailout: str) -> Reason:
        """The reason of a step that ends.

        Args:
            recorder: Its ops; None while a plan is replayed.
            was_planned: Whether it began on a plan.
            bailout: Why that was left, if it was.
        """
        entered, self._entered = self._entered, ""
        fits, self._fits = self._fits, False
        if was_planned:
            return Reason() if recorder is None else Reason(cause="left", text=f"left its plan: {bailout}")
        if entered:
            return Reason(cause="refused", text=f"its plan could not be entered: {entered}")
        if fits:
            return Reason(
                cause="fits", text="everything fits in the budget: nothing has to move, and no plan is needed"
            )
        if self._refusal:
            return Reason(cause="unplannable", text=f"steps like the one before cannot be planned: {self._refusal}")
        if recorder is None:
            return Reason(cause="unknown", text="its plan was entered in mid-step")
        if self._before is None:
            return Reason(cause="first", text="the first step: a step is planned when it has been seen twice")
        self._num_compared += 1
        if self._num_compared > _MOST_COMPARED:
            return Reason(cause="unknown", text="it was not like a step that was seen twice")
        return compare(self._before.ops, self._before.events, recorder.ops, recorder.events)


def compare(
    before: Sequence[OpRecord], events_before: Sequence[Event], now: Sequence[OpRecord], events_now: Sequence[Event]
) -> Reason:
    """Where a step parts from the one before it. What comes after the end of the shorter one counts for nothing."""
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        if old.func is not new.func:
            expected = f"{old.func}{f' ({old.where})' if old.where else ''}"
            return Reason(cause="ops", text=f"{_op(index, new)} came, where the step before had {expected}")
    made_before = [e for e in events_before if e.kind == ALLOC]
    made_now = [e for e in events_now if e.kind == ALLOC]
    for old_event, new_event in zip(made_before, made_now, strict=False):
        index = new_event.position // 2
        if old_event.nbytes != new_event.nbytes and old_event.position // 2 == index and index < len(now):
            sizes = f"{format_nbytes(new_event.nbytes)}, {format_nbytes(old_event.nbytes)} in the step before"
            return Reason(cause="sizes", text=f"the same ops on other sizes: {_op(index, now[index])} made {sizes}")
        if old_event.position != new_event.position:
            below = f"{format_nbytes(new_event.nbytes)} here, and not in the step before"
            place = f"{_op(index, now[index])} made" if index < len(now) else "between ops were made"
            return Reason(cause="sizes", text=f"the same ops on other sizes: {place} {below}")
    return Reason(cause="again", text="as the step before: it is planned as soon as it was seen twice")


def _op(index: int, op: OpRecord) -> str:
    return f"op {index} ({op.func}{f', {op.where}' if op.where else ''})"
