"""Plans that steps leave out ops of, and joining unlike steps for them: whether that has paid."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ooc.memory.counters import Counters
from ooc.replay.learning_budget import FREE_S, FREE_SHARE, JOIN_FREE_S, LEAST_FREE_S, LearningBudget, Stay
from tests.replay.test_learning_budget import _Clock, _Plan


@pytest.mark.parametrize(("cost_ns", "is_loss"), [(85_000_000, False), (100_000_000, True)])
def test_a_plan_that_steps_leave_out_ops_of_is_left_where_it_takes_longer(cost_ns: int, is_loss: bool) -> None:
    """An op of these took 0.8 ms on demand. Steps differ, so what takes a little longer may not be the plan's fault."""
    thread_ns = [0]
    learning = LearningBudget(Counters(), is_limited=True, thread_clock=lambda: thread_ns[0])
    plan: Any = SimpleNamespace(may_omit=True, is_elastic=True)
    other: Any = SimpleNamespace(may_omit=False, is_elastic=True)
    assert not learning.is_loss(Stay(plan, "key", entered_ns=0, num_ops=100), 0)
    learning.note_on_demand("key", num_ops=100, cost_ns=80_000_000)
    thread_ns[0] = cost_ns
    assert learning.is_loss(Stay(plan, "key", entered_ns=0, num_ops=100), 0) == is_loss
    assert not learning.is_loss(Stay(other, "key", entered_ns=0, num_ops=100), 0)
    assert not learning.is_loss(Stay(plan, "key", entered_ns=0, num_ops=100, is_late=True), 0)


def test_a_plan_that_steps_leave_counts_with_all_that_ran_after_it() -> None:
    """Half of an LSTM's ops on a plan, and then the rest on demand: 700 ms where all on demand took 600."""
    learning, plan = LearningBudget(Counters(), is_limited=True), _Plan(may_omit=True)
    learning.note_on_demand("key", num_ops=2000, cost_ns=600_000_000)
    for _ in range(8):
        learning.end_period(num_ops=2000)
        stay = {"num_ops": 1000, "num_others": 1000, "entered_ns": 0, "key": "key", "may_omit": True}
        learning.note_stay(plan, cost_ns=700_000_000, **stay)  # type: ignore[arg-type]
    assert not all(learning.may_enter(plan) for _ in range(8))  # type: ignore[arg-type]


def test_a_plan_that_is_left_at_once_is_tried_less_and_less_often() -> None:
    """Packed sequences, 10 of whose 9,000 ops were on a plan: that the rest came sooner is not its merit."""
    counters = Counters()
    learning, plan = LearningBudget(counters, is_limited=True), _Plan(may_omit=True)
    learning.note_on_demand("key", num_ops=9000, cost_ns=1_300_000_000)
    stay = {"num_ops": 10, "num_others": 8990, "entered_ns": 20_000_000, "key": "key", "may_omit": True}
    num_entered = 0
    for _ in range(64):
        learning.begin_period()
        counters.num_crowded += 1
        learning.end_period(num_ops=9000)
        if learning.may_enter(plan):  # type: ignore[arg-type]
            num_entered += 1
            learning.note_stay(plan, cost_ns=1_200_000_000, **stay)  # type: ignore[arg-type]
    assert 1 < num_entered < 8


def test_plans_that_steps_leave_ops_out_of_are_judged_by_others_of_their_kind() -> None:
    """Each replaces one that was left, so it is not entered just because it is new; others are."""
    learning = LearningBudget(Counters(), is_limited=True)
    learning.end_period(num_ops=9000)
    for num_chances in (0, 1, 2):
        plan: Any = _Plan(may_omit=True)
        assert [learning.may_enter(plan) for _ in range(num_chances + 1)] == [False] * num_chances + [True]
        learning.note_stay(plan, num_ops=10, num_others=8990, entered_ns=1_000_000_000, key="key", may_omit=True)
    assert learning.may_enter(_Plan())  # type: ignore[arg-type]


def test_unlike_steps_are_joined_less_often_where_that_gains_nothing() -> None:
    clock = _Clock()
    learning, plan = LearningBudget(Counters(), is_limited=True, clock=clock), _Plan(may_omit=True)

    def join(seconds: float) -> bool:
        if not learning.may_join():
            return False
        with learning.spending(), learning.joining():
            clock.now += seconds
        return True

    assert join(LEAST_FREE_S / 2)  # at first it is free
    assert join(LEAST_FREE_S / 2)
    assert not join(1.0)  # there is no time for one
    clock.now += JOIN_FREE_S / FREE_SHARE
    assert all(join((JOIN_FREE_S - LEAST_FREE_S) / 4) for _ in range(4))
    assert not join(1.0)
    clock.now += 1000.0
    assert all(join(1.0) for _ in range(3))  # up to `FREE_S`, now that it is little of the time
    assert [join(1.0) for _ in range(14)] == [*[False] * 4, True, *[False] * 8, True]
    clock.now += 1000.0
    assert sum(join(0.001) for _ in range(20)) == 20 - 16  # what found nothing to join lets no more chances pass
    learning.note_on_demand("key", num_ops=1000, cost_ns=90_000_000_000)
    learning.note_stay(plan, num_ops=1000, entered_ns=0, key="key", cost_ns=40_000_000_000, may_omit=True)
    assert join(1.0)


def test_the_longest_join_is_what_the_next_one_is_expected_to_take() -> None:
    """To begin a union of several steps anew took 3.2 s, where nothing had been gained."""
    clock = _Clock()
    learning = LearningBudget(Counters(), is_limited=True, clock=clock)
    with learning.spending(), learning.joining():
        clock.now += 4.0
    clock.now += 100.0
    assert not learning.may_join()  # 8 of 104 s would be more than the least part
    clock.now += 300.0
    assert [learning.may_join() for _ in range(2)] == [False, True]  # the first has gained nothing


def test_where_steps_are_long_joining_them_is_free_for_longer() -> None:
    clock = _Clock()
    learning = LearningBudget(Counters(), is_limited=True, clock=clock)
    clock.now += 60.0
    with learning.spending(), learning.joining():
        clock.now += FREE_S - 0.5
    assert learning.may_join()
    with learning.spending(), learning.joining():
        clock.now += 1.0
    assert not learning.may_join()
