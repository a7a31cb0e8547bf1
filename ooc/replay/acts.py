"""Acts on single residencies while a plan is replayed: loads, arrivals, releases, births."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from ooc.errors import StoreFailed
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.bailout import has_landed
from ooc.replay.dispatcher import Dispatcher, NativeReleases
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import ExecutableResidency
from ooc.replay.present_sizes import fitting, note_present_nbytes
from vmm.driver import MemoryFault


class ResidencyActs:
    """Begins and ends residencies as the executor says, in the order that DESIGN.md section 10 demands.

    Where an act cannot be done as planned, it bails out of the plan and says so.

    Args:
        manager: Whose records they are.
        dispatcher: Native code, which does some of this itself.
        bail_out: Leaves the plan, for the reason given.

    Attributes:
        writes, loads: Residencies whose transfer is under way, or has failed. Native code has these lists, too.
        guards_releases: Whether code that no op tells us of may touch variables now: between steps.
    """

    def __init__(self, manager: ResidencyManager, dispatcher: Dispatcher, *, bail_out: Callable[[str], None]) -> None:
        self._manager = manager
        self._space = manager.space
        self._dispatcher = dispatcher
        self._bail_out = bail_out
        self.writes: list[ExecutableResidency] = []
        self.loads: list[ExecutableResidency] = []
        self.guards_releases = False

    def guard_releases(self, is_on: bool) -> None:
        """Say whether code that no op tells us of may touch variables from now on."""
        self.guards_releases = is_on
        which = NativeReleases.GUARDED if is_on else NativeReleases.ALL
        self._dispatcher.allow_releases(NativeReleases.NONE if self._manager.debug else which)

    def __repr__(self) -> str:
        return f"<ResidencyActs, {len(self.writes)} writes and {len(self.loads)} loads noted>"

    def end_wait(self, executable: ExecutablePlan, index: int, started_ns: int) -> int:
        """Note that transfers were waited for before an op, from then until now; 0: they were not. Returns 0."""
        if started_ns:
            self._manager.note_stall(started_ns)
            executable.between.note_wait(index, time.monotonic_ns() - started_ns)
        return 0

    def may_move(self, record: VariableRecord) -> bool:
        """Whether no collective uses the record (any more: it is waited for, not without limit). False: the step has
        left the plan.
        """
        flights = self._manager.flights
        if not flights or flights.wait_for(record, is_needed=False):
            return True
        self._bail_out(f"not over, and its operand was to be moved: {flights.name_of(record)}")
        return False

    def start_load(self, residency: ExecutableResidency) -> None:
        """Start a planned load, after the transfers that still use its chunks."""
        record = residency.variable.record
        assert record is not None
        if record.state is not State.AWAY:
            return
        if self._is_given_out(record):
            self.await_all(residency.waits)  # the next residency of these chunks looks no further back than to this one
            return  # written through a pointer until it arrives, it would come as it was before: `load_late`
        self._start_load(residency, record)
        if record.reservation.is_file and self.guards_releases:
            self.guard([record])  # what was given out once: a touch from now on has it read once more

    def load_late(self, residency: ExecutableResidency, record: VariableRecord) -> None:
        """Load right before an op what was given out when its load was due.

        Raises `StoreFailed` and `MemoryFault`, with the plan left.
        """
        if not self._is_given_out(record):
            self._start_load(residency, record)
            self.arrive(record)
            return
        self.await_all(residency.waits)
        runs, segments = fitting(self._manager, residency, record)
        try:
            self._manager.still.arrive(record, runs, segments)
        except StoreFailed as error:
            self._abandon(error)
        except MemoryFault as fault:
            self._leave_for(fault)
            raise

    def _start_load(self, residency: ExecutableResidency, record: VariableRecord) -> None:
        after = []
        for other in residency.waits:
            if other.transfer is None:
                continue
            if other.transfer.done():
                self.await_transfer(other)
            else:
                after.append(other.transfer)
        # Its addresses show what they showed until it has arrived: a guarded variable stays guarded.
        runs, segments = fitting(self._manager, residency, record)
        self._manager.start_load(record, runs, after, segments)
        residency.transfer, residency.moved = record.transfer, record
        self.loads.append(residency)

    def await_all(self, residencies: Iterable[ExecutableResidency]) -> None:
        """Wait for whatever transfers of these residencies are under way."""
        for other in residencies:
            if other.transfer is not None:
                self.await_transfer(other)

    def _is_given_out(self, record: VariableRecord) -> bool:
        if record.exports:
            self._manager.end_exports()
        return record.exports > 0

    def show(self, record: VariableRecord) -> None:
        """Let the addresses of what is being given out show its bytes, where the plan has it away: the store's file.

        Host memory only. Raises `StoreFailed`, with the plan left.
        """
        if record.state is State.LOADING:
            self.arrive(record)
        elif record.state is State.AWAY:
            try:
                self._manager.settle(record)
            except StoreFailed:  # a write's: the bytes are still in memory
                self._bail_out("a transfer failed")
            else:
                self._manager.guards.hide(record)

    def arrive(self, record: VariableRecord) -> None:
        """Let ops wait for a load, and show its chunks. Raises `StoreFailed` and `MemoryFault`, with the plan left."""
        try:
            self._manager.settle(record, for_ops=True)
        except StoreFailed as error:
            self._abandon(error)
        if self._manager.guards.lift(record):
            self.reread(record)
        self._map(record)

    def reread(self, record: VariableRecord) -> None:
        """Load again what was touched on its way in: what came may be older than what the store's file holds now.

        Raises `StoreFailed`, with the plan left.
        """
        runs = record.runs
        record.load_undone()
        try:
            self._manager.settle_load(record, runs)
        except StoreFailed as error:
            self._abandon(error)
        self._map(record)

    def _map(self, record: VariableRecord) -> None:
        """Let its addresses show what has arrived. Raises `MemoryFault`, with the plan left and the record away."""
        try:
            self._space.map(record.reservation, record.runs)
        except MemoryFault as fault:
            record.load_undone()
            self._leave_for(fault)
            raise

    def _leave_for(self, fault: MemoryFault) -> None:
        with contextlib.suppress(StoreFailed):
            self._bail_out(str(fault))

    def guard(self, records: list[VariableRecord]) -> bool:
        """Serve stray touches of what has just been released. False: that cannot be, and the step has bailed out."""
        try:
            self._manager.guards.guard_away(records)
        except (MemoryFault, OSError) as fault:
            self._bail_out(str(fault))
            return False
        return True

    def await_transfer(self, residency: ExecutableResidency) -> None:
        """Let ops wait for the residency's transfer. One that has ended may have failed: it is seen only here."""
        assert residency.transfer is not None
        try:
            residency.transfer.order()
        except OSError as error:
            failure = StoreFailed(f"a transfer failed: {error}", errno=error.errno)
            failure.__cause__ = error
            self._abandon(failure)
        residency.transfer = None

    def _abandon(self, error: StoreFailed) -> None:
        """Bail out since a transfer failed in mid-step, then fail the step."""
        with contextlib.suppress(StoreFailed):
            self._bail_out("a transfer failed")
        raise error

    def release(self, executable: ExecutablePlan, residency: ExecutableResidency) -> bool:
        """End a residency; the store has its bytes, or gets them. False: it must not end; the step has bailed out."""
        record = residency.variable.record
        if record is None or not executable.variable_alive[residency.variable.index]:
            return True
        if record.state is State.LOADING:  # loaded, but freed or not used after all
            self.arrive(record)
        if record.state is not State.RESIDENT:
            return True
        if not self.may_move(record):
            return False
        is_given_out = self._is_given_out(record)
        if not (record.seen or residency.variable.evictable):
            self._bail_out("a variable that may be in use unseen cannot be evicted")
            return False
        if is_given_out and not self._manager.may_leave(record):
            self._bail_out("a variable whose memory was given out cannot be evicted")
            return False
        if is_given_out:
            self._leave_still(residency, record)
            return True
        if not record.stored:  # what it had when it was written may have changed since
            self.await_all([residency])
            self._write(residency, record)
        if residency.transfer is not None and residency.transfer.done():
            self.await_transfer(residency)
        self._manager.check_clean(record)
        record.released(residency.transfer)
        if not self._manager.is_host:  # when it comes back to other chunks, the host waits for no newer work than this
            self._space.note_unused(record.reservation)
        if self._manager.debug or (self.guards_releases and not residency.variable.dies_within):
            return self.guard([record])
        return True

    def _leave_still(self, residency: ExecutableResidency, record: VariableRecord) -> None:
        """End a residency of what was given out: whoever has a pointer finds its bytes in the store's file."""
        self.await_all([residency])
        segments = fitting(self._manager, residency, record)[1] if record.runs == residency.runs else None
        try:
            self._manager.still.leave(record, segments)
        except StoreFailed as error:
            self._abandon(error)

    def prepare_birth(self, residency: ExecutableResidency) -> None:
        """Show the chunks in which a variable is about to be allocated."""
        record = residency.variable.record
        assert record is not None
        self.forget_write(residency)
        self._manager.guards.lift(record)
        record.nbytes = residency.variable.nbytes  # until its own size is known
        record.born(residency.runs)
        self._space.map(record.reservation, residency.runs)

    @staticmethod
    def forget_write(residency: ExecutableResidency) -> None:
        """Let the residency's write of the step before end: its record was freed meanwhile.

        Nothing needs those bytes, well or not.
        """
        if residency.transfer is not None and not residency.transfer.done():
            with contextlib.suppress(OSError):
                residency.transfer.order()

    def start_write(self, executable: ExecutablePlan, residency: ExecutableResidency, record: VariableRecord) -> None:
        """Start a planned write of the bytes that are there, unless the store has them already."""
        note_present_nbytes(executable, residency.variable)
        if record.stored:
            self._manager.counters.dropped_nbytes += record.nbytes
            return
        self._write(residency, record)

    def _write(self, residency: ExecutableResidency, record: VariableRecord) -> None:
        # Written in the step before, it may lie in other chunks than it is released from: it is copied at the border.
        is_there = record.runs == residency.runs
        segments = fitting(self._manager, residency, record)[1] if is_there else None
        residency.transfer, residency.moved = self._manager.start_write(record, segments), record
        self.writes.append(residency)

    def write_late(self, executable: ExecutablePlan, residency: ExecutableResidency) -> None:
        """Write what is about to be released and was to be written in the step before, or at the end of this one.

        A plan's first step finds it as it was left, and code between two steps may have changed it.
        """
        record = residency.variable.record if executable.variable_alive[residency.variable.index] else None
        if record is None or record.state is not State.RESIDENT or record.stored or record.exports:
            return
        if self.may_move(record):
            self.start_write(executable, residency, record)  # after one that is under way: the store sees to that

    def movable(self, executable: ExecutablePlan, residency: ExecutableResidency) -> VariableRecord | None:
        """The record of a residency that is to end, if it may move; None also if the step has left the plan."""
        record = residency.variable.record
        if record is None or not executable.variable_alive[residency.variable.index]:
            return None
        return record if self.may_move(record) else None

    def prune(self) -> None:
        """Forget transfers that have ended well. A failed one stays, and fails the action that needs it."""
        for noted in self.writes, self.loads:
            noted[:] = [residency for residency in dict.fromkeys(noted) if not has_landed(residency)]
