"""Residency manager: tracks where each variable's bytes are, and loads and evicts variables on demand.

There is one `VariableRecord` per live storage at or above the threshold. Records are accurate in every mode: the
executor of a plan updates the same ones, so that at any moment a step can bail out of its plan and go on on demand
(DESIGN.md sections 6 and 8).

The memory that a record holds is counted in chunks of the pool, and the pool is the budget: variables get memory
from nowhere else.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ooc.errors import RerunLost, StoreFailed
from ooc.memory.ahead import Ahead
from ooc.memory.births import Births, Ready
from ooc.memory.foresight import Foresight
from ooc.memory.hidden_writes import hidden_write
from ooc.memory.no_room import NoRoom
from ooc.memory.record import NO_GUARD, Runs, State, VariableRecord
from ooc.memory.record_transfers import RecordTransfers
from ooc.memory.still_moves import StillMoves
from vmm.chunks import ChunkPool
from vmm.driver import MemoryFault

if TYPE_CHECKING:
    from ooc.memory.protocols import AddressGuards, Space, Store

_LEAST_OPS_AWAY = 256
"""What is used within so many ops does not make room for what a loop allocates again and again: it may be the loop's,
too, and would come and go in each turn."""


class ResidencyManager(RecordTransfers):
    """Manages the variables outside any active plan: tracks residency, loads and evicts on demand, by guessed next use.

    The variables of the active plan are the executor's (`forget`); when a step bails out they come back to `records`,
    and `retake_pool` accounts for their chunks.

    Owns none of what it is given; the session does. One thread at a time (the session's lock).

    Args:
        pool: Which chunks are free.
        space, store, guards: Of one `ooc.devices.protocols.Memory`.
        debug: Checks that what is dropped was not written since it was stored.
        is_host: Whether the memory is the host's. A device's cannot be read by the host, and what was given out must
            stay there, since no touch of it can be served.

    Attributes:
        records: Those it manages, by address.
        ended_exports: Records whose exports have ended, one entry an export; appended to on any thread.
        peak_chunks: The most chunks in use at once so far.
        foresight: Guesses when variables are used next.
        num_serials: More than any serial so far.
        ahead: Moves variables by these guesses before somebody waits for them.
        still: Moves memory that was given out.
        position: Tells which op runs, or comes next.
    """

    def __init__(
        self,
        *,
        pool: ChunkPool,
        space: Space,
        store: Store,
        guards: AddressGuards,
        debug: bool = False,
        is_host: bool = True,
    ) -> None:
        super().__init__(space=space, store=store, debug=debug, is_host=is_host)
        self._pool = pool
        self.records: dict[int, VariableRecord] = {}
        self.guards = guards
        self.ended_exports: deque[VariableRecord] = deque()
        self.peak_chunks = 0
        self.num_serials = 0
        self._resident: dict[int, VariableRecord] = {}  # by address
        # In debug mode the use of what was freed is a fault.
        self._births = Births(space, reuses_addresses=not debug, has_views=is_host)
        self._loading: dict[int, VariableRecord] = {}  # read ahead, by address
        self.foresight = Foresight()
        self.ahead = Ahead(self)
        self.still = StillMoves(self, guards)
        self.position: Callable[[], int] = lambda: 0

    def __repr__(self) -> str:
        return (
            f"<ResidencyManager of {len(self.records)} variables, {len(self._resident)} resident, "
            f"{self.num_free} chunks free>"
        )

    def close(self) -> None:
        """End the guards, and stop watching forked processes. Idempotent."""
        self.guards.close()
        self.fork_readers.close()

    @property
    def num_free(self) -> int:
        """Chunks that hold no variable."""
        return self._pool.num_free + self._births.num_ready

    @property
    def num_chunks(self) -> int:
        """Chunks in the pool."""
        return self._pool.num_chunks

    @property
    def pool(self) -> ChunkPool:
        """Which chunks are free. Another object after `retake_pool` and `share_pool`: do not keep it."""
        self._births.end_ready(self._pool)
        return self._pool

    def workspaces(self) -> list[VariableRecord]:
        """Records of memory that ops allocated and kept without naming it: it stays resident, beside any plan."""
        return [r for r in self.records.values() if r.is_workspace and not r.seen and not r.exports]

    def records_at(self, addresses: Iterable[int]) -> list[VariableRecord]:
        """Records of the variables at these addresses, each once; others are skipped."""
        return [r for a in dict.fromkeys(addresses) if (r := self.records.get(a)) is not None]

    def chunks_of(self, nbytes: int) -> int:
        """Chunks that `nbytes` occupy."""
        return -(-nbytes // self.chunk_nbytes)

    def new_record(self, nbytes: int) -> VariableRecord:
        """A record with a reservation of its own and no chunks, not managed yet."""
        return VariableRecord(nbytes=nbytes, reservation=self.space.reserve(nbytes), serial=self.next_serial())

    def next_serial(self) -> int:
        """A number that no storage of this session has had."""
        self.num_serials += 1
        return self.num_serials - 1

    def books_of_births(
        self,
    ) -> tuple[Births, dict[int, VariableRecord], Ready]:
        """What native code changes in our place (native/births.h): `Births`, what is resident, and what lies ready."""
        return self._births, self._resident, self._births.ready

    # -- life of a record

    def allocate(self, nbytes: int) -> VariableRecord:
        """Allocate a resident variable; evicts others as needed. Raises `NoRoom`, `StoreFailed`."""
        num_chunks = self.chunks_of(nbytes)
        is_short = len(self._resident) < len(self.records)  # where all is in memory, nothing has to go
        num_spared = self._births.num_spared(num_chunks, self._pool, self.num_serials) if is_short else 0
        self.make_room(num_chunks, num_spared=num_spared)
        reservation, runs = self._births.take(num_chunks, self._pool, self.num_serials)
        reservation.nbytes = nbytes
        record = VariableRecord(nbytes=nbytes, reservation=reservation, serial=self.next_serial())
        record.born(runs)
        self._note_peak()
        self.enter(record)
        return record

    def take(self, num_chunks: int) -> Runs:
        """Take free chunks, of which there are so many; see `make_room`."""
        self._births.end_ready(self._pool, num_free=num_chunks)
        return self._pool.take(num_chunks)

    def take_again(self, record: VariableRecord) -> Runs:
        """Take chunks for what is away, of which so many are free: on a device those that it shows still, if it can.

        On the CPU mapping others costs too little to be seen in any script.
        """
        shown, num_chunks = record.reservation.runs, self.chunks_of(record.nbytes)
        if (
            not self.is_host
            and shown is not None
            and sum(n for _, n in shown) == num_chunks
            and self._pool.take_if_free(shown)
        ):
            return shown
        return self.take(num_chunks)

    def give_chunks(self, record: VariableRecord) -> None:
        """Give chunks to a record whose bytes are about to be made; evicts others as needed. Manages it from now on.

        Raises `NoRoom`, `StoreFailed`.
        """
        num_chunks = self.chunks_of(record.nbytes)
        self.make_room(num_chunks)
        runs = self.take(num_chunks)
        self.guards.lift(record)
        self.space.map(record.reservation, runs)
        if record.state is State.DISCARDED:
            record.recomputed(runs)
        else:
            record.born(runs)
        self._note_peak()
        self.enter(record)

    def give_up(self, record: VariableRecord) -> None:
        """Discard a record that could not be made, wherever it is."""
        self._resident.pop(record.address, None)
        with contextlib.suppress(StoreFailed):
            self.settle(record)
        if record.state is State.RESIDENT:
            self._pool.give(record.runs)
        if record.state is not State.DISCARDED:
            record.discarded()

    def enter(self, record: VariableRecord) -> None:
        """Manage this record from now on."""
        self.records[record.address] = record
        record.used_ns = time.monotonic_ns()
        if record.state is State.RESIDENT:
            self._resident[record.address] = record

    def forget(self, record: VariableRecord) -> None:
        """Manage this record no more; it stays as it is, and from now on the executor moves it."""
        del self.records[record.address]
        self._resident.pop(record.address, None)

    def free(self, address: int) -> VariableRecord | None:
        """Free the chunks and the slot of a storage that was freed. None if its record is not managed here."""
        record = self.records.pop(address, None)
        if record is None:
            return None
        self._resident.pop(address, None)
        if record.state is State.LOADING or not self.is_host:
            self._loading.pop(address, None)
            with contextlib.suppress(StoreFailed):  # nobody needs its bytes any more, but they come into its chunks
                runs = record.runs
                self.settle(record)
            if record.state is not State.RESIDENT:
                self._pool.give(runs)
        runs = record.runs
        if record.state is State.RESIDENT:
            is_plain = record.guard == NO_GUARD and not (record.exports or record.reservation.is_file)
            is_kept = is_plain and self._births.keep_ready(
                record.reservation, runs, self._pool, born=record.serial, now=self.num_serials
            )
            if not is_kept:
                self._pool.give(runs)
                is_kept = is_plain and self._births.keep(record.reservation, runs, self._pool)
            if is_kept:
                self._give_up_slot(record)
                return record
        self.dispose(record)
        return record

    def dispose(self, record: VariableRecord) -> None:
        """Give back the reservation and the store slot of a record without chunks."""
        self.guards.lift(record)
        self._give_up_slot(record)
        self.space.release(record.reservation)

    def _give_up_slot(self, record: VariableRecord) -> None:
        if record.slot is not None:
            self.fork_readers.free(record.slot)
            record.slot = None

    def end_exports(self) -> None:
        """Take note of the exports that have ended (`ended_exports`, filled on any thread)."""
        while self.ended_exports:
            self.ended_exports.popleft().end_export()

    # -- moving

    def may_be_evicted(self, record: VariableRecord) -> bool:
        """Whether nothing that is known to use a resident record keeps it in memory."""
        return not record.pins and record.seen and self.may_leave(record)

    def may_leave(self, record: VariableRecord) -> bool:
        """Whether a record may be evicted if it was given out: not a device's, nor what `session.resident` keeps."""
        return not record.exports or (self.is_host and not record.pins)

    def moves_still(self, record: VariableRecord) -> bool:
        """Whether somebody may write to a record while it is moved: it was given out. (A device's then stays.)"""
        return record.exports > 0 and self.is_host

    def make_room(self, num_chunks: int, *, num_spared: int = 0) -> None:
        """Evict what is used last, by `foresight`, until so many chunks are free. Raises `NoRoom`, `StoreFailed`.

        And up to `num_spared` more, of what is not used soon.
        """
        missing = num_chunks - self.num_free
        if missing + num_spared <= 0:
            return
        self.counters.num_crowded += missing > 0
        self.end_exports()
        victims: list[VariableRecord] = []
        index = self.position()
        movable = self.by_next_use(index)
        for record, later in movable:
            if missing <= -num_spared or (missing <= 0 and later <= index + _LEAST_OPS_AWAY):
                break
            victims.append(record)
            missing -= self.chunks_of(record.nbytes)
        if missing > 0:
            if self.land() or self.flights.wait_any():
                self.make_room(num_chunks)
                return
            movable_chunks = sum(self.chunks_of(r.nbytes) for r, _ in movable)
            pinned = sum(self.chunks_of(r.nbytes) for r in self._resident.values()) - movable_chunks
            raise NoRoom(num_needed=num_chunks, num_free=self.num_free, num_pinned=pinned)
        if not victims:
            return
        others = movable[len(victims) :]
        self.evict([*victims, *self.ahead.spare(others, index)], for_ops=True)
        self.ahead.write_behind((record for record, _ in others), index)

    def by_next_use(self, index: int) -> list[tuple[VariableRecord, int]]:
        """What may be evicted, in the order in which it should go, and the op after `index` that uses it."""
        is_host = self.is_host
        # As `may_be_evicted` says, which takes as long to call as all the rest of this.
        movable = [r for r in self._resident.values() if not r.pins and r.seen and (is_host or not r.exports)]
        order = [(movable[place], later) for place, later in self.foresight.latest_first(movable, index)]
        if any(record.exports for record in movable):
            order.sort(key=lambda entry: entry[0].exports > 0)  # a stable sort: what was given out goes last
        return order

    def land(self) -> bool:
        """Wait for what is read ahead, which is then resident like all else, and for all writes. Whether it read any.

        A read that fails leaves its variable away, a write dirty; whoever needs either does it again.
        """
        found = list(self._loading.values())
        for record in found:
            with contextlib.suppress(StoreFailed, MemoryFault):
                self._arrive(record)
        for record in self.records.values():
            if record.transfer is not None:
                with contextlib.suppress(StoreFailed):
                    self.settle(record)
        return bool(found)

    def _arrive(self, record: VariableRecord, *, for_ops: bool = False) -> None:
        """Wait for a record that is on its way in, and map it. Raises `StoreFailed`, `MemoryFault`: it is away."""
        self._loading.pop(record.address, None)
        runs = record.runs
        try:
            self.settle(record, for_ops=for_ops)
            self.guards.lift(record)
            self.space.map(record.reservation, runs)
        except (StoreFailed, MemoryFault):
            if record.state is State.RESIDENT:  # it has arrived, and cannot be mapped
                record.load_undone()
            self._pool.give(runs)
            raise
        self._resident[record.address] = record

    def evict(self, records: Sequence[VariableRecord], *, for_ops: bool = False) -> None:
        """Evict records: write those out that the store has no current copy of, wait, and free the chunks.

        Args:
            records: Resident ones.
            for_ops: Only ops, and loads that come after them, use the chunks next: on a device the host does not wait.

        Raises:
            StoreFailed: A write failed. Its variable is still resident; the others are away.
        """
        started = time.monotonic_ns()
        failure: StoreFailed | MemoryFault | None = None
        leaving = []
        has_waited = False
        for record in records:
            is_written = record.stored and (record.transfer is None or record.transfer.done())
            has_waited = has_waited or not is_written
            if record.stored and not record.exports and self._is_written(record):
                self.check_clean(record)
                self.counters.dropped_nbytes += record.nbytes
                leaving.append(record)
                continue
            if self.moves_still(record):
                leaving.append(record)
                continue
            try:
                self.settle(record)  # a write under way is of bytes that have changed since
            except StoreFailed as error:
                failure = error
            try:
                self.start_write(record)
            except MemoryFault as fault:  # a device's: those whose writes have begun go, all the same
                failure = fault
                continue
            leaving.append(record)
        for record in leaving:
            runs, is_still = record.runs, self.moves_still(record)
            try:
                if is_still:
                    self.still.leave(record)
                else:
                    self.leave(record, for_ops=for_ops)
            except (StoreFailed, MemoryFault) as error:
                failure = error
                continue
            self._resident.pop(record.address, None)
            self._pool.give(runs)
            if not is_still:
                record.released()
                self.guards.hide(record)
        self.ahead.note_eviction(has_waited=has_waited)
        self.note_stall(started)
        if failure is not None:
            raise failure

    def _is_written(self, record: VariableRecord) -> bool:
        """Wait for a write behind, if one is under way. False: it failed, and nobody had waited for it; write again."""
        try:
            self.settle(record)
        except StoreFailed:
            return False
        return True

    def check_clean(self, record: VariableRecord) -> None:
        """In debug mode, check that a resident record equals its copy in the store, which is to be relied on.

        Raises:
            HiddenWrite: It was written since, and nothing said so.
        """
        if self.debug and record.checksum is not None and self.checksum(record) != record.checksum:
            raise hidden_write(record)

    def load(self, records: Iterable[VariableRecord], *, for_ops: bool = False) -> None:
        """Load records and wait for them. The caller has pinned them, so that none evicts another.

        Args:
            records: Those of them that are resident are left alone.
            for_ops: Only ops use them next: on a device these wait, and the host does not. Who is given an address may
                use it on a stream that nobody knows of.

        Raises:
            NoRoom: They do not fit beside what is pinned. What was loaded stays.
            StoreFailed: A read failed; that variable stays away, its copy in the store untouched.
        """
        missing = [r for r in records if r.state is not State.RESIDENT]
        if not missing:
            return
        for record in missing:
            if record.state is State.DISCARDED:
                raise RerunLost(f"{record.label or 'a variable'} was discarded, and is not made again yet")
        started = time.monotonic_ns()
        failure: StoreFailed | MemoryFault | None = None
        for record in missing:
            if record.state is State.LOADING:
                with contextlib.suppress(StoreFailed, MemoryFault):  # it is read again below
                    self._arrive(record)
            else:
                self.settle(record)
        missing = [r for r in missing if r.state is State.AWAY]
        self.make_room(sum(self.chunks_of(r.nbytes) for r in missing))
        loading = []
        for record in missing:
            taken = self.take_again(record)
            is_still = self.moves_still(record)
            try:
                (self.still.arrive if is_still else self.start_load)(record, taken)
            except (StoreFailed, MemoryFault) as error:
                self._pool.give(taken)
                failure = error
                continue
            if is_still:
                self._resident[record.address] = record
            else:
                loading.append(record)
        for record in loading:
            try:
                self._arrive(record, for_ops=for_ops)
            except (StoreFailed, MemoryFault) as error:
                failure = error
        self._note_peak()
        self.note_stall(started)
        if failure is not None:
            raise failure
        self.ahead.read_ahead(self.position(), self._loading)

    # -- for the executor

    def manages(self, record: VariableRecord) -> bool:
        """Whether a record is the manager's, and not an executor's."""
        return self.records.get(record.address) is record

    def resident_chunks(self) -> int:
        """Chunks held by the managed records."""
        return sum(self.chunks_of(r.nbytes) for r in self.records.values() if r.state.holds_chunks)

    def retake_pool(self, pool: ChunkPool) -> None:
        """Go on with a fresh pool, in which resident records have their chunks: no plan is active any more."""
        self._births.move_to(pool)
        self._pool = pool
        self._resident.clear()
        for record in sorted(self.records.values(), key=lambda r: r.serial):
            if record.state is State.RESIDENT:
                pool.take_exactly(record.runs)
                self._resident[record.address] = record

    def share_pool(self, pool: ChunkPool, num_chunks: int, workspaces: Sequence[VariableRecord]) -> None:
        """Go on with a fresh pool of which a plan has the first `num_chunks` chunks for itself.

        Beside the workspaces, which keep theirs, what is left serves allocations that the plan does not have.
        """
        self._births.move_to(pool)
        pool.take_exactly([(0, num_chunks)] if num_chunks else [])
        for record in workspaces:
            pool.take_exactly(record.runs)
        self._pool = pool

    def _note_peak(self) -> None:
        self.peak_chunks = max(self.peak_chunks, self.num_chunks - self.num_free)
