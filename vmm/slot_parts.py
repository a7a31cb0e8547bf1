"""Reads and writes any bytes of a store's slots, not only whole ones: for ops that run in parts.

Whole blocks go past the page cache, as all transfers of the store. A part's bytes may begin and end anywhere, though:
the rest goes through a second, buffered descriptor of the store's file. What was moved so leaves the page cache then,
what was written as soon as it is on the device.
What we rely on (ext4, xfs and btrfs on Linux): a direct read first writes back the dirty cached pages of its range, a
direct write drops them, and a file mapping shows the same pages. So whoever reads the slot later, by whichever way,
finds these bytes (`tests/vmm/test_faults.py`, `tests/vmm/test_slot_parts.py`).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence

from vmm.files import BLOCK_NBYTES, anonymous_memory
from vmm.store import FileStore, Slot
from vmm.transfers import Segments

__all__ = ["Piece", "SlotParts"]

Piece = tuple[int, int]
"""`(offset, nbytes)` within a slot. Pieces are in ascending order, and apart."""
_Placed = tuple[int, int, int]
"""`(offset in the file, address, nbytes)`."""

_PIECE_NBYTES = 1 << 20
_SYNC_ALL = 7
"""SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER (linux/fs.h)."""


class SlotParts:
    """Moves parts of a store's slots to and from memory. Calls block, without the GIL; one thread at a time.

    Both wait for the slot's last write. For a write the caller waits for the slot's other transfers first; in neither
    does it begin any meanwhile.

    Raises:
        OSError: The store's file cannot be opened a second time (no /proc).
    """

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._descriptor = os.open(f"/proc/self/fd/{store.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._memcmp = ctypes.CDLL(None).memcmp
        self._memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
        self._sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

    def __repr__(self) -> str:
        return f"<SlotParts of {self._store!r}>"

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def begin(self, slot: Slot) -> None:
        """Make a new slot one that can be read. Until they are written, its bytes are whatever they were.

        Raises:
            OSError: The device failed.
        """
        with anonymous_memory(BLOCK_NBYTES) as (address, nbytes):
            self._store.write(slot, [(address, nbytes)]).wait()

    def read(self, slot: Slot, pieces: Sequence[Piece], address: int) -> None:
        """Read pieces of a slot, one after the other, to memory from `address` on.

        Raises:
            OSError: The device failed, or the file is shorter than that.
        """
        self._store.wait_written(slot)
        direct, cached = self._placed(slot, pieces, address)
        tickets = [
            self._store.engine.submit_read(self._store.descriptor, place, Segments([(at, nbytes)]))
            for place, at, nbytes in direct
        ]
        try:
            for span in _spans(cached):
                self._read_span(span)
            self._drop(cached)
        finally:
            self._wait(tickets)

    def write(self, slot: Slot, pieces: Sequence[Piece], address: int) -> None:
        """Write memory from `address` on to pieces of a slot, one after the other. They are on the device afterwards.

        Raises:
            OSError: The device failed. Some of the pieces may have been written.
        """
        self._store.wait_written(slot)
        direct, cached = self._placed(slot, pieces, address)
        tickets = [
            self._store.engine.submit_write(self._store.descriptor, place, Segments([(at, nbytes)]))
            for place, at, nbytes in direct
        ]
        try:
            for place, at, nbytes in cached:
                self._write(place, (ctypes.c_char * nbytes).from_address(at))
            self._sync(cached)
            self._drop(cached)
        finally:
            self._wait(tickets)

    def copy(self, source: Slot, target: Slot) -> None:
        """Copy all bytes of a slot to another of at least its size. Raises OSError, and `target` is of no use."""
        with anonymous_memory(_PIECE_NBYTES) as (address, _):
            for piece in _pieces_of(source.capacity_nbytes):
                self.read(source, [piece], address)
                self.write(target, [piece], address)

    def are_equal(self, one: Slot, other: Slot, nbytes: int) -> bool:
        """Whether two slots have the same first `nbytes` bytes, rounded up to whole blocks. Raises OSError."""
        with anonymous_memory(2 * _PIECE_NBYTES) as (address, _):
            for piece in _pieces_of(-(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES):
                self.read(one, [piece], address)
                self.read(other, [piece], address + _PIECE_NBYTES)
                if self._memcmp(address, address + _PIECE_NBYTES, piece[1]):
                    return False
        return True

    def _read_span(self, span: Sequence[_Placed]) -> None:
        """Read pieces that lie close together at once, with what is between them: there may be thousands of them."""
        if len(span) == 1:
            place, address, nbytes = span[0]
            self._read(place, (ctypes.c_char * nbytes).from_address(address))
            return
        start, stop = span[0][0], span[-1][0] + span[-1][2]
        with anonymous_memory(stop - start) as (between, _):
            self._read(start, (ctypes.c_char * (stop - start)).from_address(between))
            between -= start
            move = ctypes.memmove
            for place, address, nbytes in span:
                move(address, between + place, nbytes)

    def _read(self, place: int, memory: ctypes.Array[ctypes.c_char]) -> None:
        view, done = memoryview(memory).cast("B"), 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], place + done)
            if count == 0:
                raise OSError(errno.EIO, f"the store's file ends at {place + done}")
            done += count

    def _write(self, place: int, memory: ctypes.Array[ctypes.c_char]) -> None:
        view, done = memoryview(memory).cast("B"), 0
        while done < len(view):
            done += os.pwritev(self._descriptor, [view[done:]], place + done)

    def _placed(self, slot: Slot, pieces: Sequence[Piece], address: int) -> tuple[list[_Placed], list[_Placed]]:
        """Pieces with their memory: those of whole blocks, which go past the page cache, and the others."""
        direct: list[_Placed] = []
        cached: list[_Placed] = []
        is_direct = self._store.is_direct
        for offset, nbytes in pieces:
            is_whole = is_direct and not (offset | nbytes | address) % BLOCK_NBYTES
            (direct if is_whole else cached).append((slot.offset + offset, address, nbytes))
            address += nbytes
        return direct, cached

    def _wait(self, tickets: Sequence[int]) -> None:
        """Wait for all, whatever fails: their memory must stay until then."""
        failure: OSError | None = None
        for ticket in tickets:
            try:
                self._store.engine.wait(ticket)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    def _sync(self, placed: Sequence[_Placed]) -> None:
        if not placed:
            return
        start, stop = placed[0][0], placed[-1][0] + placed[-1][2]
        while self._sync_file_range(self._descriptor, start, stop - start, _SYNC_ALL):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def _drop(self, placed: Sequence[_Placed]) -> None:
        if placed:
            start, stop = placed[0][0], placed[-1][0] + placed[-1][2]
            os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


def _spans(placed: Sequence[_Placed]) -> Iterator[Sequence[_Placed]]:
    """Pieces that are read at once: less than a block apart, and at most `_PIECE_NBYTES` in all."""
    first = 0
    for index in range(1, len(placed) + 1):
        if index < len(placed):
            place, _, nbytes = placed[index]
            before, _, before_nbytes = placed[index - 1]
            is_near = place - (before + before_nbytes) < BLOCK_NBYTES
            if is_near and place + nbytes - placed[first][0] <= _PIECE_NBYTES:
                continue
        yield placed[first:index]
        first = index


def _pieces_of(nbytes: int) -> Iterator[Piece]:
    return ((start, min(_PIECE_NBYTES, nbytes - start)) for start in range(0, nbytes, _PIECE_NBYTES))
