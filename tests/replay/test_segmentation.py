"""Whether whole steps or segments are planned, by what became of the steps so far."""

from __future__ import annotations

from ooc.replay.segmentation import Segmentation, WholeUnions

_NONE = WholeUnions()


def test_steps_that_come_again_are_planned_whole() -> None:
    segmentation = Segmentation()
    for index in range(100):
        segmentation.note_whole(is_new=index < 4 or index % 3 == 0)  # and an evaluation now and then
        assert not segmentation.is_on


def test_segments_are_planned_where_no_step_comes_again() -> None:
    segmentation = Segmentation()
    for _ in range(7):
        assert not segmentation.is_on
        segmentation.note_whole(is_new=True)
    assert segmentation.is_on


def test_whole_steps_are_planned_again_when_all_are_alike_and_going_back_takes_more() -> None:
    segmentation = Segmentation()
    while not segmentation.is_on:
        segmentation.note_whole(is_new=True)
    for index in range(20):
        segmentation.note_segments(("a", "b") if index % 5 else ("a", "a", "b"))
    assert segmentation.is_on
    for _ in range(4):
        segmentation.note_segments(("a", "b"))
    assert not segmentation.is_on
    for _ in range(7):
        segmentation.note_whole(is_new=True)
        assert not segmentation.is_on
    segmentation.note_whole(is_new=True)
    assert segmentation.is_on


def num_whole(segmentation: Segmentation, unions: WholeUnions = _NONE) -> int:
    """Steps until segments are planned, if each is new."""
    for number in range(1, 100):
        segmentation.note_whole(is_new=True, unions=unions)
        if segmentation.is_on:
            return number
    raise AssertionError("never")


def test_a_union_of_whole_steps_is_tried_before_they_are_cut() -> None:
    assert num_whole(Segmentation()) == 7
    segmentation = Segmentation()
    for _ in range(5):
        segmentation.note_whole(is_new=True)
    assert num_whole(segmentation, unions=WholeUnions(1, exist=True)) == 7  # it plans nothing
    segmentation = Segmentation()
    for _ in range(5):
        segmentation.note_whole(is_new=True)
    for number in range(20):
        segmentation.note_whole(is_new=True, unions=WholeUnions(1, exist=True, await_plan=number < 15))
    assert not segmentation.is_on
    assert num_whole(segmentation, unions=WholeUnions(1, exist=True)) == 1  # six steps after its plan was there
    segmentation = Segmentation()
    for _ in range(5):
        segmentation.note_whole(is_new=True)
    assert num_whole(segmentation, unions=WholeUnions(1, exist=True, await_plan=True)) == 39  # not for ever
    segmentation = Segmentation()
    for _ in range(5):
        segmentation.note_whole(is_new=True)
    for _ in range(3):
        segmentation.note_whole(is_new=True, unions=WholeUnions(1, exist=True))
    assert num_whole(segmentation, unions=WholeUnions(1, exist=False)) == 1  # it was given up


def test_steps_of_many_passes_are_cut_after_two_that_were_new() -> None:
    segmentation = Segmentation()
    segmentation.note_whole(is_new=True, num_passes=0)  # before the first step
    for number in range(3):  # the model is made, then the optimizer's state; a third one is new for other reasons
        assert not segmentation.is_on
        segmentation.note_whole(is_new=True, num_passes=20 - number)
    assert segmentation.is_on
    accumulated = Segmentation()
    for index in range(100):
        accumulated.note_whole(is_new=index < 2 or index % 3 == 0, num_passes=8)
        assert not accumulated.is_on
    few = Segmentation()
    for _ in range(6):
        few.note_whole(is_new=True, num_passes=3)
        assert not few.is_on


def test_steps_of_a_number_of_passes_that_changes_are_cut_after_two_that_were_new() -> None:
    segmentation = Segmentation()
    for num_passes in (2, 2, 1, 3):
        assert not segmentation.is_on
        segmentation.note_whole(is_new=True, num_passes=num_passes)
    assert segmentation.is_on
    epochs = Segmentation()
    for index in range(100):  # the last batches of an epoch are fewer
        is_last = index % 10 == 9
        epochs.note_whole(is_new=index < 2 or is_last, num_passes=1 if is_last else 3)
        assert not epochs.is_on
    known = Segmentation()
    for index in range(100):  # one number after the other, each of which has a plan
        known.note_whole(is_new=index < 4, num_passes=1 + (index + 1) // 2 % 2)
        assert not known.is_on


def test_steps_of_many_passes_that_were_planned_again_are_cut_as_late_as_others() -> None:
    segmentation = Segmentation()
    while not segmentation.is_on:
        segmentation.note_whole(is_new=True, num_passes=8)
    while segmentation.is_on:
        segmentation.note_segments(("a", "a", "b"))
    for _ in range(7):
        segmentation.note_whole(is_new=True, num_passes=8)
        assert not segmentation.is_on
    segmentation.note_whole(is_new=True, num_passes=8)
    assert segmentation.is_on


def test_pieces_are_joined_when_all_steps_have_them_and_each_time_it_takes_more() -> None:
    segmentation = Segmentation()
    assert not any(segmentation.note_pieces(["whole"]) for _ in range(50))
    assert not any(segmentation.note_pieces(["average", None]) for _ in range(50))  # nobody knows what that was
    assert not any(segmentation.note_pieces(["average", "step"] if index % 5 else ["step"]) for index in range(50))
    segmentation = Segmentation()
    for num_before in (7, 15):
        assert not any(segmentation.note_pieces(["average", "step"]) for _ in range(num_before))
        assert segmentation.note_pieces(["average", "step"])


def test_a_plan_that_is_complete_counts_for_its_own_step() -> None:
    """It ends in the next one; on demand it would have ended before."""
    segmentation = Segmentation()
    while not segmentation.is_on:
        segmentation.note_whole(is_new=True)
    is_planned = [True, False, False, True, True, False, True, True]
    for index, (before, now) in enumerate(zip([False, *is_planned], is_planned, strict=False)):
        assert segmentation.is_on, index
        segmentation.note_segments([*["b"] * before, "a", *["b"] * (not now)], "b" if now else None)
    assert not segmentation.is_on
