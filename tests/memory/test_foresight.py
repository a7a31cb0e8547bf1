"""Guesses of next uses, without memory or torch."""

from __future__ import annotations

from ooc.memory.foresight import NEVER, Allocation, Candidate, Foresight, StepUses

A, B, P = 0x1000, 0x2000, 0x9000


def alloc(address: int, position: int) -> Allocation:
    return Allocation(address=address, is_free=False, position=position)


def free(address: int, position: int) -> Allocation:
    return Allocation(address=address, is_free=True, position=position)


def step() -> StepUses:
    """Op 0 makes A from P; op 1 makes B from A; op 2 reads B, which goes; op 3 makes another there; op 4 reads A."""
    return StepUses(
        [("f", [P]), ("g", [A, A]), ("h", [B]), ("g", [A]), ("i", [A, B])],
        start={P: 7},
        allocations=[alloc(A, 1), alloc(B, 3), free(B, 6), alloc(B, 7)],
    )


def test_uses_are_of_variables_not_of_addresses() -> None:
    assert step().uses_at == [(-8,), (0,), (1,), (0,), (0, 2)]


def test_next_use() -> None:
    uses = step()
    assert [uses.next_use(0, index) for index in range(5)] == [1, 3, 3, 4, NEVER]
    assert uses.next_use(-8, 0) == 5  # in the next step, at its first op
    assert uses.next_use(1, 2) == NEVER
    assert uses.next_use(99, 0) == NEVER


def test_an_address_used_before_its_allocation_in_the_same_op_is_another_variable() -> None:
    uses = StepUses([("f", [A]), ("g", [A])], start={A: 3}, allocations=[free(A, 2), alloc(A, 2)])
    assert uses.uses_at == [(-4,), (0,)]


def candidates(*serials: int) -> list[Candidate]:
    return [Candidate(serial=serial, used_ns=100 + place) for place, serial in enumerate(serials)]


def places(foresight: Foresight, *serials: int) -> list[int]:
    return [place for place, _ in foresight.latest_first(candidates(*serials), 5)]


def test_the_latest_use_goes_first() -> None:
    funcs = ["f", "g"]
    foresight = Foresight(lambda start: funcs[start:])
    foresight.remember(step)
    foresight.begin(first_serial=20)
    # Before op 2: variable 1 (serial 21) is used next by op 2, 0 (serial 20) by op 3, P (serial 7) in the next step.
    assert foresight.latest_first(candidates(21, 20, 7), 1) == [(2, 5), (1, 3), (0, 2)]
    assert foresight.upcoming(1, 2) == [(2, 1), (3, 0)]


def test_a_step_that_goes_another_way_is_no_reference() -> None:
    funcs = ["f"]
    foresight = Foresight(lambda start: funcs[start:])
    foresight.remember(step)
    foresight.begin(first_serial=20)
    assert foresight.reference() is not None
    funcs.append("x")
    assert foresight.reference() is None
    assert places(foresight, 5, 6) == [0, 1]  # least recently used
    funcs[1:] = []
    foresight.begin(first_serial=20)
    assert foresight.reference() is not None


def test_the_latest_step_that_fits_is_the_reference() -> None:
    other = StepUses([("f", [P]), ("x", [])], start={P: 7}, allocations=[])
    funcs = ["f"]
    foresight = Foresight(lambda start: funcs[start:])
    foresight.remember(step)
    foresight.remember(lambda: other)
    foresight.begin(first_serial=0)
    assert foresight.reference() is other
    funcs.append("g")
    reference = foresight.reference()
    assert reference is not None
    assert reference is not other


def test_the_backward_pass_takes_what_the_forward_pass_left_in_reverse() -> None:
    foresight = Foresight()
    foresight.begin(first_serial=0)
    assert places(foresight, 1, 2, 3) == [0, 1, 2]
    foresight.note_backward(102)
    # 2 was used by the backward pass already: the optimizer is next to use it.
    assert places(foresight, 1, 2, 3) == [2, 0, 1]


def test_without_the_order_of_allocations_nothing_is_said_of_what_a_step_makes() -> None:
    foresight = Foresight(lambda _: [])
    foresight.remember(step)
    foresight.begin(first_serial=None)
    assert foresight.variable(3) is None
