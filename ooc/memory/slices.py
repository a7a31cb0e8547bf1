"""Moves parts of a variable's bytes, wherever they are: in its chunks, or in the store.

For ops that run in parts (`ooc.dispatch.ops_in_parts`). A variable that is in memory is read and written at its
addresses. One that is away is read from its slot of the store, and written there: it stays away, and its slot current.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Sequence

from ooc.errors import RerunLost, StoreFailed
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.units import format_nbytes
from vmm.slot_parts import Piece, SlotParts
from vmm.store import FileStore, Slot, StoreError

_CHECKSUM_NBYTES = 1 << 20


class Slices:
    """Reads and writes parts of one session's variables, on its thread, with its lock held.

    Args:
        manager: Of a session whose store is a file.
    """

    def __init__(self, manager: ResidencyManager) -> None:
        self._manager = manager
        self._opened: SlotParts | None = None

    def __repr__(self) -> str:
        return f"<Slices of {self._manager!r}>"

    def open(self) -> bool:
        """Get ready, once. False: this store's file cannot be read in parts."""
        if self._opened is None and isinstance(self._manager.store, FileStore):
            try:
                self._opened = SlotParts(self._manager.store)
            except OSError:
                return False
        return self._opened is not None

    def close(self) -> None:
        """Close the store's second descriptor. Idempotent."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _parts(self) -> SlotParts:
        assert self._opened is not None
        return self._opened

    def allocate_away(self, nbytes: int) -> VariableRecord:
        """Allocate a variable that takes no chunks: its bytes are written to the store, part by part.

        Raises `StoreFull`, `StoreFailed`, `MemoryFault`; nothing was changed.
        """
        manager = self._manager
        record = manager.new_record(nbytes)
        slot: Slot | None = None
        try:
            slot = manager.store.allocate(record.reservation.nbytes)
            try:
                self._parts.begin(slot)
            except OSError as error:
                raise StoreFailed(f"cannot begin a variable in the store: {error}", errno=error.errno) from error
            record.slot = slot
            record.born_away()
            manager.guards.hide(record)
        except BaseException:
            if slot is not None:
                manager.store.free(slot)
            manager.space.release(record.reservation)
            raise
        manager.enter(record)
        return record

    def read(self, record: VariableRecord, pieces: Sequence[Piece], address: int) -> None:
        """Copy these parts of a variable, one after the other, to memory from `address` on.

        Raises:
            StoreFailed: The device failed.
            RerunLost: It was discarded.
        """
        if record.state is State.RESIDENT:
            for offset, nbytes in pieces:
                ctypes.memmove(address, record.address + offset, nbytes)
                address += nbytes
            return
        started = time.monotonic_ns()
        slot = self._settled(record)
        try:
            self._parts.read(slot, pieces, address)
        except OSError as error:
            raise _failed("read", record, error) from error
        self._manager.note_stall(started)
        self._manager.counters.loaded_nbytes += sum(nbytes for _, nbytes in pieces)

    def write(self, record: VariableRecord, pieces: Sequence[Piece], address: int) -> None:
        """Copy memory from `address` on to these parts of a variable. What forked processes may read stays as it is.

        Raises:
            StoreFailed: The device failed, or is full: some of the parts may have been written.
            RerunLost: It was discarded.
        """
        if record.state is State.LOADING:  # it has its chunks already: it arrives
            self._manager.load([record])
        if record.state is State.RESIDENT:
            record.written()
            for offset, nbytes in pieces:
                ctypes.memmove(record.address + offset, address, nbytes)
                address += nbytes
            return
        started = time.monotonic_ns()
        slot = self._settled(record)
        record.checksum = None  # `note_checksum` makes it anew
        try:
            if self._manager.fork_readers.hold(slot):
                slot = self._own_slot(record, slot)
            self._parts.write(slot, pieces, address)
        except (OSError, StoreError) as error:
            raise _failed("write", record, error) from error
        self._manager.note_stall(started)
        self._manager.counters.evicted_nbytes += sum(nbytes for _, nbytes in pieces)

    def note_checksum(self, record: VariableRecord) -> None:
        """In debug mode, after the last write: what the store has of an away variable from now on."""
        if not self._manager.debug or record.state is State.RESIDENT or record.slot is None:
            return
        buffer, total = ctypes.create_string_buffer(_CHECKSUM_NBYTES), 0
        for start in range(0, record.nbytes, _CHECKSUM_NBYTES):
            nbytes = min(_CHECKSUM_NBYTES, record.nbytes - start)
            self._parts.read(record.slot, [(start, nbytes)], ctypes.addressof(buffer))
            total = zlib.crc32(memoryview(buffer)[:nbytes], total)
        record.checksum = total

    def _settled(self, record: VariableRecord) -> Slot:
        """The slot of a variable that is away, or on its way in, whose last write has ended. Raises `RerunLost`."""
        if record.state is State.DISCARDED:  # no plan does that: nothing makes it again (`StepRecorder.build`)
            raise RerunLost(f"{record.label or 'a variable'} is read in slices, and was discarded")
        slot: Slot | None = record.slot
        assert slot is not None, record
        if record.state is State.AWAY:
            self._manager.settle(record)
        return slot

    def _own_slot(self, record: VariableRecord, held: Slot) -> Slot:
        """Another slot with the same bytes, in place of one that a forked process may read."""
        manager = self._manager
        slot: Slot = manager.store.allocate(record.reservation.nbytes)
        try:
            self._parts.begin(slot)
            self._parts.copy(held, slot)
            record.slot = slot
            manager.guards.hide(record)  # its addresses show the new one
        except BaseException:
            record.slot = held
            manager.store.free(slot)
            raise
        manager.fork_readers.free(held)
        return slot


def _failed(act: str, record: VariableRecord, error: Exception) -> StoreFailed:
    return StoreFailed(
        f"cannot {act} a part of {record.label or 'a variable'} ({format_nbytes(record.nbytes)}): {error}. "
        "The step is void.",
        errno=getattr(error, "errno", None),
    )
