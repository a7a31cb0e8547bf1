"""Realigns a step and its plan where they differ harmlessly, so that the step stays on its plan.

- *Bystanders*: ops that touch no variable, which a step may go without.
- *Marks* of ops in parts (`ooc.tracing.operand_marks`), which no step has.
- *Late bindings*: what comes into the step from outside, and is another storage each time (a batch from a list).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.acts import ResidencyActs
from ooc.replay.bindings import Bindings
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import PlanVariable
from scheduler.plan import Loaded
from vmm.table import AllocatorTable


class Replaying(Protocol):
    """What it needs of the executor; see there."""

    active: ExecutablePlan | None

    def before(self, index: int) -> bool: ...
    def after(self, index: int) -> None: ...
    def bail_out(self, reason: str) -> None: ...
    def is_anyone_late(self, executable: ExecutablePlan, tick: int) -> bool: ...


class Realignment:
    """Of the plan that an executor replays, on the session's thread and with its lock held. Owns nothing."""

    def __init__(
        self,
        executor: Replaying,
        manager: ResidencyManager,
        allocator: AllocatorTable,
        dispatcher: Dispatcher,
        bindings: Bindings,
        acts: ResidencyActs,
    ) -> None:
        self._executor = executor
        self._manager = manager
        self._allocator = allocator
        self._dispatcher = dispatcher
        self._bindings = bindings
        self._acts = acts

    def __repr__(self) -> str:
        return f"<Realignment of {self._executor!r}>"

    def skip_to(self, func: Any) -> bool:
        """Skip planned ops that no step need have, up to the next `func`, but no acts around them. True if possible."""
        executable = self._executor.active
        assert executable is not None
        cursor = index = self._dispatcher.cursor
        while index < executable.num_ops and executable.funcs[index] is not func and _may_skip(executable, index):
            index += 1
        if index == cursor or index == executable.num_ops or executable.funcs[index] is not func:
            return False
        return self._skip(executable, cursor, index) and self._can_run_in_parts(executable, index)

    def skip_marks(self, index: int) -> None:
        """After op `index`, skip the marks of its operands, if it has run in parts."""
        executable = self._executor.active
        if executable is not None and (marks := executable.parts.marks_after(index)):
            self._skip(executable, marks.start, marks.stop)

    def _skip(self, executable: ExecutablePlan, start: int, stop: int) -> bool:
        for skipped in range(start, stop):
            self._allocator.state.set_between(skipped)
            executable.op_start_ns[skipped] = executable.op_stop_ns[skipped] = time.monotonic_ns()
            if executable.before[skipped] is not None and not self._executor.before(skipped):
                return False
            if executable.after[skipped] is not None:
                self._executor.after(skipped)
            if self._executor.active is None:
                return False
        self._allocator.state.set_between(stop)
        self._dispatcher.start(stop)
        return True

    def _can_run_in_parts(self, executable: ExecutablePlan, index: int) -> bool:
        """Whether the operands of an op in parts are where it can use them. False: the step has left the plan.

        What it reads is in memory or in the store. What it writes is in memory, and written out after it.
        """
        parts, variables = executable.parts, executable.variables
        records = {number: variables[number].record for number in parts.sliced[index] or ()}
        present = {n: r for n, r in records.items() if r is not None and executable.variable_alive[n]}
        if any(record.state is State.DISCARDED for record in present.values()):
            self._executor.bail_out("an op that runs in parts uses what was discarded")
            return False
        for number, mark in parts.written(index):
            residencies = (executable.residency_at(variables[number], op) for op in (index, mark))
            if number in present and (present[number].state is not State.RESIDENT or len(set(residencies)) > 1):
                self._executor.bail_out("an op that runs in parts writes what is not in memory")
                return False
        return True

    def rebind(self, addresses: Sequence[int]) -> bool:
        """Bind operands of the next op to plan variables that are not bound yet.

        Returns:
            True if the op's operands are now as planned, and resident.
        """
        executable = self._executor.active
        assert executable is not None
        index = self._dispatcher.cursor
        changes = executable.late_bindings(index, addresses, self._manager.records)
        return bool(changes) and all(
            self._bind_late(executable, variable, record, index) for variable, record in changes
        )

    def _bind_late(
        self, executable: ExecutablePlan, variable: PlanVariable, record: VariableRecord, index: int
    ) -> bool:
        residency = executable.residency_at(variable, index)
        if residency is None or record.exports or not record.seen or self._manager.flights.holds(record):
            return False
        if self._executor.is_anyone_late(executable, executable.trace.ops[index].start_tick):
            return False
        if executable.variable_alive[variable.index]:
            if variable.record is not None and (
                variable.record.state is State.DISCARDED or not self._acts.may_move(variable.record)
            ):
                return False
            self._bindings.expel(executable, variable)
        if record.state is State.RESIDENT:
            self._manager.evict([record])
        del self._manager.records[record.address]
        self._bindings.bury(executable, variable)
        variable.record = record
        self._bindings.set_alive(executable, variable, record)
        start = residency.planned.start
        started = time.monotonic_ns()
        if not (isinstance(start, Loaded) and start.before_op == index):
            self._acts.start_load(residency)
            self._acts.arrive(record)
        # Else `before` loads it, after it has released the variable that has the chunks until this very op.
        if executable.is_written_from(variable, index):
            record.written()  # the op that was to note the first write may have been another's
        self._manager.note_stall(started)
        return True


def _may_skip(executable: ExecutablePlan, index: int) -> bool:
    return executable.parts.is_mark(index) or executable.is_bystander(index)
