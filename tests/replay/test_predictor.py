"""Which sequence of ops is expected next."""

from __future__ import annotations

import random

import pytest

from ooc.replay import predictor
from ooc.replay.predictor import _MOST_PASTS, SequencePredictor, likeliest


def num_wrong(keys: str, *, after: int = 0) -> int:
    """Wrong guesses from the step `after` on, when these steps come."""
    expectation, wrong = SequencePredictor(), 0
    for index, key in enumerate(keys):
        if index > after and expectation.next() != key:
            wrong += 1
        expectation.note(key)
    return wrong


@pytest.mark.parametrize(
    ("pattern", "most_wrong"),
    [
        ("A", 0),
        ("AB", 2),
        ("AAB", 6),
        ("AAAAE", 6),  # an evaluation every fifth step
        ("AABBC", 8),
        ("AAAAAG", 3),  # five steps of a critic, one of its generator; without `_SURE` it takes two rounds more
        ("AAAAAAAE", 4),
    ],
)
def test_patterns_are_learned_within_a_few_rounds(pattern: str, most_wrong: int) -> None:
    keys = pattern * 20
    assert num_wrong(keys) <= most_wrong
    assert num_wrong(keys, after=6 * len(pattern)) == 0


def test_the_common_one_is_expected_when_nothing_else_is_known() -> None:
    """One step in ten is another one, at random: only those are guessed wrong, or hardly more."""
    source = random.Random(5)
    keys = "".join(source.choices("AB", (9, 1), k=1000))
    assert num_wrong(keys) < 1.5 * keys.count("B")


def test_two_rhythms_together() -> None:
    """Evaluation every fifth step, a checkpoint every sixth: most plain steps are guessed right."""
    keys = "".join("E" if i % 5 == 4 else "S" if i % 6 == 5 else "A" for i in range(600))
    assert num_wrong(keys, after=300) < 300 * 0.1


def test_the_latest_decides_between_equals() -> None:
    expectation = SequencePredictor()
    assert expectation.next() is None
    for key in "AXAYAZA":
        expectation.note(key)
    assert expectation.next() == "Z"


def test_an_interruption_ends_the_past() -> None:
    expectation = SequencePredictor()
    for key in "ABABABA":
        expectation.note(key)
    assert expectation.next() == "B"
    expectation.interrupt()
    assert expectation.next() is None


def test_steps_that_never_repeat_take_little_memory() -> None:
    expectation = SequencePredictor()
    for number in range(3 * _MOST_PASTS):
        expectation.note(str(number))
    assert len(expectation) <= _MOST_PASTS


@pytest.mark.parametrize(
    ("found", "num_now", "expected"),
    [
        ([], 10, None),
        ([40], 10, 40),  # better than none
        ([39, 52], 39, 39),
        ([39, 52], 52, 52),  # gradients are there
        ([39, 52], 46, 39),  # a few more tell nothing
        ([52, 39, 39], 38, 39),
    ],
)
def test_the_likeliest_that_begins_with_about_as_many(found: list[int], num_now: int, expected: int | None) -> None:
    assert likeliest(found, int, num_now) == expected


@pytest.mark.parametrize("most_known", [1, 3, 100])
def test_what_gets_another_name_is_expected_by_that(most_known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few of the keys are kept at hand."""
    monkeypatch.setattr(predictor, "_MOST_KNOWN", most_known)
    steps = SequencePredictor()
    for key in "abcabcabc":
        steps.note(key)
    steps.rename("x", "y")
    steps.rename("a", "d")
    assert steps.next() == "d"
    steps.note("d")
    assert steps.next() == "b"
    steps.rename("d", "a")
    assert steps.next() == "b"
    for key in "bc":
        steps.note(key)
    assert steps.next() == "a"
