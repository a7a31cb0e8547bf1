"""Where evicted bytes live: an unlinked file, with transfers in flight both ways.

The file has no name, so nothing is left behind however the process ends. Its space is allocated
before it is promised, so a full disk is an error when a slot is allocated, never in mid-step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from vmm.faults import MoveFailed
from vmm.files import (
    BLOCK_NBYTES,
    FULL_ERRORS,
    StoreError,
    StoreUnavailable,
    allocate_space,
    check_directory,
    default_directory,
    file_system_name,
    open_file,
)
from vmm.ranges import FreeRanges
from vmm.sizes import format_exactly, format_nbytes
from vmm.store_speed import PROBE_FILE_NBYTES, StoreSpeed, check_buffer, measure
from vmm.transfers import DROP_CACHE, Direction, Job, Segments, TransferEngine, TransferRecord, TransferStatistics

__all__ = ["FileStore", "Slot", "StoreError", "StoreFull", "StoreUnavailable", "Transfer"]

_log = logging.getLogger(__name__)

_GROWTH_NBYTES = 64 << 20
"""The file grows by at least this, so that a session of many small variables makes few calls."""


class StoreFull(StoreError):
    """The file system has no room for another slot. Nothing was changed.

    Attributes:
        needed_nbytes: What the file would have had to grow by.
        free_nbytes: What the file system has left.
    """

    def __init__(self, message: str, *, needed_nbytes: int, free_nbytes: int) -> None:
        super().__init__(message)
        self.needed_nbytes = needed_nbytes
        self.free_nbytes = free_nbytes


class Slot:
    """An extent of the store's file. Made and freed by its `FileStore` alone."""

    __slots__ = ("_is_freed", "_last_write", "_reads", "capacity_nbytes", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int, capacity_nbytes: int) -> None:
        self.offset = offset
        """Where it begins in the file."""
        self.nbytes = nbytes
        """Bytes asked for."""
        self.capacity_nbytes = capacity_nbytes
        """Bytes that it has: `nbytes` rounded up to `BLOCK_NBYTES`."""
        self._last_write: int | None = None
        self._reads: list[int] = []  # tickets of reads since the last write
        self._is_freed = False

    def __repr__(self) -> str:
        state = ", freed" if self._is_freed else ", empty" if self._last_write is None else ""
        return f"<Slot of {self.nbytes} bytes at {self.offset}{state}>"

    @property
    def is_freed(self) -> bool:
        """Whether it was given back; then it must not be used."""
        return self._is_freed


class Transfer:
    """A write or read under way. `done` never blocks; `wait` raises what went wrong."""

    __slots__ = ("_engine", "nbytes", "ticket")

    def __init__(self, engine: TransferEngine, ticket: int, nbytes: int) -> None:
        self._engine = engine
        self.ticket = ticket
        """Its number: later transfers have larger ones."""
        self.nbytes = nbytes
        """Bytes moved, rounded up to `BLOCK_NBYTES`."""

    def __repr__(self) -> str:
        return f"<Transfer {self.ticket} of {self.nbytes} bytes>"

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._engine.done(self.ticket)

    def wait(self) -> None:
        """Block until it is over, without the GIL. Raises `vmm.transfers.TransferError` if it failed."""
        self._engine.wait(self.ticket)

    def order(self) -> None:
        """Let all ops from now on come after it. Ops run on the host, so the host waits: as `wait`."""
        self._engine.wait(self.ticket)


class FileStore:
    """Slots in one unlinked file.

    Transfers of one slot are ordered by the store: a read waits for the slot's last write (and fails
    if that failed), a write for the reads and writes before it. Calls are made by one thread at a
    time; a `Transfer` may be waited for on any.

    Args:
        directory: Where the file is. By default $OOC_STORE, else $TMPDIR, /var/tmp or the current
            directory, the first that is not kept in memory.
        num_threads: Threads that write, and as many that read.
        direct: Use O_DIRECT, so that the page cache does not fill with evicted bytes. Where the
            file system cannot, each transfer syncs and drops its pages instead, which is slower.
        allow_memory: Accept a directory whose files are kept in memory (tmpfs).
        growth_nbytes: The file grows by at least this much.

    Raises:
        StoreUnavailable: The directory is missing, is not one, cannot be written, or is in memory.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        num_threads: int = 2,
        direct: bool = True,
        allow_memory: bool = False,
        growth_nbytes: int = _GROWTH_NBYTES,
    ) -> None:
        if growth_nbytes <= 0 or growth_nbytes % BLOCK_NBYTES:
            raise ValueError(f"growth_nbytes={growth_nbytes}: must be a positive multiple of {BLOCK_NBYTES}")
        self._directory = Path(directory) if directory is not None else default_directory(allow_memory=allow_memory)
        check_directory(self._directory, allow_memory=allow_memory)
        self._growth_nbytes = growth_nbytes
        self._free = FreeRanges(0, 0)
        self._slots: dict[int, Slot] = {}
        self._limbo: list[tuple[Slot, list[int]]] = []  # freed, but transfers on them are not over
        with contextlib.ExitStack() as undo:
            self._descriptor, self._is_direct = open_file(self._directory, direct=direct)
            undo.callback(os.close, self._descriptor)
            if direct and not self._is_direct:
                _log.warning(
                    "O_DIRECT does not work in %s (%s): transfers sync and drop their pages instead, which is slower",
                    self._directory,
                    file_system_name(self._directory),
                )
            self._engine = TransferEngine(num_writers=num_threads, num_readers=num_threads)
            undo.callback(self._engine.close)
            self._finalizer = weakref.finalize(self, _shut, self._engine, self._descriptor)
            undo.pop_all()

    def __repr__(self) -> str:
        state = f"{self.used_nbytes} of {self.file_nbytes} bytes in {len(self._slots)} slots"
        how = "direct" if self._is_direct else "buffered"
        return f"<FileStore in {self._directory}, {how}, {state if self._finalizer.alive else 'closed'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """Where the file is."""
        return self._directory

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._is_direct

    @property
    def descriptor(self) -> int:
        """The open file, for reading a slot by other means (`os.pread` in a forked child)."""
        return self._descriptor

    @property
    def native_file(self) -> tuple[int, int]:
        """The open file, and the flags of each transfer, for native code that asks the engine (its `native_calls`)."""
        return self._descriptor, 0 if self._is_direct else DROP_CACHE

    @property
    def engine(self) -> TransferEngine:
        """What moves the bytes; its records give a timeline."""
        return self._engine

    @property
    def file_nbytes(self) -> int:
        """Bytes of the file system that the store holds."""
        return self._free.stop

    @property
    def used_nbytes(self) -> int:
        """Bytes of it in slots, freed ones with transfers under way included."""
        return self._free.stop - self._free.total

    @property
    def num_slots(self) -> int:
        """Slots allocated and not freed."""
        return len(self._slots)

    def allocate(self, nbytes: int) -> Slot:
        """A slot for `nbytes` bytes, with its disk space.

        Raises:
            StoreFull: The file system has no room. Nothing was changed.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes}: must be positive")
        self._check_open()
        capacity = _round_up(nbytes)
        self._reap()
        offset = self._free.take(capacity)
        if offset is None:
            self._grow(capacity)
            offset = self._free.take(capacity)
            if offset is None:
                raise AssertionError(f"grown for {capacity} bytes, still no room: {self._free!r}")
        slot = Slot(offset, nbytes, capacity)
        self._slots[offset] = slot
        return slot

    def free(self, slot: Slot) -> None:
        """Give a slot back. Its extent is used again once the transfers on it are over."""
        self._check(slot)
        del self._slots[slot.offset]
        slot._is_freed = True
        pending = self._pending(slot)
        if pending:
            self._limbo.append((slot, pending))
        else:
            self._free.give(slot.offset, slot.capacity_nbytes)

    def reserve(self, nbytes: int) -> None:
        """Make sure now that `nbytes` more bytes can be allocated, for a plan that needs them.

        Fragmentation can make a later `allocate` need more than that.

        Raises:
            StoreFull: The file system has no room. Nothing was changed.
        """
        self._check_open()
        if nbytes > self._free.total:
            self._extend(_round_up(nbytes) - self._free.total, at_least=0)

    def segments(self, segments: Sequence[tuple[int, int]]) -> Segments:
        """Prepare memory for many transfers.

        All lengths but the last must be multiples of `BLOCK_NBYTES`; the last is rounded up to one, so the
        memory behind it must reach that far. (Chunks are multiples of the page.)
        """
        *whole, (address, nbytes) = segments
        for _, length in whole:
            if length % BLOCK_NBYTES:
                raise ValueError(f"segment of {length} bytes before the last: must be a multiple of {BLOCK_NBYTES}")
        return Segments([*whole, (address, _round_up(nbytes))])

    def write(
        self, slot: Slot, segments: Segments | Sequence[tuple[int, int]], after: Sequence[Transfer] = ()
    ) -> Transfer:
        """Begin to copy memory out to a slot.

        Args:
            slot: Where to.
            segments: `(address, nbytes)` pairs (see `segments`), or what `segments` made. The memory
                must stay as it is until the transfer is over.
            after: Transfers to wait for first, beside those of the slot itself.
        """
        prepared = self._prepared(slot, segments)
        tickets = [transfer.ticket for transfer in after]
        # Only unfinished ones: a failed write must not keep the next from trying again.
        tickets += self._pending(slot)
        ticket = self._engine.submit_write(
            self._descriptor, slot.offset, prepared, tickets, drop_cache=not self._is_direct
        )
        slot._last_write = ticket
        slot._reads = []
        return Transfer(self._engine, ticket, prepared.nbytes)

    def read(
        self, slot: Slot, segments: Segments | Sequence[tuple[int, int]], after: Sequence[Transfer] = ()
    ) -> Transfer:
        """Begin to copy a slot's bytes into memory, after its last write. As `write`.

        Raises:
            ValueError: Nothing was ever written to the slot.
        """
        prepared = self._prepared(slot, segments)
        if slot._last_write is None:
            raise ValueError(f"{slot!r}: read before anything was written")
        tickets = [transfer.ticket for transfer in after]
        tickets.append(slot._last_write)  # also when it is over: if it failed there is nothing to read
        ticket = self._engine.submit_read(
            self._descriptor, slot.offset, prepared, tickets, drop_cache=not self._is_direct
        )
        if len(slot._reads) >= 8:
            slot._reads = [read for read in slot._reads if not self._engine.has_finished(read)]
        slot._reads.append(ticket)
        return Transfer(self._engine, ticket, prepared.nbytes)

    def move(
        self, direction: Direction, slot: Slot, segments: Sequence[tuple[int, int]], make: Callable[[Job], int]
    ) -> Transfer:
        """As `write` or `read`, but somebody else makes the transfer, which is over then: see `vmm.faults`.

        Args:
            direction: Which way.
            slot: Of which nothing is under way any more when `make` is called; this waits for it.
            segments: As `write` has it.
            make: Makes the transfer. Returns its ticket, or raises `MoveFailed`.

        Raises:
            TransferError: It failed, or what is to be read was never written well.
        """
        prepared = self._prepared(slot, segments)
        for ticket in self._pending(slot):
            with contextlib.suppress(OSError):
                self._engine.wait(ticket)
        if direction == "read":
            self.wait_written(slot)
        job = self._engine.job(direction, self._descriptor, slot.offset, prepared, drop_cache=not self._is_direct)
        try:
            ticket = make(job)
        except MoveFailed as failed:
            ticket = failed.ticket
            if ticket < 0:
                raise self._engine.refusal(ticket, f"{direction} of {slot!r}") from failed
        if direction == "write":
            slot._last_write, slot._reads = ticket, []
        self._engine.wait(ticket)  # it is over: this raises what went wrong
        return Transfer(self._engine, ticket, prepared.nbytes)

    def wait_written(self, slot: Slot) -> None:
        """Block until the slot's last write is over. Raises OSError: it failed, so there is nothing to read."""
        if slot._last_write is not None:
            self._engine.wait(slot._last_write)

    def wait_all(self) -> None:
        """Block until no transfer is under way. Errors are raised by each `Transfer.wait`."""
        self._engine.wait_all()

    def statistics(self, direction: Direction) -> TransferStatistics:
        """Totals of one direction since the store was made."""
        return self._engine.statistics(direction)

    def take_records(self) -> tuple[TransferRecord, ...]:
        """As `TransferEngine.take_records`."""
        return self._engine.take_records()

    def measure(self, buffer: tuple[int, int] | None = None) -> StoreSpeed:
        """Measure the store's speed for about 0.3 s, up to 2 s if it is slow, on an extent of its own.

        Args:
            buffer: `(address, nbytes)` of at least 1 MiB of memory to read into and write from, its
                bytes are lost; by default 4 MiB outside the pool for the time of the call.

        Raises:
            StoreFull: No room for 32 MiB.
            TransferError: The device failed.
        """
        check_buffer(buffer)
        scratch = self.allocate(PROBE_FILE_NBYTES)
        try:
            return measure(self._engine, self._descriptor, scratch.offset, buffer, drop_cache=not self._is_direct)
        finally:
            self.free(scratch)

    def close(self) -> None:
        """End the threads and give the disk space back. Transfers not begun fail. Idempotent."""
        self._finalizer()

    def _prepared(self, slot: Slot, segments: Segments | Sequence[tuple[int, int]]) -> Segments:
        self._check(slot)
        prepared = segments if isinstance(segments, Segments) else self.segments(segments)
        if prepared.nbytes > slot.capacity_nbytes or (self._is_direct and prepared.nbytes % BLOCK_NBYTES):
            raise ValueError(f"{slot!r}: a transfer of {prepared.nbytes} bytes (room for {slot.capacity_nbytes})")
        return prepared

    def _pending(self, slot: Slot) -> list[int]:
        """Tickets of the slot's transfers that are not over."""
        tickets = slot._reads if slot._last_write is None else [*slot._reads, slot._last_write]
        return [ticket for ticket in tickets if not self._engine.has_finished(ticket)]

    def _reap(self) -> None:
        """Make extents free whose last transfers are over."""
        left = []
        for slot, tickets in self._limbo:
            if all(self._engine.done(ticket) for ticket in tickets):
                self._free.give(slot.offset, slot.capacity_nbytes)
            else:
                left.append((slot, tickets))
        self._limbo = left

    def _grow(self, capacity: int) -> None:
        """Make the file longer until it ends with `capacity` free bytes."""
        ranges = self._free.ranges()
        tail = ranges[-1][1] - ranges[-1][0] if ranges and ranges[-1][1] == self._free.stop else 0
        self._extend(capacity - tail, at_least=self._growth_nbytes)

    def _extend(self, needed: int, *, at_least: int) -> None:
        """Make the file `needed` bytes longer; by `at_least` if the disk has room for that."""
        old = self._free.stop
        for nbytes in sorted({max(needed, at_least), needed}, reverse=True):
            try:
                allocate_space(self._descriptor, old, nbytes)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, old)  # a failed allocation may have got part of the way
                if error.errno not in FULL_ERRORS:
                    raise StoreError(
                        f"cannot allocate {format_exactly(nbytes)} in {self._directory}: {error}"
                    ) from error
                failure = error
                continue
            self._free.extend(old + nbytes)
            return
        raise self._full(needed, failure)

    def _full(self, needed: int, error: OSError) -> StoreFull:
        status = os.fstatvfs(self._descriptor)
        free = status.f_bavail * status.f_frsize
        return StoreFull(
            f"the store in {self._directory} needs {format_exactly(needed)} more; the file system has "
            f"{format_exactly(free)} free ({os.strerror(error.errno or 0)}; the store's file has "
            f"{format_nbytes(self.file_nbytes)}, in use {format_nbytes(self.used_nbytes)}).\n"
            "  Options: a store directory on a larger disk (OOC_STORE); free space there; a higher quota or "
            "file size limit (ulimit -f); a larger budget, which evicts less.",
            needed_nbytes=needed,
            free_nbytes=free,
        )

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise StoreError("the store is closed")

    def _check(self, slot: Slot) -> None:
        self._check_open()
        if self._slots.get(slot.offset) is not slot:
            raise ValueError(f"{slot!r} is not a slot of this store")


def _round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


def _shut(engine: TransferEngine, descriptor: int) -> None:
    engine.close()
    os.close(descriptor)
