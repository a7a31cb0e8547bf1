"""Transfers of single variables to and from the store: one at a time per record, kept in `record.transfer`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ooc.errors import StoreFailed
from ooc.memory.counters import Counters
from ooc.memory.flights import Flights
from ooc.memory.fork_readers import ForkReaders
from ooc.memory.record import Runs, Segments, State, VariableRecord
from ooc.memory.view_segments import checksum, view_segments
from ooc.units import format_nbytes
from vmm.store import Transfer

if TYPE_CHECKING:
    from ooc.memory.protocols import Space, Store

Move = tuple[int, int, int]
"""A transfer that was started: its ticket, and its variable's address and bytes."""

_NUM_MOVES_KEPT = 1 << 14
"""As many as the transfer engine keeps records of; `ooc.telemetry.timeline` empties it each step."""


class RecordTransfers:
    """Starts transfers of records, and waits for them. Which chunks are free is nothing to it.

    Args:
        space, store: Of one `ooc.devices.protocols.Memory`.
        debug: Keep a checksum of what is written.
        is_host: Whether the memory is the host's. A device's cannot be read by the host.

    Attributes:
        chunk_nbytes: Size of a chunk.
        counters: What was moved.
        fork_readers: Slots that forked processes may read.
        flights: What uses records beyond its op.
        moves: Transfers started since it was last emptied (by `ooc.telemetry.timeline`).
        stalls: When the session's thread waited for transfers: `(start, stop)` of the monotonic clock.
    """

    def __init__(self, *, space: Space, store: Store, debug: bool, is_host: bool) -> None:
        self.space = space
        self.chunk_nbytes = space.driver.chunk_nbytes
        self.store = store
        self.debug = debug
        self.is_host = is_host
        self.counters = Counters()
        self.fork_readers = ForkReaders(store)
        self.flights = Flights()
        self.moves: deque[Move] = deque(maxlen=_NUM_MOVES_KEPT)
        self.stalls: deque[tuple[int, int]] = deque(maxlen=_NUM_MOVES_KEPT)

    def note_stall(self, start_ns: int) -> None:
        """Note that the session's thread waited for transfers from `start_ns` until now."""
        stop_ns = time.monotonic_ns()
        self.counters.stall_ns += stop_ns - start_ns
        self.stalls.append((start_ns, stop_ns))

    def segments(self, runs: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
        """The first `nbytes` of a variable in these chunks, as ranges of the linear view."""
        return view_segments(self.space.driver.view_address, self.chunk_nbytes, runs, nbytes)

    def checksum(self, record: VariableRecord, nbytes: int | None = None) -> int:
        """A checksum of a resident record's bytes (of host memory), or of the first `nbytes` of them."""
        return checksum(self.segments(record.runs, record.nbytes if nbytes is None else nbytes))

    def start_write(self, record: VariableRecord, segments: Segments | None = None) -> Transfer:
        """Start writing a resident record to the store. It stays resident; `settle` waits for the write."""
        self.prepare_slot(record)
        if segments is None:
            segments = self.segments(record.runs, record.nbytes)
        transfer: Transfer = self.store.write(record.slot, segments)
        record.write_started(transfer)
        if self.debug and self.is_host:
            record.checksum = self.checksum(record)
        self.note_move(record, transfer)
        return transfer

    def prepare_slot(self, record: VariableRecord) -> None:
        """Give a record a slot that may be written. Raises `StoreFull`."""
        self.flights.wait_for(record)  # or the bytes of a collective half done would be taken to be current
        if record.slot is None or self.fork_readers.hold(record.slot):
            slot = self.store.allocate(record.reservation.nbytes)  # for the largest that may come to lie there
            if record.slot is not None:
                self.fork_readers.free(record.slot)
            record.slot = slot

    def note_move(self, record: VariableRecord, transfer: Transfer, *, is_load: bool = False) -> None:
        """Count a transfer that was started."""
        self.moves.append((transfer.ticket, record.address, record.nbytes))
        if is_load:
            self.counters.loaded_nbytes += record.nbytes
        else:
            self.counters.evicted_nbytes += record.nbytes

    def start_load(
        self,
        record: VariableRecord,
        runs: Runs,
        after: Sequence[Transfer] = (),
        segments: Segments | None = None,
    ) -> None:
        """Start loading a record into these chunks, after its own write and the transfers `after`."""
        assert record.slot is not None, record
        if record.transfer is not None:
            after = (*after, record.transfer)
        if segments is None:
            segments = self.segments(runs, record.nbytes)
        transfer: Transfer = self.store.read(record.slot, segments, after=after)
        record.load_started(runs, transfer)
        self.note_move(record, transfer, is_load=True)

    def leave(self, record: VariableRecord, *, for_ops: bool) -> None:
        """End a resident record's transfer, as `settle` does: it leaves its chunks, and nothing uses its addresses."""
        if not self.is_host:  # where nobody asks
            self.space.note_unused(record.reservation)
        self.settle(record, for_ops=for_ops)

    def settle_load(self, record: VariableRecord, runs: Runs) -> None:
        """Load an away record into these chunks, and wait."""
        self.start_load(record, runs)
        self.settle(record)

    def settle(self, record: VariableRecord, *, for_ops: bool = False) -> None:
        """Wait for the record's transfer, if any. Raises `StoreFailed`, with the record where it was before.

        With `for_ops` only ops wait: on a device the host goes on.
        """
        transfer = record.transfer
        if transfer is None:
            return
        loading = record.state is State.LOADING
        try:
            if for_ops:
                transfer.order()
            else:
                transfer.wait()
        except OSError as error:
            if loading:
                record.load_failed()
            else:
                record.write_failed()
            raise transfer_failed(record, error, is_load=loading) from error
        if loading:
            record.loaded()
        else:
            record.write_ended()


def transfer_failed(record: VariableRecord, error: OSError, *, is_load: bool) -> StoreFailed:
    """The error for a transfer that failed; it says what became of its variable."""
    name = f"{record.label or 'variable'} ({format_nbytes(record.nbytes)})"
    where = "in memory" if record.state is State.RESIDENT else "in the store"
    return StoreFailed(
        f"cannot {'load' if is_load else 'evict'} {name}: {error}. The step is void; the variable stays {where}.",
        errno=error.errno,
    )
