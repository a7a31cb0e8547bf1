"""What an op joins is drawn anew in each step from what earlier steps have left: samples of a replay buffer.

Each in core and under a session with debug checks, compared to the last bit; and how much of it was planned.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ooc.tracing.op_semantics import joins_list
from tests.session.test_segments import batch, digest, model, planned_share, run
from tests.thinned import thinned

aten = torch.ops.aten
DRAW = Callable[[random.Random, list[Tensor]], list[Tensor]]


def distinct(choose: random.Random, pool: list[Tensor]) -> list[Tensor]:
    return choose.sample(pool, 4)


def with_replacement(choose: random.Random, pool: list[Tensor]) -> list[Tensor]:
    """Some come twice, or three times."""
    return choose.choices(pool, k=4)


def with_the_latest(choose: random.Random, pool: list[Tensor]) -> list[Tensor]:
    """What this step has made comes first, in the midst, or not at all."""
    found = choose.sample(pool[:-1], 3)
    found.insert(choose.randint(0, 3), pool[-1] if choose.random() < 0.7 else choose.choice(pool))
    return found


def training(draw: DRAW, *, skips: bool = False, changes: bool = False) -> list[Any]:
    """A buffer that forgets its oldest, and a step on what was drawn of it."""
    choose, net, pool = random.Random(5), model(), deque[Tensor](maxlen=12)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    out: list[Any] = []
    for index in range(40):
        with torch.no_grad():
            pool.append(net[0](batch(index, 48)))
        if len(pool) < 5:
            continue
        drawn = draw(choose, list(pool))
        x = torch.cat(drawn)
        for layer in range(0, len(net), 2):
            if not skips or layer == 0 or choose.random() < 0.6:
                x = net[layer + 1](net[layer](x)) + x
        loss = x.square().mean()
        if changes:
            drawn[choose.randrange(4)].mul_(0.99)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out + digest(net) + [float(each.sum()) for each in pool]


@thinned("draw,skips", [distinct, with_replacement, with_the_latest], [False, True])
def test_steps_on_what_was_drawn_are_planned(draw: DRAW, skips: bool) -> None:
    """Remedy: `Draws`. Else plans are for what was drawn in the steps that they were made from, and are left there."""
    rows = run(lambda: training(draw, skips=skips))
    assert planned_share(rows[len(rows) // 2 :]) > 0.95


@pytest.mark.parametrize("draw", [distinct, with_replacement, with_the_latest])
def test_what_was_drawn_is_changed_in_place(draw: DRAW) -> None:
    """By an op that is not the one that joins, of one of them: which is that? Bits alone count here."""
    run(lambda: training(draw, changes=True))


def test_what_was_drawn_elsewhere_before() -> None:
    """Two ops draw from one pool: what the first has bound may be what the second one wants, in another place."""

    def program() -> list[Any]:
        choose, net, pool = random.Random(7), model(), [batch(index, 48) for index in range(9)]
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        out = []
        for _ in range(40):
            optimizer.zero_grad()
            for _ in range(2):
                loss = net(torch.cat(choose.sample(pool, 3))).square().mean()
                loss.backward()
                out.append(loss.item())
            optimizer.step()
        return out + digest(net)

    rows = run(program)
    assert planned_share(rows[-8:]) > 0.95


def test_an_operand_that_comes_again_is_no_other_one_that_is_changed() -> None:
    """`add_(a, b)` is planned, `add_(b, b)` comes, or `add_(b, a)`: what is changed counts, wherever it stands."""

    def program() -> list[Any]:
        choose, net = random.Random(3), model()
        a, b = batch(1), batch(2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        out = []
        for index in range(40):
            target, other = (a, b) if index < 12 else choose.choice([(a, b), (b, b), (b, a), (a, a)])
            target.mul_(0.5).add_(other, alpha=0.1)
            loss = (net(a) - b).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return [*out, *digest(net), a.sum().item(), b.sum().item()]

    run(program)


def test_only_ops_that_make_one_tensor_of_a_list_join() -> None:
    assert joins_list(aten.cat.default)
    assert joins_list(aten.stack.default)
    for func in (aten.add.Tensor, aten._foreach_norm.Scalar, aten._foreach_add_.List, aten.cat.out, aten.index.Tensor):
        assert not joins_list(func)
