"""Ops on lists of tensors count up the versions of what they change, as without a dispatch mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ooc

Step = Callable[[], contextlib.AbstractContextManager[object]]


def update(tensors: list[Tensor]) -> list[int]:
    torch._foreach_mul_(tensors, 2.0)
    torch._foreach_addcdiv_(tensors, tensors, tensors)
    torch._foreach_sqrt(tensors)  # changes nothing
    torch._foreach_copy_(tensors, [t.clone() for t in tensors])
    return [t._version for t in tensors]


@pytest.mark.parametrize("numel", [8, 1 << 16], ids=["small", "managed"])
@pytest.mark.parametrize("inference", [True, False])
def test_versions_are_those_of_plain_torch(numel: int, inference: bool) -> None:
    def run() -> list[int] | None:
        with torch.inference_mode(inference):
            tensors = [torch.ones(numel) for _ in range(3)]
            if inference:  # has no versions
                torch._foreach_mul_(tensors, 2.0)
                return None
            return update(tensors)

    expected = run()
    with ooc.Session("2MiB", plan_cache=False):
        assert run() == expected


@pytest.mark.parametrize("numel", [8, 1 << 16], ids=["small", "managed"])
def test_on_another_thread(numel: int) -> None:
    def run() -> list[int]:
        found: list[int] = []
        tensors = [torch.ones(numel) for _ in range(3)]
        thread = threading.Thread(target=lambda: found.extend(update(tensors)))
        thread.start()
        thread.join()
        return found

    expected = run()
    with ooc.Session("4MiB", plan_cache=False):
        assert run() == expected


def errors(step: Step) -> list[str]:
    """A loop that changes its parameters before it goes back through what was made of them: a mistake."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found = []
    for _ in range(8):
        with step():
            x = torch.randn(160, 160)
            model(x).square().mean().backward()
            late = model(x)
            optimizer.step()
            optimizer.zero_grad()
            try:
                late.sum().backward()
            except RuntimeError as error:
                found.append(str(error).partition(":")[0])
            found.append(float(late.detach().sum()).hex())
    return found


def test_a_backward_pass_through_what_has_changed_is_refused() -> None:
    """In planned steps, too: nothing goes on with other gradients than plain torch has."""
    expected = errors(contextlib.nullcontext)
    assert sum("modified by an inplace operation" in line for line in expected) == 8
    with ooc.Session("1MiB", chunk_nbytes="64KiB", policy="capuchin", recompute=False, plan_cache=False) as session:
        assert errors(session.step) == expected
        assert "planned" in {row.mode for row in session.steps.rows}
