"""Says why a step was not planned, or left its plan: for people who wonder why it is slow.

A step that runs on demand is compared with the one before it: at the first op that is another, or of another size, they
part. Only some steps are compared, since that takes a good part of the time in which they are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ooc.tracing.op_semantics import op_name
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recorder import RecordedStep, StepRecorder
from ooc.units import format_nbytes
from vmm.torch_cpu import ALLOC, Event

_MOST_COMPARED = 32
_MOST_SEGMENTS_COMPARED = 128
_MOST_SEGMENTS = 16
_MOST_SEGMENT_OPS = 1 << 14
"""Of all segments together that later ones are compared with: an op takes about 100 bytes."""

Cause = Literal[
    "", "first", "again", "sizes", "ops", "left", "refused", "segment", "unplannable", "unlearned", "fits", "unknown"
]
"""Kinds of reasons; empty where the step was planned. first: no step came before it, or the one that also made the
model; again: it was as the one before, and is planned once it was seen twice, its plan is made, and it is expected;
sizes: the same ops on other sizes; ops: other ops; left: it left its plan; refused: a plan could not be entered;
segment: a part of it is not planned; unplannable: no plan can be made; unlearned: learning has taken its share of the
time; fits: nothing has to move, so there is no need of a plan; unknown: not compared."""


class Comparable(Protocol):
    """What is compared: a recorded step, or the present one."""

    @property
    def num_ops(self) -> int: ...
    @property
    def events(self) -> Sequence[Event]: ...
    def funcs(self) -> list[Any]: ...
    def op(self, index: int) -> OpRecord: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one step was not planned.

    Attributes:
        cause: Its kind.
        text: In words, with the op, its place, and what was expected. Empty for a planned step.
    """

    cause: Cause = ""
    text: str = ""


_BEING_PLANNED = Reason(
    cause="again", text="as those before it: their plan is being made, or another one was expected here"
)
_STEPS_BEFORE = Reason(
    cause="again", text="the steps before it were alike: their plan is being made, or another one was expected here"
)
_AFTER_THE_FIRST = Reason(
    cause="first",
    text="what came before it was the first, and made the model, too: a step is planned when it has been seen twice",
)
_UNLEARNED = Reason(
    cause="unlearned",
    text="as one before it, which was not learned: learning has taken its share of the time so far",
)
_NOT_COMPARED = Reason(cause="unknown", text="it was not like a step that was seen twice")


class UnplannedSteps:
    """Finds the reason of each step in turn.

    Args:
        unplannable: Sequences that cannot be planned, with the reason.
    """

    def __init__(self, unplannable: Mapping[str, str]) -> None:
        self._unplannable = unplannable
        self._before: RecordedStep | None = None
        self._keys = ("", "")  # of the last two steps that were learned
        self._refusal = ""
        self._num_periods = 0
        self._is_unlearned = False  # the last one that was recorded
        self._not_entered = ""  # why not, if there is a plan for the step that has begun
        self._fits = False
        self._num_compared = 0
        self._num_alike = 0  # steps in a row that were as the one before
        self._last_left = ""  # why a plan was left, the last time
        self._segments: dict[int, RecordedStep] = {}  # by their ops, the newest last
        self._num_again: dict[int, int] = {}  # how often each was as the one before
        self._num_segments = 0
        self._noted: list[tuple[int, Reason]] = []  # of the present step's segments, with their ops on demand

    def __repr__(self) -> str:
        return f"<UnplannedSteps: {self._num_compared} compared>"

    def note_period(self, recording: RecordedStep, key: str) -> None:
        """A step that ran on demand has been recorded and learned as `key`."""
        if recording.num_ops or self._before is not None:  # else nothing came before the first step
            self._before = recording
        self._num_periods += recording.num_ops > 0
        self._keys = self._keys[1], key
        self._refusal = self._unplannable.get(key, "")
        self._is_unlearned = False

    def note_unlearned(self, recording: RecordedStep, key: str) -> None:
        """A step has been recorded, and was not learned for want of time."""
        self.note_period(recording, key)
        self._is_unlearned = True

    def note_segment(self, recording: RecordedStep, *, num_ops: int, bailout: str) -> None:
        """What was noted last is a segment, so many ops of it on demand; `bailout`: why it left a plan, if it did."""
        if bailout:
            self._noted.append((num_ops, self._left(bailout)))
            return
        if self._refusal:
            self._noted.append((num_ops, Reason(cause="unplannable", text=f"it cannot be planned: {self._refusal}")))
            return
        self._num_segments += 1
        if self._num_segments > _MOST_SEGMENTS_COMPARED:
            unknown = Reason(cause="unknown", text="it was not like one that was seen twice")
            self._noted.append((num_ops, _UNLEARNED if self._is_unlearned else unknown))
            return
        ops = recording.signature
        reason = self._compare_segment(recording, ops)
        self._num_again[ops] = self._num_again.get(ops, 0) + 1 if reason.cause == "again" else 0
        if reason.cause == "again" and self._is_unlearned:
            reason = _UNLEARNED
        elif self._num_again[ops] > 1:
            reason = _BEING_PLANNED
        self._noted.append((num_ops, reason))
        self._segments.pop(ops, None)
        self._segments[ops] = recording
        while len(self._segments) > _MOST_SEGMENTS or self._num_segment_ops() > _MOST_SEGMENT_OPS:
            oldest = next(iter(self._segments))
            del self._segments[oldest], self._num_again[oldest]

    def _num_segment_ops(self) -> int:
        return sum(recording.num_ops for recording in self._segments.values())

    def _compare_segment(self, recording: Comparable, signature: int) -> Reason:
        """Compared with the last segment of the same ops; without one, with the last that began with the same op."""
        before = self._segments.get(signature)
        if before is None and recording.num_ops:
            head = recording.op(0).func
            others = (
                found for found in reversed(self._segments.values()) if found.num_ops and found.op(0).func is head
            )
            before = next(others, None)
        if before is None:
            return Reason(cause="segment", text="nothing that began like it was seen before")
        return compare(before, recording, named="the last that began so")

    def _explain_segments(self) -> Reason:
        """The reason of that segment, of those noted in the step that ends, which took most ops on demand."""
        noted, self._noted = self._noted, []
        if not noted:
            return Reason()
        num_ops, reason = max(noted, key=lambda each: each[0])
        return Reason(cause=reason.cause, text=f"a segment of {num_ops} ops was not planned: {reason.text}")

    def in_part(self, num_planned: int, num_on_demand: int) -> Reason:
        """The reason of a step that ended on a plan, with ops on demand in a segment in between: that noted last."""
        text = f"{num_on_demand} of its {num_on_demand + num_planned} ops are a segment that"
        if self._refusal:
            return Reason(cause="unplannable", text=f"{text} cannot be planned: {self._refusal}")
        if self._is_unlearned:
            return Reason(
                cause="unlearned", text=f"{text} was not learned: that has taken its share of the time so far"
            )
        return Reason(cause="segment", text=f"{text} has no plan yet")

    def note_refusal(self, reason: str) -> None:
        """The plan for the step that begins could not be entered."""
        self._not_entered = f"its plan could not be entered: {reason}"

    def note_loss(self) -> None:
        """The plan for the step that begins was not entered, since such plans have gained nothing."""
        text = (
            "its plan was not entered: plans like it have cost more than they saved, or were left too early to save it"
        )
        self._not_entered = f"{text}; the last that was left: {self._last_left}" if self._last_left else text

    def _left(self, bailout: str) -> Reason:
        self._last_left = bailout
        return Reason(cause="left", text=f"left its plan: {bailout}")

    def note_all_fits(self) -> None:
        """Nothing is learned from the step that has ended, or no plan entered: nothing has had to move of late."""
        self._fits = True

    def explain(
        self, recorder: StepRecorder | None, *, was_planned: bool, bailout: str, in_segments: bool = False
    ) -> Reason:
        """The reason of a step that ends.

        Args:
            recorder: Its ops; None while a plan is replayed.
            was_planned: Whether it began on a plan.
            bailout: Why that was left, if it was.
            in_segments: Whether its segments are planned, and not the whole of it.
        """
        not_entered, self._not_entered = self._not_entered, ""
        fits, self._fits = self._fits, False
        if in_segments and not fits:
            if recorder is not None and recorder.num_ops > recorder.num_replayed:  # the one that is not over
                left = bool(recorder.num_replayed)
                reason = self._left(bailout) if left else Reason(cause="unknown")
                if not left and self._num_segments <= _MOST_SEGMENTS_COMPARED:
                    reason = self._compare_segment(recorder, recorder.signature())
                self._noted.append((recorder.num_ops - recorder.num_replayed, reason))
            return self._explain_segments()
        self._noted.clear()
        if was_planned:
            return Reason() if recorder is None else self._left(bailout)
        if not_entered:
            return Reason(cause="refused", text=not_entered)
        if fits:
            return Reason(cause="fits", text="nothing had to move in the steps before it, so no plan was looked for")
        if self._refusal:
            return Reason(cause="unplannable", text=f"steps like the one before cannot be planned: {self._refusal}")
        if recorder is None:
            return Reason(cause="unknown", text="its plan was entered in mid-step")
        if self._before is None:
            return Reason(cause="first", text="the first step: a step is planned when it has been seen twice")
        self._num_compared += 1
        was_twice = self._keys[0] == self._keys[1]
        if self._num_compared > _MOST_COMPARED:
            return _UNLEARNED if self._is_unlearned else _STEPS_BEFORE if was_twice else _NOT_COMPARED
        reason = compare(self._before, recorder)
        self._num_alike = self._num_alike + 1 if reason.cause == "again" else 0
        if reason.cause != "again":
            return _AFTER_THE_FIRST if self._num_periods <= 1 else reason
        was_twice = was_twice or self._num_alike > 1
        return _UNLEARNED if self._is_unlearned else _BEING_PLANNED if was_twice else reason


def compare(before: Comparable, now: Comparable, *, named: str = "the step before") -> Reason:
    """Where a step parts from the one before it. What comes after the end of the shorter one counts for nothing.

    `named`: what to call the latter.
    """
    funcs = now.funcs()
    for index, (old, new) in enumerate(zip(before.funcs(), funcs, strict=False)):
        if old is not new:
            expected = before.op(index)
            place = f" ({expected.where})" if expected.where else ""
            text = f"{_op(index, now.op(index))} came, where {named} had {op_name(expected.func)}{place}"
            return Reason(cause="ops", text=text)
    made_before = [e for e in before.events if e.kind == ALLOC]
    made_now = [e for e in now.events if e.kind == ALLOC]
    for old_event, new_event in zip(made_before, made_now, strict=False):
        index = new_event.position // 2
        if old_event.nbytes != new_event.nbytes and old_event.position // 2 == index and index < len(funcs):
            sizes = f"{format_nbytes(new_event.nbytes)}, {format_nbytes(old_event.nbytes)} in {named}"
            return Reason(cause="sizes", text=f"the same ops on other sizes: {_op(index, now.op(index))} made {sizes}")
        if old_event.position != new_event.position:
            below = f"{format_nbytes(new_event.nbytes)} here, and not in {named}"
            place = f"{_op(index, now.op(index))} made" if index < len(funcs) else "between ops were made"
            return Reason(cause="sizes", text=f"the same ops on other sizes: {place} {below}")
    return Reason(cause="again", text=f"as {named}: it is planned as soon as it was seen twice")


def _op(index: int, op: OpRecord) -> str:
    return f"op {index} ({op_name(op.func)}{f', {op.where}' if op.where else ''})"
