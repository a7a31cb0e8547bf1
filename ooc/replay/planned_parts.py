"""The ops of a plan that run in parts, and the marks that stand for their operands (`ooc.tracing.operand_marks`)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.tracing.observed import Observed
from ooc.tracing.operand_marks import ROOM_ORDINAL, OperandMark
from scheduler.plan import Dies, Discarded, Dropped, Loaded, occupied_ticks
from scheduler.trace import Trace


class PlannedParts:
    """Which ops of a plan run in parts, on what, and in which memory.

    Attributes:
        sliced: Per op, the variables that it reads in slices, wherever they are; None: it runs as a whole.
    """

    def __init__(self, trace: Trace, observed: Observed) -> None:
        self._trace = trace
        self.sliced = observed.sliced or (None,) * len(trace.ops)
        self._apart = {variable for apart in self.sliced for variable in apart or ()}
        self._marks = [isinstance(func, OperandMark) for func in observed.funcs]

    def __repr__(self) -> str:
        return f"<PlannedParts: {len(self.ops())} of {len(self.sliced)} ops>"

    def ops(self) -> list[int]:
        """The ops that run in parts."""
        return [op for op, apart in enumerate(self.sliced) if apart is not None]

    def may_run_again(self, op: int) -> bool:
        """Whether this is an op that ran as a whole, and makes nothing that another uses in slices."""
        is_whole = self.sliced[op] is None and not self.is_mark(op)
        return is_whole and not any(u.writes and u.variable in self._apart for u in self._trace.ops[op].uses)

    def is_mark(self, op: int) -> bool:
        """Whether this op is none, but a mark, which no step has."""
        return self._marks[op]

    def marks_after(self, op: int) -> range:
        """The marks after an op."""
        stop = op + 1
        while stop < len(self._marks) and self._marks[stop]:
            stop += 1
        return range(op + 1, stop)

    def divide(
        self, op: int, births: Sequence[ExecutableResidency]
    ) -> tuple[list[ExecutableResidency], list[ExecutableResidency]]:
        """What an op's allocations get (in parts: its results), and the memory in which its parts run."""
        if self.sliced[op] is None:
            return list(births), []
        rooms = [r for r in births if self._is_room(op, r.variable)]
        return [r for r in births if r not in rooms], rooms

    def _is_room(self, op: int, variable: PlanVariable) -> bool:
        """Whether this is no allocation of the op, but what its recording says of the memory for its parts."""
        death_tick = self._trace.variables[variable.index].death_tick
        is_within = death_tick is not None and death_tick < self._trace.ops[op].stop_tick
        return is_within and variable.origin is not None and variable.origin[2] == ROOM_ORDINAL

    def leave_out(self, residencies: Iterable[ExecutableResidency], sources: Container[int]) -> None:
        """Note which residencies are loaded for marks alone: the op reads these variables from the store.

        `sources` are the identities of those that re-runs read.
        """
        if not any(self._marks):
            return
        uses, ops = self._trace.uses_by_variable(), self._trace.ops
        for residency in residencies:
            planned = residency.planned
            may_stay_away = isinstance(planned.start, Loaded) and isinstance(planned.stop, Dies | Dropped | Discarded)
            if not may_stay_away or id(residency) in sources:
                continue
            first, last = occupied_ticks(planned, self._trace)
            mine = [i for i, _ in uses[planned.variable] if ops[i].stop_tick > first and ops[i].start_tick < last]
            residency.is_left_out = bool(mine) and all(self._marks[i] for i in mine)
