"""A plan that cannot be made ready to be played costs its sequence the plan, not the user the training run."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

import ooc
from ooc.compiled import Compiled
from scheduler import planning
from scheduler.plan import Machine, Plan, PlanError
from scheduler.trace import Trace
from tests.continuation import BUDGET, Trainer

FAILURES = pytest.mark.parametrize("failure", [PlanError("not to be played"), RuntimeError("a fault")], ids=type)


def train(num_steps: int) -> tuple[list[float], list[str], ooc.Session]:
    """Losses, how each step ran, and the closed session."""
    with ooc.Session(BUDGET) as session:
        trainer = Trainer()
        losses = []
        for index in range(num_steps):
            with session.step():
                losses.append(trainer.step(index))
        modes = [row.mode for row in session.steps.rows]
    return losses, modes, session


@FAILURES
def test_a_sequence_whose_plan_does_not_compile_stays_on_demand(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, modes, _ = train(5)
    assert "planned" in modes

    def fail(**_: Any) -> Compiled:
        raise failure

    monkeypatch.setattr("ooc.sequences.Compiled", fail)
    with caplog.at_level(logging.WARNING):
        losses, modes, session = train(5)
    assert losses == expected
    assert "planned" not in modes
    (reason,) = session._sequences.unplannable.values()
    assert str(failure) in reason
    assert "stays on demand" in caplog.text


@FAILURES
def test_a_plan_made_anew_that_does_not_compile_leaves_the_old_one(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _, _ = train(8)
    monkeypatch.setattr("ooc.sequences._WORTHWHILE_STALL", -1.0)  # plan anew, whatever it is worth
    monkeypatch.setattr("ooc.sequences._WORTHWHILE", 1e9)
    num_compiled = 0

    def compile_once(**named: Any) -> Compiled:
        nonlocal num_compiled
        num_compiled += 1
        if num_compiled > 1:
            raise failure
        return Compiled(**named)

    monkeypatch.setattr("ooc.sequences.Compiled", compile_once)
    with caplog.at_level(logging.WARNING):
        losses, modes, _ = train(8)
    assert num_compiled > 1
    assert losses == expected
    assert modes[-1] == "planned"
    assert "the plan so far stays" in caplog.text or "cannot plan anew" in caplog.text


def test_a_better_plan_pays_for_its_remaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made anew that stalls less, but whose remaps cost more than that, does not replace the first."""
    made: list[Plan] = []

    def make_plan(trace: Trace, machine: Machine, **how: Any) -> Plan:
        plan = planning.make_plan(trace, machine, **how)
        if made:
            plan = replace(plan, predicted={**plan.predicted, "duration_ns": 1, "remap_ns": 10**15})
        made.append(plan)
        return plan

    monkeypatch.setattr("ooc.sequences.make_plan", make_plan)
    monkeypatch.setattr("ooc.sequences._WORTHWHILE_STALL", -1)  # always plan anew
    with ooc.Session(BUDGET, plan_cache=False) as session:
        trainer = Trainer()
        for index in range(14):
            with session.step():
                trainer.step(index)
        assert session.plan() is made[0]
    assert len(made) == 3  # the first, and one for each of `_REFINE_AFTER`
