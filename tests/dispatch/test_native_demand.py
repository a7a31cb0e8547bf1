"""Ops on demand that native code runs: recorded, pinned and refused as Python does it for the others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.dispatch.signals import CriticalLock
from ooc.errors import BudgetTooSmall
from ooc.tracing.observed import Observed

HERE = Path(__file__).name


class Net(nn.Module):
    """Views, in-place ops, a list op, dropout, a module used twice, and an op outside all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.norm = nn.BatchNorm1d(256)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.relu_(self.first(x)) + x
        return torch.cat(torch._foreach_mul([self.norm(x), x.view(-1, 128)[:, :1].expand(-1, 256)], 2.0))


def _observe(*, natively: bool) -> tuple[Observed, list[str]]:
    """A recorded step, and the states of its records afterwards."""
    torch.manual_seed(0)
    with ooc.Session("16MiB", recompute=False) as session:  # else Python tries each kind of op once
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        runner, manager = session.engine.runner, session.engine.manager
        for _ in range(2):  # the first has the optimizer's state made
            with session.step():
                if not natively:
                    runner.dispatcher.demand(None)
                model(torch.ones(256, 256)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            recorder = runner.recording.recorder
            assert recorder is not None
        assert recorder.num_ops > 60
        assert recorder.log is not None
        runner.absorb()
        states = [f"{r.nbytes} {r.seen} {r.stored} {r.pins}" for r in manager.records.values()]
        return recorder.build(manager.records), states


def test_the_recording_is_the_same() -> None:
    natively, states = _observe(natively=True)
    other, other_states = _observe(natively=False)
    assert natively.trace.fingerprint() == other.trace.fingerprint()
    assert [op.where for op in natively.trace.ops] == [op.where for op in other.trace.ops]
    assert any(op.where.startswith("backward of first (") for op in natively.trace.ops)
    assert natively.occurrences == other.occurrences
    assert natively.funcs == other.funcs
    assert states == other_states


def test_ops_for_which_torch_names_its_own_class_are_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies without a gradient that relu and softmax keep of their results."""
    seen = []
    with ooc.Session("16MiB") as session:
        runner = session.engine.runner
        with session.step():
            ones = torch.ones(256, 256, requires_grad=True)  # the first op of a step is Python's: it may begin a plan
            monkeypatch.setattr(runner, "_run", lambda func, args, kwargs: seen.append(func) or func(*args, **kwargs))
            ones.relu().softmax(1).sum().backward()
        recorder = runner.recording.recorder
        assert recorder is not None
        assert torch.ops.aten.detach.default in [op.func for op in recorder.ops]
    assert torch.ops.aten.detach.default not in seen


def test_equal_steps_have_equal_signatures_however_they_were_recorded() -> None:
    with ooc.Session("16MiB") as session:
        recording = session.engine.runner.recording
        found = []
        for natively in (True, False):
            with session.step():
                if not natively:
                    session.engine.runner.dispatcher.demand(None)
                (torch.ones(256, 256) * 2).sum()
            session.engine.runner.absorb()
            recorder = recording.recorder
            assert recorder is not None
            found.append(recorder.signature())
            assert recorder.ops  # taken from the log: the hash must not notice
            found.append(recorder.signature())
        assert len(set(found)) == 1


def test_an_op_that_raises_leaves_nothing_pinned() -> None:
    with ooc.Session("8MiB") as session:
        a, b = torch.ones(256, 256), torch.ones(128, 128)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="multiplied"):
                a @ b
            a.add_(1)
        assert a.sum().item() == 4 * 256 * 256
        assert all(record.pins == 0 for record in session.engine.manager.records.values())


@pytest.mark.usefixtures("whole_ops")
def test_an_op_that_finds_no_room_is_explained_and_leaves_nothing_pinned() -> None:
    with ooc.Session("2MiB") as session:
        a = torch.ones(384, 1024)
        with pytest.raises(BudgetTooSmall, match=HERE):
            a + 1
        assert all(record.pins == 0 for record in session.engine.manager.records.values())
        assert a.mul_(3).sum().item() == 3 * 384 * 1024


def test_what_an_op_writes_is_written_out_again() -> None:
    """`a` is away and comes back; what a native op then writes must not be taken to be in the store."""
    with ooc.Session("2MiB"):
        a, b = torch.ones(256, 1024), torch.ones(192, 1024)
        for value in range(1, 5):
            assert a.sum().item() == value * 256 * 1024  # loads it
            a.add_(1)  # natively
            assert b.sum().item() == 192 * 1024
            torch.ones(192, 1024)  # one of them goes


def test_call_sites_of_a_module_that_takes_anothers_place() -> None:
    """Another module at the address of one that was freed has a path of its own."""

    class Holder(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.ReLU())
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, self.name)(x)  # type: ignore[no-any-return]

    with ooc.Session("4MiB") as session:
        for number in range(6):
            model = Holder(f"part{number}")
            model(torch.ones(64, 1024))
            recorder = session.engine.runner.recording.recorder
            assert recorder is not None
            assert recorder.ops[-1].where.startswith(f"part{number} ("), recorder.ops[-1]
            del model


def test_frames_keep_no_tensor_alive() -> None:
    with ooc.Session("4MiB"):
        x = torch.ones(64, 1024)
        nn.ReLU()(x)
        references = sys.getrefcount(x)
        nn.ReLU()(x)
        assert sys.getrefcount(x) == references


class _Failing(CriticalLock):
    """Its native `acquire` and `release` raise when their turn has come."""

    __slots__ = ()
    turns: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self.acquire = self._raising("acquire", self.acquire)  # type: ignore[method-assign]
        self.release = self._raising("release", self.release)  # type: ignore[method-assign]

    def _raising(self, name: str, call: Any) -> Any:
        def raising() -> None:
            if name == "release":
                call()
            if self.turns and self.turns[0][0] == name:
                left = self.turns[0][1] - 1
                self.turns[0] = name, left
                if left == 0:
                    self.turns.clear()
                    raise ZeroDivisionError(name)
            if name == "acquire":
                call()

        return raising


@pytest.mark.parametrize(
    ("which", "number", "runs"), [("acquire", 1, 0), ("release", 1, 0), ("acquire", 2, 1), ("release", 2, 1)]
)
def test_an_op_whose_lock_fails_holds_nothing(
    which: str, number: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the op or after it: its operands can be evicted, the step goes on, and no reference is lost."""
    monkeypatch.setattr("ooc.dispatch.op_runner.CriticalLock", _Failing)
    with ooc.Session("8MiB") as session, session.step():
        manager = session.engine.manager
        x = torch.ones(1 << 18)
        x.add_(1)  # by now its kind is known
        before = sys.getrefcount(True)
        for _ in range(20):
            _Failing.turns[:] = [(which, number)]
            with pytest.raises(ZeroDivisionError, match=which):
                x.add_(1)
            assert not _Failing.turns
        assert abs(sys.getrefcount(True) - before) < 10
        assert [record.pins for record in manager.records.values()] == [0]
        others = [torch.zeros(1 << 18) for _ in range(9)]  # more than fits beside it
        assert x.sum().item() == (2 + 20 * runs) * x.numel()
        assert all(other.sum().item() == 0 for other in others)
