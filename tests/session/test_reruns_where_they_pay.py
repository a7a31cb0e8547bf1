"""Recomputation that nobody asked for: where the store is slow, ops are tried within a planned step, and run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ooc.replay.planned_trials import waits_much
from ooc.replay.rerun_trials import RerunTrial, RerunTrials
from scheduler.trace import Op, Trace
from tests.session.recomputed import CASES, Training, compare, noted

NUM_STEPS = 7


def train(case: str) -> Training:
    return compare(CASES[case], recompute=None, policy="auto", num_steps=NUM_STEPS)


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
