"""Steps that are alike at last are planned as a whole, whatever came before, and their bits stay those of training."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ooc
from ooc.replay import segmentation
from tests.session.test_segments import batch, digest, model, planned_share, run


def assert_whole_at_last(program: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In core and under a session, with the same results, and the last steps from one plan."""
    entered: list[int] = []

    def begin(session: ooc.Session) -> None:
        executor, steps = session.engine.executor, session.steps
        enter = executor.enter

        def noted(*args: Any, **kwargs: Any) -> bool:
            entered.append(steps.num_steps)
            return enter(*args, **kwargs)

        monkeypatch.setattr(executor, "enter", noted)

    rows = run(program, budget="1536KiB", begin=begin)
    assert [row.mode for row in rows[-4:]] == ["planned"] * 4
    assert entered and not set(entered).intersection(range(len(rows) - 4, len(rows)))


def alike() -> list[Any]:
    """Each step has the same ops."""
    return averaging(since=99)


def averaging(since: int = 10) -> list[Any]:
    """After some steps an average of the weights is kept, too, which is updated between two steps."""
    net = model(0, 4)
    average = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    out: list[Any] = []
    for index in range(36):
        optimizer.zero_grad()
        loss = net(batch(index)).square().mean()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
        if index >= since:
            with torch.no_grad():
                for mine, its in zip(average.parameters(), net.parameters(), strict=True):
                    mine.lerp_(its, 0.1)
    return out + digest(net, average)


def test_steps_that_have_been_planned_by_their_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if those before had been unlike each other: a net that grows. Their plans began each later step, too."""
    monkeypatch.setattr(segmentation, "_MOST_NEW", 1)
    monkeypatch.setattr(segmentation, "_NUM_FIRST", 0)
    assert_whole_at_last(alike, monkeypatch)


def test_steps_to_which_something_was_added_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was added had a plan of its own, so that two plans were entered in each step."""
    assert_whole_at_last(averaging, monkeypatch)


def drawing() -> list[Any]:
    """A step begins with rows of the data, and takes small weights further on; once, sums come before it."""
    net = model(0, 4)
    data, weights = batch(7), torch.randn(8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    out: list[Any] = []
    for index in range(24):
        found = net(data[torch.randperm(160 - 8 * (index % 5))]).square().mean()
        loss = found * weights[torch.randperm(8)].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
        if index % 12 == 11:
            out += [parameter.detach().sum().item() for parameter in net.parameters()]
    return out + digest(net)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_step_is_not_cut_where_its_first_op_comes_once_more(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan was awaited after the sums, and was refused when it came: so it was taken to begin there, too."""
    cuts: dict[int, int] = {}

    def begin(session: ooc.Session) -> None:
        cycle, steps, budget = session.engine.cycle, session.steps, session.engine.learning
        pass_border, may_enter = cycle._pass, budget.may_enter

        def passed(choose: Callable[[], Any], *, is_begun: bool = False) -> None:
            cuts[steps.num_steps] = cuts.get(steps.num_steps, 0) + is_begun
            pass_border(choose, is_begun=is_begun)

        monkeypatch.setattr(cycle, "_pass", passed)
        monkeypatch.setattr(
            budget, "may_enter", lambda plan: not (is_refused and cuts.get(steps.num_steps)) and may_enter(plan)
        )

    rows = run(drawing, budget="1536KiB", begin=begin)
    assert rows[11].mode == "planned"
    assert {step: number for step, number in cuts.items() if number} == {12: 1}  # between the sums and the step


def skipping() -> list[Any]:
    """Each step skips layers; sums come before some of them, and so before all others in the union of these steps."""
    net = model(0, 8)
    data = batch(7)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    rng = random.Random(3)
    out: list[Any] = []
    for index in range(60):
        x, skipped = data[torch.randperm(160)], rng.sample(range(8), rng.choice([0, 2, 3]) if index > 5 else 0)
        for number in range(8):
            if number not in skipped:
                x = net[2 * number + 1](net[2 * number](x))
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
        if index in (9, 14):
            out += [parameter.detach().sum().item() for parameter in net.parameters()]
    return out + digest(net)


def test_a_step_goes_on_with_a_union_that_begins_with_what_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the plan of a single step that begins as it does, and left that at the first layer that was skipped."""
    monkeypatch.setenv("OOC_BACKGROUND_PLANNING", "0")  # when plans are there depends on no clock

    def begin(session: ooc.Session) -> None:
        steps, budget = session.steps, session.engine.learning
        may_enter = budget.may_enter  # while none is, nothing tells the sums from the step that they come before
        monkeypatch.setattr(budget, "may_enter", lambda plan: not 8 <= steps.num_steps <= 15 and may_enter(plan))

    rows = run(skipping, budget="2MiB", begin=begin)
    assert planned_share(rows[-20:]) > 0.95, [(r.mode, r.num_demand_ops, r.why) for r in rows[-20:]]
    assert len({row.mode for row in rows[-20:]}) == 1
