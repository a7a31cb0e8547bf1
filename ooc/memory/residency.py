"""The books: which variable is where, and the on-demand way of moving them.

One `VariableRecord` per live storage at or above the threshold. The books are the truth in every
mode: the executor of a plan updates the same records, so that at any moment a step can leave its
plan and go on from here (DESIGN.md sections 6 and 8).

Memory that a record holds is counted in chunks of the pool, and the pool is the budget: nothing
here allocates memory for variables anywhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ooc.errors import HiddenWrite, StoreFailed
from ooc.memory.flights import Flights
from ooc.memory.fork_readers import ForkReaders
from ooc.memory.guards import Guards
from ooc.memory.record import Runs, Segments, State, VariableRecord
from ooc.units import format_nbytes
from vmm.chunks import ChunkPool
from vmm.driver import MemoryFault
from vmm.store import Transfer

if TYPE_CHECKING:
    from ooc.memory.protocols import Space, Store

Move = tuple[int, int, int]
"""A transfer begun: its ticket, and its variable's address and bytes."""

_NUM_MOVES_KEPT = 1 << 14
"""As many as the transfer engine keeps records of; whoever draws a timeline empties it each step."""


class NoRoom(Exception):
    """The pool cannot give so many chunks: what remains is pinned. The caller knows for what."""

    def __init__(self, *, num_needed: int, num_free: int, num_pinned: int) -> None:
        super().__init__(f"{num_needed} chunks needed, {num_free} free, {num_pinned} pinned")
        self.num_needed = num_needed
        self.num_free = num_free
        self.num_pinned = num_pinned


class Counters:
    """What was moved; only ever growing. Sizes in bytes, times in nanoseconds."""

    __slots__ = ("dropped_nbytes", "evicted_nbytes", "loaded_nbytes", "num_faults", "stall_ns")

    def __init__(self) -> None:
        self.loaded_nbytes = 0
        self.evicted_nbytes = 0
        self.dropped_nbytes = 0
        self.num_faults = 0
        self.stall_ns = 0

    def copy(self) -> dict[str, int]:
        """The present values, by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class ResidencyManager:
    """Records of all live variables, and loads and evictions on demand.

    `moves` are the transfers begun since it was last emptied (by `ooc.telemetry.timeline`); `stalls`, when the
    session's thread waited for transfers, as `(start, stop)` of the monotonic clock. Without `is_host` the memory
    is a device's: the host cannot look into it, and what was given out must stay, since nothing serves a touch.

    `space` and `store` are of one `ooc.devices.protocols.Memory`.

    Owns none of what it is given; the session does. One thread at a time (the session's lock).
    """

    def __init__(
        self,
        *,
        pool: ChunkPool,
        space: Space,
        store: Store,
        debug: bool = False,
        guards: Guards | None = None,
        is_host: bool = True,
    ) -> None:
        self.pool = pool
        self.space = space
        self.store = store
        self.debug = debug
        self.records: dict[int, VariableRecord] = {}
        self.counters = Counters()
        self.guards = guards if guards is not None else Guards(space=space, store=store, debug=debug)
        self.is_host = is_host
        self.fork_readers = ForkReaders(store)
        self.flights = Flights()
        self.ended_exports: deque[VariableRecord] = deque()
        self.moves: deque[Move] = deque(maxlen=_NUM_MOVES_KEPT)
        self.stalls: deque[tuple[int, int]] = deque(maxlen=_NUM_MOVES_KEPT)
        self.peak_chunks = 0
        self._next_serial = 0
        self._by_use: OrderedDict[int, VariableRecord] = OrderedDict()  # resident, least recently used first

    def __repr__(self) -> str:
        return (
            f"<Books of {len(self.records)} variables, {len(self._by_use)} resident, {self.pool.num_free} chunks free>"
        )

    def close(self) -> None:
        """End the guards, and watch forked children no more. Idempotent."""
        self.guards.close()
        self.fork_readers.close()

    @property
    def chunk_nbytes(self) -> int:
        """Size of a chunk."""
        return self.space.driver.chunk_nbytes

    def workspaces(self) -> list[VariableRecord]:
        """What ops have allocated and kept without ever naming it: it stays in memory, beside any plan."""
        return [r for r in self.records.values() if r.is_workspace and not r.seen and not r.exports]

    def chunks_of(self, nbytes: int) -> int:
        """Chunks that `nbytes` occupy."""
        return -(-nbytes // self.chunk_nbytes)

    def new_record(self, nbytes: int) -> VariableRecord:
        """A record with a reservation of its own and no chunks, not in the books yet."""
        return VariableRecord(nbytes=nbytes, reservation=self.space.reserve(nbytes), serial=self.next_serial())

    def next_serial(self) -> int:
        """A number that no storage of this session has had."""
        self._next_serial += 1
        return self._next_serial - 1

    def segments(self, runs: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
        """The first `nbytes` of a variable in these chunks, as ranges of the linear view."""
        view, chunk = self.space.driver.view_address, self.chunk_nbytes
        found = []
        left = nbytes
        for first, count in runs:
            length = min(left, count * chunk)
            found.append((view + first * chunk, length))
            left -= length
        return found

    def note_stall(self, start_ns: int) -> None:
        """The session's thread waited for transfers from `start_ns` until now."""
        stop_ns = time.monotonic_ns()
        self.counters.stall_ns += stop_ns - start_ns
        self.stalls.append((start_ns, stop_ns))

    # -- life of a record

    def allocate(self, nbytes: int) -> VariableRecord:
        """A new resident variable; evicts others as needed. Raises `NoRoom`, `StoreFailed`."""
        self.make_room(self.chunks_of(nbytes))
        record = self.new_record(nbytes)
        runs = self.pool.take(self.chunks_of(nbytes))
        try:
            self.give_chunks(record, runs)
        except BaseException:
            self.pool.give(runs)
            self.space.release(record.reservation)
            raise
        self.enter(record)
        return record

    def enter(self, record: VariableRecord) -> None:
        """Put a record into the books."""
        self.records[record.address] = record
        if record.state is State.RESIDENT:
            self._by_use[record.address] = record

    def forget(self, record: VariableRecord) -> None:
        """Take a record out of the books as it is: from now on it is the executor's."""
        del self.records[record.address]
        self._by_use.pop(record.address, None)

    def free(self, address: int) -> VariableRecord | None:
        """The storage at `address` was freed: forget it. None if it was not in the books."""
        record = self.records.pop(address, None)
        if record is None:
            return None
        self._by_use.pop(address, None)
        with contextlib.suppress(StoreFailed):  # nobody needs its bytes any more
            self.settle(record)
        if record.state is State.RESIDENT:
            self.pool.give(record.runs)
        self.dispose(record)
        return record

    def dispose(self, record: VariableRecord) -> None:
        """Give back the reservation and the store slot of a record that holds no chunks."""
        self.guards.lift(record)
        if record.slot is not None:
            self.fork_readers.free(record.slot)
            record.slot = None
        self.space.release(record.reservation)

    def end_exports(self) -> None:
        """Forget pointers that the outside has let go of (`ended_exports`, filled on any thread)."""
        while self.ended_exports:
            record = self.ended_exports.popleft()
            record.exports -= 1
            if record.state is not State.AWAY:  # else what was written is in the store's file
                record.stored = False

    def touch(self, record: VariableRecord) -> None:
        """Note a use, for the order of eviction."""
        if record.address in self._by_use:
            self._by_use.move_to_end(record.address)

    # -- moving

    def give_chunks(self, record: VariableRecord, runs: Runs) -> None:
        """Map chunks (already taken from the pool) for a record, which is resident from now on."""
        self.guards.lift(record)
        self.space.map(record.reservation, runs)
        record.runs = runs
        record.state = State.RESIDENT
        self.peak_chunks = max(self.peak_chunks, self.pool.num_chunks - self.pool.num_free)

    def may_be_evicted(self, record: VariableRecord) -> bool:
        """Whether a resident record may go away, for all that is known of who uses it."""
        return not record.pins and record.seen and (self.is_host or not record.exports)

    def make_room(self, num_chunks: int) -> None:
        """Evict least recently used variables until so many chunks are free. Raises `NoRoom`."""
        missing = num_chunks - self.pool.num_free
        if missing <= 0:
            return
        self.end_exports()
        victims: list[VariableRecord] = []
        movable = [r for r in self._by_use.values() if self.may_be_evicted(r)]
        for record in sorted(movable, key=_is_exported):  # a stable sort: what was given out goes last
            victims.append(record)
            missing -= self.chunks_of(record.nbytes)
            if missing <= 0:
                break
        else:
            if self.flights.wait_any():
                self.make_room(num_chunks)
                return
            movable_chunks = sum(self.chunks_of(r.nbytes) for r in movable)
            pinned = sum(self.chunks_of(r.nbytes) for r in self._by_use.values()) - movable_chunks
            raise NoRoom(num_needed=num_chunks, num_free=self.pool.num_free, num_pinned=pinned)
        self.evict(victims)

    def evict(self, records: Sequence[VariableRecord]) -> None:
        """Write out what the store has no current copy of, and free the chunks. Waits for the writes.

        Raises:
            StoreFailed: A write failed. Its variable is still resident; the others are away.
        """
        started = time.monotonic_ns()
        failure: StoreFailed | MemoryFault | None = None
        leaving = []
        for record in records:
            if record.stored and not record.exports:
                self.check_clean(record)
                self.counters.dropped_nbytes += record.nbytes
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
            try:
                self.settle(record)
            except StoreFailed as error:
                failure = error
                continue
            self._by_use.pop(record.address, None)
            self.pool.give(record.runs)
            self.hide(record)
        self.note_stall(started)
        if failure is not None:
            raise failure

    def check_clean(self, record: VariableRecord) -> None:
        """In debug mode: a resident record whose copy in the store is to be relied on must equal it.

        Raises:
            HiddenWrite: It was written since, and nothing said so.
        """
        if self.debug and record.checksum is not None and self._checksum(record) != record.checksum:
            raise HiddenWrite(
                f"{record.label or 'a variable'} ({format_nbytes(record.nbytes)}) was changed since it was last "
                "written to the store, but no op that ran meanwhile says that it writes it: outside debug mode the "
                "change would be lost.\n  Options: ooc.opaque(fn) around code that writes tensors behind the "
                "dispatcher's back; a report, if it was an ATen op (its schema hides a write)."
            )

    def _checksum(self, record: VariableRecord) -> int:
        total = 0
        for address, nbytes in self.segments(record.runs, record.nbytes):
            total = zlib.crc32((ctypes.c_char * nbytes).from_address(address), total)
        return total

    def hide(self, record: VariableRecord) -> None:
        """A record's chunks were given away: from now on its bytes are in the store only."""
        record.runs = ()
        record.state = State.AWAY
        self.guards.hide(record)

    def load(self, records: Iterable[VariableRecord]) -> None:
        """Bring records in and wait for them. The caller has pinned them, so that none evicts another.

        Raises:
            NoRoom: They do not fit beside what is pinned. What was loaded stays.
            StoreFailed: A read failed; that variable stays away, its copy in the store untouched.
        """
        missing = [r for r in records if r.state is not State.RESIDENT]
        if not missing:
            return
        for record in missing:
            self.settle(record)
        missing = [r for r in missing if r.state is State.AWAY]
        self.make_room(sum(self.chunks_of(r.nbytes) for r in missing))
        started = time.monotonic_ns()
        failure: StoreFailed | MemoryFault | None = None
        loading = []
        for record in missing:
            runs = self.pool.take(self.chunks_of(record.nbytes))
            try:
                self.start_load(record, runs)
            except MemoryFault as fault:  # a device's
                self.pool.give(runs)
                failure = fault
                continue
            loading.append(record)
        for record in loading:
            runs = record.runs
            try:
                self.settle(record)
                self.guards.lift(record)
                self.space.map(record.reservation, runs)
            except (StoreFailed, MemoryFault) as error:
                record.runs, record.state = (), State.AWAY
                self.pool.give(runs)
                failure = error
                continue
            self._by_use[record.address] = record
        self.peak_chunks = max(self.peak_chunks, self.pool.num_chunks - self.pool.num_free)
        self.note_stall(started)
        if failure is not None:
            raise failure

    # -- transfers: one at a time per record, noted in `record.transfer`

    def start_write(self, record: VariableRecord, segments: Segments | None = None) -> Transfer:
        """Start writing a resident record out. It stays resident; `settle` completes the act."""
        self.flights.wait_for(record)  # or the bytes of a collective half done would be taken to be current
        if record.slot is None or self.fork_readers.hold(record.slot):
            slot = self.store.allocate(record.nbytes)
            if record.slot is not None:
                self.fork_readers.free(record.slot)
            record.slot = slot
        if segments is None:
            segments = self.segments(record.runs, record.nbytes)
        record.transfer = self.store.write(record.slot, segments)
        self.moves.append((record.transfer.ticket, record.address, record.nbytes))
        record.stored = True
        if self.debug and self.is_host:
            record.checksum = self._checksum(record)
        self.counters.evicted_nbytes += record.nbytes
        return record.transfer

    def start_load(
        self,
        record: VariableRecord,
        runs: Runs,
        after: Sequence[Transfer] = (),
        segments: Segments | None = None,
    ) -> Transfer:
        """Start reading a record into these chunks, after its own write and `after` are done."""
        assert record.slot is not None, record
        if record.transfer is not None:
            after = (*after, record.transfer)
        if segments is None:
            segments = self.segments(runs, record.nbytes)
        record.transfer = self.store.read(record.slot, segments, after=after)
        if not self.is_host:
            self.space.note_unused(record.reservation, record.transfer.fence)
        self.moves.append((record.transfer.ticket, record.address, record.nbytes))
        record.runs = runs
        record.state = State.LOADING
        self.counters.loaded_nbytes += record.nbytes
        return record.transfer

    def settle_load(self, record: VariableRecord, runs: Runs) -> None:
        """Read an away record into these chunks, and wait."""
        self.start_load(record, runs)
        self.settle(record)

    def settle(self, record: VariableRecord, *, for_ops: bool = False) -> None:
        """Wait for the record's transfer, if any. Raises `StoreFailed`, with the record in its old state.

        With `for_ops` only ops need it: on a device they wait, and the host goes on.
        """
        transfer = record.transfer
        if transfer is None:
            return
        record.transfer = None
        loading = record.state is State.LOADING
        try:
            if for_ops:
                transfer.order()
            else:
                transfer.wait()
        except OSError as error:
            if loading:
                record.state = State.AWAY
                record.runs = ()
            else:
                record.stored = False
            act = "load" if loading else "evict"
            raise StoreFailed(
                f"cannot {act} {record.label or 'variable'} ({format_nbytes(record.nbytes)}): {error}. "
                "The step is void; "
                + ("the variable stays in the store." if loading else "the variable stays in memory."),
                errno=error.errno,
            ) from error
        if loading:
            record.state = State.RESIDENT

    # -- for the executor

    def resident_chunks(self) -> int:
        """Chunks held by records in the books."""
        return sum(self.chunks_of(r.nbytes) for r in self.records.values() if r.state is not State.AWAY)

    def retake_pool(self, pool: ChunkPool) -> None:
        """Start over with a fresh pool that agrees with the records, after a plan was left."""
        self.pool = pool
        self._by_use.clear()
        for record in sorted(self.records.values(), key=lambda r: r.serial):
            if record.state is State.RESIDENT:
                self.pool.take_exactly(record.runs)
                self._by_use[record.address] = record


def _is_exported(record: VariableRecord) -> bool:
    return record.exports > 0
