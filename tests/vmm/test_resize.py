"""A pool that gets shorter and longer while it is in use."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vmm.test_posix import run_python
from vmm import machine
from vmm.driver import MemoryFault
from vmm.machine import MemoryRoom
from vmm.posix import PosixDriver, Syscalls

CHUNK = 64 << 10


@pytest.fixture
def driver() -> Iterator[PosixDriver]:
    """Eight chunks, of which there may be up to 64."""
    with PosixDriver(8, CHUNK, max_chunks=64) as made:
        yield made


def file_nbytes(driver: PosixDriver) -> tuple[int, int]:
    """Length of the pool's file, and of its pages."""
    status = os.fstat(driver._file.descriptor)
    return status.st_size, status.st_blocks * 512


def poke(address: int, value: int) -> None:
    ctypes.c_uint8.from_address(address).value = value


def peek(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


def view_of(driver: PosixDriver, chunk: int) -> int:
    return driver.view_address + chunk * CHUNK


def test_shorter_gives_the_memory_back_and_longer_takes_it(driver: PosixDriver) -> None:
    address = driver.reserve(2)
    driver.map(address, [(2, 2)])
    poke(address, 7)
    for num_chunks in (4, 64, 5, 6):
        driver.resize(num_chunks)
        assert driver.num_chunks == num_chunks
        assert file_nbytes(driver) == (num_chunks * CHUNK, num_chunks * CHUNK)
        assert peek(address) == 7
        poke(view_of(driver, num_chunks - 1), num_chunks)
        assert peek(address + CHUNK) == 4  # poked when chunk 3 was the last one
    other = driver.reserve(2)
    driver.map(other, [(4, 2)])
    assert peek(other + CHUNK) == 6


def test_what_was_cut_off_comes_back_as_zeros(driver: PosixDriver) -> None:
    poke(view_of(driver, 7), 9)
    driver.resize(7)
    driver.resize(8)
    assert peek(view_of(driver, 7)) == 0


def test_a_mapped_chunk_is_not_cut_off(driver: PosixDriver) -> None:
    address = driver.reserve(3)
    driver.map(address, [(1, 2), (6, 1)])
    with pytest.raises(ValueError, match="chunk 6 is mapped at"):
        driver.resize(6)
    assert driver.num_chunks == 8
    driver.resize(7)
    driver.unmap(address, 3)
    driver.resize(1)
    with pytest.raises(ValueError, match="not inside the pool of 1 chunks"):
        driver.map(address, [(0, 2)])


@pytest.mark.parametrize("num_chunks", [-1, 65])
def test_sizes_that_cannot_be(driver: PosixDriver, num_chunks: int) -> None:
    with pytest.raises(ValueError, match="0 to 64 chunks"):
        driver.resize(num_chunks)
    with PosixDriver(8, CHUNK) as fixed, pytest.raises(ValueError, match="0 to 8 chunks"):
        fixed.resize(9)


def test_more_than_the_machine_has_is_refused(driver: PosixDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    room = MemoryRoom(available_nbytes=20 * CHUNK, explanation="so little")
    monkeypatch.setattr(machine, "memory_room", lambda: room)
    with pytest.raises(MemoryFault, match=r"beside the 512.0 KiB that it has(.|\n)*so little"):
        driver.resize(29)
    assert file_nbytes(driver) == (8 * CHUNK, 8 * CHUNK)
    driver.resize(28)


class FailingCalls(Syscalls):
    """Lets the k-th call after `arm(k)` fail."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 0

    def arm(self, left: int) -> None:
        self._left = left

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise OSError(errno.ENOMEM, "no memory, says the test")

    def ftruncate(self, descriptor: int, nbytes: int) -> None:
        self._count()
        super().ftruncate(descriptor, nbytes)

    def fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        self._count()
        super().fallocate(descriptor, offset, nbytes)

    def mmap(self, address: int, nbytes: int, prot: int, flags: int, descriptor: int, offset: int) -> int:
        self._count()
        return super().mmap(address, nbytes, prot, flags, descriptor, offset)


@pytest.mark.parametrize("which", [1, 2, 3])
def test_growing_that_fails_changes_nothing(which: int) -> None:
    """The length, the view and the pages: each call in turn."""
    calls = FailingCalls()
    with PosixDriver(8, CHUNK, max_chunks=64, huge_pages=False, syscalls=calls) as driver:
        address = driver.reserve(8)
        driver.map(address, [(0, 8)])
        poke(address, 5)
        calls.arm(which)
        with pytest.raises(MemoryFault, match="says the test"):
            driver.resize(32)
        assert driver.num_chunks == 8
        assert file_nbytes(driver) == (8 * CHUNK, 8 * CHUNK)
        assert peek(address) == 5
        driver.resize(32)
        assert file_nbytes(driver) == (32 * CHUNK, 32 * CHUNK)


def test_few_addresses_make_a_pool_that_cannot_grow() -> None:
    class FewAddresses(Syscalls):
        def mmap(self, address: int, nbytes: int, prot: int, flags: int, descriptor: int, offset: int) -> int:
            if nbytes > 64 << 20:
                raise OSError(errno.ENOMEM, "ulimit -v")
            return super().mmap(address, nbytes, prot, flags, descriptor, offset)

    with PosixDriver(8, CHUNK, max_chunks=1 << 20, arena_nbytes=1 << 20, syscalls=FewAddresses()) as driver:
        assert driver.max_chunks == 8


def test_the_view_beyond_the_end_faults() -> None:
    """Not another process's memory, not zeros: a touch ends the process."""
    done = run_python(
        "driver.resize(3)\nctypes.c_char.from_address(driver.view_address + 3 * 65536).value\nprint('read')"
    )
    assert done.returncode < 0
    assert "read" not in done.stdout


def test_a_child_does_not_see_what_came_later(driver: PosixDriver) -> None:
    driver.resize(32)
    flags: dict[int, str] = {}
    start = stop = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if word == "VmFlags:":
            flags.update({chunk: line for chunk in range(32) if start <= view_of(driver, chunk) < stop})
        elif not word.endswith(":"):
            start, stop = (int(part, 16) for part in word.split("-"))
    assert len(flags) == 32
    assert all(" dc" in line for line in flags.values())  # MADV_DONTFORK


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 64), min_size=1, max_size=12))
def test_any_sequence_of_sizes(sizes: list[int]) -> None:
    with PosixDriver(8, CHUNK, max_chunks=64) as driver:
        known = {0: 1}
        poke(view_of(driver, 0), 1)
        for number, num_chunks in enumerate(sizes, start=2):
            driver.resize(num_chunks)
            known = {chunk: value for chunk, value in known.items() if chunk < num_chunks}
            known[num_chunks - 1] = number % 251
            poke(view_of(driver, num_chunks - 1), number % 251)
            assert file_nbytes(driver) == (num_chunks * CHUNK, num_chunks * CHUNK)
            assert {chunk: peek(view_of(driver, chunk)) for chunk in known} == known
