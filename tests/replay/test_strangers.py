"""Steps whose ops are the same and that see other variables each time, as rows are routed: one plan has them all.

A part of 64 rows has 64 KiB, the threshold: in each step other parts are variables. Debug mode is on.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.learner import Learner
from ooc.memory.residency import ResidencyManager
from tests.replay.test_elastic import ROW, Program, digest, run

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 16
NUM_PARTS = 12

Step = Callable[[], contextlib.AbstractContextManager[None]]


def sizes(index: int) -> list[int]:
    """Rows of each part, about 64."""
    r = random.Random(index)
    return [r.randint(52, 76) for _ in range(NUM_PARTS)]


def routed(step: Step, lengths: list[int], *, within: Callable[[int, int, Tensor], Tensor] | None = None) -> list[Any]:
    """Each part goes through a network of its own; `within` may do something with what its first layer returns."""
    networks = [nn.ModuleList((nn.Linear(ROW, ROW), nn.Linear(ROW, ROW))) for _ in range(NUM_PARTS)]
    optimizer = torch.optim.SGD([p for n in networks for p in n.parameters()], lr=1e-2, foreach=False)
    out: list[Any] = []
    for index, _ in enumerate(lengths):
        batch = torch.randn(900, ROW, generator=torch.Generator().manual_seed(index))
        with contextlib.suppress(LookupError), step():
            start, total = 0, torch.zeros(900, ROW)
            for part, (num, network) in enumerate(zip(sizes(index), networks, strict=True)):
                rows = torch.arange(start, start + num)
                start += num
                x = batch[rows]
                for number, layer in enumerate(network):
                    x = torch.tanh(layer(x))
                    if number == 0 and within is not None:
                        x = within(index, part, x)
                total = total.index_add(0, rows, x)
            loss = (total - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
    return out + digest([p for network in networks for p in network.parameters()])


def with_part(within: Callable[[int, int, Tensor], Tensor]) -> Program:
    return lambda step, lengths: routed(step, lengths, within=within)


BUDGET = "10MiB"


def run_routed(program: Program = routed, **options: Any) -> tuple[ooc.Session, list[str]]:
    return run(program, [0] * NUM_STEPS, budget=BUDGET, policy="capuchin", recompute=False, **options)


@pytest.mark.parametrize("debug", [True, False])
def test_parts_near_the_threshold_are_planned(debug: bool) -> None:
    """Remedy: `Shape._merge`. No step has all of the variables, and one plan has room for them."""
    session, modes = run_routed(debug=debug)
    assert modes[NUM_STEPS // 2 :].count("planned") >= NUM_STEPS // 2 - 2, modes
    assert session.engine.sequences.num_plans == 1
    assert session.counters()["loaded_nbytes"] > 0
    assert session.report()["peak_nbytes"] <= session.report()["budget_nbytes"]


def test_what_is_written_in_place_is_a_stranger() -> None:
    _, modes = run_routed(with_part(lambda _index, part, x: (x * 2).mul_(1.5) if part % 2 else x.clone().add_(0.5)))
    assert modes[NUM_STEPS // 2 :].count("planned") >= NUM_STEPS // 2 - 2, modes


def test_a_stranger_outlives_its_step() -> None:
    """It is looked at one step later, when the plan has begun again."""
    held: list[Tensor] = []

    def within(_index: int, part: int, x: Tensor) -> Tensor:
        if part == 2:
            if held:
                x = x + held.pop().sum() * 1e-3
            held.append((x * 2).detach())
        return x

    def program(step: Step, lengths: list[int]) -> list[Any]:
        held.clear()
        return routed(step, lengths, within=within)

    _, modes = run_routed(program)
    assert "planned" in modes


def test_a_step_that_fails_among_strangers() -> None:
    """They are evicted and come back like all others: an op has named them."""

    def within(index: int, part: int, x: Tensor) -> Tensor:
        if index % 5 == 4 and part == 3:
            raise LookupError
        return x

    _, modes = run_routed(with_part(within))
    assert "off_plan" in modes


def test_a_stranger_is_given_out() -> None:
    """As a numpy array that is held to the end, and written through."""
    held: list[Any] = []

    def within(index: int, part: int, x: Tensor) -> Tensor:
        if part == 1 and index % 6 == 5:
            array = (x.detach() * 3).numpy()
            array += 1.0
            held.append(array)
            return x + torch.from_numpy(array)
        return x

    def program(step: Step, lengths: list[int]) -> list[Any]:
        held.clear()
        return [*routed(step, lengths, within=within), *(float(a.sum()) for a in held)]

    run_routed(program)


def test_what_no_step_had_before_is_used_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedy: `Acts::meets_stranger`. A part is large enough for the first time, and the plan has left room."""
    machine = Learner._machine
    monkeypatch.setattr(
        Learner, "_machine", lambda cycle: replace(machine(cycle), num_chunks=machine(cycle).num_chunks - 20)
    )
    monkeypatch.setattr(sys.modules[__name__], "sizes", lambda index: [72 if index in (6, 8) else 60] + [60] * 11)
    _, modes = run_routed()
    assert modes[5:] == ["planned"] * (NUM_STEPS - 5), modes


def test_a_stranger_that_a_plan_has_met_can_be_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedy: it is noted as seen. The step leaves its plan, and what is held beside it must go."""
    held: list[Tensor] = []

    def within(index: int, part: int, x: Tensor) -> Tensor:
        if index == 6 and part == 0:
            held.append(x)
        if index == 6 and part == 11:
            needed = session.engine.budget_nbytes - (1 << 16)
            held.append(torch.zeros(needed // 4).add_(1.0))
        return x

    machine = Learner._machine
    monkeypatch.setattr(
        Learner, "_machine", lambda cycle: replace(machine(cycle), num_chunks=machine(cycle).num_chunks - 20)
    )
    monkeypatch.setattr(sys.modules[__name__], "sizes", lambda index: [72 if index == 6 else 60] + [60] * 11)
    with ooc.Session(BUDGET, debug=True, plan_cache=False, policy="capuchin", recompute=False) as session:
        routed(session.step, [0] * 8, within=within)
        assert len(held) == 2
        assert float(held[1].sum()) == held[1].numel()
        held.clear()
        assert session.steps.rows[5].mode == "planned"
        assert session.steps.rows[6].mode == "off_plan"


@pytest.mark.parametrize("num_spare", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_an_op_uses_beside_the_plan_stays_while_it_runs(monkeypatch: pytest.MonkeyPatch, num_spare: int) -> None:
    """Remedy: `Executor._pin`. The op leaves its plan, as its result has no room there; all that may go then goes."""
    machine, make_room = Learner._machine, ResidencyManager.make_room

    def empty(manager: ResidencyManager, num_chunks: int, **options: int) -> None:
        manager.evict([record for record, _ in manager.by_next_use(manager.position())])
        make_room(manager, num_chunks, **options)

    monkeypatch.setattr(
        Learner, "_machine", lambda cycle: replace(machine(cycle), num_chunks=machine(cycle).num_chunks - num_spare)
    )
    monkeypatch.setattr(ResidencyManager, "make_room", empty)
    monkeypatch.setattr(sys.modules[__name__], "sizes", lambda index: [72 if index == 6 else 60] * 3 + [60] * 9)
    session, _ = run_routed()
    assert "that the plan does not have" in session.steps.rows[6].why
