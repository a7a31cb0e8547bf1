"""A small model, its training, and its bytes, which the tests of access from outside the dispatcher share."""

from __future__ import annotations

import contextlib
import ctypes

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 256
BUDGET = "1MiB"
NUM_STEPS = 12
PLANNED_STEP = 6
"""By then steps are planned, in and after which something is done; in step 1 they still run on demand."""


class InCore:
    """No session."""

    def step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> float:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(WIDTH, WIDTH, generator=generator)
    y = torch.randint(0, 10, (WIDTH,), generator=generator)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def contents(model: nn.Module) -> list[bytes]:
    """Every tensor's bytes, by way of an op each."""
    return [t.detach().clone().numpy().tobytes() for t in model.state_dict().values()]


def pointers_of(model: nn.Module) -> list[tuple[int, int]]:
    return [(p.data_ptr(), 4 * p.numel()) for p in model.parameters()]


def read_all(pointers: list[tuple[int, int]]) -> list[bytes]:
    return [ctypes.string_at(address, nbytes) for address, nbytes in pointers]
