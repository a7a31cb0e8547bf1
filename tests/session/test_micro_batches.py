"""Micro-batches: the gradients of plain PyTorch over the same parts, to the last bit, in less memory."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ooc
from tests.harness import digest

WIDTH, BATCH = 128, 512
ACTIVATION_NBYTES = BATCH * WIDTH * 4
NUM_STEPS = 7


pytestmark = pytest.mark.usefixtures("one_thread")


def build() -> nn.Module:
    torch.manual_seed(7)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def batch(index: int, length: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(length, WIDTH, generator=generator), torch.randint(0, 10, (length,), generator=generator)


def bits(model: nn.Module) -> list[str]:
    return [digest(p) for p in model.parameters()]


def by_hand(size: int, length: int, *, reduction: str = "mean") -> tuple[list[str], list[str]]:
    """Plain PyTorch, spelled out."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for index in range(NUM_STEPS):
        x, y = batch(index, length)
        total = None
        for start in range(0, length, size):
            own_x, own_y = x[start : start + size], y[start : start + size]
            loss = functional.cross_entropy(model(own_x), own_y, reduction=reduction)
            loss = loss * (len(own_x) / length if reduction == "mean" else 1.0)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        assert total is not None
        losses.append(total.item().hex())
    return losses, bits(model)


def ours(
    length: int, *, in_backward: bool = False, reduction: str = "mean", **cut: int
) -> tuple[tuple[list[str], list[str]], list[dict[str, Any]]]:
    with ooc.Session("1MiB", debug=True, step_boundary="optimizer") as session:
        model = build()
        optimizer = torch.optim.Adam(model.parameters())
        if in_backward:
            ooc.step_in_backward(optimizer)
        losses = []
        for index in range(NUM_STEPS):

            def loss_of(output: Tensor, targets: Tensor) -> Tensor:
                return functional.cross_entropy(output, targets, reduction=reduction)

            total = session.micro_batch(model, loss_of, batch(index, length), reduction=reduction, **cut)
            optimizer.step()
            optimizer.zero_grad()
            assert not total.requires_grad
            losses.append(total.item().hex())
        return (losses, bits(model)), session.report()["steps"]


@pytest.mark.parametrize("in_backward", [False, True])
def test_bits_of_plain_micro_batches(in_backward: bool) -> None:
    actual, steps = ours(BATCH, parts=4, in_backward=in_backward)
    assert actual == by_hand(BATCH // 4, BATCH)
    assert steps[-1]["mode"] == "planned"


def test_uneven_parts_weigh_their_share() -> None:
    length = BATCH - 100
    expected = by_hand(128, length)
    actual, steps = ours(length, size=128)
    assert actual == expected
    assert steps[-1]["mode"] == "planned"
    assert ours(length, parts=4)[0] == by_hand(-(-length // 4), length)


def test_sums() -> None:
    assert ours(BATCH, size=200, reduction="sum")[0] == by_hand(200, BATCH, reduction="sum")


def test_close_to_the_whole_batch() -> None:
    """Weights are right: the sum over uneven parts is the whole batch's gradient, but for rounding."""
    model = build().eval()
    x, y = batch(0, 300)
    functional.cross_entropy(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with ooc.Session("1MiB") as session:
        loss = session.micro_batch(model, functional.cross_entropy, (x, y), size=128)
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(loss, functional.cross_entropy(model(x), y).detach())


def test_less_memory_than_the_whole_batch() -> None:
    """What does not run as a whole runs in parts: one op of the whole has two activations at once."""
    budget = ACTIVATION_NBYTES + 3 * 65536

    def run(**cut: int) -> None:
        with ooc.Session(budget, chunk_nbytes=65536) as session:
            model = build()
            session.micro_batch(model, functional.cross_entropy, batch(0), **cut)

    with pytest.raises(ooc.BudgetTooSmall):
        run(parts=1)
    run(parts=8)


class Pair(NamedTuple):
    """A batch with names."""

    x: Any
    y: Any


def test_batches_of_every_form() -> None:
    given = {"a": torch.arange(10).view(5, 2), "b": [torch.arange(5), "text"], "c": Pair(torch.ones(5), 3), "d": None}
    given["e"] = torch.tensor(2.0)
    found = list(ooc.micro_batches(given, size=2))
    assert [weight for _, weight in found] == [0.4, 0.4, 0.2]
    last = found[-1][0]
    assert last["a"].tolist() == [[8, 9]]
    assert last["b"][0].tolist() == [4]
    assert last["b"][1] == "text"
    assert isinstance(last["c"], Pair)
    assert last["c"].x.tolist() == [1]
    assert last["c"].y == 3
    assert last["d"] is None
    assert last["e"] is given["e"]
    with ooc.Session("1MiB") as session:
        model = nn.Bilinear(2, 3, 1)
        inputs = {"input1": torch.ones(4, 2), "input2": torch.ones(4, 3)}
        session.micro_batch(model, functional.mse_loss, (inputs, torch.ones(4, 1)), parts=2)
        session.micro_batch(model, functional.mse_loss, (tuple(inputs.values()), torch.ones(4, 1)), parts=2)


@pytest.mark.parametrize(
    ("given", "cut", "words"),
    [
        (torch.ones(4), {}, "one of the two"),
        (torch.ones(4), {"parts": 2, "size": 2}, "one of the two"),
        (torch.ones(4), {"parts": 0}, "parts=0: a whole number, at least 1"),
        (torch.ones(4), {"size": 2.0}, "size=2.0"),
        ((torch.ones(4), torch.ones(3)), {"parts": 2}, "found: 3, 4"),
        (("text",), {"parts": 2}, "no tensor at all"),
        (torch.ones(0, 3), {"parts": 2}, "found: 0"),
        (torch.ones(4), {"parts": 2, "reduction": "none"}, "reduction='none'"),
    ],
)
def test_what_cannot_be_cut(given: Any, cut: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ooc.micro_batches(given, **cut)


def test_batch_norm_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Normed(nn.Sequential):
        pass

    model = Normed(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with ooc.Session("1MiB") as session, caplog.at_level(logging.WARNING, "ooc"):
        for _ in range(2):
            session.micro_batch(model, functional.mse_loss, (torch.ones(8, 8), torch.ones(8, 8)), parts=2)
        found = [record.getMessage() for record in caplog.records if "normalizes over the samples" in record.message]
    assert found == [message for message in found if message.startswith("micro-batches: 1 (BatchNorm1d)")]
    assert len(found) == 1


def test_pairs_only() -> None:
    with ooc.Session("1MiB") as session, pytest.raises(ValueError, match=r"a pair of inputs and targets, not Tensor"):
        session.micro_batch(nn.Linear(2, 2), functional.mse_loss, torch.ones(2, 2), parts=2)  # type: ignore[arg-type]


def test_a_varying_number_of_parts_is_planned() -> None:
    """The sum of the losses so far is the first thing after a backward pass, and names none of the batch."""
    lengths = [(4, 3, 4, 2, 5)[index % 5] * WIDTH for index in range(5 * NUM_STEPS)]

    def program(model: nn.Module, session: Any) -> list[str]:
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for index, length in enumerate(lengths):
            x, y = batch(index, length)
            if session is None:
                total = None
                for start in range(0, length, WIDTH):
                    part = slice(start, start + WIDTH)
                    loss = functional.cross_entropy(model(x[part]), y[part]) * (WIDTH / length)
                    loss.backward()
                    total = loss.detach() if total is None else total + loss.detach()
            else:
                total = session.micro_batch(model, functional.cross_entropy, (x, y), size=WIDTH)
            optimizer.step()
            optimizer.zero_grad()
            assert total is not None
            losses.append(total.item().hex())
        return [*losses, *bits(model)]

    expected = program(build(), None)
    with ooc.Session("640KiB", chunk_nbytes="64KiB", step_boundary="optimizer") as session:
        found = program(build(), session)
        rows = list(session.steps.rows)[len(lengths) // 2 :]
    assert found == expected
    num_planned = sum(row.num_planned_ops for row in rows)
    num_ops = num_planned + sum(row.num_demand_ops for row in rows)
    assert num_planned > 0.8 * num_ops, [row.why for row in rows]
