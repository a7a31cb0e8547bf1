"""Where a device's evicted bytes live: pinned host memory first, and a file for what that cannot hold.

Transfers to and from host memory are queued on streams and ordered by events; the host never waits for
them (see `device_streams`). A slot that found no room there lives in the file, and its transfers go
through pinned staging memory: those may make the host wait, which is counted (`num_host_waits`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from vmm.cuda_calls import CudaFault
from vmm.device_streams import DeviceEvent, DeviceStreams, WaitRule, events_of
from vmm.host_blocks import HostBlocks
from vmm.nvtx_ranges import marked
from vmm.ranges import Run
from vmm.sizes import format_exactly, format_nbytes
from vmm.store import StoreFull
from vmm.store_speed import StoreSpeed
from vmm.transfers import Direction, TransferRecord, TransferStatistics

__all__ = ["DeviceSlot", "DeviceStore", "DeviceTransfer", "FilePart"]

_PROBE_NBYTES = 64 << 20
_NUM_PROBES = 3
_UNKNOWN = StoreSpeed(
    write_bytes_per_s=1e9, read_bytes_per_s=1e9, write_together_bytes_per_s=5e8, read_together_bytes_per_s=5e8
)
"""For a store without any room: nothing will be evicted."""
Ranges = Sequence[tuple[int, int]]
"""Memory as `(address, nbytes)` pairs, in the order of the bytes."""


class DeviceTransfer:
    """A copy between device and host memory. `order` is for ops, `wait` for the host."""

    __slots__ = ("_streams", "event", "is_load", "nbytes", "ticket")

    def __init__(
        self,
        streams: DeviceStreams,
        event: DeviceEvent,
        *,
        ticket: int,
        nbytes: int,
        is_load: bool,
    ) -> None:
        self._streams = streams
        self.event = event
        self.ticket = ticket
        self.nbytes = nbytes
        self.is_load = is_load

    def __repr__(self) -> str:
        return f"<DeviceTransfer {self.ticket} of {self.nbytes} bytes, {'in' if self.is_load else 'out'}>"

    def done(self) -> bool:
        """Whether the host has seen its end already. Asks nobody."""
        return self.event.is_observed

    def order(self) -> None:
        """Let all ops from now on come after it. The host goes on."""
        rule = WaitRule.OP_AFTER_LOAD if self.is_load else WaitRule.OP_AFTER_WRITE
        self._streams.wait(rule, self._streams.follow(), self.event)

    def wait(self) -> None:
        """Let the host wait until it is over."""
        self._streams.observe(WaitRule.HOST_AFTER_TRANSFER, self.event)


class DeviceSlot:
    """A place for one variable's bytes. Made and freed by its `DeviceStore` alone.

    Attributes:
        nbytes: Bytes asked for.
        runs: Its host blocks; empty if it lives in the file.
        in_file: What the file's part keeps of it, if it lives there.
    """

    __slots__ = ("in_file", "is_freed", "last_read", "last_write", "nbytes", "predecessors", "runs")

    def __init__(self, nbytes: int, runs: tuple[Run, ...], predecessors: tuple[DeviceEvent, ...]) -> None:
        self.nbytes = nbytes
        self.runs = runs
        self.predecessors = predecessors  # loads out of its blocks from before they were its
        self.last_write: Any = None
        self.last_read: Any = None
        self.in_file: Any = None
        self.is_freed = False

    def __repr__(self) -> str:
        where = "in the file" if self.in_file is not None else f"in {sum(r.length for r in self.runs)} host blocks"
        return f"<DeviceSlot of {self.nbytes} bytes {where}{', freed' if self.is_freed else ''}>"


class FilePart(Protocol):
    """What keeps the slots that found no room in host memory."""

    @property
    def directory(self) -> Path: ...
    @property
    def is_direct(self) -> bool: ...
    def allocate(self, nbytes: int) -> Any: ...
    def free(self, slot: Any) -> None: ...
    def reserve(self, nbytes: int) -> None: ...
    def write(self, slot: DeviceSlot, ranges: Ranges, ticket: int) -> Any: ...
    def read(self, slot: DeviceSlot, ranges: Ranges, after: Sequence[DeviceEvent], ticket: int) -> Any: ...
    def content(self, slot: DeviceSlot) -> bytes: ...
    def measure(self) -> StoreSpeed: ...
    def wait_all(self) -> None: ...
    def close(self) -> None: ...


class DeviceStore:
    """Slots in pinned host memory and, where there is a `file`, in a file.

    Calls are made by one thread at a time. Reads and writes are ordered after the ops that were issued
    before them, and a slot's read after its last write; transfers of different slots that share chunks need `after`.

    Args:
        streams: The session's.
        blocks: The host memory. Closed with the store.
        file: Where the rest goes. Closed with the store.
    """

    def __init__(self, streams: DeviceStreams, blocks: HostBlocks, *, file: FilePart | None = None) -> None:
        self._streams = streams
        self._blocks = blocks
        self._file = file
        self._num_slots = 0
        self._leaving: list[DeviceSlot] = []  # freed, while a load out of their blocks may be under way
        self._tickets = itertools.count(1)
        self._moved: dict[Direction, list[int]] = {"write": [0, 0], "read": [0, 0]}
        self._speed: StoreSpeed | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self._num_slots} slots"
        return f"<DeviceStore {state}, {self._blocks!r}, then {self._file!r}>"

    @property
    def directory(self) -> Path | None:
        """Where the file is, if there is one."""
        return self._file.directory if self._file is not None else None

    @property
    def file(self) -> Any:
        """What is behind the host memory; None: nothing."""
        return self._file

    @property
    def is_direct(self) -> bool:
        """Whether the file's transfers bypass the page cache."""
        return self._file is not None and self._file.is_direct

    @property
    def num_slots(self) -> int:
        """Slots allocated and not freed."""
        return self._num_slots

    @property
    def used_host_nbytes(self) -> int:
        """Host memory in slots, freed ones with a load under way included."""
        return (self._blocks.num_blocks - self._blocks.num_free) * self._blocks.block_nbytes

    def allocate(self, nbytes: int) -> DeviceSlot:
        """A slot for `nbytes` bytes: in host memory if there is room, else in the file.

        Raises:
            StoreFull: There is room in neither. Nothing was changed.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes}: must be positive")
        num_blocks = self._num_blocks(nbytes)
        predecessors: list[DeviceEvent] = []
        while self._blocks.num_free < num_blocks and self._leaving:
            predecessors += self._reclaim()
        runs = self._blocks.take(num_blocks)
        slot = DeviceSlot(nbytes, runs or (), events_of(predecessors))
        if runs is None:
            slot.in_file = self._in_file(nbytes)
        self._num_slots += 1
        return slot

    def free(self, slot: DeviceSlot) -> None:
        """Give a slot back. Loads from it may be under way."""
        self._check(slot)
        slot.is_freed = True
        self._num_slots -= 1
        if slot.in_file is not None:
            assert self._file is not None
            self._file.free(slot.in_file)
        else:
            self._leaving.append(slot)

    def reserve(self, nbytes: int) -> None:
        """Make sure now that `nbytes` more bytes can be allocated. Raises `StoreFull`."""
        free = (self._blocks.num_free + sum(self._num_blocks(it.nbytes) for it in self._leaving)) * (
            self._blocks.block_nbytes
        )
        if nbytes <= free:
            return
        if self._file is None:
            raise self._full(nbytes)
        self._file.reserve(nbytes - free)

    def segments(self, segments: Ranges) -> Ranges:
        """Device memory for many transfers: nothing to prepare."""
        return segments

    def write(self, slot: DeviceSlot, segments: Ranges, after: Sequence[Any] = ()) -> Any:  # noqa: ARG002
        """Begin to copy device memory out to a slot, after the ops issued so far. The host goes on.

        The slot may be larger than what `segments` has: its first bytes are written. Nobody asks for `after`: writes
        are in order among each other, and behind all ops.
        """
        nbytes = self._checked_nbytes(slot, segments)
        ticket = next(self._tickets)
        self._count("write", nbytes)
        streams = self._streams
        streams.wait(WaitRule.WRITE_AFTER_USE, streams.outward, streams.fence())
        if slot.in_file is not None:
            assert self._file is not None
            slot.last_write = self._file.write(slot, segments, ticket)
            return slot.last_write
        for event in slot.predecessors:
            streams.wait(WaitRule.WRITE_AFTER_READ_OF_BLOCKS, streams.outward, event)
        slot.predecessors = ()
        with marked("evict"), self._all_or_nothing():
            for host, device, length in self._pairs(slot, segments, nbytes):
                streams.calls.copy_to_host(host, device, length, streams.outward)
            event = streams.record(streams.outward)
        slot.last_write = DeviceTransfer(streams, event, ticket=ticket, nbytes=nbytes, is_load=False)
        return slot.last_write

    def read(self, slot: DeviceSlot, segments: Ranges, after: Sequence[Any] = ()) -> Any:
        """Begin to copy a slot's bytes to device memory, after its last write and the ops issued so far.

        Args:
            slot: From where.
            segments: `(address, nbytes)` pairs, for as many of the slot's first bytes as they have.
            after: Transfers of those who held the memory before.

        Raises:
            ValueError: Nothing was ever written to the slot.
        """
        nbytes = self._checked_nbytes(slot, segments)
        if slot.last_write is None:
            raise ValueError(f"{slot!r}: read before anything was written")
        ticket = next(self._tickets)
        self._count("read", nbytes)
        streams = self._streams
        holders = events_of(it.event for it in after if it is not slot.last_write)
        fence = streams.fence()
        if slot.in_file is not None:
            assert self._file is not None
            slot.last_read = self._file.read(slot, segments, (fence, *holders), ticket)
            return slot.last_read
        streams.wait(WaitRule.LOAD_AFTER_USE, streams.inward, fence)
        streams.wait(WaitRule.LOAD_AFTER_OWN_WRITE, streams.inward, slot.last_write.event)
        for event in holders:
            streams.wait(WaitRule.LOAD_AFTER_HOLDER, streams.inward, event)
        with marked("load"), self._all_or_nothing():
            for host, device, length in self._pairs(slot, segments, nbytes):
                streams.calls.copy_to_device(device, host, length, streams.inward)
            event = streams.record(streams.inward)
        slot.last_read = DeviceTransfer(streams, event, ticket=ticket, nbytes=nbytes, is_load=True)
        return slot.last_read

    def host_segments(self, slot: DeviceSlot) -> Ranges:
        """Where a slot's bytes are in host memory, for who takes them over when the session ends."""
        return self._blocks.segments(slot.runs, slot.nbytes)

    def file_bytes(self, slot: DeviceSlot) -> bytes:
        """The bytes of a slot that lives in the file, once its write is over."""
        assert self._file is not None
        return self._file.content(slot)

    def wait_all(self) -> None:
        """Let the host wait until no transfer is under way."""
        if self._file is not None:
            self._file.wait_all()
        self._streams.observe_all()

    def statistics(self, direction: Direction) -> TransferStatistics:
        """Totals of one direction. How long the link was busy is not known: nobody waits to find out."""
        num_jobs, nbytes = self._moved[direction]
        return TransferStatistics(num_jobs=num_jobs, nbytes=nbytes, num_calls=0, num_queued=0, busy_ns=0, call_ns=0)

    def take_records(self) -> tuple[TransferRecord, ...]:
        """No times are known of single transfers."""
        return ()

    def measure(self, buffer: tuple[int, int] | None = None) -> StoreSpeed:
        """The speed of the link to host memory, each way alone and both at once.

        Args:
            buffer: `(address, nbytes)` of device memory that nothing uses, to measure with: its bytes are lost.
                By default the answer of last time.
        """
        if buffer is None:
            assert self._speed is not None
            return self._speed
        address, nbytes = buffer[0], min(buffer[1], _PROBE_NBYTES)
        runs = self._blocks.take(min(self._num_blocks(nbytes), self._blocks.num_free)) or ()
        if not runs:  # all goes to the file
            self._speed = self._file.measure() if self._file is not None else _UNKNOWN
            return self._speed
        host = self._blocks.segments(runs, nbytes)
        try:
            self._streams.observe_all()
            rates = [self._rate(host, address, ways) for ways in (("write",), ("read",), ("write", "read"))]
        finally:
            self._streams.observe_all()
            self._blocks.give(runs)
        (write,), (read,), (write_together, read_together) = rates
        self._speed = StoreSpeed(
            write_bytes_per_s=write,
            read_bytes_per_s=read,
            write_together_bytes_per_s=write_together,
            read_together_bytes_per_s=read_together,
        )
        return self._speed

    def close(self) -> None:
        """Wait for what is under way and give the host memory and the file back. Idempotent."""
        if self._is_closed:
            return
        self.wait_all()
        self._is_closed = True
        self._leaving.clear()
        self._blocks.close()
        if self._file is not None:
            self._file.close()

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """If a call fails, the copies queued before it end before anybody learns of it."""
        try:
            yield
        except CudaFault:
            self._streams.drain()
            raise

    def _rate(self, host: Ranges, address: int, ways: tuple[Direction, ...]) -> list[float]:
        """Bytes per second of each way, all of them busy at once, the best of a few goes.

        Both at once use halves of the memory, so that no byte is read and written.
        """
        calls, streams = self._streams.calls, self._streams
        best = 0.0
        for _ in range(_NUM_PROBES):
            started_ns = time.monotonic_ns()
            moved = 0
            place = address
            for at, length in host:
                share = length // len(ways)
                if "write" in ways:
                    calls.copy_to_host(at, place, share, streams.outward)
                if "read" in ways:
                    calls.copy_to_device(place + length - share, at + length - share, share, streams.inward)
                moved += share
                place += length
            streams.observe_all()
            best = max(best, moved * 1e9 / max(time.monotonic_ns() - started_ns, 1))
        return [best] * len(ways)

    def _reclaim(self) -> list[DeviceEvent]:
        """Take the blocks of the slot freed longest ago; what their next user must wait for."""
        slot = self._leaving.pop(0)
        self._blocks.give(slot.runs)
        events = list(slot.predecessors)
        if slot.last_read is not None:
            events.append(slot.last_read.event)
        return events

    def _in_file(self, nbytes: int) -> Any:
        if self._file is None:
            raise self._full(nbytes)
        return self._file.allocate(nbytes)

    def _full(self, nbytes: int) -> StoreFull:
        free = self._blocks.num_free * self._blocks.block_nbytes
        return StoreFull(
            f"evicted variables need {format_exactly(nbytes)} more host memory; {format_exactly(free)} of the "
            f"{format_nbytes(self._blocks.num_blocks * self._blocks.block_nbytes)} that are pinned are free, and there "
            "is no file.\n"
            "  Options: a larger host_budget; a store directory, for the rest; a larger budget, which evicts less.",
            needed_nbytes=nbytes,
            free_nbytes=free,
        )

    def _pairs(self, slot: DeviceSlot, segments: Ranges, nbytes: int) -> Iterator[tuple[int, int, int]]:
        return paired(self._blocks.segments(slot.runs, nbytes), segments)

    def _checked_nbytes(self, slot: DeviceSlot, segments: Ranges) -> int:
        """What a transfer moves: at most what the slot holds."""
        self._check(slot)
        nbytes = sum(n for _, n in segments)
        if not 0 < nbytes <= slot.nbytes:
            raise ValueError(f"{slot!r}: a transfer of {nbytes} bytes")
        return nbytes

    def _count(self, direction: Direction, nbytes: int) -> None:
        self._moved[direction][0] += 1
        self._moved[direction][1] += nbytes

    def _num_blocks(self, nbytes: int) -> int:
        return -(-nbytes // self._blocks.block_nbytes)

    def _check(self, slot: DeviceSlot) -> None:
        if slot.is_freed or self._is_closed:
            raise ValueError(f"{slot!r} is not a slot of this store")


def paired(first: Ranges, second: Ranges) -> Iterator[tuple[int, int, int]]:
    """Two lists of ranges with the same bytes, cut at the ends of both: `(address, other address, nbytes)`.

    Raises:
        ValueError: One of them is longer than the other.
    """
    ones, others = list(first), list(second)
    if sum(n for _, n in ones) != sum(n for _, n in others):
        raise ValueError(f"{sum(n for _, n in ones)} bytes against {sum(n for _, n in others)}")
    while ones:
        (address, nbytes), (other, other_nbytes) = ones.pop(0), others.pop(0)
        length = min(nbytes, other_nbytes)
        yield address, other, length
        if nbytes > length:
            ones.insert(0, (address + length, nbytes - length))
        if other_nbytes > length:
            others.insert(0, (other + length, other_nbytes - length))
