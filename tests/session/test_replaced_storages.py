"""What is the same storage for some steps, and then another one: it stays in memory meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ooc
from ooc.units import MIB
from tests.session.program_runs import run_many

NUM_PROGRAMS = 24
RUNNER = "tests.session.program_replaced:run_seed"
_EVERY, _NUM_STEPS = 6, 42
_ROWS, _WIDTH = 2048, 256


def _train(*, writes: bool) -> list[float]:
    """Steps of batches that are drawn from what was collected; every few steps something else is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(_WIDTH, 512), nn.Tanh(), nn.Linear(512, _WIDTH))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    found, collected = [], torch.zeros(0)
    for step in range(_NUM_STEPS):
        if step % _EVERY == 0:
            collected = torch.randn(_ROWS, _WIDTH)
        loss = net(collected[torch.randint(0, _ROWS, (64,))]).square().mean()
        if writes:
            collected[step % 7] += 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, *(parameter.sum().item() for parameter in net.parameters())]


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("budget", ["64MiB", "9MiB", "5MiB"])
def test_what_is_replaced_every_few_steps_is_loaded_once_each_time(budget: str, writes: bool) -> None:
    expected = _train(writes=writes)
    with ooc.Session(
        budget, plan_cache=False, step_boundary="optimizer", background_planning=False, debug=True
    ) as session:
        assert _train(writes=writes) == expected
        rows = session.report()["steps"][-2 * _EVERY :]
    assert [row["mode"] for row in rows] == ["planned"] * (2 * _EVERY)
    nbytes = 4 * _ROWS * _WIDTH
    between = [row["loaded_nbytes"] for index, row in enumerate(rows) if index % _EVERY]
    if budget == "5MiB":  # what has to move is not this
        assert max(between) <= MIB < nbytes
    else:
        assert between == [0] * len(between)
        assert all(row["loaded_nbytes"] == nbytes for row in rows[::_EVERY])


def test_random_programs_of_storages_that_are_replaced() -> None:
    """`python -m tests.session.program_runs --runner tests.session.program_replaced:run_seed --seed 0` runs more."""
    tally = run_many(range(NUM_PROGRAMS), runner=RUNNER)
    tally.check(NUM_PROGRAMS)
    assert tally.modes["standing"] > NUM_PROGRAMS / 4, tally.modes
