"""Copies within memory between two steps of a plan: what is kept comes to the chunks in which the next step starts.

A plan says which chunks are copied, and in which order (`scheduler.plan.BorderCopy`). Here what they move is looked at
first: it must be where the plan has it, and nobody may use it but ops. Then transfers that use the chunks are waited
for, chunks are copied, and addresses show the new ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from ooc.errors import InconsistentRecord
from ooc.memory.record import Runs, State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.acts import ResidencyActs
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import ExecutableResidency
from ooc.replay.present_sizes import fitting, note_present_nbytes
from scheduler.plan import BorderCopy
from vmm.driver import MemoryFault


class BorderRelocation:
    """Moves variables within memory at the border of two steps, as the plan that is replayed says.

    Where that cannot be done as planned, it bails out of the plan: records say at any time where their bytes are.

    Args:
        manager: Whose records they are.
        acts: Waits for transfers.
        check_deaths: Evicts what should have been freed by a tick and was not: it may lie where something is copied to.
            False: it must stay, and the step has bailed out.
        bail_out: Leaves the plan, for the reason given.
    """

    def __init__(
        self,
        manager: ResidencyManager,
        acts: ResidencyActs,
        check_deaths: Callable[[ExecutablePlan, int], bool],
        *,
        bail_out: Callable[[str], None],
    ) -> None:
        self._manager = manager
        self._check_deaths = check_deaths
        self._acts = acts
        self._bail_out = bail_out

    def __repr__(self) -> str:
        return f"<BorderRelocation over {self._manager!r}>"

    def cross(self, executable: ExecutablePlan) -> bool:
        """Carry out a plan's copies, if it has any: all releases of the step are done.

        Variables are still bound as in the step that ends. False: it cannot be, and the step has bailed out.

        Raises:
            StoreFailed: A transfer that used the chunks has failed; the plan is left.
        """
        border = executable.border
        if border is None:
            return True
        if not self._check_deaths(executable, executable.trace.num_ticks):
            return False
        alive = executable.variable_alive
        if any(_is_left_over(m.record) for m in executable.movers if m.successor is None and alive[m.index]):
            self._bail_out("a variable outlived its role in the plan")
            return False
        self._manager.end_exports()
        found: list[tuple[VariableRecord, ExecutableResidency]] = []
        for ends, starts in border.moved:
            record = ends.variable.record
            if record is None or not alive[ends.variable.index]:
                continue
            note_present_nbytes(executable, ends.variable)
            if not self._may_be_moved(record, ends):
                return False
            found.append((record, starts))
        self._await(border.waits)
        return self._move(border.copies, found)

    def _may_be_moved(self, record: VariableRecord, ends: ExecutableResidency) -> bool:
        """Whether a record is where the plan has it, and ops alone use it. False: the step has bailed out."""
        if record.state is State.LOADING:
            self._acts.arrive(record)
        chunks = _chunks(record.runs)
        if record.state is not State.RESIDENT or chunks != _chunks(ends.runs)[: len(chunks)]:
            self._bail_out("a variable was not where the plan expects it")
            return False
        if record.exports or record.pins:
            self._bail_out("a variable whose memory was given out cannot be moved")
            return False
        return self._acts.may_move(record)

    def _await(self, residencies: Iterable[ExecutableResidency]) -> None:
        """Wait for transfers out of and into the chunks that are about to be filled."""
        under_way = [residency for residency in residencies if residency.transfer is not None]
        if under_way:
            started = time.monotonic_ns()
            self._acts.await_all(under_way)
            self._manager.note_stall(started)

    def _move(self, copies: Sequence[BorderCopy], found: list[tuple[VariableRecord, ExecutableResidency]]) -> bool:
        """Copy, and let addresses show the new chunks. False: a call failed, and the step has bailed out."""
        manager = self._manager
        is_checked = manager.debug and manager.is_host
        sums = [manager.checksum(record) for record, _ in found] if is_checked else []
        started, num_done = time.monotonic_ns(), 0
        fault: MemoryFault | None = None
        unmapped = []
        try:
            for copy in copies:
                manager.space.copy_chunks(copy.source, copy.target, copy.num_chunks)
                num_done += 1
        except MemoryFault as error:
            fault = error
        for record, starts in found:
            record.relocated(
                fitting(manager, starts, record)[0] if fault is None else _now(record.runs, copies[:num_done])
            )
        for record, _ in found:
            try:
                manager.guards.lift(record)
                manager.space.map(record.reservation, record.runs)
            except MemoryFault as error:
                fault = error
                unmapped.append(record)
        manager.counters.note_relocation(started, sum(record.nbytes for record, _ in found))
        for (record, _), expected in zip(found, sums, strict=False):
            if manager.checksum(record) != expected:
                raise InconsistentRecord(record=repr(record), state=record.state.value, transition="relocated")
        if fault is None:
            return True
        try:
            manager.evict(unmapped)  # what cannot be shown goes to the store
        finally:
            self._bail_out(str(fault))
        return False


def _is_left_over(record: VariableRecord | None) -> bool:
    return record is not None and record.state.holds_chunks


def _now(runs: Runs, copies: Iterable[BorderCopy]) -> Runs:
    """Where the bytes are that were in these chunks before the copies."""
    origin: dict[int, int] = {}
    for copy in copies:
        for offset in range(copy.num_chunks):
            source = copy.source + offset
            origin[copy.target + offset] = origin.pop(source, source)
    place = {before: now for now, before in origin.items()}
    return tuple((place.get(chunk, chunk), 1) for chunk in _chunks(runs))


def _chunks(runs: Runs) -> list[int]:
    return [chunk for first, count in runs for chunk in range(first, first + count)]
