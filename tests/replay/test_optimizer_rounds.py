"""Which steps end a period where optimizers take turns."""

from __future__ import annotations

import random

from ooc.replay.optimizer_rounds import OptimizerRounds

CRITIC, GENERATOR, TEMPERATURE = 1, 2, 3


def ends(rounds: OptimizerRounds, *optimizers: int) -> list[int]:
    return [int(rounds.ends_with(optimizer)) for optimizer in optimizers]


def test_one_optimizer_ends_every_period() -> None:
    rounds = OptimizerRounds()
    assert ends(rounds, *[CRITIC] * 50) == [1] * 50
    assert rounds.num_steps == 1


def test_two_that_take_turns_make_rounds_after_ten_steps() -> None:
    rounds = OptimizerRounds()
    assert ends(rounds, *[CRITIC, GENERATOR] * 7) == [1] * 10 + [0, 1, 0, 1]
    assert rounds.num_steps == 2


def test_five_steps_for_one() -> None:
    rounds = OptimizerRounds()
    turn = [*[CRITIC] * 5, GENERATOR]
    assert ends(rounds, *turn * 2) == [1] * 12
    assert ends(rounds, *turn * 2) == [0, 0, 0, 0, 0, 1] * 2


def test_three_that_take_turns() -> None:
    rounds = OptimizerRounds()
    turn = [CRITIC, GENERATOR, TEMPERATURE]
    assert ends(rounds, *turn * 5) == [1] * 12 + [0, 0, 1]


def test_out_of_turn_each_step_stands_for_itself_and_more_rounds_are_waited_for() -> None:
    rounds = OptimizerRounds()
    turn = [CRITIC, GENERATOR, TEMPERATURE]
    ends(rounds, *turn * 4)
    assert ends(rounds, CRITIC, CRITIC) == [0, 1]
    assert rounds.num_steps == 1
    rounds.forget()
    assert ends(rounds, *turn * 4) == [1] * 12
    assert ends(rounds, *turn) == [0, 0, 1]
    assert ends(rounds, CRITIC, CRITIC) == [0, 1]
    rounds.forget()
    assert ends(rounds, *turn * 8) == [1] * 24
    assert ends(rounds, *turn) == [0, 0, 1]


def test_steps_in_an_order_by_chance_are_hardly_ever_taken_for_rounds() -> None:
    rounds, choose = OptimizerRounds(), random.Random(0)
    found = ends(rounds, *[choose.choice((CRITIC, GENERATOR)) for _ in range(2000)])
    assert found.count(0) < 20


def test_no_turns_no_rounds() -> None:
    rounds = OptimizerRounds()
    order = [CRITIC, GENERATOR, GENERATOR, CRITIC, CRITIC, CRITIC, GENERATOR, CRITIC, CRITIC, GENERATOR, GENERATOR]
    assert ends(rounds, *order) == [1] * len(order)


def test_rounds_that_are_never_the_same_are_given_up_for_good() -> None:
    rounds = OptimizerRounds()
    ends(rounds, *[CRITIC, GENERATOR] * 5)
    for _ in range(3):
        rounds.note_period(is_new=True)  # as the first ones of any program
    for _ in range(20):  # one in four
        for is_new in (True, False, False, False):
            rounds.note_period(is_new=is_new)
    assert rounds.num_steps == 2
    for _ in range(3):
        rounds.note_period(is_new=True)
    assert rounds.num_steps == 1
    assert ends(rounds, *[CRITIC, GENERATOR] * 20) == [1] * 40


def test_rounds_that_were_given_up_do_not_come_back() -> None:
    rounds = OptimizerRounds()
    ends(rounds, *[CRITIC, GENERATOR] * 7)
    rounds.give_up()
    assert rounds.take_change() is False
    assert ends(rounds, *[CRITIC, GENERATOR] * 40) == [1] * 80
    assert rounds.num_steps == 1
