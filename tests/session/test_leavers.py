"""Variables that leave a session while it trains, and those that an earlier session has left: steps are planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ooc
from tests.interop.cases import BUDGET, NUM_STEPS, WIDTH, InCore, build, contents, train
from tests.quick_plans import QUICK_PLANS
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("one_thread")

Leave = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def _share(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[0].weight.share_memory_()


def _share_all(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model.share_memory()


def _replace(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    for parameter in model[2].parameters():
        parameter.data = torch.from_numpy(parameter.detach().clone().numpy().copy())


def _replace_state(_: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for state in list(optimizer.state.values())[:2]:
        state["exp_avg"] = torch.from_numpy(state["exp_avg"].clone().numpy().copy())


@thinned("leave,boundary", [_share, _share_all, _replace, _replace_state], ["explicit", "optimizer"])
def test_steps_are_planned_again_after_a_variable_has_left(leave: Leave, boundary: Any) -> None:
    """Each step planned anew, for variables that were gone, in the foreground: 8 to 19 times plain PyTorch's time."""

    def program(session: Any) -> list[Any]:
        model, optimizer = build()
        found: list[Any] = []
        for index in range(2 * NUM_STEPS):
            if index == NUM_STEPS:
                leave(model, optimizer)
            with session.step():
                found.append(train(model, optimizer, index))
        return [*found, contents(model)]

    expected = program(InCore())
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", step_boundary=boundary, **QUICK_PLANS) as session:
        found = program(session if boundary == "explicit" else InCore())
        rows = list(session.steps.rows)
    assert found == expected
    assert {row.mode for row in rows[NUM_STEPS + 4 :]} == {"planned"}, [row.why for row in rows]


@pytest.mark.parametrize("use", ["read", "written", "trained"])
def test_steps_that_touch_what_an_earlier_session_left_are_planned(use: str) -> None:
    """It is ordinary memory, but lies where the session's variables do: plans did not expect it among the operands."""

    def program(open_session: Callable[[], Any]) -> list[Any]:
        with open_session() as session:
            model, optimizer = build()
            table = torch.zeros(4, WIDTH, WIDTH)
            found: list[Any] = [train(model, optimizer, 0)]
        with open_session() as session:
            if use != "trained":
                model, optimizer = build()
            for index in range(NUM_STEPS):
                with session.step():
                    if use == "read":
                        found.append(float((table[0] + model[0].weight).sum()))
                    elif use == "written":
                        table[1:3].add_(model[2].weight.detach())
                    found.append(train(model, optimizer, index))
            rows.append(list(session.steps.rows) if session is not in_core else [])
        return [*found, contents(model), table.sum().item()]

    in_core, rows = _InCoreSession(), []
    expected = program(lambda: in_core)
    found = program(lambda: ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS))
    assert found == expected
    assert {row.mode for row in rows[-1][4:]} == {"planned"}, [row.why for row in rows[-1]]


def test_what_an_earlier_session_left_may_be_freed_in_a_planned_step() -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB"):
        left = [torch.full((WIDTH, WIDTH), float(i)) for i in range(NUM_STEPS)]
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        model, optimizer = build()
        for index in range(NUM_STEPS):
            with session.step():
                train(model, optimizer, index)
                value = left.pop()
                assert float(value.max()) == NUM_STEPS - 1 - index
                del value
                again = torch.ones(WIDTH, WIDTH)  # perhaps where that was: a variable again
                assert float((again + again).min()) == 2.0


class _InCoreSession(InCore):
    def __enter__(self) -> InCore:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("debug", [False, True])
def test_a_copy_that_is_shared_in_each_step(debug: bool) -> None:
    """For another process to look at, say: the plan goes on."""

    def program(session: Any) -> list[Any]:
        model, optimizer = build()
        found: list[Any] = []
        for index in range(2 * NUM_STEPS):
            with session.step():
                found.append(train(model, optimizer, index))
                shared = model[index % 2 * 2].weight.detach().clone().share_memory_()
                found.append(shared.sum().item())
        return [*found, contents(model)]

    expected = program(InCore())
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, **QUICK_PLANS) as session:
        found = program(session)
        rows = list(session.steps.rows)
    assert found == expected
    assert {row.mode for row in rows[NUM_STEPS:]} == {"planned"}, [row.why for row in rows]
    assert sum(row.evicted_nbytes for row in rows[NUM_STEPS:]) > 0
