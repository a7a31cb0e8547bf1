"""Steps that begin alike and part: what leaves its plan goes on with the plan of what came.

In core and under a session with debug checks, compared to the last bit; and how much of it was planned.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ooc.errors import StoreFailed
from ooc.memory.residency import ResidencyManager
from ooc.replay import unions
from ooc.replay.bindings import Bindings
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.executor import Executor
from ooc.replay.late_entry import LateEntry
from tests.session.program_runs import run_many
from tests.session.test_segments import batch, digest, model, planned_share, run
from tests.thinned import thinned
from vmm.driver import MemoryFault
from vmm.store import StoreFull

NUM_STEPS = 48
RUNNER = "tests.session.program_late:run_seed"
NUM_PROGRAMS = 24


@pytest.fixture(autouse=True)
def no_unions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else steps that part and come together again would have one plan."""
    for name in ("_NUM_UNLIKE", "_NUM_MIXED"):
        monkeypatch.setattr(unions, name, 99)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each late entry, before which op it was."""
    found: list[int] = []
    begin = LateEntry.begin

    def begun(self: LateEntry, *arguments: Any) -> None:
        found.append(self.at)
        begin(self, *arguments)

    monkeypatch.setattr(LateEntry, "begin", begun)
    return found


def networks() -> list[Any]:
    """A batch is made, then one of three networks of one form is trained on it, drawn at random."""
    choose, nets = random.Random(1), [model(seed, num_layers=3) for seed in range(3)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9) for net in nets]
    out: list[Any] = []
    for step in range(NUM_STEPS):
        which = choose.randrange(3)
        loss = nets[which](batch(step).sigmoid()).square().mean()
        loss.backward()
        optimizers[which].step()
        optimizers[which].zero_grad()
        out.append(loss.item())
    return out + digest(*nets)


def heads() -> list[Any]:
    """A trunk, then the head of a task, in no order: what the trunk has made is alive where plans part."""
    choose, trunk, tasks = random.Random(2), model(num_layers=3), [model(seed, num_layers=1) for seed in (5, 6, 7)]
    trained = nn.ModuleList([trunk, *tasks])
    out: list[Any] = []
    optimizers = [torch.optim.AdamW([*trunk.parameters(), *task.parameters()], lr=1e-3) for task in tasks]
    for step in range(NUM_STEPS):
        which = choose.randrange(3)
        loss = tasks[which](trunk(batch(step))).square().mean()
        loss.backward()
        optimizers[which].step()
        optimizers[which].zero_grad()
        out.append(loss.item())
    return out + digest(trained)


def state_that_goes_on() -> list[Any]:
    """What was changed before plans part is changed again after that, in the same residency of the other plan."""
    choose, net, state = random.Random(3), model(num_layers=4), batch(99)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    out: list[Any] = []
    for step in range(NUM_STEPS):
        state.mul_(0.9)
        x = batch(step) + state
        y = net(x.sin() if choose.random() < 0.5 else x.cos())
        loss = y.square().mean()
        state.add_(y.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out += [loss.item(), state.sum().item()]
    return out + digest(net)


def rare() -> list[Any]:
    """One step of eight ends with a penalty, after the forward pass."""
    choose, net = random.Random(4), model(num_layers=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    out: list[Any] = []
    for step in range(NUM_STEPS):
        loss = net(batch(step)).square().mean()
        if choose.random() < 0.125:
            loss = loss + sum(p.abs().sum() for p in net.parameters()) * 1e-4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out + digest(net)


def in_later_residencies() -> list[Any]:
    """What was made was moved out and in again before plans part, and is changed in place after that."""
    choose, net = random.Random(5), model(num_layers=6)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    out: list[Any] = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        x = batch(step)
        kept, made = [x * (number + 1) for number in range(4)], []
        for layer in net:
            x = layer(x)
            made.append(x)
        total = sum(each.sum() for each in kept)
        y = x.sin() if choose.random() < 0.5 else x.cos()
        for number, each in enumerate(kept):
            each.mul_(0.5)
            y = (y + each * 1e-3) * made[2 * number].detach()
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        out += [loss.item(), float(total)]
    return out + digest(net)


PROGRAMS = [networks, heads, state_that_goes_on, rare]


@thinned("program,debug", PROGRAMS, [True, False])
def test_what_parts_goes_on_with_the_other_plan(
    program: Callable[[], list[Any]], debug: bool, entries: list[int]
) -> None:
    rows = run(program, debug=debug)
    assert len(entries) >= 2, "the plan that was expected was always the one that came"
    assert all(at > 0 for at in entries)
    assert planned_share(rows[-NUM_STEPS // 3 :]) > 0.9  # before, some networks have no plan yet


@thinned("program,fault,debug", [heads, in_later_residencies], ["disk full", "too many mappings, once"], [True, False])
def test_what_cannot_be_entered_leaves_the_step_on_demand(
    program: Callable[[], list[Any]], fault: str, debug: bool, monkeypatch: pytest.MonkeyPatch, entries: list[int]
) -> None:
    """Refused when all is mapped, for good or once. What was bound is where it was, and shows its bytes.

    Else what this step had made was lost, or its addresses showed the chunks in which the plan has it first.
    """
    counts: Counter[str] = Counter()
    enter, reserve = Executor.enter, Bindings._reserve_store

    def counted(self: Executor, *arguments: Any, **options: Any) -> bool:
        counts["late"] += options.get("so_far") is not None
        counts["is late"], counts["tries"] = int(options.get("so_far") is not None), 0
        return enter(self, *arguments, **options)

    def refused(self: Bindings, executable: ExecutablePlan) -> None:
        counts["tries"] += 1
        if counts["is late"] and fault == "disk full" and counts["late"] % 2:
            counts["refused"] += 1
            raise StoreFull("no room", needed_nbytes=1, free_nbytes=0)
        if counts["is late"] and fault != "disk full" and counts["tries"] == 1:
            counts["refused"] += 1
            raise MemoryFault("too many mappings")
        reserve(self, executable)

    monkeypatch.setattr(Executor, "enter", counted)
    monkeypatch.setattr(Bindings, "_reserve_store", refused)
    run(program, debug=debug)
    assert counts["refused"] >= 2
    assert entries


def test_a_load_that_cannot_be_started_fails_the_op_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    enter, start_load = Executor.enter, ResidencyManager.start_load

    def counted(self: Executor, *arguments: Any, **options: Any) -> bool:
        counts["is late"] = options.get("so_far") is not None
        try:
            return enter(self, *arguments, **options)
        except StoreFailed:
            counts["failed"] += 1
            return False  # as if the program had tried the op again
        finally:
            counts["is late"] = 0

    def failing(self: ResidencyManager, *arguments: Any, **options: Any) -> None:
        if counts["is late"]:
            counts["loads"] += 1
            if counts["loads"] % 3 == 0:
                raise StoreFailed("a transfer failed")
        start_load(self, *arguments, **options)

    monkeypatch.setattr(Executor, "enter", counted)
    monkeypatch.setattr(ResidencyManager, "start_load", failing)
    run(heads)
    assert counts["failed"]


def test_random_programs_of_steps_that_begin_alike() -> None:
    """`python -m tests.session.program_runs --runner tests.session.program_late:run_seed --seed 0` runs more."""
    tally = run_many(range(NUM_PROGRAMS), runner=RUNNER)
    tally.check(NUM_PROGRAMS)
    assert tally.modes["late entries"] > NUM_PROGRAMS / 2, tally.modes
