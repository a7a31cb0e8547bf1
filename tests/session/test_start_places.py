"""Plans that take turns agree where their weights are: what is there when one is first entered stays in its place."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import ooc
from ooc.memory.record import State
from ooc.memory.residency import ResidencyManager
from ooc.replay import executor
from ooc.replay.bindings import Bound
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import ExecutableResidency

SIZE, NUM_STEPS = 192, 24


def _train(session: ooc.Session | None) -> list[Any]:
    """Two kinds of steps on the same layers, in turns."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(8))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01, momentum=0.9)
    found: list[Any] = []
    for index in range(NUM_STEPS):
        is_forth = index % 2 == 0
        with session.step() if session is not None else contextlib.nullcontext():
            h = torch.randn(64, SIZE)
            for layer in layers if is_forth else reversed(layers):
                h = torch.tanh(layer(h)) if is_forth else torch.relu(layer(h)) + 0.5
            loss = h.square().mean() if is_forth else h.sin().abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item().hex())
    return [*found, *(p.detach().clone().numpy().tobytes() for p in layers.parameters())]


def test_what_is_in_memory_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[tuple[int, int]] = []
    place = executor.start_places

    def spy(plan: ExecutablePlan, bound: Bound, manager: ResidencyManager) -> dict[int, ExecutableResidency]:
        def num_elsewhere(targets: dict[int, ExecutableResidency]) -> int:
            return sum(
                tuple(map(tuple, targets[variable.index].runs)) != tuple(map(tuple, record.runs))
                for variable, record in bound
                if variable.index in targets
                and record.state is State.RESIDENT
                and max(first + count for first, count in record.runs) <= plan.num_chunks
            )

        is_first, before = not plan.is_placed, num_elsewhere(plan.start_residencies())
        targets = place(plan, bound, manager)
        if is_first:
            placed.append((before, num_elsewhere(targets)))
        return targets

    monkeypatch.setattr(executor, "start_places", spy)
    expected = _train(None)
    with ooc.Session("2560KiB") as session:
        assert _train(session) == expected
        assert any(row.mode == "planned" for row in session.steps.rows)
    assert sum(before for before, _ in placed) > 0, placed
    assert any(before > 0 and after == 0 for before, after in placed), placed
    assert all(after <= before for before, after in placed), placed
