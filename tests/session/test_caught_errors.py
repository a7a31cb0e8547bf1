"""Ops that raise, where the program catches the error and goes on: in each step, or in some."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.session.test_segments import SIZE, batch, digest, model, planned_share, run
from tests.thinned import thinned

NUM_STEPS = 20


def factored(x: Tensor, fails: bool) -> Tensor:
    """A Cholesky decomposition, tried with ever more on the diagonal."""
    matrix, eye = x.T @ x / len(x), torch.eye(SIZE)
    for jitter in (-1e3 if fails else 1.0, 1.0):
        try:
            return x @ torch.linalg.cholesky(matrix + jitter * eye)
        except torch.linalg.LinAlgError:
            continue
    raise AssertionError("not positive definite")


def joined(x: Tensor, fails: bool) -> Tensor:
    """Batches that are joined, if they fit."""
    try:
        return torch.cat([x, x[:, : SIZE // 2] if fails else x * 0.5])
    except RuntimeError:
        return torch.cat([x[:, : SIZE // 2], x[:, SIZE // 2 :] * 2], 1) * 0.5


def added(x: Tensor, fails: bool) -> Tensor:
    """An update in place, of a tensor that may have another shape."""
    total = x.detach() * 0.1
    try:
        total.add_(x.detach()[: len(x) // 2] if fails else x.detach())
    except RuntimeError:
        total.mul_(2)
    return x + total


def half_written(x: Tensor, fails: bool) -> Tensor:
    """An op that has changed a part of its operand when it raises."""
    total = x.detach() * 0.1
    try:
        torch.ops.ooc_tests_caught.shift(total, fails)
    except ValueError:
        total.mul_(2)
    return x + total


def small(x: Tensor, fails: bool) -> Tensor:
    """An op on nothing that is managed."""
    try:
        return x * (torch.ones(2) @ torch.ones(3 if fails else 2))
    except RuntimeError:
        return x * 0.5


@pytest.fixture(autouse=True)
def shift() -> Iterator[None]:
    with torch.library._scoped_library("ooc_tests_caught", "FRAGMENT") as library:

        def body(x: Tensor, fails: bool) -> None:
            x[: len(x) // 2] += torch.ones_like(x[: len(x) // 2])
            if fails and len(x) < SIZE:
                raise ValueError("says the test")
            if fails:
                torch.empty(1 << 44)
            x[len(x) // 2 :] += 1

        library.define("shift(Tensor(a!) x, bool fails) -> ()")
        library.impl("shift", body, "CPU")
        yield


def train(step: Callable[[Tensor, bool], Tensor], fails: Callable[[int, random.Random], bool]) -> Callable[[], Any]:
    def program() -> list[Any]:
        net, choose, out = model(num_layers=4), random.Random(2), []
        optimizer = torch.optim.Adam(net.parameters())
        assert isinstance(net, nn.Sequential)
        for index in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = net[4:](step(net[:4](batch(index)), fails(index, choose))).square().mean()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out + digest(net)

    return program


STEPS = [factored, joined, added, half_written, small]


@thinned("step,debug", STEPS, [False, True])
def test_an_error_in_each_step(step: Callable[[Tensor, bool], Tensor], debug: bool) -> None:
    """They are planned like others."""
    rows = run(train(step, lambda *_: True), budget="1792KiB", debug=debug)
    assert planned_share(rows[NUM_STEPS // 2 :]) == 1.0, [row.why for row in rows]
    assert sum(row.evicted_nbytes for row in rows[NUM_STEPS // 2 :]) > 0


@thinned("step,debug", STEPS, [True, False])
def test_an_error_in_some_steps(step: Callable[[Tensor, bool], Tensor], debug: bool) -> None:
    """Of which nobody knows which: the op does not make what the plan has it make, or makes what it has not."""
    rows = run(train(step, lambda _, choose: choose.random() < 0.3), budget="1792KiB", debug=debug)
    assert planned_share(rows[NUM_STEPS // 2 :]) > 0.3, [row.why for row in rows]


@pytest.mark.parametrize("debug", [False, True])
def test_what_an_op_has_changed_before_it_was_refused_memory_is_kept(debug: bool) -> None:
    """Of a variable whose copy in the store was of use until then; the plan is left in the midst of the op."""

    def program() -> list[Any]:
        states, choose, out = [torch.randn(SIZE, SIZE) for _ in range(8)], random.Random(3), []
        net = model(num_layers=2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for index in range(NUM_STEPS):
            optimizer.zero_grad()
            refused = choose.randrange(8) if index % 3 == 2 else None
            x = batch(index)
            for number, state in enumerate(states):
                x = x + x @ state * 1e-3
                try:
                    if index % 3 == 2:
                        torch.ops.ooc_tests_caught.shift(state, number == refused)
                except RuntimeError:
                    out.append(number)
            net(x).square().mean().backward()
            optimizer.step()
        return out + digest(net) + [state.double().sum().item() for state in states]

    rows = run(program, budget="1280KiB", debug=debug)
    assert sum("shift.default" in row.why and "allocates" in row.why for row in rows) > 2
