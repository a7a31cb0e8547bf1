"""What a step that did not fit is guessed to need: so that one restart is enough."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ooc
from ooc.errors import BudgetTooSmall

MIB = 1 << 20


def _step(model: nn.Module, length: int) -> None:
    model(torch.ones(length, 512)).square().mean().backward()


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256))


def test_a_longer_batch_is_told_by_a_shorter_ones_step() -> None:
    """The second step fails in its first large op; the guess is for the largest op behind it."""
    with ooc.Session("12MiB", step_boundary="explicit") as session:
        model = _model()
        with session.step():
            _step(model, 512)
        with pytest.raises(BudgetTooSmall) as caught, session.step():
            _step(model, 4096)
        error = caught.value
        assert "as in an earlier one with the same beginning" in str(error)
        assert "times as large" in str(error)
        expected = error.expected_nbytes
    assert expected > error.needed_nbytes
    with ooc.Session(expected, step_boundary="explicit") as session:  # one restart is enough
        model = _model()
        for length in (512, 4096):
            with session.step():
                _step(model, length)


def test_in_the_first_step_the_backward_pass_is_guessed() -> None:
    with ooc.Session("6MiB"):
        model = _model()
        with pytest.raises(BudgetTooSmall, match="for the backward pass of the ops so far") as caught:
            _step(model, 2048)
        assert caught.value.expected_nbytes > caught.value.needed_nbytes


def test_without_gradients_nothing_is_added() -> None:
    with ooc.Session("6MiB"), torch.no_grad():
        model = _model()
        with pytest.raises(BudgetTooSmall) as caught:
            model(torch.ones(2048, 512))
        assert caught.value.expected_nbytes == 0
        assert "a guess" not in str(caught.value)
