"""The suite that every driver passes: what a mapping shows, what faults, and that a failed call changed nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest

from tests.vmm.memory_cases import DriverCase, Touched, shown, stamp
from vmm import machine
from vmm.driver import Access, Driver, MemoryFault


def places(driver: Driver, address: int, *chunks: int) -> list[int]:
    return [address + chunk * driver.chunk_nbytes for chunk in chunks]


def test_is_a_driver(driver: Driver) -> None:
    assert isinstance(driver, Driver)
    assert driver.num_chunks == 16
    start, stop = driver.arena
    assert stop - start >= driver.num_chunks * driver.chunk_nbytes
    view_stop = driver.view_address + driver.num_chunks * driver.chunk_nbytes
    assert view_stop <= start or stop <= driver.view_address


def test_the_view_shows_every_chunk(case: DriverCase, driver: Driver) -> None:
    stamp(case, driver)
    assert shown(case, driver, driver.view_address, driver.num_chunks) == list(range(16))


def test_a_reservation_faults_until_mapped(case: DriverCase, driver: Driver) -> None:
    address = driver.reserve(4)
    assert driver.arena[0] <= address < driver.arena[1]
    assert all(case.faults(place) for place in places(driver, address, 0, 1, 2, 3))
    with pytest.raises(Touched):
        case.poke(address, b"x")


def test_map_shows_runs_in_order(case: DriverCase, driver: Driver) -> None:
    stamp(case, driver)
    address = driver.reserve(6)
    driver.map(address, [(9, 2), (0, 1), (13, 3)])
    assert shown(case, driver, address, 6) == [9, 10, 0, 13, 14, 15]


def test_aliases_share_bytes(case: DriverCase, driver: Driver) -> None:
    one, other = driver.reserve(3), driver.reserve(2)
    driver.map(one, [(5, 3)])
    driver.map(other, [(6, 1), (5, 1)])
    case.poke(one, b"chunk5..")
    case.poke(other, b"chunk6..")
    assert case.peek(other + driver.chunk_nbytes) == b"chunk5.."
    assert case.peek(one + driver.chunk_nbytes) == b"chunk6.."
    assert case.peek(driver.view_address + 5 * driver.chunk_nbytes) == b"chunk5.."


def test_the_same_chunk_twice_in_one_reservation(case: DriverCase, driver: Driver) -> None:
    address = driver.reserve(2)
    driver.map(address, [(3, 1), (3, 1)])
    case.poke(address, b"once....")
    assert case.peek(address + driver.chunk_nbytes) == b"once...."


def test_map_replaces_and_leaves_other_mappings(case: DriverCase, driver: Driver) -> None:
    stamp(case, driver)
    address, other = driver.reserve(4), driver.reserve(4)
    driver.map(address, [(0, 4)])
    driver.map(other, [(0, 4)])
    driver.map(address + driver.chunk_nbytes, [(8, 2)])
    assert shown(case, driver, address, 4) == [0, 8, 9, 3]
    assert shown(case, driver, other, 4) == [0, 1, 2, 3]


def test_unmap_faults_keeps_bytes_and_range(case: DriverCase, driver: Driver) -> None:
    stamp(case, driver)
    address = driver.reserve(4)
    driver.map(address, [(4, 4)])
    driver.unmap(address + driver.chunk_nbytes, 2)
    assert shown(case, driver, address, 4) == [4, None, None, 7]
    driver.unmap(address, 4)
    driver.unmap(address, 4)
    assert shown(case, driver, address, 4) == [None] * 4
    assert driver.reserve(4) != address
    driver.map(address, [(4, 4)])
    assert shown(case, driver, address, 4) == [4, 5, 6, 7]


def test_protect_faults_and_comes_back(case: DriverCase, driver: Driver) -> None:
    stamp(case, driver)
    address = driver.reserve(4)
    driver.map(address, [(0, 1), (6, 3)])
    driver.protect(address + driver.chunk_nbytes, 2, Access.NONE)
    assert shown(case, driver, address, 4) == [0, None, None, 8]
    with pytest.raises(Touched):
        case.poke(address + driver.chunk_nbytes, b"x")
    assert shown(case, driver, driver.view_address, 16) == list(range(16))
    driver.protect(address, 4, Access.READ_WRITE)
    assert shown(case, driver, address, 4) == [0, 6, 7, 8]
    driver.protect(address, 4, Access.NONE)
    driver.map(address, [(2, 1)])
    assert shown(case, driver, address, 4) == [2, None, None, None]


def test_protect_refuses_what_is_not_mapped(driver: Driver) -> None:
    address = driver.reserve(2)
    driver.map(address, [(0, 1)])
    for access in Access:
        with pytest.raises(ValueError, match="is mapped at"):
            driver.protect(address, 2, access)


def test_released_addresses_fault_and_are_used_again(case: DriverCase, driver: Driver) -> None:
    stamp(case, driver)
    kept = driver.reserve(2)
    driver.map(kept, [(0, 2)])
    first = driver.reserve(8)
    driver.map(first, [(0, 8)])
    driver.release(first, 8)
    assert all(case.faults(first + place * driver.chunk_nbytes) for place in range(8))
    assert shown(case, driver, kept, 2) == [0, 1]
    assert driver.reserve(8) == first


def test_reservations_in_turn_need_no_more_addresses(driver: Driver) -> None:
    first = driver.reserve(7)
    driver.release(first, 7)
    for _ in range(1000):
        address = driver.reserve(7)
        assert address == first
        driver.release(address, 7)


WRONG: dict[str, Callable[[Driver, int], object]] = {
    "map nothing": lambda driver, at: driver.map(at, []),
    "map too much": lambda driver, at: driver.map(at, [(0, 5)]),
    "map no such chunk": lambda driver, at: driver.map(at, [(14, 3)]),
    "map a negative chunk": lambda driver, at: driver.map(at, [(-1, 2)]),
    "map an empty run": lambda driver, at: driver.map(at, [(0, 1), (1, 0)]),
    "map inside a chunk": lambda driver, at: driver.map(at + 4096, [(0, 1)]),
    "map elsewhere": lambda driver, at: driver.map(at + 4 * driver.chunk_nbytes, [(0, 1)]),
    "unmap too much": lambda driver, at: driver.unmap(at, 5),
    "unmap nothing": lambda driver, at: driver.unmap(at, 0),
    "protect too much": lambda driver, at: driver.protect(at, 5, Access.NONE),
    "release a part": lambda driver, at: driver.release(at, 3),
    "release from within": lambda driver, at: driver.release(at + driver.chunk_nbytes, 3),
    "reserve nothing": lambda driver, _: driver.reserve(0),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_change_nothing(case: DriverCase, driver: Driver, name: str) -> None:
    stamp(case, driver)
    address = driver.reserve(4)
    driver.map(address, [(2, 4)])
    with pytest.raises(ValueError, match=r"chunk|length|run|range"):
        WRONG[name](driver, address)
    assert shown(case, driver, address, 4) == [2, 3, 4, 5]
    driver.release(address, 4)


def test_after_release_the_range_is_nobodys(driver: Driver) -> None:
    address = driver.reserve(4)
    driver.release(address, 4)
    with pytest.raises(ValueError, match="not a reservation"):
        driver.release(address, 4)
    with pytest.raises(ValueError, match="not inside one reservation"):
        driver.map(address, [(0, 1)])


def test_a_range_over_two_reservations_is_refused(driver: Driver) -> None:
    one = driver.reserve(2)
    other = driver.reserve(2)
    assert other == one + 2 * driver.chunk_nbytes
    with pytest.raises(ValueError, match="not inside one reservation"):
        driver.map(one, [(0, 4)])


OPERATIONS: dict[str, Callable[[Driver, int], object]] = {
    "map": lambda driver, at: driver.map(at, [(9, 2), (1, 1), (12, 3)]),
    "unmap": lambda driver, at: driver.unmap(at + driver.chunk_nbytes, 4),
    "protect": lambda driver, at: driver.protect(at, 4, Access.NONE),
    "unprotect": lambda driver, at: driver.protect(at + 3 * driver.chunk_nbytes, 1, Access.READ_WRITE),
    "release": lambda driver, at: driver.release(at, 8),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failed_call_changes_nothing_and_can_be_repeated(case: DriverCase, operation: str) -> None:
    """For every system call that the operation makes: that one fails."""
    fail_call = 0
    while True:
        fail_call += 1
        with case.make() as driver:
            stamp(case, driver)
            address = driver.reserve(8)
            driver.map(address, [(0, 2), (4, 2), (7, 1)])  # the last 3 places stay empty
            driver.protect(address + 3 * driver.chunk_nbytes, 1, Access.NONE)
            before = shown(case, driver, address, 8)
            assert before == [0, 1, 4, None, 7, None, None, None]
            case.failing.arm(fail_call)
            failed = fails(case, functools.partial(OPERATIONS[operation], driver, address))
            assert failed == case.failing.has_failed
            case.failing.arm(0)
            if not failed:
                break
            assert shown(case, driver, address, 8) == before
            OPERATIONS[operation](driver, address)
            if operation != "release":
                driver.release(address, 8)
            assert driver.reserve(8) == address
    assert fail_call > 1


@pytest.mark.parametrize("setting", ["never", "advise"])
def test_a_driver_that_cannot_be_made_leaves_nothing(
    case: DriverCase, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(machine, "shmem_huge_pages", lambda: setting)
    before = case.holdings()
    num_faults = 0
    for fail_call in itertools.count(1):
        case.failing.arm(fail_call)
        try:
            # A given arena size, since by default a failed mmap makes the driver try a smaller arena.
            driver = case.make(arena_nbytes=1 << 30)
        except MemoryFault:
            num_faults += 1
        else:
            has_failed = case.failing.has_failed  # huge pages are a wish: that call may fail
            case.failing.arm(0)
            stamp(case, driver)
            driver.close()
            if not has_failed:
                break
        assert case.holdings() == before
    assert num_faults == case.num_calls_to_make


def test_close_gives_everything_back_and_refuses_more(case: DriverCase) -> None:
    before = case.holdings()
    for _ in range(50):
        driver = case.make()
        driver.map(driver.reserve(4), [(0, 4)])
        driver.close()
        driver.close()
    assert case.holdings() == before
    with pytest.raises(MemoryFault, match="closed"):
        driver.reserve(1)
    assert "closed" in repr(driver)


def fails(case: DriverCase, operation: Callable[[], object]) -> bool:
    """Whether it raises MemoryFault, for the injected failure and no other."""
    try:
        operation()
    except MemoryFault as error:
        if case.injected not in str(error):
            raise
        return True
    return False
