"""An op that changes operands is not taken for the planned one with fewer of them: what it changes is noted."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ooc.replay.realignment import Realignment
from tests.session.test_segments import SIZE, batch, digest, model, run
from tests.thinned import thinned

NUM_STEPS = 30
CHANGED_AT = 20
Change = Callable[[Tensor, Tensor, Tensor, bool], None]


def added(h: Tensor, y: Tensor, small: Tensor, is_other: bool) -> None:
    """`h.add_(y)` is planned, `y.add_(small)` comes: y is the one operand that both have."""
    if is_other:
        y.add_(small)
    else:
        h.add_(y)


def copied(_: Tensor, y: Tensor, small: Tensor, is_other: bool) -> None:
    """Out of y into what is too small to be seen is planned; the other way round comes."""
    if is_other:
        y[:1].copy_(small)
    else:
        small[:].copy_(y[0])


def extremes(h: Tensor, y: Tensor, small: Tensor, is_other: bool) -> None:
    """Of y into h and what is small is planned; of what is small into y and h comes: the operands are y and h."""
    rows, first_of_y, first_of_h, few = y[1:9], y[0], h[0], small.expand(4, SIZE)
    if is_other:
        torch.aminmax(few, dim=0, out=(first_of_y, first_of_h))
    else:
        torch.aminmax(rows, dim=0, out=(first_of_h, small))


def statistics(_: Tensor, y: Tensor, small: Tensor, is_other: bool) -> None:
    """Small running statistics of y are planned; y has those of what is small. No schema says that they are changed."""
    rows, in_y, few, (mean, variance) = y[:, :4], y[0, :4], small[8:16].view(2, 4), small[:8].view(2, 4)
    if is_other:
        torch.native_batch_norm(few, None, None, in_y, variance, True, 0.1, 1e-5)
    else:
        torch.native_batch_norm(rows, None, None, mean, variance, True, 0.1, 1e-5)


@thinned("change,debug", [added, copied, extremes, statistics], [False, True])
def test_what_an_op_changes_that_has_not_all_operands(change: Change, debug: bool) -> None:
    def program() -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(8)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        small, losses = torch.full((SIZE,), 0.25), []
        for index in range(NUM_STEPS):
            optimizer.zero_grad()
            x = net[0](torch.randn(320, SIZE, generator=torch.Generator().manual_seed(index)))
            for number in range(1, len(net)):
                y = net[number](x)
                with torch.no_grad():
                    h = x * 2.0
                    change(h, y, small, index >= CHANGED_AT and number == 3)
                x = y
            loss = x.square().mean() + h.mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses + digest(net)

    rows = run(program, budget="2560KiB", debug=debug)
    assert any(row.mode == "planned" for row in rows)


def test_an_op_that_was_planned_with_one_variable_twice_gets_two() -> None:
    """Of variables from outside a step. It was bound to the one and the other by turns, for ever.

    The first time costs the plan; from then on what the op joins is anybody's.
    """

    def program() -> list[Any]:
        net, batches, out = model(num_layers=2), [batch(number) for number in range(8)], []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for index in range(16):
            one, other = batches[index % 8], batches[(index + 3) % 8]
            loss = net(torch.cat([one, other if index in (9, 12) else one])).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out + digest(net)

    rows = run(program)
    assert rows[8].mode == rows[12].mode == rows[15].mode == "planned"
    assert rows[9].mode == "off_plan"


def test_realignments_that_undo_each_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is known. What claims to have changed something, and has not, must cost the plan and not hold the step."""
    claims = collections.Counter[str]()

    def adapt(*call: Any) -> bool:
        claims[str(call[1])] += 1
        assert claims[str(call[1])] < 1000, "for ever"
        return True

    def program() -> list[Any]:
        net, out = model(num_layers=2), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for index in range(12):
            inputs = batch(index)
            loss = (net(inputs.neg()) if index == 9 else net(inputs)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out + digest(net)

    monkeypatch.setattr(Realignment, "adapt", adapt)
    rows = run(program)
    assert rows[8].mode == "planned"
    assert rows[9].mode == "off_plan"
    assert claims["aten.neg.default"] > 1
