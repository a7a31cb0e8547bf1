"""Where an op comes from: module and line, forward, backward or update; and at no cost in planned steps."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ooc
from ooc.html_report.facts import costly_ops, make_facts
from ooc.reporting.documents import read_document
from ooc.reporting.report import write_json
from ooc.tracing.call_sites import CallSites
from scheduler.trace import Trace

FILE = "tests/tracing/test_call_sites.py"
WIDTH = 256


class Double(torch.autograd.Function):
    """An op with a backward written in Python."""

    @staticmethod
    def forward(_ctx, x):  # type: ignore[no-untyped-def]
        return x * 2

    @staticmethod
    def backward(_ctx, grad):  # type: ignore[no-untyped-def]
        return grad * 2


class Block(nn.Module):
    """A module with an op of its own beside those of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        return torch.tanh(hidden) + x


class Net(nn.Module):
    """Two blocks, the second recomputed in the backward pass, and a function of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return Double.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def train(session: ooc.Session, num_steps: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(num_steps):
        with session.step():
            loss = model(torch.ones(512, WIDTH)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def line_of(function: object, text: str) -> str:
    """The file and number of the line of `function` that has `text` in it."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return f"{FILE}:{first + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.fixture(scope="module")
def trace() -> Trace:
    with ooc.Session("8MiB", plan_cache=False) as session:
        train(session, 3)
        found = session.trace()
    assert found is not None
    return found


def places_of(trace: Trace, name: str) -> list[str]:
    return [op.where for op in trace.ops if op.name.startswith(name)]


def test_forward_ops_have_module_and_line(trace: Trace) -> None:
    """The second block runs again in the backward pass, which is a call of it like any other."""
    called, added = line_of(Block.forward, "self.linear(x)"), line_of(Block.forward, "torch.tanh")
    assert places_of(trace, "aten.addmm") == [
        f"blocks.0.linear ({called})",
        f"blocks.1.linear ({called})",
        f"blocks.1.linear ({called})",
    ]
    assert places_of(trace, "aten.tanh.default")[:2] == [f"blocks.0 ({added})", f"blocks.1 ({added})"]
    # Of our own code nothing is said, nor of torch's, whatever lies between a line and its op.
    assert not [op.where for op in trace.ops if FILE not in op.where]


def test_backward_ops_have_the_place_of_their_forward_op(trace: Trace) -> None:
    called, added = line_of(Block.forward, "self.linear(x)"), line_of(Block.forward, "torch.tanh")
    assert places_of(trace, "aten.tanh_backward") == [f"backward of blocks.{i} ({added})" for i in (1, 0)]
    products = places_of(trace, "aten.mm.default")
    assert products == [f"backward of blocks.{i}.linear ({called})" for i in (1, 1, 0)]  # no gradient of the input


def test_function_of_the_users_own(trace: Trace) -> None:
    """Its forward and its backward have lines of their own, of which the latter is autograd's to call."""
    products = places_of(trace, "aten.mul")
    assert f"Net ({line_of(Double.forward, 'x * 2')})" in products
    assert f"{line_of(Double.backward, 'grad * 2')}" in products


def test_update_has_the_line_that_calls_the_optimizer(trace: Trace) -> None:
    assert set(places_of(trace, "aten.add_")) == {line_of(train, "optimizer.step()")}


def test_planned_steps_look_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    num_lookups = 0
    find = CallSites.of_this_op

    def counted(self: CallSites) -> str:
        nonlocal num_lookups
        num_lookups += 1
        return find(self)

    monkeypatch.setattr(CallSites, "of_this_op", counted)
    with ooc.Session("8MiB", plan_cache=False) as session:
        session.engine.runner.recording.see_every_op()  # or native code looks most of them up
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(6):
            with session.step():
                model(torch.ones(512, WIDTH)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((session.steps.rows[-1].mode, num_lookups))
    assert found[0][1] > 20
    assert [mode for mode, _ in found[-2:]] == ["planned", "planned"]
    assert found[-1][1] == found[-2][1]


def test_a_model_is_not_kept_alive() -> None:
    """Modules are looked at, not held: what is deleted is gone, in the step after, too."""
    with ooc.Session("8MiB") as session:
        with session.step():
            model = Net()
            model(torch.ones(512, WIDTH))
            held = session.engine.live_nbytes()
            del model
        assert held - session.engine.live_nbytes() >= 2 * WIDTH * WIDTH * 4


def test_code_that_cannot_be_hashed() -> None:
    """What Dynamo makes of a function may have a dictionary among its constants."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    code = double.__code__.replace(co_consts=(*double.__code__.co_consts, {}))
    with pytest.raises(TypeError, match="unhashable"):
        hash(code)
    with ooc.Session("4MiB") as session, session.step():
        made = FunctionType(code, globals())(torch.ones(256, 256))
        assert session.engine.runner.recording.recorder.last_op().where.startswith(FILE)
    assert made.sum().item() == 2 * 256 * 256


def test_people_are_shown_the_place(tmp_path: Path) -> None:
    with ooc.Session("2MiB", plan_cache=False) as session:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            with session.step():
                model(torch.ones(512, WIDTH)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        told = str(session.explain("blocks.0.linear.weight"))
        write_json(tmp_path / "run.json", session.report(with_timeline=True))
    assert f"blocks.0.linear ({line_of(Block.forward, 'self.linear(x)')})" in told
    document = read_document(tmp_path / "run.json")
    view, planned = document.view(), document.planned_view()
    assert view is not None
    ops = costly_ops(view, planned, len(view.trace.ops))  # all: which ones take longest depends on the machine
    assert any("blocks.1" in op.name and f"({FILE}:" in op.name for op in ops)
    facts = make_facts(document, view, planned)
    made = [variable.label for variable in facts.variables if variable.label.startswith("aten.")]
    assert made
    assert all(FILE in label for label in made)
