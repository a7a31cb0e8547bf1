"""A budget that shrinks while a plan with re-runs is replayed: the step goes over to another plan (Melon's switch)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from ooc.memory.record import State
from ooc.memory.residency import ResidencyManager
from ooc.replay import plan_change
from ooc.replay.plan_switch import Handover
from ooc.replay.reruns import Reruns
from scheduler.adapt import Switch, SwitchKind
from tests.session.program_runs import run_many
from tests.session.recomputed import CASES, CHUNK_NBYTES, Training, compare, node_at, noted

AT = 4
"""The step in which it shrinks: one that is replayed from a plan."""

SHARE = 0.8


def shrink(training: Training) -> None:
    """Take a fifth of the budget away. At once no more than that is in memory."""
    if training.session is not None:
        nbytes = int(training.case.num_chunks * SHARE) * CHUNK_NBYTES
        training.session.set_budget(nbytes)
        assert training.session.memory_stats()["resident_bytes.all.current"] <= nbytes


def at_depth(depth: int) -> Callable[[Training, int, Tensor], None]:
    """Shrink it between the passes (0), or before a node of the backward pass."""

    def hook(training: Training, index: int, output: Tensor) -> None:
        if index == AT and depth == 0:
            shrink(training)
        elif index == AT:
            node_at(output, depth).register_prehook(lambda *_: shrink(training))

    return hook


def train(name: str, num_chunks: int, depth: int) -> list[dict[str, Any]]:
    """The rows of the steps; all bits are those of the run in core, and debug mode compares each re-run."""
    run = compare(replace(CASES[name], num_chunks=num_chunks), hook=at_depth(depth), num_steps=AT + 2)
    report = noted(run, "report")
    assert report["past_budgets"][0]["peak_nbytes"] <= num_chunks * CHUNK_NBYTES
    assert report["peak_nbytes"] <= report["budget_nbytes"] == int(num_chunks * SHARE) * CHUNK_NBYTES
    rows: list[dict[str, Any]] = noted(run, "steps")
    return rows


@pytest.mark.parametrize(
    ("name", "num_chunks", "depth"),
    [
        ("convolutions", 51, 0),
        pytest.param("convolutions_melon", 40, 9, marks=pytest.mark.slow),
        ("convolutions_auto", 40, 4),
        ("encoder", 60, 9),
    ],
)
def test_the_step_goes_on_with_another_plan(name: str, num_chunks: int, depth: int) -> None:
    """It stays planned, and so do those after it, for which the policy plans without regard to this one."""
    rows = train(name, num_chunks, depth)
    assert [row["mode"] for row in rows[AT - 1 :]] == ["planned"] * 3
    assert all(row["num_reruns"] > 0 for row in rows[AT - 1 :])


def test_addresses_show_what_is_there_after_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resident variable's address shows its chunks, not those of the plan's start; one that is discarded nothing."""
    carry_out, seen = Handover.carry_out, []

    def checked(self: Handover, manager: ResidencyManager, *arguments: Any) -> Any:
        bound = carry_out(self, manager, *arguments)
        for record in self.records.values() if bound is not None else ():
            if record.state in (State.RESIDENT, State.DISCARDED):
                shown = record.reservation.runs
                assert shown == (record.runs if record.state is State.RESIDENT else None), record
                seen.append(record.state)
        return bound

    monkeypatch.setattr(Handover, "carry_out", checked)
    train("convolutions", 51, 0)
    assert {State.RESIDENT, State.DISCARDED} == set(seen)


def test_without_a_way_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is left then: what it had discarded is made again, and the rest of the step runs on demand."""

    def no_way(*_: object, **__: object) -> Switch:
        return Switch(kind=SwitchKind.RESTART, op_index=0, reason="says the test")

    monkeypatch.setattr(plan_change, "switch", no_way)
    modes = [row["mode"] for row in train("convolutions", 51, 0)]
    assert modes[AT - 1 :] == ["planned", "learning", "planned"]


def _no_recipes(patch: pytest.MonkeyPatch) -> None:
    take_over = Reruns.take_over
    patch.setattr(Reruns, "take_over", lambda self, noted: take_over(self, replace(noted, recipes={})))


@pytest.mark.parametrize("leave_out", [_no_recipes])
def test_a_rule_left_out_shows(
    leave_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - other bits, another re-run, or a step that leaves the plan
        test_the_step_goes_on_with_another_plan("convolutions", 51, 0)


def test_random_programs() -> None:
    """With recomputation forced, and a budget that shrinks between ops now and then."""
    run_many(range(10), runner="tests.session.program_reruns:run_shrinking").check(10)
