"""Torch computes under our modes as without one: it takes other formulas under a dispatch mode, with other bits.

Remedy: native/unnoticed_mode.h. Everything fits in the budget here: nothing has to move for this to go wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import ooc

pytestmark = pytest.mark.usefixtures("one_thread")


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    own = [each.clone().requires_grad_() for each in inputs]
    return list(torch.autograd.grad(function(*own).sum(), own))


def matrix() -> Tensor:
    return torch.randn(40, 30, generator=torch.Generator().manual_seed(0))


CASES: dict[str, Callable[[], list[Tensor]]] = {
    "prod": lambda: gradients(lambda x: x.prod(1), matrix()),
    "prod of all": lambda: gradients(lambda x: x.prod(), matrix()[:3, :3]),
    "masked_fill": lambda: gradients(lambda x, v: x.masked_fill(x > 0, v) * matrix(), matrix(), torch.tensor(1.0)),
    "svdvals": lambda: [torch.linalg.svdvals(matrix())],
    "norm": lambda: [torch.linalg.matrix_norm(matrix(), 2)],
    "eigvalsh": lambda: [torch.linalg.eigvalsh(matrix().T @ matrix())],
    "median": lambda: gradients(lambda x: -x.median(), matrix()),
    "min": lambda: gradients(lambda x: -x.min(), matrix()),
}


def bits(found: list[Tensor]) -> list[list[int]]:
    return [each.reshape(-1).view(torch.int32).tolist() for each in found]


@pytest.mark.parametrize("name", CASES)
def test_results_have_the_same_bits(name: str) -> None:
    expected = bits(CASES[name]())
    on_thread: list[Any] = []
    with ooc.Session("64MiB", plan_cache=False):
        assert bits(CASES[name]()) == expected
        thread = threading.Thread(target=lambda: on_thread.append(bits(CASES[name]())))
        thread.start()
        thread.join()
    assert on_thread == [expected]


def additions() -> set[str]:
    """What autograd calls to sum up the gradients of something that is used three times."""
    x = torch.randn(8, 8, requires_grad=True) * 2
    total = x.sin() + x.cos() + x.exp()
    with profile() as found:
        total.sum().backward()
    return {event.key for event in found.key_averages() if event.key.startswith("aten::add")}


def test_sums_of_gradients_are_as_under_any_mode() -> None:
    """Not in place, whichever way their addends came: steps are alike, and traces by fake execution, too."""
    assert additions() == {"aten::add_"}
    with ooc.Session("64MiB", plan_cache=False):
        assert additions() == {"aten::add"}


class Passing(TorchDispatchMode):
    """A user's mode, which is noticed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_is_noticed() -> None:
    def run() -> tuple[set[str], list[list[int]]]:
        with Passing():
            return additions(), bits(CASES["svdvals"]())

    expected = run()
    with ooc.Session("64MiB", plan_cache=False):
        assert run() == expected
    assert expected[0] == {"aten::add"}
