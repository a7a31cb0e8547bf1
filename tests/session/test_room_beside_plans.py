"""What a refused op leaves behind stays beside a plan; if there is no room for it there, other variables go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ooc


def _train() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for step in range(30):
        inputs = torch.randn(64 + step * 4, 256)  # each step another length
        outputs = model(inputs)
        if step % 3 == 1:
            with pytest.raises(RuntimeError):
                torch.ops.ooc_room_beside_plans.asks_too_much(inputs)
        loss = outputs.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


@pytest.mark.parametrize(
    "budget",
    [
        "4300KiB",
        pytest.param("4400KiB", marks=pytest.mark.slow),
        "4500KiB",
        pytest.param("4600KiB", marks=pytest.mark.slow),
        "4700KiB",
    ],
)
def test_a_refused_op_does_not_take_a_plans_room(budget: str) -> None:
    """At some of these budgets the load of what it left evicted what was in place already, and took its chunks."""

    def asks_too_much(a: torch.Tensor) -> torch.Tensor:
        result = a * 2
        torch.empty(1 << 38)
        return result

    library = torch.library.Library("ooc_room_beside_plans", "DEF")
    library.define("asks_too_much(Tensor a) -> Tensor")
    library.impl("asks_too_much", asks_too_much, "CPU")
    try:
        expected = _train()
        with ooc.Session(
            budget, step_boundary="optimizer", plan_cache=False, chunk_nbytes="64KiB", threshold_nbytes="16KiB"
        ):
            assert _train() == expected
    finally:
        library._destroy()
