"""What a step that goes like no earlier one says of its variables' next uses."""

from __future__ import annotations

from ooc.memory.present_uses import AFTER_ALL, OUT_OF_SIGHT, PresentUses

WEIGHT, STATE, OTHER = 1, 2, 3
NBYTES = 4


def test_what_a_loop_uses_in_each_turn_is_wanted_until_the_loop_has_ended() -> None:
    uses = PresentUses()
    for index in range(0, 50, 10):
        uses.note(index, [(WEIGHT, NBYTES)])
        uses.note(index + 1, [(WEIGHT, NBYTES)])  # of a view
    last = 41
    assert last < uses.next_use(WEIGHT, NBYTES, last) <= last + 10
    assert uses.next_use(WEIGHT, NBYTES, last + 5) > last + 5
    later = last + 100  # the loop is over: it goes by when it was used
    assert uses.next_use(WEIGHT, NBYTES, later) == 2 * later - last
    assert uses.next_use(OTHER, NBYTES, later) == OUT_OF_SIGHT


def test_a_loop_comes_back_in_the_backward_pass_and_takes_twice_as_long() -> None:
    uses = PresentUses()
    for index in (0, 10, 20):
        uses.note(index, [(WEIGHT, NBYTES)])
    uses.note(25, [(OTHER, NBYTES)])
    uses.note_backward(30)
    assert uses.next_use(OTHER, NBYTES, 30) == 40
    uses.note(31, [(WEIGHT, NBYTES), (OTHER, NBYTES)])
    assert uses.next_use(WEIGHT, NBYTES, 31) == 51
    assert uses.next_use(OTHER, NBYTES, 31) == AFTER_ALL  # the optimizer's


def test_sums_of_gradients_are_new_in_each_turn_and_used_in_the_next() -> None:
    """Each is made of the one before: none is used twice, and all of a size wait as long."""
    uses = PresentUses()
    uses.note_backward(0)
    uses.note_births(0, 10)
    for turn in range(1, 4):
        index = 20 * turn
        if turn > 1:
            uses.note(index, [(8 + turn, NBYTES)])  # what the turn before has made
        uses.note_births(index, 10 + turn)
    newest = 12
    assert uses.next_use(newest, NBYTES, 61) == 80
    assert uses.next_use(newest, 2 * NBYTES, 61) == AFTER_ALL  # none of this size was ever used: a finished gradient
    assert uses.next_use(newest, NBYTES, 200) == AFTER_ALL
