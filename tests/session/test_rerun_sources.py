"""What re-runs are yet to read must not change before: a pointer given out to it takes the step off its plan."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
from torch import Tensor, nn

from ooc.errors import RerunDiffers
from ooc.memory.record import State
from ooc.replay.reruns import Reruns
from tests.session.recomputed import CASES, Training, compare, convolutions, noted

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
