"""A part of a file in place of chunks: what it shows, what replaces it, and that a failed call changed nothing."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vmm.memory_cases import PosixCase, shown, stamp
from vmm import machine
from vmm.addresses import AddressSpace
from vmm.driver import MapCountExceeded, MemoryFault

CHUNK, PAGE = PosixCase.chunk_nbytes, mmap.PAGESIZE


@pytest.fixture
def case() -> Iterator[PosixCase]:
    """Only the POSIX driver can map files."""
    made = PosixCase()
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """Eight chunks, each filled with its letter."""
    descriptor = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"".join(bytes([letter]) * CHUNK for letter in b"abcdefgh"))
    yield descriptor
    os.close(descriptor)


def test_it_shows_the_file_and_nothing_behind_it(case: PosixCase, file: int) -> None:
    with case.make(8) as driver:
        address = driver.reserve(4)
        driver.map(address, [(0, 4)])
        driver.map_file(address, 4, file, 2 * CHUNK, CHUNK + PAGE + 1)
        assert case.peek(address, 4) == b"cccc"
        assert case.peek(address + CHUNK + 2 * PAGE - 1, 1) == b"d"
        assert case.faults(address + CHUNK + 2 * PAGE)
        assert case.faults(address + 3 * CHUNK)
        case.poke(address + CHUNK, b"new")
        assert os.pread(file, 4, 3 * CHUNK) == b"newd"
        stamp(case, driver)
        driver.map(address, [(4, 4)])
        assert shown(case, driver, address, 4) == [4, 5, 6, 7]
        driver.map_file(address, 4, file, 0, CHUNK)
        driver.unmap(address, 4)
        assert case.faults(address)
        driver.map_file(address, 4, file, 0, CHUNK)
        driver.release(address, 4)
        assert case.faults(address)


@pytest.mark.parametrize(("offset", "nbytes"), [(-PAGE, PAGE), (1, PAGE), (0, 0), (0, 4 * CHUNK + 1)])
def test_wrong_parts_are_refused(case: PosixCase, file: int, offset: int, nbytes: int) -> None:
    with case.make(8) as driver:
        address = driver.reserve(4)
        driver.map(address, [(0, 4)])
        with pytest.raises(ValueError, match="whole pages"):
            driver.map_file(address, 4, file, offset, nbytes)
        assert not case.faults(address)


def test_a_failed_call_changes_nothing_whichever_way(case: PosixCase, file: int) -> None:
    """From chunks to file and from file to chunks, for every system call on the way."""
    with case.make(8) as driver:
        stamp(case, driver)
        address = driver.reserve(4)
        driver.map(address, [(2, 4)])
        for fail_call in itertools.count(1):
            case.failing.arm(fail_call)
            try:
                driver.map_file(address, 4, file, 0, 2 * CHUNK)
            except MemoryFault:
                assert shown(case, driver, address, 4) == [2, 3, 4, 5]
                continue
            case.failing.arm(0)
            break
        first_good = 5 if driver._file.is_split else 4
        assert fail_call == first_good  # the file, nothing behind it, the children, and that pages stay small
        for fail_call in itertools.count(1):
            case.failing.arm(fail_call)
            try:
                driver.map(address, [(0, 1), (5, 3)])
            except MemoryFault:
                assert case.peek(address, 1) == b"a"
                assert case.peek(address + CHUNK, 1) == b"b"
                assert case.faults(address + 2 * CHUNK)
                continue
            case.failing.arm(0)
            break
        assert fail_call == first_good
        assert shown(case, driver, address, 4) == [0, 5, 6, 7]


def test_a_failure_over_a_part_puts_that_part_of_the_file_back(case: PosixCase, file: int) -> None:
    with case.make(8) as driver:
        stamp(case, driver)
        address = driver.reserve(4)
        driver.map_file(address, 4, file, CHUNK, 2 * CHUNK)
        for place, fail_call in itertools.product((1, 2), (1, 2)):
            case.failing.arm(fail_call)
            with pytest.raises(MemoryFault, match="injected"):
                driver.map(address + place * CHUNK, [(0, 1)])
            case.failing.arm(0)
            assert case.peek(address, 1) == b"b"
            assert case.peek(address + CHUNK, 1) == b"c"
            assert case.faults(address + 2 * CHUNK)
            assert case.faults(address + 3 * CHUNK)


def test_the_address_space_knows_what_shows_a_file(case: PosixCase, file: int) -> None:
    with case.make(8) as driver:
        stamp(case, driver)
        space = AddressSpace(driver)
        reservation = space.reserve(2 * CHUNK)
        runs = ((1, 2),)
        space.map(reservation, runs)
        space.map_file(reservation, file, CHUNK, 2 * CHUNK)
        assert reservation.is_file
        assert reservation.runs is None
        assert "file" in repr(reservation)
        assert case.peek(reservation.address, 1) == b"b"
        space.protect(reservation)  # nothing of ours to protect
        assert not case.faults(reservation.address)
        assert space.map(reservation, runs) == 2
        assert not reservation.is_file
        assert shown(case, driver, reservation.address, 2) == [1, 2]
        space.map_file(reservation, file, 0, CHUNK)
        space.unmap(reservation)
        assert not reservation.is_file
        assert case.faults(reservation.address)


def test_a_failed_map_over_a_file_leaves_the_file(case: PosixCase, file: int) -> None:
    with case.make(8) as driver:
        space = AddressSpace(driver)
        reservation = space.reserve(2 * CHUNK)
        space.map_file(reservation, file, CHUNK, 2 * CHUNK)
        for fail_call in (1, 2, 3):
            case.failing.arm(fail_call)
            with pytest.raises(MemoryFault, match="injected"):
                space.map(reservation, ((3, 1), (1, 1)))
            case.failing.arm(0)
            assert reservation.is_file
            assert case.peek(reservation.address, 1) == b"b"
            assert case.peek(reservation.address + CHUNK, 1) == b"c"


def test_noted_files_and_guards_count_as_mappings(case: PosixCase, file: int) -> None:
    gc.collect()  # what earlier tests have left
    with case.make(8, max_map_count=machine.map_count() + 512 + 60) as driver:
        address = driver.reserve(4)
        driver.note_file(address, 4, file, 0, CHUNK)
        before = driver.num_mappings
        driver.note_guards(5)
        assert driver.num_mappings == before + 10
        with pytest.raises(MapCountExceeded):
            driver.note_guards(100)
        assert driver.num_mappings == before + 10
        driver.note_guards(-5)
        assert driver.num_mappings == before
