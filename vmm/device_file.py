"""The third rung of a device's store: variables that found no room in host memory, in a file.

A variable goes piece by piece through pinned staging buffers: a copy on a stream, and a file transfer on the
transfer engine's threads. Streams cannot wait for files, so where one must follow the other the host
waits; each such wait is counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vmm.device_store import DeviceSlot, Ranges, paired
from vmm.device_streams import DeviceEvent, DeviceStreams, WaitRule
from vmm.files import BLOCK_NBYTES, anonymous_memory
from vmm.host_blocks import HostBlocks
from vmm.store import FileStore, Slot
from vmm.store_speed import StoreSpeed

__all__ = ["DeviceFile"]

_NUM_BUFFERS = 4
"""Two each way, so that copy and file transfer overlap. Not tuned."""


class _Buffer:
    """Staging memory. `release` makes it free again, waiting as needed; None when it is free."""

    __slots__ = ("address", "release")

    def __init__(self, address: int) -> None:
        self.address = address
        self.release: Callable[[], None] | None = None


class _Piece:
    """A part of a transfer: `nbytes` from `offset` of its variable, in one buffer."""

    __slots__ = ("buffer", "event", "nbytes", "offset", "ticket")

    def __init__(self, buffer: _Buffer, offset: int, nbytes: int) -> None:
        self.buffer = buffer
        self.offset = offset
        self.nbytes = nbytes
        self.event: DeviceEvent | None = None  # behind its copy on a stream
        self.ticket: int | None = None  # of its file transfer


class _FileSlot:
    """An extent of the file, and the transfers on it."""

    __slots__ = ("read", "slot", "write")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.write: _Write | None = None
        self.read: _Read | None = None


class _Write:
    """A variable on its way out. Ops that take its chunks over wait for the copies, not for the file."""

    is_load = False

    def __init__(self, file: DeviceFile, ticket: int, nbytes: int) -> None:
        self._file = file
        self.ticket = ticket
        self.nbytes = nbytes
        self.pieces: list[_Piece] = []

    @property
    def event(self) -> DeviceEvent:
        """Behind its last copy."""
        event = self.pieces[-1].event
        assert event is not None
        return event

    def done(self) -> bool:
        """Never known without asking."""
        return False

    def order(self) -> None:
        """Let ops come after its copies."""
        streams = self._file.streams
        streams.wait(WaitRule.OP_AFTER_WRITE, streams.follow(), self.event)

    def wait(self) -> None:
        """Let the host wait until the file has it."""
        self._file.finish_write(self)


class _Read:
    """A variable on its way in."""

    is_load = True

    def __init__(
        self, file: DeviceFile, ticket: int, nbytes: int, ranges: Ranges, after: Sequence[DeviceEvent]
    ) -> None:
        self._file = file
        self.ticket = ticket
        self.nbytes = nbytes
        self.ranges = ranges
        self.after = tuple(after)
        self.pieces: list[_Piece] = []

    @property
    def event(self) -> DeviceEvent:
        """Behind its last copy; the host waits for the file first."""
        self._file.finish_read(self)
        event = self.pieces[-1].event
        assert event is not None
        return event

    def done(self) -> bool:
        """Never known without asking."""
        return False

    def order(self) -> None:
        """Let ops come after it. The host waits for the file, and then goes on."""
        streams = self._file.streams
        streams.wait(WaitRule.OP_AFTER_LOAD, streams.follow(), self.event)

    def wait(self) -> None:
        """Let the host wait until it is over."""
        self._file.streams.observe(WaitRule.HOST_AFTER_TRANSFER, self.event)


class DeviceFile:
    """Slots in a file, reached through staging memory. One thread at a time.

    Args:
        streams: The session's.
        directory: Where the file is.
        staging_nbytes: Pinned for the staging buffers.

    Raises:
        StoreUnavailable: The directory will not do.
        StoreFull: The disk has not even room for what the staging buffers hold.
        MemoryFault: The host cannot pin them.
    """

    def __init__(self, streams: DeviceStreams, directory: str | Path, *, staging_nbytes: int) -> None:
        self.streams = streams
        self._piece_nbytes = staging_nbytes // _NUM_BUFFERS // BLOCK_NBYTES * BLOCK_NBYTES
        if self._piece_nbytes == 0:
            raise ValueError(f"staging_nbytes={staging_nbytes}: at least {_NUM_BUFFERS * BLOCK_NBYTES}")
        self.num_host_waits = 0
        """How often the host waited for a file transfer."""
        self._outgoing: list[_Piece] = []  # copied out, not handed to the file yet
        self._slots_of: dict[int, Slot] = {}  # of outgoing pieces, by id
        self._store = FileStore(directory)
        try:
            self._store.reserve(staging_nbytes)  # a disk that is full shows now, not in mid-training
            self._blocks = HostBlocks(
                streams.calls, budget_nbytes=_NUM_BUFFERS * self._piece_nbytes, block_nbytes=self._piece_nbytes
            )
        except BaseException:
            self._store.close()
            raise
        runs = self._blocks.take(_NUM_BUFFERS) or ()
        start = [at for at, _ in self._blocks.segments(runs, _NUM_BUFFERS * self._piece_nbytes)]
        found = [at + k * self._piece_nbytes for at in start for k in range(_NUM_BUFFERS)]
        self._buffers = [_Buffer(address) for address in found[:_NUM_BUFFERS]]

    def __repr__(self) -> str:
        return f"<DeviceFile {self._store!r}, {self.num_host_waits} host waits>"

    @property
    def directory(self) -> Path:
        """Where the file is."""
        return self._store.directory

    @property
    def is_direct(self) -> bool:
        """Whether file transfers bypass the page cache."""
        return self._store.is_direct

    @property
    def store(self) -> FileStore:
        """The file."""
        return self._store

    def allocate(self, nbytes: int) -> _FileSlot:
        """An extent. Raises StoreFull."""
        return _FileSlot(self._store.allocate(nbytes))

    def free(self, slot: _FileSlot) -> None:
        """Give an extent back, after the transfers on it."""
        if slot.write is not None:
            self._hand_over(slot.write)
            for piece in slot.write.pieces:
                self._wait_for_file(piece)
        if slot.read is not None:
            self.finish_read(slot.read)
        self._store.free(slot.slot)

    def reserve(self, nbytes: int) -> None:
        """Make sure that so much more can be allocated. Raises StoreFull."""
        self._store.reserve(nbytes)

    def write(self, slot: DeviceSlot, ranges: Ranges, ticket: int) -> _Write:
        """Queue the copies out, behind what that stream waits for; the file's part begins as they end."""
        place, total = slot.in_file, sum(n for _, n in ranges)
        self._pump()
        write = place.write = _Write(self, ticket, total)
        streams = self.streams
        for offset, nbytes in self._parts(total):
            piece = _Piece(self._take_buffer(), offset, nbytes)
            for host, device, length in paired([(piece.buffer.address, nbytes)], _cut(ranges, offset, nbytes)):
                streams.calls.copy_to_host(host, device, length, streams.outward)
            piece.event = streams.record(streams.outward)
            write.pieces.append(piece)
            self._outgoing.append(piece)
            self._slots_of[id(piece)] = place.slot
            piece.buffer.release = lambda piece=piece: self._wait_for_file(piece)
        return write

    def read(self, slot: DeviceSlot, ranges: Ranges, after: Sequence[DeviceEvent], ticket: int) -> _Read:
        """Begin to read from the file; the copies in come after `after`, when somebody needs them, or a buffer."""
        place, total = slot.in_file, sum(n for _, n in ranges)
        self._pump()
        self._hand_over(place.write)
        before = [piece.ticket for piece in place.write.pieces]
        read = place.read = _Read(self, ticket, total, ranges, after)
        for offset, nbytes in self._parts(total):
            piece = _Piece(self._take_buffer(), offset, nbytes)
            segments = [(piece.buffer.address, _round_up(nbytes))]
            piece.ticket = self._submit(place.slot, segments, offset, before)
            read.pieces.append(piece)
            piece.buffer.release = lambda piece=piece: self._copy_in(read, piece, frees=True)
        return read

    def finish_write(self, write: _Write) -> None:
        """Let the host wait until the file has all of it. Raises OSError."""
        self._hand_over(write)
        for piece in write.pieces:
            self._wait_for_file(piece)

    def finish_read(self, read: _Read) -> None:
        """Let the host wait for the file, and queue the copies in. Raises OSError."""
        for piece in read.pieces:
            self._copy_in(read, piece)

    def content(self, slot: DeviceSlot) -> bytes:
        """The bytes of a slot, once its write is over."""
        self.finish_write(slot.in_file.write)
        parts = []
        left, offset = slot.nbytes, slot.in_file.slot.offset
        while left:
            with anonymous_memory(self._piece_nbytes) as (address, nbytes):
                ticket = self._store.engine.submit_read(
                    self._store.descriptor, offset, [(address, min(nbytes, _round_up(left)))]
                )
                self._store.engine.wait(ticket)
                parts.append(ctypes.string_at(address, min(nbytes, left)))
            offset += len(parts[-1])
            left -= len(parts[-1])
        return b"".join(parts)

    def measure(self) -> StoreSpeed:
        """The speed of the file, which the copies to and from staging memory hide behind."""
        return self._store.measure()

    def wait_all(self) -> None:
        """Let every transfer that has begun go on to its end."""
        for piece in list(self._outgoing):
            self._hand_piece_over(piece)
        self._store.wait_all()

    def close(self) -> None:
        """Give the file and the staging memory back. Idempotent."""
        self._store.close()
        self._blocks.close()

    def _submit(self, slot: Slot, segments: Ranges, offset: int, after: Sequence[int]) -> int:
        """Read a piece of a slot into staging memory, behind the writes of the slot."""
        is_buffered = not self._store.is_direct
        return self._store.engine.submit_read(
            self._store.descriptor, slot.offset + offset, segments, after, drop_cache=is_buffered
        )

    def _hand_over(self, write: _Write) -> None:
        for piece in write.pieces:
            self._hand_piece_over(piece)

    def _hand_piece_over(self, piece: _Piece) -> None:
        """Let the file have a piece that was copied out; the host waits for the copy."""
        if piece.ticket is not None:
            return
        assert piece.event is not None
        self.streams.observe(WaitRule.FILE_AFTER_COPY, piece.event)
        slot = self._slots_of.pop(id(piece))
        self._outgoing.remove(piece)
        piece.ticket = self._store.engine.submit_write(
            self._store.descriptor,
            slot.offset + piece.offset,
            [(piece.buffer.address, _round_up(piece.nbytes))],
            drop_cache=not self._store.is_direct,
        )

    def _pump(self) -> None:
        """Let the file have what has been copied out by now. The host does not wait."""
        for piece in list(self._outgoing):
            assert piece.event is not None
            if not self.streams.has_happened(piece.event):
                return
            self._hand_piece_over(piece)

    def _wait_for_file(self, piece: _Piece) -> None:
        self._hand_piece_over(piece)
        assert piece.ticket is not None
        if not self._store.engine.done(piece.ticket):
            self.num_host_waits += 1
        self._store.engine.wait(piece.ticket)

    def _copy_in(self, read: _Read, piece: _Piece, *, frees: bool = False) -> None:
        """Queue a piece's copy to the device, once the file has delivered it."""
        streams = self.streams
        if piece.event is None:
            self._wait_for_read(piece)
            for event in read.after:
                streams.wait(WaitRule.LOAD_AFTER_USE, streams.inward, event)
            read.after = ()
            for host, device, length in paired(
                [(piece.buffer.address, piece.nbytes)], _cut(read.ranges, piece.offset, piece.nbytes)
            ):
                streams.calls.copy_to_device(device, host, length, streams.inward)
            piece.event = streams.record(streams.inward)
        if frees:
            streams.observe(WaitRule.STAGING_AFTER_COPY, piece.event)

    def _wait_for_read(self, piece: _Piece) -> None:
        assert piece.ticket is not None
        if not self._store.engine.done(piece.ticket):
            self.num_host_waits += 1
        self._store.engine.wait(piece.ticket)

    def _take_buffer(self) -> _Buffer:
        """A free buffer: the one whose turn it is, whatever that takes."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        if buffer.release is not None:
            release, buffer.release = buffer.release, None
            release()
        return buffer

    def _parts(self, nbytes: int) -> Iterator[tuple[int, int]]:
        for offset in range(0, nbytes, self._piece_nbytes):
            yield offset, min(self._piece_nbytes, nbytes - offset)


def _cut(ranges: Ranges, offset: int, nbytes: int) -> list[tuple[int, int]]:
    """The part `[offset, offset + nbytes)` of some memory."""
    found = []
    for address, length in ranges:
        skipped = min(offset, length)
        offset -= skipped
        taken = min(length - skipped, nbytes)
        if taken:
            found.append((address + skipped, taken))
            nbytes -= taken
    return found


def _round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
