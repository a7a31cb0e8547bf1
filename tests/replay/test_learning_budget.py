"""How much is learned and planned while everything fits: by a clock that the tests turn."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import ooc
from ooc.memory.counters import Counters
from ooc.replay import unions
from ooc.replay.learning_budget import (
    FREE_FRACTION,
    FREE_S,
    FREE_SEQUENCES,
    FREE_SHARE,
    LEARNING_FRACTION,
    LEAST_FREE_S,
    MOST_FRACTION,
    REPEATED_FRACTION,
    LearningBudget,
    Stay,
)
from ooc.step_cycle import StepCycle


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Plan:
    """Stands for a plan: all that is asked of it is which one it is, and whether steps may leave out ops of it."""

    def __init__(self, *, may_omit: bool = False) -> None:
        self.may_omit = may_omit


def _calm(counters: Counters, clock: _Clock, num_periods: int = 5) -> LearningBudget:
    learning = LearningBudget(counters, is_limited=True, clock=clock)
    for _ in range(num_periods):
        learning.begin_period()
        learning.end_period()
    return learning


def test_where_everything_fits_learning_takes_its_share_and_no_more() -> None:
    counters, clock = Counters(), _Clock()
    learning = _calm(counters, clock)
    assert learning.may_learn()
    with learning.spending():
        clock.now += 1.0
    assert not learning.may_learn()
    clock.now = 1.0 / LEARNING_FRACTION
    assert learning.may_learn()


def test_what_is_measured_once_for_all_does_not_count() -> None:
    counters, clock = Counters(), _Clock()
    learning = _calm(counters, clock)
    clock.now = 10.0
    with learning.spending():
        clock.now += 0.25
        with learning.uncounted():
            clock.now += 5.0
    assert learning.may_learn()


def test_where_something_was_moved_all_is_learned() -> None:
    counters, clock = Counters(), _Clock()
    learning = _calm(counters, clock)
    clock.now += 3.0
    with learning.spending():
        clock.now += 1.0
    learning.begin_period()
    assert not learning.may_learn()
    counters.num_crowded += 1
    learning.end_period()
    assert learning.may_learn()
    plan = _Plan()
    learning.note_stay(plan, num_ops=0, entered_ns=1_000_000)  # nobody knows yet what time ops take
    assert all(learning.may_enter(plan) for _ in range(8))


def test_where_something_moves_an_op_on_a_plan_saves_a_part_of_the_time_that_ops_take() -> None:
    """However large they are, and however slow the store: 1,000 ops of 100 us save 40 ms."""
    for ns_per_op in (100_000, 100_000_000):
        counters, clock = Counters(), _Clock()
        learning, plan = LearningBudget(counters, is_limited=True, clock=clock), _Plan()
        for _ in range(8):
            learning.begin_period()
            counters.num_crowded += 1
            clock.now += 1000 * ns_per_op / 1e9
            learning.end_period(num_ops=1000)
        learning.note_stay(plan, num_ops=1000, entered_ns=300 * ns_per_op)
        assert all(learning.may_enter(plan) for _ in range(8))
        for _ in range(8):
            learning.note_stay(plan, num_ops=100, entered_ns=300 * ns_per_op)
        assert not learning.may_enter(plan)


def test_a_plan_that_was_played_whole_is_tried_again_before_long() -> None:
    """It may have seemed to be a loss on a busy machine; one that was left before its end is tried more seldom."""
    learning, plan = LearningBudget(Counters(), is_limited=True, clock=_Clock()), _Plan()
    learning.note_on_demand("key", num_ops=100, cost_ns=1_000_000)
    for _ in range(16):
        learning.note_stay(plan, num_ops=100, entered_ns=0, key="key", cost_ns=2_000_000)
    assert [learning.may_enter(plan) for _ in range(9)] == [False] * 8 + [True]


def _learn_all_that_is_free(learning: LearningBudget, clock: _Clock, each_s: float) -> None:
    for _ in range(FREE_SEQUENCES):
        with learning.spending():
            clock.now += each_s


def test_where_something_moves_learning_takes_its_share_after_so_many_sequences() -> None:
    """If plans have gained as much."""
    clock = _Clock()
    learning, each_s = LearningBudget(Counters(), is_limited=True, clock=clock), FREE_S / (2 * FREE_SEQUENCES)
    clock.now = FREE_S / FREE_SHARE
    for _ in range(FREE_SEQUENCES):
        assert learning.may_learn()
        with learning.spending():
            clock.now += each_s
    assert not learning.may_learn()
    clock.now = max(clock.now, FREE_SEQUENCES * each_s / MOST_FRACTION)
    assert not learning.may_learn()
    learning.note_on_demand("key", num_ops=100, cost_ns=round(2 * FREE_S * 1e9))
    learning.note_stay(_Plan(), num_ops=100, entered_ns=0, key="key", cost_ns=round(FREE_S * 1e9))
    assert learning.may_learn()


def test_the_first_sequences_take_a_larger_share_and_not_all_the_time() -> None:
    clock = _Clock()
    learning = LearningBudget(Counters(), is_limited=True, clock=clock)
    clock.now = FREE_S / FREE_SHARE
    for _ in range(2):
        assert learning.may_learn()
        with learning.spending():
            clock.now += 1.01 * FREE_S / 2
    assert not learning.may_learn()
    clock.now = 1.01 * FREE_S / FREE_FRACTION
    assert learning.may_learn()


def test_the_first_sequences_of_short_steps_wait_for_their_time() -> None:
    """However many ops a step has: what its learning will take counts before it begins."""
    clock = _Clock()
    learning = LearningBudget(Counters(), is_limited=True, clock=clock)
    assert learning.may_learn()
    with learning.spending():
        clock.now += 1.01 * LEAST_FREE_S
    assert not learning.may_learn()
    clock.now = 3 * LEAST_FREE_S / FREE_SHARE
    assert learning.may_learn()
    assert not learning.may_learn(num_ops=50_000)
    clock.now = 12 * LEAST_FREE_S / FREE_SHARE
    assert learning.may_learn(num_ops=50_000)


def test_where_plans_gain_nothing_learning_takes_less() -> None:
    clock, plan = _Clock(), _Plan()
    learning = LearningBudget(Counters(), is_limited=True, clock=clock)
    learning.note_on_demand("key", num_ops=100, cost_ns=1_000_000_000)
    _learn_all_that_is_free(learning, clock, 1.0)
    clock.now = enough = FREE_SEQUENCES / MOST_FRACTION + 1
    for _ in range(FREE_SEQUENCES):
        learning.note_stay(plan, num_ops=100, entered_ns=0, key="key", cost_ns=2_000_000_000)
    assert not learning.may_learn()
    clock.now = 10 * enough
    assert learning.may_learn()  # all the same, in case that changes
    clock.now = enough
    for _ in range(2 * FREE_SEQUENCES):
        learning.note_stay(plan, num_ops=100, entered_ns=0, key="key", cost_ns=500_000_000)
    assert learning.may_learn()


def test_what_comes_again_just_so_is_learned_whatever_else_took() -> None:
    """Up to its own share: what is unlike takes all of its own, and waits; then what is repeated does."""
    clock = _Clock()
    learning = LearningBudget(Counters(), is_limited=True, clock=clock)
    _learn_all_that_is_free(learning, clock, FREE_S)
    assert not learning.may_learn()
    assert learning.may_learn(is_repeated=True)
    with learning.spending(is_repeated=True):
        clock.now += clock.now * 2 * REPEATED_FRACTION
    assert not learning.may_learn(is_repeated=True)


def test_what_plans_move_where_all_fits_is_no_want_of_room() -> None:
    counters, clock = Counters(), _Clock()
    learning = _calm(counters, clock)
    learning.begin_period()
    counters.evicted_nbytes += 1  # of what outlived its plan
    counters.loaded_nbytes += 1
    learning.end_period()
    assert learning.everything_fits


def test_what_entering_a_plan_moves_is_no_want_of_room() -> None:
    counters, clock = Counters(), _Clock()
    learning = _calm(counters, clock)
    counters.num_crowded += 1  # between the periods
    learning.begin_period()
    learning.end_period()
    assert learning.everything_fits


def _entered(learning: LearningBudget, plan: _Plan, num_chances: int) -> list[int]:
    """The chances at which a plan is entered that is left at once each time."""
    entered = []
    for index in range(num_chances):
        if learning.may_enter(plan):
            entered.append(index)
            learning.note_stay(plan, num_ops=0, entered_ns=1_000_000)
    return entered


def test_plans_that_are_left_are_entered_less_and_less_often() -> None:
    learning, plan = _calm(Counters(), _Clock()), _Plan()
    assert _entered(learning, plan, 40) == [0, 2, 5, 10, 19, 36]
    assert not learning.may_enter(plan)
    learning.note_stay(plan, num_ops=1_000_000, entered_ns=0)
    assert _entered(learning, plan, 2) == [0, 1]  # what it gained is more than what it has cost


def test_each_plan_is_judged_by_itself_and_a_new_one_by_all_others() -> None:
    learning = _calm(Counters(), _Clock())
    good, bad = _Plan(), _Plan()
    for _ in range(20):
        if learning.may_enter(good):
            learning.note_stay(good, num_ops=1000, entered_ns=1_000_000)
        if learning.may_enter(bad):
            learning.note_stay(bad, num_ops=10, entered_ns=1_000_000)
    assert all(learning.may_enter(good) for _ in range(20))
    assert learning.may_enter(_Plan())  # most stays have gained something
    for _ in range(20):
        learning.note_stay(_Plan(), num_ops=10, entered_ns=1_000_000)
    assert not any(learning.may_enter(_Plan()) for _ in range(20))
    assert all(learning.may_enter(good) for _ in range(20))


def test_without_limits_the_clock_decides_nothing() -> None:
    clock = _Clock()
    learning = LearningBudget(Counters(), is_limited=False, clock=clock)
    for _ in range(8):
        with learning.spending():
            clock.now += 1.0
        learning.end_period()
    assert learning.may_learn()
    assert learning.may_enter(_Plan())


def _train(num_steps: int, shrink_at: int | None, spent_s: float = 0.0) -> tuple[list[float], list[str]]:
    """Losses, and why each step was not planned. Where everything fits, nothing at all may be learned.

    When the budget shrinks, so many seconds were spent on learning.
    """
    torch.manual_seed(0)
    with ooc.Session("16MiB", step_boundary="optimizer", plan_cache=False, background_planning=True) as session:
        session.engine.cycle._learning._spent_s = 1e9
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())))
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for index in range(num_steps):
            if index == shrink_at:
                session.set_budget("2MiB")
                learning = session.engine.cycle._learning
                learning._spent_s = learning._repeated_s = spent_s
            loss = model(torch.full((32, 256), index / 10)).square().mean()
            for _ in range(max(12 - index, 0)):  # the first ones are all different
                loss = loss * 1.5
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if session.engine.sequences.background is not None:
                session.engine.sequences.background.wait()
        return losses, [f"{step['mode']} {step['cause']}" for step in session.report()["steps"]]


def test_steps_that_fit_are_not_planned_and_those_that_no_longer_do_are() -> None:
    roomy, why_roomy = _train(24, None)
    tight, why_tight = _train(24, 12)
    assert roomy == tight
    assert set(why_roomy[6:]) == {"learning fits"}
    assert set(why_tight[6:12]) == {"learning fits"}
    assert why_tight[-1] == "planned "


def test_steps_that_nobody_may_learn_from_run_on_demand_in_little_memory() -> None:
    roomy, _ = _train(16, None)
    tight, why = _train(16, 0, spent_s=1e9)
    assert roomy == tight
    assert not any(cause.startswith("planned") for cause in why)


def test_want_of_room_is_noted_on_demand_and_in_plans() -> None:
    torch.manual_seed(0)
    modes = set()
    with ooc.Session("2MiB", plan_cache=False) as session:
        counters = session.engine.manager.counters
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())))
        optimizer = torch.optim.Adam(model.parameters())
        for index in range(8):
            before = counters.num_crowded
            with session.step():
                model(torch.full((32, 256), index / 10)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert counters.num_crowded > before
            modes.add(session.report()["steps"][-1]["mode"])
    assert modes >= {"learning", "planned"}


def test_a_plan_that_is_played_whole_is_compared_with_its_sequence_on_demand() -> None:
    """A short sequence of large ops: a share of what ops take on average would not tell what its plan saves."""
    learning, good, bad = LearningBudget(Counters(), is_limited=True), _Plan(), _Plan()
    for key in ("good", "bad"):
        learning.note_on_demand(key, num_ops=100, cost_ns=60_000_000)
        learning.note_on_demand(key, num_ops=100, cost_ns=80_000_000)
    for _ in range(8):
        learning.note_stay(good, num_ops=100, entered_ns=20_000_000, key="good", cost_ns=40_000_000)
        learning.note_stay(bad, num_ops=100, entered_ns=1_000, key="bad", cost_ns=90_000_000)
    assert all(learning.may_enter(good) for _ in range(8))
    assert not all(learning.may_enter(bad) for _ in range(8))


def test_where_everything_fits_long_sequences_are_learned_when_there_was_time_for_it() -> None:
    clock = _Clock()
    learning = _calm(Counters(), clock)
    clock.now = 10.0
    assert learning.may_learn(num_ops=1000)
    assert not learning.may_learn(num_ops=100_000)
    clock.now = 1000.0
    assert learning.may_learn(num_ops=100_000)


def test_where_nothing_was_ever_moved_all_is_taken_to_fit_sooner() -> None:
    counters = Counters()
    assert _calm(counters, _Clock(), num_periods=2).everything_fits
    counters.num_crowded = 1
    assert not _calm(counters, _Clock(), num_periods=2).everything_fits
    assert _calm(counters, _Clock(), num_periods=5).everything_fits


def test_where_everything_fits_no_plan_is_entered_that_steps_leave_ops_out_of() -> None:
    learning = _calm(Counters(), _Clock())
    assert learning.may_enter(_Plan())  # type: ignore[arg-type]
    assert not learning.may_enter(_Plan(may_omit=True))  # type: ignore[arg-type]


def test_the_first_runs_of_a_sequence_are_not_what_it_costs() -> None:
    """The first one also faults memory in; what came faster since counts at once, what came slower little by little."""
    learning, plan = LearningBudget(Counters(), is_limited=True), _Plan()
    for cost_ns in (900_000_000, 50_000_000, 50_000_000, 54_000_000):
        learning.note_on_demand("key", num_ops=100, cost_ns=cost_ns)
    learning.note_stay(plan, num_ops=100, entered_ns=0, key="key", cost_ns=60_000_000)
    assert not all(learning.may_enter(plan) for _ in range(8))


def test_what_waits_counts_and_what_learns_does_not() -> None:
    counters, clock, thread_ns = Counters(), _Clock(), [0]
    learning = LearningBudget(counters, is_limited=True, clock=clock, thread_clock=lambda: thread_ns[0])
    before = learning.cost_ns()
    thread_ns[0] += 7_000
    counters.stall_ns += 5_000
    with learning.spending():
        clock.now += 2e-6
        thread_ns[0] += 2_000
    assert learning.cost_ns() - before == 12_000


def test_what_a_session_plans_is_measured_on_demand_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's step after passes of which none is like another: it is seen on demand, and then planned."""
    on_demand: list[str] = []
    whole: list[str] = []
    monkeypatch.setattr(LearningBudget, "note_on_demand", lambda _, key, **__: on_demand.append(key))

    def note_stay(_: LearningBudget, __: object, *, key: str, cost_ns: int | None, **___: int) -> None:
        whole.extend([key] if cost_ns is not None and cost_ns > 0 else [])

    monkeypatch.setattr(LearningBudget, "note_stay", note_stay)
    monkeypatch.setattr(unions, "_NUM_UNLIKE", 99)
    monkeypatch.setattr(unions, "_NUM_MIXED", 99)
    torch.manual_seed(0)
    with ooc.Session("4MiB", step_boundary="optimizer") as session:
        cells = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])
        optimizer = torch.optim.Adam(cells.parameters(), lr=1e-3)
        for number in range(16):
            x = torch.ones(8, 256)
            for turn in range(5 + number):
                x = torch.tanh(cells[turn % 4](x))
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.engine.manager.counters.loaded_nbytes > 0
    assert len(whole) > 1
    assert set(whole) <= set(on_demand)


def _look(learning: LearningBudget, clock: _Clock, num_ops: int, *, in_segments: bool = False) -> None:
    """A period in which 1 ms goes to looking for what begins; a plan with so many ops is entered there, and played."""
    watched = learning.watches
    if watched:
        with learning.at_border():
            clock.now += 1e-3
            with learning.spending(), learning.uncounted():
                clock.now += 1.0  # no cost of the border
        stay: Any = Stay(_Plan(), "", entered_ns=0, is_at_border=not in_segments)  # type: ignore[arg-type]
        stay.plan.is_elastic = False
        learning.end_stay(stay, num_ops=num_ops, num_replayed=num_ops, begun_ns=0)
    learning.end_period(
        num_ops=num_ops,
        num_planned=num_ops if watched else 0,
        num_at_borders=num_ops if watched and in_segments else 0,
    )
    learning.begin_period()


@pytest.mark.parametrize("in_segments", [True, False])
def test_where_everything_fits_nobody_looks_for_plans_that_save_less_than_that_takes(in_segments: bool) -> None:
    """1,000 ops on a plan save more than 1 ms; 100 save less, so ever fewer periods look for them."""
    clock = _Clock()
    pays, loses = (_calm(Counters(), clock) for _ in range(2))
    watched = []
    for _ in range(200):
        _look(pays, clock, 1000, in_segments=in_segments)
        assert pays.watches
        watched.append(loses.watches)
        _look(loses, clock, 100, in_segments=in_segments)
    assert watched[0]
    assert 4 <= sum(watched) <= 12
    for _ in range(200):  # what begins there has changed
        _look(loses, clock, 1000, in_segments=in_segments)
    assert loses.watches


def test_periods_in_which_nothing_was_looked_at_say_nothing_of_borders() -> None:
    """Episodes are played before one step in four."""
    clock = _Clock()
    learning, watched = _calm(Counters(), clock), 0
    for index in range(400):
        if index % 4 == 0:
            watched += learning.watches
            _look(learning, clock, 0)
        else:
            learning.end_period(num_ops=100)
            learning.begin_period()
    assert watched <= 14


def test_where_something_moves_what_begins_is_always_looked_for() -> None:
    counters, clock = Counters(), _Clock()
    learning = _calm(counters, clock)
    for _ in range(40):
        _look(learning, clock, 0)
    assert not learning.watches
    counters.num_crowded += 1
    learning.end_period()
    learning.begin_period()
    for _ in range(40):
        assert learning.watches
        counters.num_crowded += 1
        _look(learning, clock, 0)


def test_short_pieces_without_gradients_cost_little_where_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that pack what is saved run without gradients: each ended a segment, in all of the steps."""
    num_passed, passes = [0], StepCycle._pass

    def counting(self: StepCycle, *args: Any, **kwargs: Any) -> None:
        num_passed[0] += 1
        passes(self, *args, **kwargs)

    monkeypatch.setattr(StepCycle, "_pass", counting)

    def train(budget: str | None) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU())))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses, passed = [], []
        with contextlib.ExitStack() as stack:
            session = None
            if budget is not None:
                session = stack.enter_context(ooc.Session(budget, plan_cache=False, background_planning=True))
            for _ in range(120):
                before = num_passed[0]
                if session is not None:
                    session.engine.cycle._segmentation.is_on = True
                with session.step() if session is not None else contextlib.nullcontext():
                    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float):
                        loss = model(torch.randn(64, 256)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                passed.append(num_passed[0] - before)
        return losses, passed

    expected, _ = train(None)
    losses, passed = train("64MiB")
    assert losses == expected
    assert max(passed) > 8  # or there was nothing to save
    assert sorted(passed[60:])[30] <= 2
