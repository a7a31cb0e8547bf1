"""Still moves: of what other threads write while bytes are moved nothing is lost."""

from __future__ import annotations

import ctypes
import errno
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from vmm.addresses import AddressSpace, Reservation
from vmm.driver import MemoryFault
from vmm.faults import FaultTable
from vmm.posix import PosixDriver
from vmm.store import FileStore, Slot
from vmm.syscalls import MmapCall
from vmm.transfers import Direction, Job, TransferError

CHUNK = 64 << 10
NBYTES = 3 * CHUNK
IN_PIECES = ((1, 1), (4, 2))


class Moved:
    """A variable of three chunks that goes to the store and comes back, still."""

    def __init__(self, directory: Path) -> None:
        self.driver = PosixDriver(8, CHUNK, arena_nbytes=1 << 30)
        self.space = AddressSpace(self.driver)
        self.store = FileStore(directory, allow_memory=True)
        self.table = FaultTable(self.driver.arena, self.store.descriptor, self.store.engine.finished_ring)
        self.reservation: Reservation = self.space.reserve(NBYTES)
        self.space.map(self.reservation, IN_PIECES)
        self.slot: Slot = self.store.allocate(NBYTES)

    def _move(self, direction: Direction, calls: Sequence[MmapCall] | None = None) -> None:
        """As the residency manager does it; with `calls`, these instead of those that the driver would make."""
        view = self.driver.view_address
        segments = [(view + first * CHUNK, count * CHUNK) for first, count in IN_PIECES]

        def make(job: Job) -> int:
            tickets: list[int] = []

            def still(own: Sequence[MmapCall]) -> None:
                span = self.reservation.address, NBYTES
                tickets.append(self.table.move(span, self.store.engine, job, own if calls is None else calls))

            if direction == "write":
                descriptor = self.store.descriptor
                self.space.map_file(self.reservation, descriptor, self.slot.offset, NBYTES, still=still)
            else:
                self.space.map(self.reservation, IN_PIECES, still=still)
            return tickets[0]

        self.store.move(direction, self.slot, segments, make).wait()

    def leave(self, calls: Sequence[MmapCall] | None = None) -> None:
        self._move("write", calls)

    def arrive(self, calls: Sequence[MmapCall] | None = None) -> None:
        self._move("read", calls)

    @property
    def contents(self) -> bytes:
        return ctypes.string_at(self.reservation.address, NBYTES)

    def close(self) -> None:
        self.table.close()
        self.store.close()
        self.driver.close()


@pytest.fixture
def moved(tmp_path: Path) -> Iterator[Moved]:
    it = Moved(tmp_path)
    yield it
    it.close()


def test_bytes_go_to_the_file_and_come_back(moved: Moved) -> None:
    ctypes.memset(moved.reservation.address, 7, NBYTES)
    moved.leave()
    assert moved.reservation.is_file
    assert moved.contents == b"\x07" * NBYTES
    ctypes.memset(moved.reservation.address + CHUNK, 8, CHUNK)  # into the file
    ctypes.memset(moved.driver.view_address, 1, 8 * CHUNK)
    moved.arrive()
    assert not moved.reservation.is_file
    assert moved.contents == b"\x07" * CHUNK + b"\x08" * CHUNK + b"\x07" * CHUNK
    assert ctypes.string_at(moved.driver.view_address + 4 * CHUNK, 1) == b"\x08"
    assert moved.table.num_guards == 0


@pytest.mark.parametrize("delay_ns", [0, 1_000_000])
def test_what_another_thread_writes_meanwhile_is_kept(moved: Moved, delay_ns: int) -> None:
    """Its calls need no GIL, as those of C code: it writes while bytes are under way, and must wait."""
    moved.store.engine.inject_faults(delay_ns=delay_ns)
    stop, lost = threading.Event(), []

    def write() -> None:
        place = moved.reservation.address
        last = bytes(NBYTES)
        for number in itertools.count(1):
            if ctypes.string_at(place, NBYTES) != last:
                lost.append(number)
            if stop.is_set() or lost:
                return
            last = bytes([number % 251]) * NBYTES
            ctypes.memset(place, number % 251, NBYTES)

    ctypes.memset(moved.reservation.address, 0, NBYTES)
    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(100):
        moved.leave()
        time.sleep(0)
        moved.arrive()
        time.sleep(0)
    stop.set()
    thread.join()
    assert not lost


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_transfer_that_fails_leaves_all_as_it_was(moved: Moved, direction: Direction) -> None:
    ctypes.memset(moved.reservation.address, 3, NBYTES)
    if direction == "read":
        moved.leave()
    moved.store.engine.inject_faults(fail_call=1, error=errno.EIO)
    with pytest.raises(TransferError) as caught:
        moved.leave() if direction == "write" else moved.arrive()
    assert caught.value.errno == errno.EIO
    assert moved.reservation.is_file == (direction == "read")
    ctypes.memset(moved.reservation.address, 4, CHUNK)  # writable again
    assert moved.contents == b"\x04" * CHUNK + b"\x03" * (2 * CHUNK)
    moved.leave() if direction == "write" else moved.arrive()  # once more
    assert moved.contents == b"\x04" * CHUNK + b"\x03" * (2 * CHUNK)
    assert moved.table.num_guards == 0


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_mapping_that_fails_leaves_all_as_it_was(moved: Moved, direction: Direction) -> None:
    ctypes.memset(moved.reservation.address, 3, NBYTES)
    if direction == "read":
        moved.leave()
    # The first replaces what is shown, the second has no file.
    good = MmapCall(moved.reservation.address, CHUNK, 3, 0x32, -1, 0)  # MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS
    bad = MmapCall(moved.reservation.address, CHUNK, 3, 0x11, -1, 0)  # MAP_SHARED | MAP_FIXED
    with pytest.raises(MemoryFault, match="given out"):
        (moved.leave if direction == "write" else moved.arrive)([good, bad])
    assert moved.reservation.is_file == (direction == "read")
    assert moved.contents == b"\x03" * NBYTES
    ctypes.memset(moved.reservation.address, 4, NBYTES)
    moved.leave() if direction == "write" else moved.arrive()
    assert moved.contents == b"\x04" * NBYTES


def test_a_transfer_that_cannot_begin_says_why(moved: Moved) -> None:
    moved.store.engine.close()
    ctypes.memset(moved.reservation.address, 3, NBYTES)
    with pytest.raises(RuntimeError, match="closed"):
        moved.leave()
    ctypes.memset(moved.reservation.address, 4, NBYTES)
    assert moved.contents == b"\x04" * NBYTES


def test_a_read_of_what_was_never_written_well_is_refused(moved: Moved) -> None:
    moved.store.engine.inject_faults(fail_call=1)
    with pytest.raises(TransferError):
        moved.leave()
    with pytest.raises(TransferError):
        moved.store.move("read", moved.slot, [(moved.driver.view_address, NBYTES)], lambda _: 1)
