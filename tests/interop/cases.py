"""A small model, its training, and its bytes, which the tests of access from outside the dispatcher share."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ooc
from tests.quick_plans import QUICK_PLANS

WIDTH = 256
BUDGET = "1MiB"
NUM_STEPS = 10
PLANNED_STEP = 6
"""By then steps are planned, in and after which something is done; in step 1 they still run on demand."""


class InCore:
    """No session."""

    def step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


SIDE = 128
"""A tensor of this side is one chunk."""


def check_in_steps(begin: Callable[[torch.Tensor], Any], use: Callable[[Any], Any], *, debug: bool) -> None:
    """Train, in core and within a session, and `use` in mid-step what `begin` has made of a variable at its start.

    Explicit steps: after an optimizer's, what is away is guarded, and shows its own bytes.
    """

    def train_on(session: Any) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(SIDE, SIDE), nn.ReLU())))
        optimizer, found = torch.optim.Adam(net.parameters(), lr=1e-3), []
        integers = torch.randint(0, SIDE, (SIDE, SIDE), dtype=torch.int32)
        for _ in range(10):
            with session.step():
                found.append(integers.sum().item())
                seen = begin(integers)
                x = torch.randn(SIDE, SIDE)
                for index, layer in enumerate(net):
                    x = layer(x)
                    if index in (4, 8):
                        found.append(use(seen))
                loss = x.square().mean()
                loss.backward()
                found += [use(seen), loss.item()]
                optimizer.step()
                optimizer.zero_grad()
                found.append(integers.sum().item())
                del x, loss, seen
        return [*found, *contents(net)]

    expected = train_on(InCore())
    options: Any = {"chunk_nbytes": "64KiB", "threshold_nbytes": "16KiB", "plan_cache": False, "debug": debug}
    with ooc.Session("600KiB", **options, **QUICK_PLANS) as session:
        assert train_on(session) == expected
        assert sum(row.num_planned_ops for row in session.steps.rows) > 0


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
