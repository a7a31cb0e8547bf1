"""Steps on demand whose variables are written behind and read ahead: bits as in core, whatever comes in between."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.memory.record import State
from tests.quick_plans import QUICK_PLANS
from tests.thinned import thinned

LENGTHS = [24, 37, 30, 44, 19, 33, 40, 27]


class Model(nn.Module):
    """Layers whose saved activations and parameters exceed the budgets below. Some are skipped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(192, 192) for _ in range(6))
        self.norm = nn.BatchNorm1d(192)

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = x + torch.relu_(layer(x))
        return self.norm(x)


def _train(between: Callable[[int], None] = lambda _: None, *, skips: bool = False) -> list[bytes]:
    """The bytes of all that training changes, after each step."""
    torch.manual_seed(0)
    chance = random.Random(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for number, length in enumerate(LENGTHS):
        loss = model(torch.randn(8 * length, 192), chance.randrange(8) if skips else -1).square().mean()
        between(number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tensors = [loss.detach(), *model.state_dict().values()]
        tensors += [v for state in optimizer.state.values() for v in state.values()]
        found.append(b"".join(t.clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors))
    return found


@thinned("budget,skips", ["1536KiB", "2MiB", "2560KiB", "4MiB"], [False, True])
def test_bits(budget: str, skips: bool) -> None:
    expected = _train(skips=skips)
    with ooc.Session(budget, debug=True, chunk_nbytes=1 << 16, step_boundary="optimizer", **QUICK_PLANS) as session:
        assert _train(skips=skips) == expected
        ahead = session.engine.manager.ahead
        assert ahead.num_written > 10
        assert skips or ahead.num_read > 10
        assert session.engine.manager.peak_chunks <= session.engine.manager.pool.num_chunks


def test_a_fork_with_writes_and_reads_under_way() -> None:
    """The child sees the parameters as they were; the parent's bits do not change."""
    expected = _train()

    def fork(_: int) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    with ooc.Session("2MiB", debug=True, chunk_nbytes=1 << 16, step_boundary="optimizer", **QUICK_PLANS):
        assert _train(fork) == expected


def test_budgets_that_change_with_writes_and_reads_under_way() -> None:
    expected = _train()
    with ooc.Session("2MiB", debug=True, chunk_nbytes=1 << 16, step_boundary="optimizer", **QUICK_PLANS) as session:
        budgets = ["1536KiB", "3MiB", "2MiB", "1792KiB"]
        assert _train(lambda number: session.set_budget(budgets[number % len(budgets)])) == expected


def test_the_end_of_a_session_with_reads_under_way() -> None:
    tensors = []
    with ooc.Session("1MiB", debug=True, chunk_nbytes=1 << 16, step_boundary="explicit", **QUICK_PLANS) as session:
        tensors = [torch.full((64, 1024), float(value)) for value in range(8)]
        for _ in range(3):
            with session.step():
                for tensor in tensors:
                    tensor.add_(1)
        (tensors[0] + tensors[1]).sum()
    for value, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((64, 1024), float(value + 3)))


def test_what_is_read_ahead_gives_way_to_an_op_that_needs_the_room() -> None:
    """Two steps with the same beginning; then the second needs nearly the whole pool at once."""
    with ooc.Session("2MiB", debug=True, chunk_nbytes=1 << 16, step_boundary="explicit", **QUICK_PLANS) as session:
        small = [torch.full((64, 1024), float(value)) for value in range(8)]
        large = torch.full((448, 1024), 5.0)
        for number in range(4):
            with session.step():
                for index, tensor in enumerate(small):
                    if number % 2 and index == 4:
                        assert large.sum().item() == 5.0 * 448 * 1024
                    tensor.add_(1)
        assert [tensor[0, 0].item() for tensor in small] == [value + 4.0 for value in range(8)]


def test_no_plan_begins_with_a_write_or_a_read_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan gives chunks to others as soon as their variable is in the store: a write must have ended by then."""
    expected = _train_equal_steps()
    with ooc.Session("2MiB", debug=True, chunk_nbytes=1 << 16, step_boundary="optimizer", plan_cache=False) as session:
        manager, executor = session.engine.manager, session.engine.executor
        enter, bind = executor.enter, executor._bindings.bind
        found = []

        def enter_late(*arguments: Any, **options: Any) -> bool:
            for record in manager.records.values():
                if record.state is State.RESIDENT:
                    manager.settle(record)
                    manager.start_write(record)  # as if it had just begun
            assert any(record.transfer is not None for record in manager.records.values())
            return enter(*arguments, **options)

        def look(*arguments: Any, **options: Any) -> Any:
            found.append([r for r in manager.records.values() if r.transfer is not None or r.state is State.LOADING])
            return bind(*arguments, **options)

        monkeypatch.setattr(executor, "enter", enter_late)
        monkeypatch.setattr(executor._bindings, "bind", look)
        assert _train_equal_steps() == expected
        assert "planned" in [row.mode for row in session.steps.rows]
    assert found
    assert not any(found)


def _train_equal_steps() -> list[bytes]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    found = []
    for number in range(7):
        loss = model(torch.full((256, 192), 0.01 * number), -1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(b"".join(t.detach().clone().numpy().tobytes() for t in (loss, *model.parameters())))
    return found
