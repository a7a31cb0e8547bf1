"""What nobody will learn from is recorded without what learning takes; what comes again is learned all the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import ooc
from ooc.dispatch.comparison import _MOST_AWAITED, Comparison
from ooc.learner import Learner
from ooc.replay.learning_budget import LearningBudget
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recorder import StepRecorder
from ooc.tracing.recording import StepRecording
from tests.session.test_segments import batch, digest, model, planned_share, run, train_step


class _Budget:
    def __init__(self) -> None:
        self.is_left = True

    def may_learn(self) -> bool:
        return self.is_left


@pytest.fixture
def parts() -> tuple[Comparison, StepRecording, _Budget]:
    budget, recording = _Budget(), StepRecording()
    return Comparison(recording, budget), recording, budget  # type: ignore[arg-type]


def _begin(comparison: Comparison, recording: StepRecording) -> bool:
    """Whether what is recorded from now on is compared."""
    comparison.begin()
    recording.begin({})
    assert recording.recorder is not None
    return recording.recorder.is_compared


def test_nothing_is_compared_while_nothing_may_be_learned(parts: tuple[Comparison, StepRecording, _Budget]) -> None:
    comparison, recording, budget = parts
    assert _begin(comparison, recording)
    budget.is_left = False
    assert not _begin(comparison, recording)
    recorder = recording.recorder
    assert recorder is not None
    assert recording.place_of_this_op() == {"where": "", "node": 0}
    budget.is_left = True
    assert not recorder.is_compared  # nor is it learned from once there is time again: its first ops are not known
    assert _begin(comparison, recording)
    assert "test_comparison" in recording.place_of_this_op()["where"]


def test_what_has_come_before_is_waited_for(parts: tuple[Comparison, StepRecording, _Budget]) -> None:
    comparison, recording, budget = parts
    budget.is_left = False
    assert not _begin(comparison, recording)
    comparison.note_repeated(is_learned=False)
    assert all(_begin(comparison, recording) for _ in range(3))
    comparison.note_repeated(is_learned=True)
    assert not _begin(comparison, recording)
    comparison.note_repeated(is_learned=False)
    assert [_begin(comparison, recording) for _ in range(_MOST_AWAITED + 1)] == [True] * _MOST_AWAITED + [False]


def test_a_recording_under_way_at_a_rest_is_not_compared(parts: tuple[Comparison, StepRecording, _Budget]) -> None:
    comparison, recording, _ = parts
    assert _begin(comparison, recording)
    recorder = recording.recorder
    assert recorder is not None
    comparison.rest(True)
    assert not recorder.is_compared
    comparison.rest(False)
    assert recorder.is_compared  # no op has come yet
    comparison.rest(True)
    recorder.append(_an_op())
    comparison.rest(False)
    assert not recorder.is_compared


def _an_op() -> OpRecord:
    return OpRecord(func=torch.ops.aten.add.Tensor, where="", occurrences=(), written=())


@pytest.fixture
def exhausted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Only what comes again may be learned. For each recording: whether it was compared, and learned from."""
    found: list[tuple[bool, bool]] = []
    learn, learn_from = Learner._learn, Learner._learn_from

    def noted(self: Learner, recorder: StepRecorder, **how: bool) -> Any:
        found.append((recorder.is_compared, False))
        return learn(self, recorder, **how)

    def learned(self: Learner, *arguments: Any, **how: bool) -> Any:
        found[-1] = found[-1][0], True
        return learn_from(self, *arguments, **how)

    monkeypatch.setattr(Learner, "_learn", noted)
    monkeypatch.setattr(Learner, "_learn_from", learned)
    monkeypatch.setattr(LearningBudget, "may_learn", lambda _, *, num_ops=0, is_repeated=False: is_repeated)
    return found


def test_steps_that_come_again_are_planned_where_nothing_else_may_be_learned(
    exhausted: list[tuple[bool, bool]],
) -> None:
    def program() -> list[Any]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return [*(train_step(net, optimizer, index) for index in range(14)), *digest(net)]

    rows = run(program)
    assert planned_share(rows[-3:]) == 1.0
    assert (False, False) in exhausted
    assert (False, True) not in exhausted


def test_what_comes_again_among_what_never_does_is_planned(exhausted: list[tuple[bool, bool]]) -> None:
    """The optimizer's step after passes that are another each time."""

    def program() -> list[Any]:
        choose = random.Random(3)
        net = model(num_layers=6)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        out: list[Any] = []
        for index in range(40):
            x = batch(index, 64)
            for number in choose.sample(range(6), choose.randint(2, 6)):
                x = net[2 * number + 1](net[2 * number](x)) + x * choose.random()
            for _ in range(index):  # no step has as many ops as another
                x = torch.sin(x)
            loss = x.square().mean()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            out.append(loss.item())
            optimizer.step()
        return [*out, *digest(net)]

    rows = run(program, budget="640KiB")
    assert sum(row.num_planned_ops > 0 for row in rows[-12:]) >= 8
    assert (False, False) in exhausted[-12:]
    assert (False, True) not in exhausted


def test_an_error_names_the_line_where_nothing_is_compared(exhausted: list[tuple[bool, bool]]) -> None:
    del exhausted
    with ooc.Session("1MiB", chunk_nbytes="64KiB") as session:
        net = nn.Linear(256, 256)
        for length in range(8, 14):
            with session.step():
                net(torch.ones(length, 256)).sum().backward()
        with session.step(), pytest.raises(ooc.BudgetTooSmall, match="test_comparison"):
            net(torch.ones(4096, 256))
