"""Whether the order of an op's large operands tells which of them it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ooc
from ooc.replay.realignment import Realignment
from ooc.tracing.op_semantics import order_tells_changes

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "num_changed", "is_told"),
    [
        (aten.add.Tensor, 0, True),
        (aten.add_.Tensor, 1, True),
        (aten.addcdiv_.default, 1, True),
        (aten.add_.Tensor, 0, False),  # a small one
        (aten.aminmax.out, 2, True),
        (aten.aminmax.out, 1, False),
        (aten.native_batch_norm.default, 2, True),
        (aten.native_batch_norm.default, 0, False),  # its schema hides them
        (aten.batch_norm_gather_stats_with_counts.default, 2, False),  # they are neither first nor last
        (aten._foreach_add_.List, 1, False),
    ],
)
def test_told(op: Any, num_changed: int, is_told: bool) -> None:
    assert order_tells_changes(op, num_changed) == is_told


def test_batch_norms_stay_out_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their statistics are small in each step: native code sees that, and asks nobody."""
    asked: list[Any] = []
    adapt = Realignment.adapt

    def asking(self: Realignment, func: Any, *rest: Any) -> bool:
        asked.append(func)
        return adapt(self, func, *rest)

    monkeypatch.setattr(Realignment, "adapt", asking)
    with ooc.Session("8MiB", chunk_nbytes="64KiB", threshold_nbytes="16KiB", plan_cache=False) as session:
        net = nn.Sequential(*[each for _ in range(3) for each in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(8):
            asked.clear()
            with session.step():
                net(torch.randn(8, 8, 16, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert session.report()["steps"][-1]["mode"] == "planned"
    assert aten.native_batch_norm.default not in asked
