"""Reservations against a model: what each place shows, with failures at any call, and what is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.vmm.memory_cases import CudaCase, DriverCase, PosixCase, shown, stamp
from vmm.addresses import AddressSpace, Reservation
from vmm.driver import Driver, MemoryFault

NUM_CHUNKS = 12
chunks_of_places = st.lists(st.integers(0, NUM_CHUNKS - 1), min_size=1, max_size=6)


def runs_of(chunks: list[int]) -> tuple[tuple[int, int], ...]:
    """One run a chunk: merging is the address space's business."""
    return tuple((chunk, 1) for chunk in chunks)


class SpaceMachine(RuleBasedStateMachine):
    """The model: for each reservation its list of chunks (None: unmapped) and whether it is protected."""

    make_case: Callable[[], DriverCase] = PosixCase

    def __init__(self) -> None:
        super().__init__()
        self.case = self.make_case()
        self.driver = self.case.make(NUM_CHUNKS, arena_nbytes=1024 * self.case.chunk_nbytes)
        stamp(self.case, self.driver)
        self.space = AddressSpace(self.driver)
        self.model: dict[Reservation, tuple[list[int] | None, bool]] = {}
        self.num_remapped = 0

    reservations = Bundle("reservations")

    @initialize(target=reservations)
    def first(self) -> Reservation:
        return self.reserve(4 * self.driver.chunk_nbytes)

    @rule(target=reservations, num_pieces=st.integers(1, 6 * 16))
    def reserve_pieces(self, num_pieces: int) -> Reservation:
        return self.reserve(num_pieces * self.driver.chunk_nbytes // 16)

    def reserve(self, nbytes: int) -> Reservation:
        reservation = self.space.reserve(nbytes)
        assert reservation.num_chunks == -(-nbytes // self.driver.chunk_nbytes)
        self.model[reservation] = (None, False)
        return reservation

    @rule(reservation=reservations, chunks=chunks_of_places, fail_call=st.sampled_from([0, 0, 1, 2, 3, 4, 5, 6]))
    def map(self, reservation: Reservation, chunks: list[int], fail_call: int) -> None:
        chunks = (chunks * 6)[: reservation.num_chunks]
        before, _ = self.model[reservation]
        changed = [old != new for old, new in zip(before or [None] * len(chunks), chunks, strict=True)]
        self.case.failing.arm(fail_call)
        try:
            result = self.space.map(reservation, runs_of(chunks))
        except MemoryFault:
            assert self.case.failing.has_failed
            return  # and the invariant says that nothing has changed
        finally:
            self.case.failing.arm(0)
        assert result == sum(changed)
        self.num_remapped += sum(changed) if before is not None else 0
        self.model[reservation] = (chunks, False)

    @rule(
        reservation=reservations, fail_call=st.integers(0, 3), name=st.sampled_from(["unmap", "protect", "unprotect"])
    )
    def change(self, reservation: Reservation, fail_call: int, name: str) -> None:
        chunks, _ = self.model[reservation]
        self.case.failing.arm(fail_call)
        try:
            getattr(self.space, name)(reservation)
        except MemoryFault:
            assert self.case.failing.has_failed
            return
        finally:
            self.case.failing.arm(0)
        self.model[reservation] = (
            (None, False) if name == "unmap" else (chunks, name == "protect" and chunks is not None)
        )

    @rule(reservation=reservations, num_places=st.integers(1, 6), fail_call=st.integers(0, 2))
    def shrink(self, reservation: Reservation, num_places: int, fail_call: int) -> None:
        before = reservation.num_chunks
        num_places = min(num_places, before)
        self.case.failing.arm(fail_call)
        try:
            self.space.shrink(reservation, num_places * self.driver.chunk_nbytes - 1)
        except MemoryFault:
            assert self.case.failing.has_failed
            assert reservation.num_chunks == before
            return
        finally:
            self.case.failing.arm(0)
        assert reservation.num_chunks == num_places
        chunks, is_protected = self.model[reservation]
        self.model[reservation] = (chunks[:num_places] if chunks is not None else None, is_protected)
        behind = shown(self.case, self.driver, reservation.address, before)[num_places:]
        assert behind == [None] * (before - num_places)

    @rule(reservation=consumes(reservations))
    def release(self, reservation: Reservation) -> None:
        self.space.release(reservation)
        del self.model[reservation]
        assert reservation.is_released

    @invariant()
    def memory_agrees(self) -> None:
        for reservation, (chunks, is_protected) in self.model.items():
            expected = [None] * reservation.num_chunks if chunks is None or is_protected else chunks
            assert shown(self.case, self.driver, reservation.address, reservation.num_chunks) == expected

    @invariant()
    def books_agree(self) -> None:
        assert self.space.num_remapped_chunks == self.num_remapped
        assert set(self.space.reservations) == set(self.model)
        for reservation, (chunks, is_protected) in self.model.items():
            assert reservation.is_protected == is_protected
            mapped = [c for first, n in reservation.runs or () for c in range(first, first + n)]
            assert mapped == (chunks or [])
            last = reservation.address + reservation.num_chunks * self.driver.chunk_nbytes - 1
            assert self.space.find(reservation.address) is self.space.find(last) is reservation
            assert self.space.find(last + 1) is not reservation

    def teardown(self) -> None:
        self.space.close()
        assert self.space.reservations == ()
        self.driver.close()
        self.case.close()


class CudaSpaceMachine(SpaceMachine):
    """The same over the fake CUDA driver."""

    make_case = CudaCase


TestSpace = SpaceMachine.TestCase
TestSpace.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)

TestCudaSpace = CudaSpaceMachine.TestCase
TestCudaSpace.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.fixture
def space(driver: Driver) -> AddressSpace:
    return AddressSpace(driver)


def test_only_what_differs_is_mapped(space: AddressSpace) -> None:
    reservation = space.reserve(8 * space.driver.chunk_nbytes)
    assert space.map(reservation, [(0, 8)]) == 8
    assert (space.num_maps, space.num_mapped_runs, space.num_remapped_chunks) == (1, 1, 0)
    assert space.map(reservation, [(0, 3), (3, 5)]) == 0
    assert space.num_maps == 1
    assert space.map(reservation, [(0, 2), (9, 1), (3, 3), (10, 2)]) == 3
    assert (space.num_maps, space.num_mapped_runs, space.num_remapped_chunks) == (3, 3, 3)
    assert reservation.runs == ((0, 2), (9, 1), (3, 3), (10, 2))


def test_the_same_runs_again_cost_nothing_but_unprotect(case: DriverCase, space: AddressSpace) -> None:
    reservation = space.reserve(2 * space.driver.chunk_nbytes)
    runs = ((4, 1), (2, 1))
    space.map(reservation, runs)
    case.failing.arm(1)  # any call would fail
    assert space.map(reservation, runs) == 0
    case.failing.arm(0)
    space.protect(reservation)
    assert case.faults(reservation.address)
    assert space.map(reservation, runs) == 0
    assert not case.faults(reservation.address)
    assert space.num_maps == 1


def test_a_list_of_runs_may_change_after_the_call(space: AddressSpace) -> None:
    reservation = space.reserve(2 * space.driver.chunk_nbytes)
    runs = [(4, 1), (2, 1)]
    space.map(reservation, runs)
    runs[0] = (7, 1)
    assert space.map(reservation, runs) == 1
    assert reservation.runs == ((7, 1), (2, 1))


def test_a_failure_in_mid_map_leaves_a_protected_reservation_protected(case: DriverCase, space: AddressSpace) -> None:
    stamp(case, space.driver)
    reservation = space.reserve(3 * space.driver.chunk_nbytes)
    space.map(reservation, [(0, 3)])
    space.protect(reservation)
    for fail_call in range(1, 2 * case.num_calls_to_replace + 2):  # two stretches, and one call to open the rest
        case.failing.arm(fail_call)
        with pytest.raises(MemoryFault, match=case.injected):
            space.map(reservation, [(9, 1), (1, 1), (8, 1)])
        assert shown(case, space.driver, reservation.address, 3) == [None] * 3
        assert reservation.is_protected
        space.unprotect(reservation)
        assert shown(case, space.driver, reservation.address, 3) == [0, 1, 2]
        space.protect(reservation)
    assert space.num_remapped_chunks == 0
    assert space.map(reservation, [(9, 1), (1, 1), (8, 1)]) == 2
    assert shown(case, space.driver, reservation.address, 3) == [9, 1, 8]


def test_after_a_failed_undo_everything_is_mapped_anew(case: DriverCase, space: AddressSpace) -> None:
    stamp(case, space.driver)
    reservation = space.reserve(3 * space.driver.chunk_nbytes)
    space.map(reservation, [(0, 3)])

    def broken(*_: object, **__: object) -> None:
        raise MemoryFault("injected")

    original = space.driver.map
    with pytest.MonkeyPatch.context() as patch:
        calls = iter([original, broken, broken])
        patch.setattr(space.driver, "map", lambda *arguments, **options: next(calls)(*arguments, **options))
        with pytest.raises(MemoryFault, match="injected"):
            space.map(reservation, [(9, 1), (1, 1), (8, 1)])  # the first succeeds, the second fails, so does its undo
    assert reservation.runs is None
    assert space.map(reservation, [(9, 1), (1, 1), (8, 1)]) == 3
    assert shown(case, space.driver, reservation.address, 3) == [9, 1, 8]


def test_wrong_arguments_are_refused(space: AddressSpace) -> None:
    reservation = space.reserve(2 * space.driver.chunk_nbytes)
    space.map(reservation, [(0, 2)])
    for runs in ([(0, 1)], [(0, 3)], [], [(0, 2), (3, 0)], [(15, 2)]):
        with pytest.raises(ValueError, match=r"run|chunks"):
            space.map(reservation, runs)
    assert reservation.runs == ((0, 2),)
    for nbytes in (0, -5):
        with pytest.raises(ValueError, match="must be positive"):
            space.reserve(nbytes)


def test_a_released_or_foreign_reservation_is_refused(space: AddressSpace) -> None:
    reservation = space.reserve(1)
    space.map(reservation, [(0, 1)])
    space.release(reservation)
    again = space.reserve(1)
    assert again.address == reservation.address
    other_space = AddressSpace(space.driver)
    for operation in (space.release, space.unmap, space.protect, space.unprotect):
        with pytest.raises(ValueError, match="released"):
            operation(reservation)
    with pytest.raises(ValueError, match="released"):
        space.map(reservation, ((0, 1),))
    with pytest.raises(ValueError, match="not a reservation"):
        other_space.unmap(again)


def test_find_outside(space: AddressSpace) -> None:
    start, stop = space.driver.arena
    assert [space.find(address) for address in (0, start - 1, start, stop - 1, stop)] == [None] * 5
