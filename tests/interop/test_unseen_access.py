"""Functions of torch's that touch memory without an op: `print`, `apply_`, `map_`, `torch.tensor`, a growing storage.

Within a planned step the addresses of what is away show other variables' bytes, and nobody would know of a write.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from tests.session.test_segments import digest, run

SIZE, NUM_STEPS = 256, 30


def printed(b: Tensor) -> Any:
    return repr(b)


def gathered(b: Tensor) -> Any:
    entries = [b[i, i] for i in range(5)]
    return [torch.tensor(entries).tolist(), torch.as_tensor(entries).tolist(), b.new_tensor([entries]).tolist()]


def applied(b: Tensor) -> Any:
    return b[:4].apply_(lambda value: value * 0.5 + 1.0).sum().item()


def mapped(b: Tensor) -> Any:
    b[:1].map_(torch.zeros(1, SIZE), lambda value, _: value + 1.0)
    b[1:2].map2_(b[2:3], b[3:4], lambda value, one, other: value + one - other)
    return b[:4].sum().item()


def grown(b: Tensor) -> Any:
    b.untyped_storage().resize_(2 * b.untyped_storage().nbytes())
    return b.new_empty(0).set_(b.untyped_storage(), 0, (SIZE, SIZE)).square().mean().item()


def training(touch: Callable[[Tensor], Any]) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(SIZE, SIZE), nn.Tanh())))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    state, found = torch.randn(SIZE, SIZE), []
    for _ in range(NUM_STEPS):
        b = state * 0.5
        loss = net(torch.randn(64, SIZE)).square().mean() + b.square().mean()
        loss.backward()
        found += [touch(b), loss.item()]
        optimizer.step()
        optimizer.zero_grad()
        found.append([b.sum().item(), state.apply_(abs)[0, 0].item() if touch is applied else 0])
        del b, loss
    return found + digest(net)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("touch", [printed, gathered, applied, mapped, grown])
def test_it_sees_and_changes_the_variables_own_bytes(touch: Callable[[Tensor], Any], debug: bool) -> None:
    for budget in ("2304KiB", "2560KiB", "3MiB"):
        rows = run(lambda: training(touch), budget=budget, debug=debug)
        assert sum(row.num_planned_ops for row in rows) > 0


def test_a_thread_may_print_and_apply() -> None:
    from concurrent.futures import ThreadPoolExecutor

    expected = torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE)
    with ooc.Session("1MiB", chunk_nbytes="64KiB") as session, ThreadPoolExecutor(1) as threads:
        a = torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE)
        others = [torch.ones(SIZE, SIZE) for _ in range(6)]
        assert threads.submit(repr, a).result() == repr(expected)
        threads.submit(a[:2].apply_, lambda value: value + 1).result()
        expected[:2] += 1
        assert torch.equal(a, expected)
        assert session.engine.manager.counters.evicted_nbytes > 0
        del others


def test_afterwards_they_are_torchs_own() -> None:
    names = ("apply_", "map_", "map2_", "__repr__", "new_tensor")
    before = [getattr(torch.Tensor, name) for name in names], torch.tensor, torch.UntypedStorage.resize_
    with ooc.Session("1MiB"):
        assert torch.tensor is not before[1]
    assert before == ([getattr(torch.Tensor, name) for name in names], torch.tensor, torch.UntypedStorage.resize_)


def test_a_list_op_whose_lists_are_cut_otherwise_changes_others() -> None:
    """The same function on the same variables in the same order: `[a] += [b]`, and `[a, b] += [1, 2]`."""

    def program() -> list[Any]:
        torch.manual_seed(0)
        choose, losses = random.Random(3), []
        net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(SIZE, SIZE), nn.Tanh())))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        a, b, small = torch.randn(128, 128), torch.randn(128, 128), [torch.full((1,), 0.25), torch.full((1,), 0.5)]
        for step in range(60):
            if step < 24 or choose.random() < 0.6:
                torch._foreach_add_([a], [b])
            else:
                torch._foreach_add_([a, b], small)
            y = net(torch.randn(64, SIZE))
            loss = y.square().mean() + (y[:, :128] @ a.mul_(0.5) @ b).square().mean() * 1e-3
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del y, loss
        return losses + digest(net)

    for debug in (False, True):
        run(program, budget="2304KiB", debug=debug)
