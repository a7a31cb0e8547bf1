"""What a step that did not fit is guessed to need: so that one restart is enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ooc
from ooc.dispatch.expected_need import expected_need
from ooc.errors import BudgetTooSmall
from scheduler.trace import Op, Trace, Use, Variable

MIB = 1 << 20


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels that share their work among threads keep sums for each of them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _trace(*ops: tuple[str, str]) -> Trace:
    """A chain of ops with names and places: op `i` reads variable `i` and makes `i + 1`, of 1, 2, 3, ... MiB."""
    return Trace(
        variables=tuple(Variable(nbytes=(i + 1) * MIB, birth_tick=None, death_tick=None) for i in range(len(ops) + 1)),
        ops=tuple(
            Op(
                name=name,
                where=where,
                start_tick=i,
                stop_tick=i + 1,
                duration_ns=1,
                uses=(Use(variable=i, reads=True, writes=False), Use(variable=i + 1, reads=False, writes=True)),
            )
            for i, (name, where) in enumerate(ops)
        ),
        num_ticks=len(ops) + 1,
        cyclic=False,
    )


def _guess(so_far: Trace, failed: str, *, is_going_back: bool = False, may_go_back: bool = True) -> int | None:
    """For an op that reads 4 and 2 MiB and makes 8 MiB."""
    found = expected_need(
        so_far,
        failed,
        14 * MIB,
        [4 * MIB, 2 * MIB],
        [8 * MIB],
        (),
        may_go_back=may_go_back,
        is_going_back=is_going_back,
    )
    return found.nbytes // MIB if found is not None else None


def test_what_is_guessed_for_an_op_of_each_kind() -> None:
    nothing = _trace()
    assert _guess(nothing, "aten.relu.default") == 14 + 4
    assert _guess(nothing, "aten.mm.default") == 14
    assert _guess(nothing, "aten.convolution.default") == 2 * 14 + 2  # in the backward pass 14 + 4 + 8
    assert _guess(nothing, "aten.mkldnn_rnn_layer.default") == 14 + 18 * 8 + 4 * 6
    assert _guess(nothing, "aten.mm.default", may_go_back=False) is None
    assert _guess(nothing, "aten.convolution.default", may_go_back=False) == 2 * 14 + 2


def test_in_a_backward_pass_the_forward_ops_are_guessed_and_no_others() -> None:
    going = {"is_going_back": True, "may_go_back": False}
    so_far = _trace(
        ("aten.mm.default", ""), ("aten.mkldnn_rnn_layer.default", "LSTM"), ("aten.mm.default", "backward of x")
    )
    assert _guess(so_far, "aten.mkldnn_rnn_layer_backward.default", **going) == 2 + 3 + 2 * 2
    assert _guess(_trace(("aten.mm.default", "backward of x")), "aten.mm.default", **going) is None


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
        assert "as in an earlier one with the same beginning" in error.args[0]  # what is told without a dry run
        assert "times as large" in error.args[0]
        expected = error.expected_nbytes
    assert expected > error.needed_nbytes
    with ooc.Session(expected, step_boundary="explicit") as session:  # one restart is enough
        model = _model()
        for length in (512, 4096):
            with session.step():
                _step(model, length)


@pytest.mark.usefixtures("whole_ops")
def test_in_the_first_step_the_backward_pass_is_guessed() -> None:
    """The ReLU behind the second layer does not fit: 4.3 MiB twice, and three times in the backward pass."""
    with ooc.Session("8704KiB"):
        model = _model()
        with pytest.raises(BudgetTooSmall) as caught:
            _step(model, 1100)
        assert "for the backward pass of the ops so far" in caught.value.args[0]  # what is told without a dry run
        assert caught.value.expected_nbytes > caught.value.needed_nbytes


def test_without_gradients_no_backward_pass_is_guessed() -> None:
    """Its largest op: 8 MiB through a ReLU."""
    with ooc.Session("6MiB"), torch.no_grad():
        model = _model()
        with pytest.raises(BudgetTooSmall) as caught:
            model(torch.ones(2048, 512))
        assert "a guess" not in str(caught.value.args[0])
        assert caught.value.expected_nbytes == 16 * MIB


@pytest.mark.slow  # what kernels take for themselves is another machine's own
@pytest.mark.usefixtures("one_thread")
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
        pytest.raises(BudgetTooSmall, match="a guess") as caught,
    ):
        step()
    with ooc.Session(caught.value.expected_nbytes, chunk_nbytes="64KiB"):
        step()


@pytest.mark.slow  # what kernels take for themselves is another machine's own
@pytest.mark.usefixtures("one_thread")
def test_in_a_backward_pass_what_the_forward_pass_told_is_told_again() -> None:
    with ooc.Session("8MiB") as session:
        layer = nn.LSTM(256, 256)
        made = layer(torch.ones(8, 20, 256))[0].sum()
        session.set_budget("6MiB")
        with pytest.raises(BudgetTooSmall, match="for the backward pass of the ops so far") as caught:
            made.backward()
        assert "backward" in caught.value.op_name
        assert caught.value.expected_nbytes > caught.value.needed_nbytes


@pytest.mark.slow  # what kernels take for themselves is another machine's own
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize(("batch", "channels", "width"), [(16, (48, 96), 24), (8, (64, 64), 40), (4, (3, 64), 96)])
def test_one_restart_is_enough_for_a_convolution(
    batch: int, channels: tuple[int, int], width: int, has_gradients: bool
) -> None:
    """What oneDNN copies comes after the allocation that fails."""

    def step() -> None:
        torch.manual_seed(0)
        layer = nn.Conv2d(*channels, 3, padding=1)
        with torch.set_grad_enabled(has_gradients):
            found = layer(torch.ones(batch, channels[0], width, width, requires_grad=has_gradients))
        if has_gradients:
            found.sum().backward()

    smallest = batch * max(channels) * width * width * 4 + MIB // 2
    with ooc.Session(smallest, chunk_nbytes="64KiB"), pytest.raises(BudgetTooSmall, match="a guess") as caught:
        step()
    with ooc.Session(caught.value.expected_nbytes, chunk_nbytes="64KiB"):
        step()
