"""The variables of an executable plan, the records bound to them, and their residencies."""

from __future__ import annotations

from typing import Any

from ooc.memory.record import Runs, VariableRecord
from scheduler.plan import Evicted, Kept, Residency
from scheduler.trace import Trace
from vmm.store import Transfer


class PlanVariable:
    """A variable of the plan, and the record that is bound to it in this step.

    Attributes:
        record: The one bound to it. For a variable born in the step, the record whose reservation it will get.
        successor: The plan variable that its record passes to in the next step, where that is another one.
        predecessor: The plan variable that its record had in the step before, where that is another one.
        double_buffered: It is born while its successor's record, from the step before, is still
            alive: the two take turns with two reservations.
        is_persistent: The same storage in every step.
        is_standing: Another storage each time, which exists throughout: what the segment before has left there.
        dies_within: It is born and freed within the step.
        is_elastic: Its size differs from step to step; `nbytes` is the largest that the plan has room for.
        origin: Where it is born (`VariableRecord.origin`).
        serial: For a persistent variable, its record's serial.
        rank: For one that exists at the start: how many of its size were younger then.
    """

    __slots__ = (
        "dies_within",
        "double_buffered",
        "evictable",
        "successor",
        "index",
        "is_born",
        "is_elastic",
        "is_persistent",
        "is_standing",
        "lives_on",
        "nbytes",
        "origin",
        "rank",
        "predecessor",
        "record",
        "serial",
        "residencies",
    )

    def __init__(self, *, index: int, trace: Trace) -> None:
        traced = trace.variables[index]
        self.index = index
        self.nbytes = traced.nbytes
        self.evictable = traced.evictable
        self.is_born = traced.birth_tick is not None
        self.lives_on = traced.death_tick is None
        self.dies_within = self.is_born and not self.lives_on
        self.is_persistent = traced.becomes == index
        self.is_standing = False
        self.double_buffered = False
        self.is_elastic = False
        self.serial: int | None = None
        self.rank: int | None = None
        self.origin: tuple[str, int, int] | None = None
        self.successor: PlanVariable | None = None
        self.predecessor: PlanVariable | None = None
        self.record: VariableRecord | None = None
        self.residencies: list[ExecutableResidency] = []

    def has_room(self, nbytes: int) -> bool:
        """Whether a storage of this size can be it."""
        return nbytes == self.nbytes or (self.is_elastic and nbytes < self.nbytes)

    def is_taken(self, alive: Any) -> bool:
        """Whether its addresses are still its successor's, freed later than planned. `alive`: of each variable."""
        successor = self.successor
        return successor is not None and bool(alive[successor.index]) and successor.record is self.record

    def __repr__(self) -> str:
        return (
            f"<PlanVariable {self.index}, {self.nbytes} bytes, {len(self.residencies)} residencies, "
            f"bound to {self.record!r}>"
        )


class ExecutableResidency:
    """One residency of a plan variable: an interval of the step in which it is in memory, in fixed chunks.

    Attributes:
        runs: Its chunks.
        is_left_out: It is loaded for marks alone (`ooc.tracing.operand_marks`), so its variable stays in the store.
        is_written_before: Its bytes are written in the step before, and stay in memory over the border.
        waits: Earlier holders of its chunks whose transfer must be complete first.
        dead: Indices of variables freed inside the op that it is born in, from which it takes chunks over.
        transfer: Its latest load or write.
        moved: The record that this transfer moves.
        segments: Its bytes as ranges of the linear view.
        fitted: Its chunks, and its bytes made ready for the store, as far as records of other sizes need them: by bytes
            and by chunks of the reservation (`ooc.replay.present_sizes`).
    """

    __slots__ = (
        "dead",
        "fitted",
        "is_left_out",
        "is_written_before",
        "moved",
        "planned",
        "runs",
        "segments",
        "transfer",
        "variable",
        "waits",
    )

    def __init__(self, *, variable: PlanVariable, planned: Residency, segments: list[tuple[int, int]]) -> None:
        self.variable = variable
        self.planned = planned
        self.is_left_out = False
        self.is_written_before = isinstance(planned.stop, Evicted) and planned.stop.write_op < 0
        self.runs: Runs = planned.chunks
        self.segments = segments
        self.fitted: dict[tuple[int, int], tuple[Runs, Any]] = {}
        self.waits: tuple[ExecutableResidency, ...] = ()
        self.dead: tuple[int, ...] = ()
        self.transfer: Transfer | None = None
        self.moved: VariableRecord | None = None

    @property
    def is_kept_at_start(self) -> bool:
        """Whether it goes on from the step before."""
        return isinstance(self.planned.start, Kept)

    @property
    def is_kept_at_end(self) -> bool:
        """Whether it goes on in the next step."""
        return isinstance(self.planned.stop, Kept)

    def __repr__(self) -> str:
        return f"<ExecutableResidency of variable {self.variable.index}: {self.planned.start} to {self.planned.stop}>"
