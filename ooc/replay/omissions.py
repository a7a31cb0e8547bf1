"""Omissions: a step that leaves out ops of its plan, and stays on it.

Plans for unions of steps (`ooc.replay.step_unions`) have more ops than any step. Where another op comes than the next
one, the plan's ops up to that one are left out: what the plan does around them is done, but nothing is born. What would
have been born there may be missing further on, as the input of the layer after one that is skipped: there another
variable *stands in*, the one that the step uses instead. Its bytes move to the chunks that the plan has for the
missing one, and from then on it is that one.

Whatever is left out, each op that runs is compared with the plan, operand by operand, and what is not as planned leaves
the plan. That asks two things of others: a plan's addresses count for live variables only, and what an op changes is
what the union says, whichever variable is there.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ooc.errors import StoreFailed
from ooc.memory.record import Runs, State, VariableRecord
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.replay.present_sizes import note_present_nbytes, spans, trim
from ooc.replay.replaying import PartOfReplay
from ooc.replay.union_walk import are_one_to_one
from ooc.tracing.call_sites import may_be_one_place
from scheduler.plan import Loaded

_MOST_CANDIDATES = 256
"""So many ops with the same function are compared."""
_LEAST_PLAYED = 0.1
"""Of a plan's ops, so many at least must have come for the rest to be left out at the step's end."""

StandIns = Mapping[PlanVariable, VariableRecord]
VariableAt = Callable[[int], PlanVariable | None]


class Omissions(PartOfReplay):
    """Of the plan that an executor replays, on the session's thread and with its lock held. Owns nothing."""

    def omit_to(self, func: Any, addresses: Sequence[int], place: Callable[[], str]) -> bool:
        """Leave out planned ops up to the one that is about to run. True if that is the next one now.

        Args:
            func: What it calls.
            addresses: Of its operands.
            place: Where in the program it comes from.
        """
        executable, cursor = self._executor.active, self._dispatcher.cursor
        assert executable is not None
        if not executable.may_omit:
            return False
        found = self._find(executable, cursor, func, addresses, place)
        if found is None:
            return False
        index, stand_ins = found
        if index == cursor and not stand_ins and index not in executable.doubts:
            return False  # it is the next one, and native code has found it to be another all the same
        with self._leaving_on_error(executable), self._keeping_room(stand_ins.values()):
            if not (self._omit(executable, cursor, index, stand_ins) and self._stand_in(executable, index, stand_ins)):
                return False
        executable.doubts.trust(index)
        return True

    def foresees(self, func: Any, addresses: Sequence[int], place: Callable[[], str]) -> bool:
        """Whether there is such an op from here on. Changes nothing."""
        executable, cursor = self._executor.active, self._dispatcher.cursor
        if executable is None or not executable.may_omit:
            return False
        return self._find(executable, cursor, func, addresses, place) is not None

    def omit_rest(self) -> bool:
        """At the step's end, leave out what has not come. True if the plan is complete now."""
        executable, cursor = self._executor.active, self._dispatcher.cursor
        if executable is None or not executable.may_omit:
            return False
        if cursor - len(executable.omitted) < _LEAST_PLAYED * executable.num_ops:
            return False
        with self._leaving_on_error(executable):
            return self._omit(executable, cursor, executable.num_ops, {})

    @contextmanager
    def _leaving_on_error(self, executable: ExecutablePlan) -> Iterator[None]:
        """Whatever is raised half way, a failed transfer or a refused mapping, leaves the plan: some of it is done."""
        try:
            yield
        except BaseException:
            if self._executor.active is executable:
                with suppress(StoreFailed):
                    self._executor.bail_out("leaving out ops has failed")
            raise

    @contextmanager
    def _keeping_room(self, records: Collection[VariableRecord]) -> Iterator[None]:
        """What leaves the plan because its role is over, and is to have another one, keeps its place for any size."""
        self._bindings.keep_room = records
        try:
            yield
        finally:
            self._bindings.keep_room = ()
            for record in records:
                if self._manager.manages(record) and record.state is not State.LOADING:
                    trim(self._manager, record)

    # -- which op it is

    def _find(
        self,
        executable: ExecutablePlan,
        cursor: int,
        func: Any,
        addresses: Sequence[int],
        place: Callable[[], str],
    ) -> tuple[int, StandIns] | None:
        """The next op of the plan that this may be, and what stands in for others there."""
        places = executable.places_of(func)
        start = bisect_left(places, cursor)
        where: str | None = None
        candidates = places[start : start + _MOST_CANDIDATES]
        known: dict[int, PlanVariable | None] = {}

        def variable_at(address: int) -> PlanVariable | None:  # it looks at all variables, and says the same all along
            if address not in known:
                known[address] = executable.variable_at(address)
            return known[address]

        gradient_of, forward = gradient_of_op(executable, cursor), executable.observed.forward
        for index in executable.doubts.ordered(candidates):
            source = forward[index] if forward and gradient_of is not None else -1
            if source not in (-1, gradient_of):
                continue  # of another turn
            stand_ins = self._compare(executable, index, addresses, variable_at)
            if stand_ins is None and _is_smaller(executable, index, addresses, is_known=source == gradient_of):
                stand_ins = {}
            if stand_ins is None:
                continue
            where = place() if where is None else where
            is_sure = len(stand_ins) < len(set(addresses))  # an operand is as planned
            if may_be_one_place(executable.trace.ops[index].where, where, is_sure=is_sure):
                return index, stand_ins
        return None

    def _compare(
        self, executable: ExecutablePlan, index: int, addresses: Sequence[int], variable_at: VariableAt
    ) -> StandIns | None:
        expected = executable.occurrences[index]
        if len(expected) != len(addresses):
            return {} if _is_part(executable, expected, addresses) else None
        if not are_one_to_one(expected, addresses):
            return None  # one storage cannot be two variables
        found: dict[PlanVariable, VariableRecord] = {}
        for number, address in zip(expected, addresses, strict=True):
            if executable.is_at(number, address):
                continue
            variable = executable.variables[number]
            record = (
                None
                if executable.variable_alive[number]
                else self._stand_in_at(executable, address, variable, variable_at)
            )
            if record is None or not executable.is_born_before(variable, index):
                return None
            if executable.residency_at(variable, index) is None:
                return None
            found[variable] = record
        return found

    def _stand_in_at(
        self, executable: ExecutablePlan, address: int, variable: PlanVariable, variable_at: VariableAt
    ) -> VariableRecord | None:
        """The record at an address, if it may be this variable, which is not alive."""
        if not variable.is_born:
            return None
        record = self._manager.records.get(address)
        if record is None:
            other = variable_at(address)
            record = other.record if other is not None and other.is_born else None
            if record is None or other is None:
                return None
            nbytes = int(executable.variable_nbytes[other.index]) if other.is_elastic else record.nbytes
        elif not record.seen or record.is_workspace:
            return None
        else:
            nbytes = record.nbytes
        if not variable.has_room(nbytes) or record.pins or record.exports:
            return None
        if executable.is_elastic and not spans(self._manager, record, variable):
            return None  # its addresses are to have room for any size in the next step, and no more
        if self._manager.flights.holds(record):
            return None
        return record

    # -- leaving ops out

    def _omit(self, executable: ExecutablePlan, start: int, stop: int, stand_ins: StandIns) -> bool:
        """Do what the plan does around these ops. False: the step has left the plan."""

        def bear(births: Sequence[ExecutableResidency]) -> bool:
            for residency in births:
                if any(executable.variable_alive[variable] for variable in residency.dead):
                    self._executor.bail_out("a variable was freed later than planned")
                    return False
                record = stand_ins.get(residency.variable) or self._left_over(executable, residency.variable)
                if record is None:
                    self._acts.await_all(residency.waits)  # the next residency of these chunks looks no further back
                elif not self._move_in(executable, residency, record, is_due=True):
                    return False
            return True

        return self._pass_over(executable, start, stop, bear)

    def _left_over(self, executable: ExecutablePlan, variable: PlanVariable) -> VariableRecord | None:
        """What is in place of a variable that an op would make which is left out: what nothing after that op would use.

        Made for sums: where one addend was not made, the other one is the sum. Whether it is one is not looked at: what
        a later op finds there is compared as ever.
        """
        op = self._allocator.state.op_index
        stop = executable.trace.op_starts[op + 1] if op + 1 < executable.num_ops else executable.trace.num_ticks
        for number in executable.occurrences[op]:
            other = executable.variables[number]
            death = executable.trace.variables[number].death_tick
            if executable.variable_alive[number] and other.is_born and death is not None and death < stop:
                address = int(executable.variable_address[number])
                record = self._stand_in_at(executable, address, variable, executable.variable_at)
                if record is not None:
                    return record
        return None

    def _stand_in(self, executable: ExecutablePlan, index: int, stand_ins: StandIns) -> bool:
        """Let what stands in and is not there yet be where op `index` finds it. False: the step has left the plan."""
        for variable, record in stand_ins.items():
            if variable.record is record:
                continue
            residency = executable.residency_at(variable, index)
            if residency is None or not self._executor.check_deaths(executable, executable.trace.ops[index].start_tick):
                return False
            # What is loaded before this very op gets its chunks only when that has released others.
            if not self._move_in(executable, residency, record, is_due=residency.planned.start != Loaded(index)):
                return False
        return True

    def _move_in(
        self, executable: ExecutablePlan, residency: ExecutableResidency, record: VariableRecord, *, is_due: bool
    ) -> bool:
        """Let a record be the variable of a residency, in its chunks; if that is not due, in the store until then.

        What should be dead by now is. False: the step has left the plan.
        """
        if not self._acts.may_move(record):
            return False
        if executable.is_elastic and not spans(self._manager, record, residency.variable):
            self._executor.bail_out("what stands in for a variable that was not made has outlived its role")
            return False
        started = time.monotonic_ns()
        other = executable.variable_at(record.address)
        if other is not None:
            note_present_nbytes(executable, other)
            # A write that fails is to find it where it was.
            self._acts.await_all(r for r in other.residencies if r.transfer is not None and r.moved is record)
        if record.state is State.LOADING:
            self._acts.arrive(record)
        if record.state is State.RESIDENT:
            self._make_way(residency, record, is_managed=other is None, is_due=is_due)
        self._acts.await_all((*residency.waits, residency))  # one that was freed may be on its way in still
        executable.variable_nbytes[residency.variable.index] = record.nbytes
        self._bindings.stand_in(executable, residency.variable, record)
        if record.state is State.RESIDENT:
            self._relocate(record, residency.runs)
        elif is_due:
            self._acts.start_load(residency)
            self._acts.arrive(record)
        if is_due:
            record.written()  # who was to note the first write may have been left out
        self._manager.note_stall(started)
        return self._executor.active is executable

    def _make_way(
        self, residency: ExecutableResidency, record: VariableRecord, *, is_managed: bool, is_due: bool
    ) -> None:
        """Evict what cannot be copied within memory. Its addresses stay as they are."""
        if is_managed:
            self._manager.evict([record])
        elif not is_due or not set(_chunks(record.runs)).isdisjoint(_chunks(residency.runs)):
            if not record.stored:
                self._manager.start_write(record, self._manager.segments(record.runs, record.nbytes))
            self._manager.settle(record)
            record.released()
            self._manager.guards.hide(record)

    def _relocate(self, record: VariableRecord, runs: Runs) -> None:
        """Copy a record's bytes to these chunks, none of which it has."""
        manager, started = self._manager, time.monotonic_ns()
        for source, target, count in _copies(record.runs, runs):
            manager.space.copy_chunks(source, target, count)
        record.relocated(runs)
        manager.counters.note_relocation(started, record.nbytes)
        manager.space.map(record.reservation, record.runs)


def _is_smaller(executable: ExecutablePlan, index: int, addresses: Sequence[int], *, is_known: bool) -> bool:
    """Whether an op has the operands of a planned one, but for what may be too small for a variable this time.

    `is_known`: if it has no operand, something else says that it is that one.
    """
    expected = executable.occurrences[index]
    alive = [number for number in expected if executable.variable_alive[number]]
    if len(alive) == len(expected) or len(alive) != len(addresses) or not (addresses or is_known):
        return False
    may_be_small = all(number in executable.elastic for number in expected if number not in alive)
    return may_be_small and all(executable.is_at(*pair) for pair in zip(alive, addresses, strict=True))


def gradient_of_op(executable: ExecutablePlan, cursor: int) -> int | None:
    """Of a plan's ops that have come, that whose gradient the op that is about to run is a part of, if it is known.

    Autograd says which node it runs, and native code has noted how many there were when each op began.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number = node._sequence_nr() + 1
    found = int(executable.op_nodes[:cursor].searchsorted(number))  # ascending: see `note_passed_over`
    return found if found < cursor and executable.op_nodes[found] == number else None


def _is_part(executable: ExecutablePlan, expected: Sequence[int], addresses: Sequence[int]) -> bool:
    """Whether an op on lists has some of the operands that are planned, in order, and no others."""
    if not 0 < len(addresses) < len(expected):
        return False
    planned = iter([int(executable.variable_address[i]) if executable.variable_alive[i] else 0 for i in expected])
    return all(address in planned for address in addresses)


def _copies(sources: Runs, targets: Runs) -> Iterable[tuple[int, int, int]]:
    """What to copy from some chunks to as many others: where from, where to, how many in a row."""
    theirs, ours = _chunks(sources), _chunks(targets)
    start = 0
    for stop in range(1, len(ours) + 1):
        length = stop - start
        if stop == len(ours) or theirs[stop] != theirs[start] + length or ours[stop] != ours[start] + length:
            yield theirs[start], ours[start], length
            start = stop


def _chunks(runs: Runs) -> list[int]:
    return [chunk for first, count in runs for chunk in range(first, first + count)]
