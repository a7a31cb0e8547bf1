"""The log of steps: what it says of what they take in core."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ooc
from ooc.units import MIB


def _needed(budget: str) -> int:
    """Of steps whose activations grow, on a weight and its gradient of 1 MiB each: on demand, learned and planned."""
    with ooc.Session(budget, plan_cache=False, step_boundary="optimizer", background_planning=False) as session:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(16):
            optimizer.zero_grad()
            loss = torch.zeros(())
            hidden = torch.randn(128 + 32 * step, 512)
            for layer in net:
                hidden = torch.tanh(layer(hidden))
                loss = loss + hidden.square().mean()
            loss.backward()
            optimizer.step()
            del hidden, loss
        assert any(row.mode == "planned" for row in session.engine.steps.rows)
        needed = session.report()["in_core_peak_nbytes"]
        assert session.memory_stats()["allocated_bytes.all.peak"] == needed
    assert session.engine.steps.in_core_peak_nbytes == needed
    return int(needed)


def test_what_steps_take_in_core_does_not_depend_on_the_budget() -> None:
    needed = {_needed(budget) for budget in ("64MiB", "16MiB", "10MiB")}
    assert len(needed) == 1
    assert 16 * MIB < needed.pop() < 32 * MIB


def test_what_another_session_takes_does_not_count() -> None:
    with ooc.Session("16MiB") as session:
        kept = torch.zeros(4 * MIB // 4)
        assert session.report()["in_core_peak_nbytes"] == 4 * MIB
    with ooc.Session("16MiB") as other:
        assert other.report()["in_core_peak_nbytes"] == 0  # `kept` has outlived its session
        torch.zeros(2 * MIB // 4)
        del kept
        torch.zeros(3 * MIB // 4)
        assert other.report()["in_core_peak_nbytes"] == 3 * MIB
    assert session.engine.steps.in_core_peak_nbytes == 4 * MIB


def test_what_an_earlier_session_has_left_counted_does_not_count() -> None:
    """A thread that allocates while its session closes may come too late for that."""
    with ooc.Session("16MiB") as session:
        state = session.engine.memory.allocator.state
    state.live_nbytes = MIB
    with ooc.Session("16MiB") as session:
        kept = torch.zeros(4 * MIB // 4)
        assert session.report()["in_core_peak_nbytes"] == 4 * MIB
        del kept
        assert state.live_nbytes == 0


@pytest.mark.parametrize("nbytes", [8 * MIB, 2 * MIB])
def test_what_is_resized_counts_as_it_is_then(nbytes: int) -> None:
    with ooc.Session("16MiB") as session:
        some = torch.zeros(4 * MIB // 4)
        some.untyped_storage().resize_(nbytes)
        assert session.engine.memory.allocator.state.live_nbytes == nbytes
