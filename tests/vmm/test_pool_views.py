"""Addresses of a view of the pool show their chunks before anybody asks, and are reservations like any other."""

from __future__ import annotations

import ctypes
import os

import pytest

from vmm import machine, syscalls
from vmm.addresses import AddressSpace
from vmm.driver import MemoryFault
from vmm.places import Places
from vmm.pool_views import PoolViews
from vmm.posix import PosixDriver

CHUNK = 1 << 16


def write(address: int, value: int) -> None:
    ctypes.memset(address, value, CHUNK)


def read(address: int) -> int:
    return ctypes.string_at(address, 1)[0]


def test_a_range_shows_its_chunks_without_a_call() -> None:
    with PosixDriver(8, CHUNK) as driver:
        write(driver.view_address + 3 * CHUNK, 7)
        address = driver.reserve_shown(2, 2)
        assert address is not None
        assert read(address + CHUNK) == 7
        num_mappings = driver.num_mappings
        driver.release(address, 2)
        assert driver.reserve_shown(2, 2) == address
        assert driver.num_mappings == num_mappings


def test_chunks_whose_addresses_are_taken_are_shown_by_another_view_until_there_are_enough() -> None:
    with PosixDriver(8, CHUNK) as driver:
        found = [driver.reserve_shown(0, 4) for _ in range(6)]
        held = [address for address in found if address is not None]
        assert 1 < len(held) == len(set(held)) < 6
        assert found[len(held) :] == [None] * (6 - len(held))
        write(driver.view_address, 9)
        assert [read(address) for address in held] == [9] * len(held)
        driver.release(held[1], 4)
        assert driver.reserve_shown(1, 2) == held[1] + CHUNK


def test_what_showed_something_else_shows_its_own_chunks_again() -> None:
    with PosixDriver(8, CHUNK) as driver:
        for chunk in range(8):
            write(driver.view_address + chunk * CHUNK, chunk)
        address = driver.reserve_shown(0, 2)
        assert address is not None
        num_mappings = driver.num_mappings
        driver.map(address, [(4, 1), (6, 1)])
        assert (read(address), read(address + CHUNK)) == (4, 6)
        driver.release(address, 2)
        assert driver.num_mappings == num_mappings  # nothing piles up in what is free
        others = [driver.reserve_shown(0, 2) for _ in range(4)]  # all views, the first one's range among them
        assert address in others
        assert [read(other) for other in others if other is not None] == [0] * 4


def test_a_file_is_not_shown_any_more_after_the_release() -> None:
    descriptor = os.memfd_create("slot")
    os.truncate(descriptor, CHUNK)
    with PosixDriver(4, CHUNK) as driver:
        write(driver.view_address, 5)
        address = driver.reserve_shown(0, 1)
        assert address is not None
        driver.map_file(address, 1, descriptor, 0, CHUNK)
        assert read(address) == 0
        driver.release(address, 1)
        assert read(address) == 5
    os.close(descriptor)


@pytest.mark.parametrize("num_chunks", [4, 12])
def test_a_pool_of_another_size_has_other_views(num_chunks: int) -> None:
    with PosixDriver(8, CHUNK, max_chunks=16) as driver:
        kept, other = driver.reserve_shown(0, 1), driver.reserve_shown(6, 2)
        assert kept is not None
        assert other is not None
        driver.release(other, 2)
        write(kept, 3)
        driver.resize(num_chunks)
        assert read(kept) == 3
        again = driver.reserve_shown(num_chunks - 1, 1)
        assert again is not None
        write(driver.view_address + (num_chunks - 1) * CHUNK, 8)
        assert read(again) == 8
        driver.release(kept, 1)
        driver.release(again, 1)
        num_free = driver.num_reserved_chunks
        assert num_free == 0


def test_chunks_that_are_held_in_a_view_do_not_go() -> None:
    with PosixDriver(8, CHUNK) as driver:
        address = driver.reserve_shown(6, 2)
        held = [driver.reserve_shown(5, 1) for _ in range(2)]
        with pytest.raises(ValueError, match=r"chunk [567] is mapped"):
            driver.resize(4)
        for chunk in range(8):
            write(driver.view_address + chunk * CHUNK, chunk)
        more = [driver.reserve_shown(5, 1), driver.reserve_shown(7, 1)]  # of views that have all chunks, as before
        assert address is not None
        assert [read(other) for other in (address, address + CHUNK, *held, *more) if other] == [6, 7, 5, 5, 5, 7]


class _Failing(syscalls.Syscalls):
    """The k-th mapping from `arm` on fails."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def mmap(self, *arguments: int) -> int:
        self.left -= 1
        if self.left == 0:
            raise OSError(12, "no memory")
        return super().mmap(*arguments)


def test_a_view_that_cannot_be_mapped_is_none() -> None:
    calls = _Failing()
    with PosixDriver(8, CHUNK, syscalls=calls) as driver:
        calls.left = 1
        assert driver.reserve_shown(0, 1) is None
        address = driver.reserve_shown(0, 1)
        assert address is not None
        driver.map(address, [(3, 1)])
        driver.unmap(address, 1)
        calls.left = 1
        with pytest.raises(MemoryFault, match="release"):
            driver.release(address, 1)
        driver.release(address, 1)
        assert driver.reserve_shown(0, 1) == address


def test_where_addresses_are_few_views_go_without() -> None:
    with PosixDriver(8, CHUNK, arena_nbytes=64 * CHUNK) as driver:
        kept = driver.reserve_shown(0, 2)
        assert kept is not None
        write(kept, 4)
        driver.reserve(56)  # all but the view
        other = driver.reserve(6)
        driver.map(other, [(2, 6)])
        write(other, 5)
        assert read(kept) == 4
        with pytest.raises(MemoryFault, match="no such range free"):
            driver.reserve(1)


def test_where_mappings_are_few_what_is_freed_can_still_be_given_back() -> None:
    with PosixDriver(64, CHUNK) as driver:
        held = [driver.reserve_shown(2 * index, 1) for index in range(32)]
        for index, address in enumerate(held):
            assert address is not None
            driver.map(address, [(63 - index, 1)])
        driver._mappings._max_map_count = machine.map_count() + 8  # no new mapping may be made
        driver._mappings._num_mappings_unchecked = 0
        for address in held:
            assert address is not None
            driver.release(address, 1)
        assert driver.num_reserved_chunks == 0


def test_a_space_has_them_for_neighbouring_chunks() -> None:
    with PosixDriver(8, CHUNK) as driver:
        space = AddressSpace(driver)
        assert space.reserve_shown(((0, 1), (3, 1)), 2 * CHUNK) is None
        reservation = space.reserve_shown(((2, 3),), 3 * CHUNK - 5)
        assert reservation is not None
        assert (reservation.num_chunks, reservation.runs) == (3, ((2, 3),))
        assert space.map(reservation, [(2, 3)]) == 0
        assert space.num_maps == 0
        assert space.map(reservation, [(5, 3)]) == 3
        space.release(reservation)
        assert space.reservations == ()


def test_views_begin_where_large_pages_do() -> None:
    places = Places(base=0, chunk_nbytes=CHUNK, start=3, stop=1000)
    views = PoolViews(places, alignment=32)
    starts = [views.add(40) for _ in range(3)]
    assert all(start is not None and start % 32 == 0 for start in starts)
    views.take(starts[0] or 0, 8)
    with pytest.raises(ValueError, match="in no view"):
        views.take(1, 1)
    with pytest.raises(ValueError, match="not all free"):
        views.take(starts[0] or 0, 1)
    views.retire()
    assert places.num_reserved == 8
    assert places.reserve(900) >= 3  # what was free in the views serves others


def test_an_opening_that_is_interrupted_lets_go_of_everything() -> None:
    """Whatever is there already by then: a lent arena is cleared, too."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with PosixDriver(8, CHUNK) as lender, pytest.raises(KeyboardInterrupt):
        PosixDriver(8, CHUNK, arena=lender.arena, checkpoint=interrupt)
