"""Late bindings: what comes into a step from outside, and is another storage each time.

A batch from a list, samples drawn from those of earlier steps: nobody knows before the op comes which storage it will
be. Its plan variable is bound then, and loaded. What comes may be another variable's until then: one that was drawn
before, in another place, or one that the step has made and that is drawn at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ooc.memory.record import State, VariableRecord
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import PlanVariable
from ooc.replay.replaying import PartOfReplay
from ooc.tracing.op_semantics import joins_list
from scheduler.plan import Loaded

_Changes = dict[PlanVariable, VariableRecord]


class LateBindings(PartOfReplay):
    """Of the plan that an executor replays, on the session's thread and with its lock held. Owns nothing."""

    def bind(self, addresses: Sequence[int]) -> bool:
        """Bind operands of the next op, which are at `addresses`, to plan variables that are not bound to them yet.

        Returns:
            True if the op's operands are now as planned, and resident.
        """
        executable = self._executor.active
        assert executable is not None
        index = self._dispatcher.cursor
        changes = self._changes(executable, index, addresses)
        if not changes:
            self._note_draw(executable, index, addresses)
        if not changes or not self._may_change(executable, changes, index):
            return False
        for record in changes.values():
            holder = executable.variable_at(record.address)
            if holder is not None and not self._leave(executable, holder):
                return False
        return all(self._bind(executable, variable, record, index) for variable, record in changes.items())

    def _changes(self, executable: ExecutablePlan, op: int, addresses: Sequence[int]) -> _Changes:
        """Which variables op `op` would bind to which records. Empty if they are bound so already, or cannot be.

        What comes twice, and was not planned to, is bound once, and the other variable stays as it is: native code lets
        pass that the op does not have that.
        """
        expected = executable.occurrences[op]
        if len(expected) != len(addresses):
            return {}
        pairs = list(dict.fromkeys(zip(expected, addresses, strict=True)))
        there = [pair for pair in pairs if executable.is_at(*pair)]
        found = {address for _, address in there}
        known = {index for index, _ in there}
        changes: _Changes = {}
        for index, address in pairs:
            if address in found:
                continue
            if index in known:
                return {}  # one variable cannot be bound to two records
            variable, record = executable.variables[index], self._manager.records.get(address)
            if record is None and (holder := executable.variable_at(address)) is not None:
                record = holder.record if self._may_lose(executable, holder, op) else None
            if record is None or variable.is_born or variable.is_persistent or not variable.has_room(record.nbytes):
                return {}
            changes[variable] = record
            found.add(address)
            known.add(index)
        return changes

    def _note_draw(self, executable: ExecutablePlan, op: int, addresses: Sequence[int]) -> None:
        """Where the next op joins others than the plan has, note that these are drawn anew in each step.

        Next time the operands of such an op are anybody's (`Draws` in `ooc.tracing.observed`). Not where it joins
        parameters, of another network this time: what the plan has there has other uses, too.
        """
        func, expected = executable.funcs[op], set(executable.occurrences[op])
        if not joins_list(func) or len(executable.occurrences[op]) != len(addresses):
            return
        others = (executable.occurrences[i] for i, other in enumerate(executable.funcs) if not joins_list(other))
        if all(expected.isdisjoint(used) for used in others):
            executable.draws.add((func, executable.trace.ops[op].where))

    def _may_lose(self, executable: ExecutablePlan, holder: PlanVariable, op: int) -> bool:
        """Whether what a live variable is bound to may be another one's from op `op` on.

        It came from outside, and another storage may come for it; or it was made, lives on, and is not used any more.
        """
        is_shared = holder.predecessor is not None and holder.predecessor.record is holder.record
        if holder.is_persistent or is_shared or not holder.evictable or executable.reruns.by_op:
            return False  # what runs again may be going to read it
        return not holder.is_born or (holder.lives_on and not executable.is_used_from(holder, op))

    def _may_change(self, executable: ExecutablePlan, changes: _Changes, index: int) -> bool:
        """Whether each of these may be bound now."""
        for variable, record in changes.items():
            residency = executable.residency_at(variable, index)
            if residency is None and variable.index not in (executable.parts.sliced[index] or ()):
                return False  # else it is read where it is: in the store
            if record.exports or not record.seen or self._manager.flights.holds(record):
                return False
            if record.state is State.DISCARDED:
                return False
        return not self._executor.is_anyone_late(executable, executable.trace.ops[index].start_tick)

    def _leave(self, executable: ExecutablePlan, variable: PlanVariable) -> bool:
        """Give what a live variable is bound to back to the manager. False: it must stay, or the step has left."""
        record = variable.record
        if record is not None and (record.state is State.DISCARDED or not self._acts.may_move(record)):
            return False
        self._bindings.expel(executable, variable)
        return True

    def _bind(self, executable: ExecutablePlan, variable: PlanVariable, record: VariableRecord, index: int) -> bool:
        residency = executable.residency_at(variable, index)
        if executable.variable_alive[variable.index] and not self._leave(executable, variable):
            return False
        if record.state is State.RESIDENT:
            self._manager.evict([record])
        del self._manager.records[record.address]
        self._bindings.bury(executable, variable)
        variable.record = record
        self._bindings.set_alive(executable, variable, record)
        started = time.monotonic_ns()
        if residency is not None and residency.planned.start != Loaded(index):
            self._acts.start_load(residency)
            self._acts.arrive(record)
        # Else `before` loads it, if at all, after it has released the variable that has the chunks until this very op.
        if executable.is_written_from(variable, index):
            record.written()  # the op that was to note the first write may have been another's
        self._manager.note_stall(started)
        return True
