"""Recomputation that nobody asked for: where the store is slow, ops are tried within a planned step, and run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ooc.replay import sequences
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.executor import Executor
from ooc.replay.plan_maker import PlanMaker
from ooc.replay.planned_trials import waits_much
from ooc.replay.rerun_trials import RerunTrial, RerunTrials
from scheduler.plan import Machine, Plan, occupied_ticks
from scheduler.trace import Op, Trace
from tests.session.recomputed import CASES, Training, compare, noted

NUM_STEPS = 7


def train(case: str, num_steps: int = NUM_STEPS) -> Training:
    return compare(CASES[case], recompute=None, policy="auto", num_steps=num_steps)


def column(run: Training, name: str) -> list[Any]:
    return [row[name] for row in noted(run, "steps")]


@pytest.mark.parametrize("case", ["convolutions_auto", "encoder_fused"])
def test_a_slow_store(case: str, trials: list[RerunTrial]) -> None:
    """The first plan moves bytes; its ops are tried within its steps; the next plan runs them again. Bits are equal."""
    run = train(case)
    first = column(run, "mode").index("planned")
    assert set(column(run, "mode")[first:]) == {"planned"}
    assert column(run, "num_reruns")[first] == 0
    assert sum(column(run, "num_reruns")) > 0
    assert trials


def test_a_budget_for_all(trials: list[RerunTrial], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is moved, nothing is tried, and nothing runs again."""
    monkeypatch.setitem(CASES, "with room", replace(CASES["convolutions_auto"], num_chunks=150))
    run = train("with room")
    assert "planned" in column(run, "mode")
    assert not trials
    assert sum(column(run, "num_reruns")) == 0


def test_only_a_plan_that_waits_has_its_ops_tried() -> None:
    trace = Trace(
        ops=(Op(name="op", start_tick=0, stop_tick=1, duration_ns=1_000_000, uses=()),), variables=(), num_ticks=1
    )
    assert not waits_much(1_050_000, trace)
    assert waits_much(1_200_000, trace)


def test_what_differs_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial within a plan finds an op whose bits differ: it is named, and no plan runs it again."""
    note_outcome, refused = RerunTrials.note_outcome, torch.ops.aten.native_batch_norm.default

    def differs(self: RerunTrials, kind: int, func: Any, problem: str) -> bool:
        return note_outcome(self, kind, func, "its bits differed, says the test" if func is refused else problem)

    monkeypatch.setattr(RerunTrials, "note_outcome", differs)
    run = train("convolutions_auto")
    assert "says the test" in noted(run, "report")["not_replayable"][str(refused)]


def test_what_was_proven_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that re-runs and is not worth a change at first (op times of cold steps) is looked at again later."""
    asked: list[int] = []
    make_plan = PlanMaker.here

    def noted_plan(self: PlanMaker, trace: Trace, machine: Machine) -> Plan:
        asked.append(sum(op.replayable for op in trace.ops))
        return make_plan(self, trace, machine)

    monkeypatch.setattr(PlanMaker, "here", noted_plan)
    monkeypatch.setattr(sequences, "_WORTHWHILE", 0.0)  # no plan is
    train("convolutions_auto", num_steps=9)
    first = next(index for index, count in enumerate(asked) if count)
    assert len(asked) > first + 1
    assert all(asked[first:])


def test_there_is_room_to_try_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of the trials leaves free what each convolution makes: a plan for all of the memory would fill it."""
    entered: list[ExecutablePlan] = []
    enter = Executor.enter

    def noted_enter(self: Executor, executable: ExecutablePlan, *rest: Any, **options: Any) -> bool:
        if executable.trials is not None:
            entered.append(executable)
        return enter(self, executable, *rest, **options)

    monkeypatch.setattr(Executor, "enter", noted_enter)
    monkeypatch.setitem(CASES, "convolutions_auto", replace(CASES["convolutions_auto"], num_chunks=40))
    train("convolutions_auto")
    assert entered
    executable = entered[0]
    trace, machine = executable.trace, executable.plan.machine
    assert executable.leaves_room
    assert executable.num_chunks == machine.num_chunks == CASES["convolutions_auto"].num_chunks
    assert executable.trials is None  # the step is over
    for index, op in enumerate(trace.ops):
        if op.name != "aten.convolution.default":
            continue
        spans = [(occupied_ticks(r, trace), r) for r in executable.plan.residencies]
        held = [r for (start, stop), r in spans if start <= op.stop_tick and stop > op.start_tick]
        chunks = {chunk for r in held for first, count in r.chunks for chunk in range(first, first + count)}
        born = executable.reruns.graph.births[index]
        needed = sum(machine.chunks_of(trace.variables[v].nbytes) for v in born)
        assert len(chunks) + needed <= machine.num_chunks, f"op {index}"
