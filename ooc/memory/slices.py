"""Moves parts of a variable's bytes, wherever they are: in its chunks, or in the store.

For ops that run in parts (`ooc.dispatch.ops_in_parts`). A variable that is in memory is read and written at its
addresses. One that is away is read from its slot of the store, and written there: it stays away, and its slot current.
Slots are also copied whole, so that what is written to them later is not seen by forked processes.
"""

from __future__ import annotations

import ctypes
import logging
import time
import zlib
from collections.abc import Sequence

from ooc.errors import RerunLost, StoreFailed
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.units import format_nbytes
from vmm.slot_parts import Piece, SlotParts
from vmm.store import FileStore, Slot, StoreError

_log = logging.getLogger(__name__)

_CHECKSUM_NBYTES = 1 << 20


class Slices:
    """Reads and writes parts of one session's variables, on its thread, with its lock held.

    Args:
        manager: Of a session whose store is a file.
    """

    def __init__(self, manager: ResidencyManager) -> None:
        self._manager = manager
        self._opened: SlotParts | None = None
        self._has_told = False

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
                slot = self.copy(record)
                self.move(record, slot)
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

    def part_from_forks(self, record: VariableRecord) -> None:
        """Let an away variable whose memory is given out have a slot that no forked process reads.

        What is written through its addresses goes there. If there can be no such slot, a forked process may see it.

        Raises:
            StoreFailed: Its last write has failed.
            MemoryFault, OSError: Its addresses cannot show it.
        """
        manager = self._manager
        readers = manager.fork_readers
        if record.state is not State.AWAY or record.slot is None or not readers.hold(record.slot):
            return
        readers.forget_gone()
        # Given out before, it may be written while it is copied. (That it could not be copied then was said.)
        if record.exports > 1 or not readers.hold(record.slot):
            return
        manager.settle(record)
        try:
            slot = self.copy(record)
        except (OSError, StoreError) as error:
            if not self._has_told:
                self._has_told = True
                _log.warning(
                    "a forked process may see what is written through an array or pointer to %s (%s, away): %s",
                    record.label or "a variable",
                    format_nbytes(record.nbytes),
                    error,
                )
            return
        self.move(record, slot)

    def copy(self, record: VariableRecord) -> Slot:
        """A new slot with the bytes that the store has of a variable after its last write; the caller frees it.

        Raises:
            StoreFull, StoreError: There is no room, or the store's file cannot be read in parts.
            OSError: The device failed.
        """
        manager, source = self._manager, record.slot
        assert isinstance(source, Slot), record
        if not self.open():
            raise StoreError("the store's file cannot be opened a second time (no /proc?)")
        # For the largest that may come to lie there, and all of the source: its reservation may have shrunk since.
        slot: Slot = manager.store.allocate(max(record.reservation.nbytes, source.nbytes))
        try:
            self._parts.begin(slot)
            self._parts.copy(source, slot)
        except BaseException:
            manager.store.free(slot)
            raise
        return slot

    def is_copy(self, slot: Slot, record: VariableRecord) -> bool:
        """Whether a slot has the bytes that the store has of a variable now. Raises OSError."""
        source = record.slot
        assert isinstance(source, Slot), record
        fits = record.nbytes <= min(slot.nbytes, source.nbytes)
        return fits and self.open() and self._parts.are_equal(source, slot, record.nbytes)

    def move(self, record: VariableRecord, slot: Slot) -> None:
        """Let an away variable have this copy of its slot, and its addresses show it, instead of the one that it has.

        Raises `MemoryFault`, OSError: as `AddressGuards.hide`. The copy is freed.
        """
        manager, held = self._manager, record.slot
        assert isinstance(held, Slot), record
        record.slot = slot
        try:
            manager.guards.hide(record)
        except BaseException:
            record.slot = held
            manager.store.free(slot)
            raise
        manager.fork_readers.free(held)

    def _settled(self, record: VariableRecord) -> Slot:
        """The slot of a variable that is away, or on its way in, whose last write has ended. Raises `RerunLost`."""
        if record.state is State.DISCARDED:  # no plan does that: nothing makes it again (`StepRecorder.build`)
            raise RerunLost(f"{record.label or 'a variable'} is read in slices, and was discarded")
        slot: Slot | None = record.slot
        assert slot is not None, record
        if record.state is State.AWAY:
            self._manager.settle(record)
        return slot


def _failed(act: str, record: VariableRecord, error: Exception) -> StoreFailed:
    return StoreFailed(
        f"cannot {act} a part of {record.label or 'a variable'} ({format_nbytes(record.nbytes)}): {error}. "
        "The step is void.",
        errno=getattr(error, "errno", None),
    )
