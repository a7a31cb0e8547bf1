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


@pytest.mark.parametrize(
    ("length", "batch", "width_in", "width", "is_bidirectional"),
    [(35, 20, 256, 256, False), (10, 64, 512, 512, False), (100, 8, 128, 256, False), (20, 32, 64, 384, True)],
)
def test_one_restart_is_enough_for_a_recurrent_layer(
    length: int, batch: int, width_in: int, width: int, is_bidirectional: bool
) -> None:
    """One op is a whole layer; oneDNN's copies of the weights come after the allocation that fails."""

    def step() -> None:
        torch.manual_seed(0)
        layer = nn.LSTM(width_in, width, bidirectional=is_bidirectional)
        layer(torch.ones(length, batch, width_in))[0].sum().backward()

    weights = 4 * width * (width_in + width) * 4 * (2 if is_bidirectional else 1)
    with (
        ooc.Session(weights + 2 * MIB, chunk_nbytes="64KiB"),
        pytest.raises(BudgetTooSmall, match="for the backward pass of the ops so far") as caught,
    ):
        step()
    with ooc.Session(caught.value.expected_nbytes, chunk_nbytes="64KiB"):
        step()


def test_in_a_backward_pass_what_the_forward_pass_told_is_told_again() -> None:
    with ooc.Session("8MiB") as session:
        layer = nn.LSTM(256, 256)
        made = layer(torch.ones(8, 20, 256))[0].sum()
        session.set_budget("6MiB")
        with pytest.raises(BudgetTooSmall, match="for the backward pass of the ops so far") as caught:
            made.backward()
        assert "backward" in caught.value.op_name
        assert caught.value.expected_nbytes > caught.value.needed_nbytes
