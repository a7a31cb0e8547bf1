"""Optimizers that take turns: a plan for a whole round of their steps, with the bits of ordinary training."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ooc
from scheduler.plan import Plan

SIZE = 192
BUDGET = "1280KiB"


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh())


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(160, SIZE, generator=torch.Generator().manual_seed(seed))


class _Gan:
    def __init__(self) -> None:
        self.generator, self.critic = _network(0), _network(1)
        self.ours = torch.optim.AdamW(self.generator.parameters(), lr=1e-3)
        self.theirs = torch.optim.RMSprop(self.critic.parameters(), lr=1e-3)
        self.out: list[Any] = []
        self.num_steps = 0

    def critic_step(self) -> None:
        self.num_steps += 1
        self.theirs.zero_grad()
        fake = self.generator(_batch(self.num_steps)).detach()
        loss = self.critic(fake).mean() - self.critic(_batch(1000 + self.num_steps)).mean()
        loss.backward()
        self.theirs.step()
        self.out.append(loss.item())

    def generator_step(self) -> None:
        self.num_steps += 1
        self.ours.zero_grad()
        loss = -self.critic(self.generator(_batch(self.num_steps))).mean()
        loss.backward()
        self.ours.step()
        self.out.append(loss.item())

    def digest(self) -> list[Any]:
        tensors = [t for net in (self.generator, self.critic) for p in net.parameters() for t in (p.detach(), p.grad)]
        return self.out + [(float(t.double().sum()), float(t.double().abs().max())) for t in tensors if t is not None]


def _train(program: Callable[[_Gan], None]) -> tuple[list[Any], dict[str, Any]]:
    """Rows of the steps, and the report's plan; what was computed must be as in core."""
    expected = _Gan()
    program(expected)
    with ooc.Session(
        BUDGET, debug=True, plan_cache=False, step_boundary="optimizer", chunk_nbytes="64KiB", threshold_nbytes="16KiB"
    ) as session:
        found = _Gan()
        program(found)
        digest = found.digest()
        report = session.report()
        rows = list(session.steps.rows)
    assert digest == expected.digest()
    assert len(rows) == found.num_steps
    return rows, report["plan"]


def test_a_round_has_one_plan() -> None:
    def program(gan: _Gan) -> None:
        for _ in range(10):
            gan.critic_step()
            gan.critic_step()
            gan.generator_step()

    rows, plan = _train(program)
    assert plan["num_steps"] == 3
    assert [row.mode for row in rows[21:]] == ["planned"] * 9
    assert max(row.relocated_nbytes for row in rows[24:]) == 0
    # A round is more than its steps: each row counts its own ops alone.
    assert rows[-3].num_planned_ops == rows[-6].num_planned_ops
    assert sum(row.num_planned_ops for row in rows[-3:]) == sum(row.num_planned_ops for row in rows[-6:-3])
    assert rows[-1].num_planned_ops != rows[-2].num_planned_ops


def test_a_plan_that_is_given_is_played_in_every_turn() -> None:
    options: dict[str, Any] = {"plan_cache": False, "step_boundary": "optimizer", "threshold_nbytes": "16KiB"}
    with ooc.Session("1280KiB", chunk_nbytes="64KiB", **options) as session:
        gan = _Gan()
        for _ in range(4):
            gan.critic_step()
            gan.generator_step()
        given = Plan.from_json(json.dumps(session.report(with_timeline=True)["timeline"]["plan"]))
    with ooc.Session("1280KiB", chunk_nbytes="64KiB", plan=given, **options) as session:
        gan = _Gan()
        for _ in range(14):
            gan.critic_step()
            gan.generator_step()
        report = session.report()
    assert report["plan"]["num_steps"] == 1
    assert report["given_plan_refused"] == ""


def test_turns_that_change_and_what_comes_in_between() -> None:
    def program(gan: _Gan) -> None:
        for index in range(9):
            gan.critic_step()
            gan.generator_step()
            if index == 7:
                torch.save(gan.ours.state_dict(), io.BytesIO())
                with torch.no_grad():
                    gan.out.append(gan.critic(gan.generator(_batch(5000))).mean().item())
        gan.critic_step()
        try:  # the generator's step does not come
            gan.generator(_batch(0)[:, :5])
        except RuntimeError:
            gan.out.append("failed")
        for _ in range(14):
            gan.critic_step()
            gan.critic_step()
            gan.generator_step()

    rows, plan = _train(program)
    assert rows[17].mode == "planned"
    assert plan["num_steps"] == 3
    assert [row.mode for row in rows[-3:]] == ["planned"] * 3


def test_a_new_budget_in_the_middle_of_a_round() -> None:
    def program(gan: _Gan) -> None:
        for index in range(14):
            gan.critic_step()
            if index in (7, 8):
                with contextlib.suppress(ooc.SessionError):  # in core there is none
                    ooc.set_budget("1152KiB" if index == 7 else "1408KiB")
            gan.generator_step()

    rows, plan = _train(program)
    assert plan["num_steps"] == 2
    assert [row.mode for row in rows[-2:]] == ["planned"] * 2
