"""Small models for tests of updates inside the backward pass, and their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ooc
from tests.harness import digest

NUM_STEPS = 6
Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Net(nn.Module):
    """Odd sizes, a weight that is used twice, one that is never used, one that is frozen, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.first = nn.Linear(5 * 36, 33)
        self.twice = nn.Linear(33, 33, bias=False)
        self.last = nn.Linear(33, 7)
        self.unused = nn.Parameter(torch.randn(11))
        self.frozen = nn.Parameter(torch.randn(33), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = torch.tanh(self.twice(torch.tanh(self.twice(self.first(x)))))
        return self.last(x * self.frozen)


class Matrices(nn.Module):
    """Two-dimensional parameters alone, which is what Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :48]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x[:, :7]


def batch(index: int, size: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 7, (size,), generator=generator)


def loss_of(model: nn.Module, index: int) -> Tensor:
    x, y = batch(index)
    return functional.cross_entropy(model(x), y)


def build(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters, buffers, the optimizer's state and its groups."""
    found: dict[str, Any] = {name: digest(value) for name, value in model.state_dict().items()}
    names = {id(p): name for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{key} of {names[id(p)]}"] = digest(value) if isinstance(value, Tensor) else repr(value)
    groups = [{k: repr(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {**found, "groups": groups}


def train_by(step: Step, *, in_backward: bool, **how: Any) -> Any:
    """The bits of a model that this loop has trained."""
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if in_backward:
        ooc.step_in_backward(optimizer, **how)
    for index in range(NUM_STEPS):
        step(model, optimizer, index)
    return bits_of(model, optimizer)


def assert_equal(step: Step, **how: Any) -> None:
    """The loop has the bits that it has without `step_in_backward`."""
    assert train_by(step, in_backward=True, **how) == train_by(step, in_backward=False)
