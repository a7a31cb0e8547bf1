"""Ctrl-C while a step is planned: planning is given up at once, training goes on from there and plans again."""

from __future__ import annotations

import signal
from typing import Any

import pytest

import ooc
from ooc.replay.plan_maker import make_plan
from tests.dispatch.test_signals import assert_goes_on, session, train
from tests.session.continuation import BUDGET, Trainer

__all__ = ["session"]  # the fixture


class Interrupted:
    """Makes plans; while it makes the n-th, a signal arrives."""

    def __init__(self, number: signal.Signals, nth: int = 1) -> None:
        self.number = number
        self.nth = nth
        self.num_begun = self.num_made = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.num_begun += 1
        if self.num_begun == self.nth:
            signal.raise_signal(self.number)
        plan = make_plan(*arguments, **named)
        self.num_made += 1
        return plan


def test_it_is_given_up_and_tried_again(session: ooc.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Interrupted(signal.SIGINT)
    monkeypatch.setattr("ooc.replay.plan_maker.make_plan", planner)
    trainer = Trainer()
    with pytest.raises(KeyboardInterrupt):
        train(session, trainer, range(6))
    assert (planner.num_begun, planner.num_made) == (1, 0)
    assert session.report()["unplannable"] == {}
    train(session, trainer, range(6))
    assert planner.num_made >= 1
    assert session.steps.rows[-1].mode == "planned"
    assert_goes_on(session, trainer, range(4))


def test_planning_anew_is_given_up_and_the_plan_stays(session: ooc.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Interrupted(signal.SIGINT, nth=2)
    monkeypatch.setattr("ooc.replay.plan_maker.make_plan", planner)
    monkeypatch.setattr("ooc.replay.sequences._WORTHWHILE_STALL", 0.0)
    trainer = Trainer()
    with pytest.raises(KeyboardInterrupt):
        train(session, trainer, range(40))
    assert (planner.num_begun, planner.num_made) == (2, 1)
    train(session, trainer, range(2))
    assert_goes_on(session, trainer, range(4))


def test_other_signals_do_not_end_it(session: ooc.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's timer must not keep it from ever being planned."""
    arrived: list[int] = []
    planner = Interrupted(signal.SIGUSR1)
    monkeypatch.setattr("ooc.replay.plan_maker.make_plan", planner)
    before = signal.signal(signal.SIGUSR1, lambda number, _: arrived.append(number))
    try:
        train(session, Trainer(), range(6))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert planner.num_made >= 1
    assert arrived == [signal.SIGUSR1]


def test_a_handler_of_the_users_own_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who only notes a Ctrl-C loses one attempt to plan, and nothing else."""
    noted: list[int] = []
    planner = Interrupted(signal.SIGINT)
    monkeypatch.setattr("ooc.replay.plan_maker.make_plan", planner)
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        with ooc.Session(BUDGET, debug=True) as opened:
            train(opened, Trainer(), range(8))
            modes = [row.mode for row in opened.steps.rows]
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == [signal.SIGINT]
    assert modes[-1] == "planned"
