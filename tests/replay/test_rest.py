"""Where everything fits, a session rests from plans that save less than they take (`LearningBudget.rests`)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import ooc
from ooc.memory.counters import Counters
from ooc.replay import unions
from ooc.replay.learning_budget import LearningBudget


def _calm(counters: Counters) -> LearningBudget:
    """Everything has fitted for the periods that it takes to believe that."""
    learning = LearningBudget(counters, is_limited=True, clock=lambda: 0.0)
    for _ in range(4):
        learning.begin_period()
        learning.end_period()
    learning.begin_period()
    return learning


def _rest(learning: LearningBudget, *, num_planned: int, entered_ns: int = 0, is_known: bool = False) -> bool:
    """A period of 1,000 ops; if it was not one of rest, so many were planned. Whether it was one."""
    rests = learning.rests
    if not rests:
        learning.note_entry(entered_ns)
        if is_known:
            learning.note_known()
    learning.end_period(num_ops=1000, num_planned=0 if rests else num_planned)
    learning.begin_period()
    return rests


def test_where_everything_fits_the_session_rests_from_plans_that_save_less_than_they_take() -> None:
    """Steps that are never alike have none; one that is entered for 5 ms a step saves 3 ms; one for 1 ms pays."""
    unlike, dear, cheap = (_calm(Counters()) for _ in range(3))
    num_rests = [0, 0, 0]
    for _ in range(400):
        num_rests[0] += _rest(unlike, num_planned=0)
        num_rests[1] += _rest(dear, num_planned=1000, entered_ns=5_000_000)
        num_rests[2] += _rest(cheap, num_planned=1000, entered_ns=1_000_000)
        assert not (unlike.rests and unlike.watches)
    assert num_rests[0] > 340
    assert 200 < num_rests[1] < 340  # plans that are played are given more periods, in case they are played on
    assert num_rests[2] == 0
    for _ in range(200):
        _rest(unlike, num_planned=1000)  # steps are alike now
    assert not unlike.rests


def test_what_comes_again_is_given_time_to_be_planned() -> None:
    learning, unknown = (_calm(Counters()) for _ in range(2))
    rests = [[_rest(each, num_planned=0, is_known=each is learning) for _ in range(12)] for each in (learning, unknown)]
    assert not any(rests[0])
    assert any(rests[1])


def test_nobody_rests_once_something_moves() -> None:
    counters = Counters()
    learning = _calm(counters)
    while not learning.rests:
        _rest(learning, num_planned=0)
    counters.num_crowded += 1
    _rest(learning, num_planned=0)
    assert not learning.rests
    assert not learning.everything_fits


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the next period is one of rest; all run on demand."""
    value = [False]
    end = LearningBudget.end_period

    def end_period(self: LearningBudget, **counts: int) -> None:
        end(self, **counts)
        self.rests = value[0]

    monkeypatch.setattr(unions, "_NUM_UNLIKE", 99)
    monkeypatch.setattr(unions, "_NUM_MIXED", 99)
    monkeypatch.setattr(LearningBudget, "end_period", end_period)
    return value


def _sums_of_gradients(session: ooc.Session, weight: torch.Tensor, index: int) -> list[str]:
    """The ops by which a step, unlike all others, sums up the gradient of a weight that is used three times."""
    with session.step():
        for _ in range(index):
            torch.ones(64, 64).sin_()
        x = torch.ones(64, 64)
        for _ in range(3):
            x = (x @ weight).tanh()
        loss = x.sum()
        with torch.autograd.profiler.profile() as seen:
            loss.backward()
    return [event.name for event in seen.function_events or () if event.name.startswith("aten::add")]


def test_gradients_are_summed_up_in_place_at_rest_alone(rests: list[bool]) -> None:
    """Elsewhere steps are compared, and that must not depend on who has a tensor. The bits are the same."""
    grads = []
    weight = torch.randn(64, 64).mul_(0.1).requires_grad_()
    with ooc.Session("8MiB", threshold_nbytes="4KiB", chunk_nbytes="64KiB", plan_cache=False) as session:
        for index in range(6):
            rests[0] = index in (2, 3)
            found: list[str] = []
            for part in range(2):  # the first ends the period before it
                weight.grad = None
                found = _sums_of_gradients(session, weight, 2 * index + part)
                assert weight.grad is not None
                grads.append(weight.grad.clone())
            assert set(found) == {"aten::add_" if rests[0] else "aten::add"}
        rests[0] = True
        _sums_of_gradients(session, weight, 20)
    rests[0] = False
    with ooc.Session("8MiB", threshold_nbytes="4KiB", chunk_nbytes="64KiB", plan_cache=False) as session:
        weight.grad = None
        assert set(_sums_of_gradients(session, weight, 0)) == {"aten::add"}  # the other has left nothing behind
    assert all(torch.equal(grads[0], grad) for grad in grads)


@pytest.mark.usefixtures("one_thread")  # the others are not in the child
def test_a_child_that_was_forked_at_rest_compares_its_own_steps(rests: list[bool]) -> None:
    weight = torch.randn(64, 64).mul_(0.1).requires_grad_()
    options: dict[str, Any] = {"threshold_nbytes": "4KiB", "chunk_nbytes": "64KiB", "plan_cache": False}
    with ooc.Session("8MiB", **options) as session:
        rests[0] = True
        for index in range(3):
            weight.grad = None
            found = _sums_of_gradients(session, weight, index)
        assert set(found) == {"aten::add_"}
        rests[0] = False
        child = os.fork()
        if child == 0:
            weight.grad = None
            try:
                with ooc.Session("8MiB", **options) as own:
                    os._exit(0 if set(_sums_of_gradients(own, weight, 1)) == {"aten::add"} else 3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_where_ops_come_from_is_noted_where_they_are_compared(rests: list[bool]) -> None:
    """At rest nobody looks for it, nor whether an op may run again, which takes runs of its own."""
    with ooc.Session("8MiB", threshold_nbytes="4KiB", plan_cache=False, recompute=True) as session:
        runner = session.engine.runner
        for index in range(6):  # no two steps are alike
            rests[0] = index in (2, 3)
            for part in range(2):  # the first ends the period before it
                with session.step():
                    for _ in range(2 * index + part):
                        torch.ones(64, 64).cos_()
                    x = torch.ones(64, 64)
                    for _ in range(3):
                        x = x.sin()
                    recorder = runner.recording.recorder
                    assert recorder is not None
                    ops = recorder.ops
            assert {bool(op.where) for op in ops[-2:]} == {not rests[0]}
            assert {op.replayable for op in ops[-2:]} == {not rests[0]}
            assert x.sum().item() == pytest.approx(64 * 64 * 0.67843, rel=1e-4)
