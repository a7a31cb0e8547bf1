"""The rest of a step that did not fit, run without data: so that one restart is enough, and nothing else changes."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.dispatch import dry_run
from ooc.errors import BudgetTooSmall
from ooc.tracing.own_memory import own_memory

MIB = 1 << 20


class Widening(nn.Module):
    """Its largest op is the last ReLU's backward: three tensors of 1,024 x 1,024 floats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 512), nn.Linear(512, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.last(torch.relu(self.first(x)))).mean()


def _fail(
    model: nn.Module, x: Tensor, *, make_optimizer: Any = None, has_gradients: bool = True
) -> tuple[BudgetTooSmall, torch.optim.Optimizer | None]:
    optimizer = make_optimizer(model.parameters()) if make_optimizer is not None else None
    with pytest.raises(BudgetTooSmall) as caught, torch.set_grad_enabled(has_gradients):
        model(x).backward()
    return caught.value, optimizer


def _train(budget_nbytes: int) -> None:
    with ooc.Session(budget_nbytes, step_boundary="optimizer"):
        model = Widening()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.ones(1024, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.usefixtures("whole_ops")
@pytest.mark.parametrize("budget", ["3MiB", "5MiB", "9MiB"])
def test_one_restart_is_enough(budget: str) -> None:
    """Wherever it fails: in the second layer, in its ReLU, in the backward pass."""
    with ooc.Session(budget):
        error, _ = _fail(Widening(), torch.ones(1024, 64))
    assert 12 * MIB <= error.expected_nbytes <= 12.5 * MIB
    assert ("by a run of Widening without data" in str(error)) == (budget != "9MiB")
    _train(error.expected_nbytes)


def test_what_follows_the_model_is_guessed_as_a_loss() -> None:
    """Of 4 MiB: log_softmax, its result's gradient and its own."""
    with ooc.Session("3MiB"):
        model = nn.Linear(64, 1024)
        with pytest.raises(BudgetTooSmall) as caught:
            nn.functional.cross_entropy(model(torch.ones(1024, 64)), torch.zeros(1024, dtype=torch.long)).backward()
    assert caught.value.expected_nbytes == 12 * MIB


def test_the_optimizers_step_is_run_too() -> None:
    """Three tensors of the weight's size; the model's own largest op needs the weight, its gradient and little else."""
    with ooc.Session("5MiB"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 512))
        error, optimizer = _fail(model, torch.ones(1024, 1024), make_optimizer=torch.optim.Adam)
        assert optimizer is not None
        assert error.expected_nbytes == 12 * MIB
        assert not optimizer.state
        assert all(len(group["params"]) == 4 for group in optimizer.param_groups)


@pytest.mark.usefixtures("whole_ops")
def test_an_optimizer_that_fails_knows_what_follows_in_it() -> None:
    """Its state of 4 MiB is made first, beside the gradient; the update has three such tensors."""
    with ooc.Session("6MiB") as session:
        weight = nn.Parameter(torch.ones(1024, 1024))
        optimizer = torch.optim.Adam([weight])
        session.set_budget("16MiB")
        weight.sum().backward()
        session.set_budget("6MiB")
        with pytest.raises(BudgetTooSmall, match="by its optimizer's step") as caught:
            optimizer.step()
        assert caught.value.expected_nbytes == 12 * MIB


def test_a_parameter_that_does_not_fit_will_have_a_gradient() -> None:
    with ooc.Session("3MiB"):
        with pytest.raises(BudgetTooSmall, match="for a parameter and its gradient") as caught:
            nn.Embedding(16 * 1024, 64)
        assert caught.value.expected_nbytes == 8 * MIB
        with pytest.raises(BudgetTooSmall) as other:
            torch.empty(1 << 20)
        assert other.value.expected_nbytes == 4 * MIB


class Busybody(nn.Module):
    """Changes all that a `forward` can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(512)
        self.layer = nn.Linear(512, 1024)
        self.rnn = nn.LSTM(8, 8)
        self.register_buffer("mean", torch.zeros(512))
        self.register_buffer("kept", torch.zeros(40_000))
        self.calls, self.seen, self.by_name = 0, [0], {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.by_name["calls"] += 1
        self.kept.add_(1)
        print("called")
        x = self.norm(x) * torch.rand(512) * random.random()
        self.mean = x.detach().mean(0)
        self.last = x.shape
        torch.manual_seed(self.calls)
        x = x + self.rnn(x[:4, :8].unsqueeze(0))[0].mean()
        return nn.functional.dropout(torch.relu(self.layer(x))).sum() * self.mean.mean()

    def state(self) -> list[Any]:
        tensors = [t.detach().clone() for t in (*self.parameters(), *self.buffers())]
        return [*(t.tolist() for t in tensors), self.calls, list(self.seen), dict(self.by_name), list(vars(self))]


def _fail_and_go_on(*, asks: bool) -> tuple[list[Any], list[Any], str]:
    torch.manual_seed(3)
    random.seed(3)
    with ooc.Session("5MiB", debug=True) as session:
        model = Busybody()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.ones(1024, 512)
        error, _ = _fail(model, x)
        said = str(error) if asks else ""
        assert all(p.grad is None for p in model.parameters())
        before = [*model.state(), random.getstate(), torch.get_rng_state().tolist()]
        session.set_budget("24MiB")
        for _ in range(3):
            with session.step():
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        after = [*model.state(), random.getstate(), torch.get_rng_state().tolist()]
    return before, after, said


def test_asking_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """What a program finds after the error, and how its training goes on, is the same whether the message was read."""
    asked = _fail_and_go_on(asks=True)
    printed = capsys.readouterr().out
    unasked = _fail_and_go_on(asks=False)
    assert "by a run of Busybody without data" in asked[2]
    assert asked[0] == unasked[0]
    assert asked[1] == unasked[1]
    assert printed == capsys.readouterr().out


class Mismatched(nn.Module):
    """Fails behind the op that does not fit, in a way that torch logs at length for fake tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (torch.ones(4096, 1024) @ torch.ones(1024, 4096)).sum()
        return x @ torch.ones(3, 5)


def test_where_the_model_fails_without_data_nothing_is_logged() -> None:
    shown: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = shown.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with ooc.Session("8MiB", plan_cache=False), pytest.raises(ooc.BudgetTooSmall) as raised:
            Mismatched()(torch.ones(4, 64))
        assert "budget >=" in str(raised.value)
        assert not shown
        logger.error("as ever")
        assert [record.getMessage() for record in shown] == ["as ever"]
    finally:
        logger.removeHandler(handler)


def test_nothing_is_run_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(dry_run.DryRun, "_look_ahead", lambda self, traceback: looked.append(traceback))
    with ooc.Session("3MiB"):
        error, _ = _fail(Widening(), torch.ones(1024, 64))
        assert not looked
        for _ in range(2):
            str(error)
        assert len(looked) == 1


class Endless(nn.Module):
    """Ends when a value says so, which tensors without data never do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 1024)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.layer(x))
        while y.min().item() > 0:
            y = y - 1
        return y


class Unknown(nn.Module):
    """Has an op of its own that torch can only run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.ooc_dry.strange(torch.relu(self.layer(x)))


@pytest.mark.parametrize("kind", [Endless, Unknown])
def test_a_run_that_gets_stuck_tells_what_it_saw(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ReLU's backward pass."""
    monkeypatch.setattr(dry_run, "_MOST_OPS", 200)
    library = torch.library.Library("ooc_dry", "FRAGMENT")
    library.define("strange(Tensor x) -> Tensor")
    library.impl("strange", lambda x: x.clone(), "CPU")
    with ooc.Session("3MiB"):
        error, _ = _fail(kind(), torch.ones(1024, 64))
    assert error.expected_nbytes == 12 * MIB
    library._destroy()


def test_nothing_is_run_where_other_ranks_may_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with ooc.Session("3MiB"):
        error, _ = _fail(Widening(), torch.ones(1024, 64))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "by a run of" not in str(error)


def test_what_convolutions_copy() -> None:
    """Operand and result once more; the derivative also in such a layout. Of a product of matrices nothing."""
    x, weight = torch.empty(4, 32, 32, 32, device="meta"), torch.empty(64, 32, 3, 3, device="meta")
    rest: list[Any] = [None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    x_nbytes, out_nbytes, w_nbytes = 4 * 32 * 32 * 32 * 4, 4 * 64 * 32 * 32 * 4, 64 * 32 * 9 * 4
    forward = own_memory(torch.ops.aten.convolution.default, [x, weight, *rest])
    assert (forward.before_nbytes, forward.with_results_nbytes) == (0, x_nbytes + out_nbytes + w_nbytes)
    out = torch.empty(4, 64, 32, 32, device="meta")
    backward = own_memory(torch.ops.aten.convolution_backward.default, [out, x, weight, *rest, [True, False, False]])
    assert (backward.before_nbytes, backward.with_results_nbytes) == (x_nbytes + out_nbytes + w_nbytes, x_nbytes)
    transposed = own_memory(
        torch.ops.aten.convolution.default,
        [x, torch.empty(32, 8, 2, 2, device="meta"), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1],
    )
    assert transposed.with_results_nbytes == x_nbytes + 4 * 8 * 64 * 64 * 4 + 32 * 8 * 4 * 4
    assert own_memory(torch.ops.aten.convolution.default, [x.double(), weight.double(), *rest]).with_results_nbytes == 0
    assert own_memory(torch.ops.aten.relu.default, [x]).with_results_nbytes == 0
