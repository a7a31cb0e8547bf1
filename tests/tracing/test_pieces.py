"""Cutting recordings into what repeats in them."""

from __future__ import annotations

import itertools
import random

from ooc.tracing.pieces import repeats


def test_repetitions_are_found_between_what_comes_before_and_after() -> None:
    assert repeats([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 7]) == [2, 5, 8, 11]
    assert repeats([1, 2, 1, 2]) == [0, 2, 4]
    assert repeats([1, 1, 2, 1, 1, 2]) == [0, 3, 6]


def test_what_does_not_repeat_is_left_whole() -> None:
    assert repeats([]) == []
    assert repeats([1, 2, 3, 4]) == []
    assert repeats([1, 2, 3, 4, 5, 6, 7, 7]) == []  # less than half of it


def test_any_repetition_between_two_cuts_is_the_same() -> None:
    rng = random.Random(0)
    for _ in range(200):
        batch = [rng.randint(1, 6) for _ in range(rng.randint(1, 9))]
        ops = [rng.randint(1, 6) for _ in range(rng.randint(0, 4))] + batch * rng.randint(2, 6)
        cuts = repeats(ops)
        pieces = [ops[start:stop] for start, stop in itertools.pairwise(cuts)]
        assert all(piece == pieces[0] for piece in pieces)
        assert not cuts or 2 * (cuts[-1] - cuts[0]) >= len(ops)
