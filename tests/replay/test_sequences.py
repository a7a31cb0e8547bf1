"""A plan that cannot be made ready to be played costs its sequence the plan, not the user the training run."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ooc
from ooc.learner import Learner
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.step_unions import StepUnion
from scheduler import planning
from scheduler.plan import Machine, Plan, PlanError
from scheduler.renaming import is_renamed
from scheduler.trace import Trace
from tests.html_report.cases import net
from tests.planner_faults import faults_allowed
from tests.session.continuation import BUDGET, Trainer

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

    def fail(**_: Any) -> ExecutablePlan:
        raise failure

    monkeypatch.setattr("ooc.replay.sequences.ExecutablePlan", fail)
    with caplog.at_level(logging.WARNING), faults_allowed():
        losses, modes, session = train(5)
    assert losses == expected
    assert "planned" not in modes
    (reason,) = session.engine.sequences.unplannable.values()
    assert str(failure) in reason
    assert "stays on demand" in caplog.text


@FAILURES
def test_a_plan_made_anew_that_does_not_compile_leaves_the_old_one(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _, _ = train(8)
    monkeypatch.setattr("ooc.replay.sequences._WORTHWHILE_STALL", -1.0)  # plan anew, whatever it is worth
    monkeypatch.setattr("ooc.replay.sequences._WORTHWHILE", 1e9)
    num_compiled = 0

    def compile_once(**named: Any) -> ExecutablePlan:
        nonlocal num_compiled
        num_compiled += 1
        if num_compiled > 1:
            raise failure
        return ExecutablePlan(**named)

    monkeypatch.setattr("ooc.replay.sequences.ExecutablePlan", compile_once)
    with caplog.at_level(logging.WARNING), faults_allowed():
        losses, modes, _ = train(8)
    assert num_compiled > 1
    assert losses == expected
    assert modes[-1] == "planned"
    assert "the plan so far stays" in caplog.text or "cannot plan anew" in caplog.text


@pytest.mark.parametrize(("where", "name"), [(StepUnion, "_as_observed"), (Learner, "_learn_from")])
def test_a_fault_in_what_steps_have_in_common_ends_no_training(
    where: type, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps with some of the layers each: they are planned no more, and go on on demand."""

    def run(step: Callable[[], AbstractContextManager[Any]]) -> list[float]:
        torch.manual_seed(0)
        layers, chosen = [nn.Linear(128, 128) for _ in range(6)], random.Random(0)
        optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
        losses = []
        for _ in range(10):
            with step():
                x = torch.randn(64, 128)
                for layer in layers:
                    x = layer(x).relu() if chosen.random() < 0.6 else x
                loss = (x * layers[0](x)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("a fault of ours")

    expected = run(contextlib.nullcontext)
    monkeypatch.setattr(where, name, fail)
    with caplog.at_level(logging.WARNING), faults_allowed(), ooc.Session("512KiB") as session:
        losses = run(session.step)
    assert losses == expected
    assert "a fault in the planner" in caplog.text
    assert "a fault of ours" in caplog.text


def test_a_better_plan_pays_for_its_remaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made anew that stalls less, but whose remaps cost more than that, does not replace the first."""
    made: list[Plan] = []

    def make_plan(trace: Trace, machine: Machine, **how: Any) -> Plan:
        plan = planning.make_plan(trace, machine, **how)
        if made:
            plan = replace(plan, predicted={**plan.predicted, "duration_ns": 1, "remap_ns": 10**15})
        made.append(plan)
        return plan

    monkeypatch.setattr("ooc.replay.plan_maker.make_plan", make_plan)
    monkeypatch.setattr("ooc.replay.sequences._WORTHWHILE_STALL", -1)  # always plan anew
    with ooc.Session(BUDGET, plan_cache=False) as session:
        trainer = Trainer()
        for index in range(14):
            with session.step():
                trainer.step(index)
        found = session.plan()
    assert found is not None
    assert is_renamed(found, made[0])  # its chunks were, when it was entered
    assert found.predicted.get("remap_ns", 0) < 10**15
    assert len(made) == 3  # the first, and one for each of `_REFINE_AFTER`


def test_a_plan_that_stays_says_what_was_measured_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told anew at each of `_REFINE_AFTER`; the session says what was told last, with bounds of the same times."""
    told: list[Plan] = []

    def tell(plan: Plan, _trace: Trace, _machine: Machine) -> Plan:
        told.append(plan)
        return replace(plan, predicted={**plan.predicted, "duration_ns": 10**12 + len(told)}, bounds={})

    monkeypatch.setattr("ooc.replay.sequences.told_anew", tell)
    monkeypatch.setattr("ooc.replay.sequences._WORTHWHILE", 0.0)  # no plan is good enough to take its place
    with ooc.Session(BUDGET, plan_cache=False) as session:
        trainer = Trainer()
        for index in range(14):
            with session.step():
                trainer.step(index)
        found = session.plan()
    assert len(told) == 2
    assert told[0].residencies is told[1].residencies
    assert found is not None
    assert found.predicted["duration_ns"] == 10**12 + 2
    assert found.bounds["duration_ns"] < 10**12


def _steps_with_small_ops(session: ooc.Session | None, num_steps: int, small_ops: Callable[[int], bool]) -> list[float]:
    """Losses of a training loop in which some steps load their batch op by op, in tensors too small to be variables."""
    torch.manual_seed(4)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for index in range(num_steps):
        with session.step() if session is not None else contextlib.nullcontext():
            generator = torch.Generator().manual_seed(index)
            if small_ops(index):
                rows = [torch.ones(8).clone().mul_(i) for i in range(30)]
                torch.stack(rows).sum().item()
            hidden = torch.randn(256, 256, generator=generator)
            for number, layer in enumerate(model):
                hidden = layer(hidden)
                if small_ops(index) and number % 3 == 0:
                    torch.zeros(3).add(number).tolist()
            loss = hidden.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss, hidden
    return losses


@pytest.mark.parametrize("learned_with", [True, False])
def test_ops_that_touch_no_variable_come_and_go_within_one_plan(learned_with: bool) -> None:
    """Loading a batch, logging: such ops vary from step to step, and the plan has acts around them. It goes on."""

    def small_ops(index: int) -> bool:
        return learned_with == (index < 5 or index % 3 == 0)

    expected = _steps_with_small_ops(None, 14, small_ops)
    with ooc.Session("3MiB", plan_cache=False, debug=True) as session:
        assert _steps_with_small_ops(session, 14, small_ops) == expected
        modes = [row.mode for row in session.steps.rows]
        active = session.engine.executor.active
        assert active is not None
        acts = [
            index
            for index in range(active.num_ops)
            if active.is_bystander(index) and (active.before[index] or active.after[index])
        ]
    assert modes[5:] == ["planned"] * 9, modes
    assert session.engine.sequences.num_plans == 1
    assert bool(acts) >= learned_with  # else nothing was tested: a plan with acts where an op did not come
