"""Guesses of next uses, without memory or torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from ooc.memory.foresight import Foresight
from ooc.memory.step_uses import NEVER, Allocation, Operands, StepUses

A, B, P = 0x1000, 0x2000, 0x9000


def alloc(address: int, position: int) -> Allocation:
    return Allocation(address=address, is_free=False, position=position)


def free(address: int, position: int) -> Allocation:
    return Allocation(address=address, is_free=True, position=position)


def step() -> StepUses:
    """Op 0 makes A from P; op 1 makes B from A; op 2 reads B, which goes; op 3 makes another there; op 4 reads A."""
    return StepUses(
        Operands.of([("f", [P]), ("g", [A, A]), ("h", [B]), ("g", [A]), ("i", [A, B])]),
        start={P: 7},
        allocations=[alloc(A, 1), alloc(B, 3), free(B, 6), alloc(B, 7)],
    )


def test_uses_are_of_variables_not_of_addresses() -> None:
    assert step().uses_at == {0: (-8,), 1: (0,), 2: (1,), 3: (0,), 4: (0, 2)}


def test_next_use() -> None:
    uses = step()
    assert [uses.next_use(0, index) for index in range(5)] == [1, 3, 3, 4, NEVER]
    assert uses.next_use(-8, 0) == 5  # in the next step, at its first op
    assert uses.next_use(1, 2) == 3  # it is freed before that op: until then it holds its memory, and then it goes
    assert [uses.is_over(1, index) for index in range(4)] == [False, False, True, False]
    assert not uses.is_over(0, 4)  # nothing tells when it goes
    assert uses.next_use(99, 0) == NEVER


def test_an_address_used_before_its_allocation_in_the_same_op_is_another_variable() -> None:
    uses = StepUses(Operands.of([("f", [A]), ("g", [A])]), start={A: 3}, allocations=[free(A, 2), alloc(A, 2)])
    assert uses.uses_at == {0: (-4,), 1: (0,)}


class Present:
    """A present step: its ops, the serials at each address, and how many there are."""

    def __init__(self, ops: list[tuple[Any, list[int]]], serials: dict[int, int] | None = None, upto: int = 22) -> None:
        self.ops, self.serials, self.upto = ops, serials or {}, upto

    def ops_since(self, start: int) -> Operands:
        return Operands.of(self.ops[start:])

    def variable_at(self, address: int) -> tuple[int, int] | None:
        return (self.serials[address], 4) if address in self.serials else None

    def next_serial(self) -> int:
        return self.upto


class Record(NamedTuple):
    serial: int
    used_ns: int
    nbytes: int = 4


def candidates(*serials: int) -> list[Record]:
    return [Record(serial=serial, used_ns=100 + place) for place, serial in enumerate(serials)]


def places(foresight: Foresight, *serials: int) -> list[int]:
    return [place for place, _ in foresight.latest_first(candidates(*serials), 5)]


def test_the_latest_use_goes_first() -> None:
    foresight = Foresight(Present([("f", []), ("g", [])]))
    foresight.remember(step)
    foresight.begin(first_serial=20)
    # Before op 2: variable 1 (serial 21) is used next by op 2, 0 (serial 20) by op 3, P (serial 7) in the next step.
    assert foresight.latest_first(candidates(21, 20, 7), 1) == [(2, 5), (1, 3), (0, 2)]
    assert list(foresight.upcoming(1, 2)) == [(2, 21), (3, 20)]
    assert list(foresight.upcoming(-1, 2)) == [(0, 7), (1, 20)]


def test_a_step_that_goes_another_way_is_no_reference() -> None:
    ops: list[tuple[Any, list[int]]] = [("f", [])]
    foresight = Foresight(Present(ops))
    foresight.remember(step)
    foresight.begin(first_serial=20)
    assert foresight.reference() is not None
    ops.append(("x", []))
    assert foresight.reference() is None
    assert places(foresight, 5, 6) == [0, 1]  # least recently used
    ops[1:] = []
    foresight.begin(first_serial=20)
    assert foresight.reference() is not None


def test_the_latest_step_that_fits_is_the_reference() -> None:
    other = StepUses(Operands.of([("f", [P]), ("x", [])]), start={P: 7}, allocations=[])
    ops: list[tuple[Any, list[int]]] = [("f", [])]
    foresight = Foresight(Present(ops))
    foresight.remember(step)
    foresight.remember(lambda: other)
    foresight.begin(first_serial=0)
    reference = foresight.reference()
    assert reference is not None
    assert reference.uses is other
    ops.append(("g", []))
    reference = foresight.reference()
    assert reference is not None
    assert reference.uses is not other


def test_the_backward_pass_takes_what_the_forward_pass_left_in_reverse() -> None:
    forward: list[tuple[Any, list[int]]] = [("f", [P]), ("f", [Q]), ("f", [R]), ("f", []), ("f", [])]
    foresight = Foresight(Present(forward, {P: 1, Q: 2, R: 3}))
    foresight.begin(first_serial=0)
    assert places(foresight, 1, 2, 3) == [0, 1, 2]  # least recently used
    foresight.note_backward(5)
    forward.append(("b", [R]))
    # R was used by the backward pass already: the optimizer is next to use it. P was used before Q, so it comes later.
    assert places(foresight, 1, 2, 3) == [2, 0, 1]


def test_without_the_order_of_allocations_nothing_is_said_of_what_a_step_makes() -> None:
    foresight = Foresight(Present([]))
    foresight.remember(step)
    foresight.begin(first_serial=20, knows_births=False)
    # P (serial 7) lives on, and comes in the next step; of what was made here nobody can say.
    assert foresight.latest_first(candidates(21, 7), 1) == [(1, 5), (0, 1)]
    assert list(foresight.upcoming(-1, 5)) == [(0, 7)]


Q, R = 0xA000, 0xB000
LAYERS = [("f", [P]), ("f", [Q]), ("f", [R]), ("b", [R]), ("b", [Q]), ("b", [P])]


def layers() -> StepUses:
    """Three layers, forwards and back; each op forwards makes something that its own op backwards uses."""
    ops = [(func, addresses if func == "f" else [*addresses, addresses[0] + 1]) for func, addresses in LAYERS]
    made = [alloc(address + 1, 2 * index + 1) for index, address in enumerate((P, Q, R))]
    return StepUses(Operands.of(ops), start={P: 1, Q: 2, R: 3}, allocations=made)


def test_a_layer_that_is_left_out_costs_the_reference_only_until_the_next_one() -> None:
    ops: list[tuple[Any, list[int]]] = [("f", [P])]
    present = Present(ops, {P: 1, Q: 2, R: 3}, upto=21)
    foresight = Foresight(present)
    foresight.remember(layers)
    foresight.begin(first_serial=20)
    assert [serial for _, serial in foresight.upcoming(0, 2)] == [2, 3]
    ops.append(("f", [R]))  # the second layer is left out
    present.upto = 22
    reference = foresight.reference()
    assert reference is not None
    assert reference.shift == 1
    # In two ops' time the one backwards that is left out this time, then the first layer's.
    assert list(foresight.upcoming(1, 4)) == [(2, 3), (2, 21), (3, 2), (4, 1), (4, 20)]
    assert foresight.latest_first(candidates(1, 20, 21, 3), 1) == [(0, 4), (1, 4), (2, 2), (3, 2)]
    ops.append(("b", [R]))
    assert foresight.reference() is not None
    ops.append(("b", [P]))
    reference = foresight.reference()
    assert reference is not None
    assert reference.shift == 2


def test_an_op_on_what_the_earlier_step_does_not_know_says_nothing_of_the_place() -> None:
    ops: list[tuple[Any, list[int]]] = [("f", [P])]
    foresight = Foresight(Present(ops, {P: 1, A: 9, B: 21}))
    foresight.remember(layers)
    foresight.begin(first_serial=20)
    ops.append(("b", [A, B]))
    assert foresight.reference() is None
    ops.append(("b", []))
    assert foresight.reference() is None


def test_other_variables_than_the_earlier_step_had_there_are_another_way() -> None:
    foresight = Foresight(Present([("f", [Q])], {P: 1, Q: 2}))
    foresight.remember(layers)
    foresight.begin(first_serial=20)
    reference = foresight.reference()
    assert reference is not None
    assert reference.shift == 1  # as if the first layer had been left out


def test_what_is_new_since_the_earlier_step_is_awaited_until_it_is_used() -> None:
    foresight = Foresight(Present([("f", [P])], {P: 1}))
    foresight.remember(layers)
    foresight.begin(first_serial=20, now_ns=101)
    # Serials 8 and 9 came between the steps, and 8 was used in this one: it goes first, and 9 stays.
    gradients = [Record(serial=9, used_ns=100), Record(serial=8, used_ns=102), Record(serial=3, used_ns=50)]
    assert foresight.latest_first(gradients, 0) == [(1, NEVER), (2, 2), (0, 0)]
