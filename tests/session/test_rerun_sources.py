"""What re-runs are yet to read must not change before: a pointer given out to it takes the step off its plan."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.errors import RerunDiffers
from ooc.memory.record import State
from ooc.replay.reruns import Reruns
from tests.session.recomputed import CASES, Training, compare, convolutions, noted
from tests.store_speed import SLOW, store_speed
from tests.thinned import thinned

_models: list[nn.Module] = []


def _remembered() -> nn.Module:
    _models.append(convolutions())
    return _models[-1]


CASE = replace(CASES["convolutions"], model=_remembered)


def _write_between(training: Training, index: int, _: Tensor) -> None:
    """Change the weights behind autograd's back, after the forward pass: in core only gradients differ by that."""
    if index != 4:
        return
    for module in _models[-1].modules():
        if isinstance(module, nn.Conv2d):
            floats = (ctypes.c_float * module.weight.numel()).from_address(module.weight.data_ptr())
            for position in range(module.weight.numel()):
                floats[position] *= 1.5
    if training.session is not None:
        training.notes.append(("active", training.session.engine.executor.active))


def test_a_written_source_takes_the_step_off_its_plan() -> None:
    waiting: list[bool] = []

    def look_and_write(training: Training, index: int, output: Tensor) -> None:
        if training.session is not None and index == 4:
            engine = training.session.engine
            reruns, active = engine.executor.reruns, engine.executor.active
            assert active is not None
            held = [record for v in active.reruns.held_until if (record := active.variables[v].record) is not None]
            waiting.extend(reruns.needs(active, record) for record in held)
            assert not any(reruns.needs(active, record) for record in engine.manager.records.values())
            assert not any(reruns.needs(None, r) for r in held if r.state is State.RESIDENT)
        _write_between(training, index, output)

    run = compare(CASE, hook=look_and_write, num_steps=6, threshold_nbytes=2048, debug=False)
    assert any(waiting)
    assert noted(run, "active") is None


def test_without_the_rule_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reruns, "needs", lambda *_: False)
    with pytest.raises((AssertionError, RerunDiffers)):
        compare(CASE, hook=_write_between, num_steps=6, threshold_nbytes=2048, debug=False)


def _fill_array(x: Tensor, values: Tensor) -> None:
    x.numpy()[:] = values.numpy()


def _fill_each(x: Tensor, values: Tensor) -> None:
    given = iter(values.reshape(-1).tolist())
    x.apply_(lambda _: next(given))


def _fill_on_a_thread(x: Tensor, values: Tensor) -> None:
    thread = threading.Thread(target=x.copy_, args=(values,))
    thread.start()
    thread.join()


@thinned("fill,keeps", [_fill_array, _fill_each, _fill_on_a_thread], [True, False])
def test_what_was_filled_beside_the_ops_is_not_made_again(fill: Callable[[Tensor, Tensor], None], keeps: bool) -> None:
    """Remedy: `PlannedReruns.needed_until`. An op makes a buffer, other code fills it: by its op alone it is zeros.

    With `keeps` the buffer itself would be made again, else what was computed from it, after its death. The plan is
    left for that until one is made that runs none of these ops again (`PlannedReruns.often_touched`).
    """

    def train(step: Callable[[], contextlib.AbstractContextManager[None]], num_steps: int) -> list[float]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(128, 128) * 0.05)
        optimizer = torch.optim.SGD([weight], lr=1e-2)
        out = []
        for _ in range(num_steps):
            with step():
                inputs = []
                for _ in range(3):
                    x = torch.zeros(512, 128)
                    fill(x, torch.randn(512, 128))
                    inputs.append(x if keeps else x * 2 + 1)
                    del x
                loss = sum(((x.mean(0) @ weight).square().mean() for x in inputs), torch.zeros(()))
                large = torch.full((2048, 64), 1.0)
                large = (large * 2).sum()
                squares = [x.square().mean() for x in inputs]
                (loss + sum(squares) + large).backward()
                optimizer.step()
                optimizer.zero_grad()
                out += [loss.item(), *(square.item() for square in squares)]
                del inputs, squares, large, loss
        return [*out, *weight.detach().reshape(-1).tolist()]

    num_steps = 12
    expected = train(contextlib.nullcontext, num_steps)
    with (
        store_speed(SLOW),
        ooc.Session(
            "1280KiB", chunk_nbytes="64KiB", threshold_nbytes="16KiB", plan_cache=False, recompute=True, debug=False
        ) as session,
    ):
        assert train(session.step, num_steps) == expected
        modes = [row.mode for row in session.steps.rows]
    assert modes[-3:] == ["planned"] * 3, modes


@pytest.mark.parametrize("is_tangent", [True, False])
def test_zeros_without_memory(is_tangent: bool) -> None:
    """The tangents of what does not vary. Whoever compared their bytes would read at address 0."""

    def train() -> list[float]:
        torch.manual_seed(0)
        net = torch.nn.Linear(256, 256)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        found = []
        for _ in range(8):
            x, weight, bias = torch.randn(64, 256), net.weight.detach(), net.bias.detach()
            if is_tangent:
                _, tangent = torch.func.jvp(lambda b: nn.functional.linear(x, weight, b), (bias,), (torch.ones(256),))  # noqa: B023
            else:
                tangent = torch._efficientzerotensor((64, 256)) * 2 + x  # type: ignore[attr-defined]
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.item(), tangent.sum().item()]
        return found

    expected = train()
    with ooc.Session(
        "4MiB",
        chunk_nbytes="64KiB",
        threshold_nbytes="16KiB",
        plan_cache=False,
        step_boundary="optimizer",
        recompute=True,
    ):
        assert train() == expected
