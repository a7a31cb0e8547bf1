"""Code that is one op, called beside the plan: on tensors too small to be the session's, at any place of a step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc

pytestmark = pytest.mark.usefixtures("one_thread")


def _opaque() -> Callable[[Tensor], Tensor]:
    return ooc.opaque(lambda x: x * 2)


def _region() -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: torch.tanh(x) * 2 + x, dynamic=True)


def _train(step: Callable[[], contextlib.AbstractContextManager[Any]], function: Callable[[Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    chosen = random.Random(1)
    layer = nn.Linear(128, 128)
    optimizer = torch.optim.Adam(layer.parameters())
    found = []
    for index in range(40):
        with step():
            if index > 5 and chosen.random() < 0.3:
                found.append(function(torch.ones(8)).clone())
            y = torch.randn(64, 128)
            for _ in range(3):
                y = layer(y).tanh()
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if chosen.random() < 0.3:
                found.append(function(torch.ones(8)).clone())
            if chosen.random() < 0.3:
                with torch.no_grad():
                    found.append(layer(function(torch.ones(64, 128))).sum())
    return [*found, layer.weight.detach().clone()]


@pytest.mark.parametrize("make", [_opaque, _region])
def test_beside_a_plan(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    """Nobody knows what such an op returns, takes from a list or changes: whoever asks is told so."""
    function = make()
    expected = _train(contextlib.nullcontext, function)
    with ooc.Session("1280KiB", chunk_nbytes="64KiB", threshold_nbytes="4KiB", plan_cache=False) as session:
        actual = _train(session.step, function)
        modes = [row.mode for row in session.steps.rows]
    assert "planned" in modes
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
