"""Plans of the mixed-integer policies, played: the re-runs that they ask for, with the bits of in-core training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.session.recomputed import Case, compare, noted


def small() -> nn.Module:
    """Few ops, since a program has a variable for each pair of them; and none that takes memory for itself, which
    depends on the processor."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(1024, 64), torch.randint(0, 10, (1024,))


@pytest.mark.parametrize("policy", ["checkmate", "poet"])
def test_a_program_s_plan_is_played(policy: str) -> None:
    run = compare(Case(model=small, num_chunks=20, batch=rows, policy=policy), num_steps=5)
    assert noted(run, "num_reruns") > 0
    assert "planned" in [row["mode"] for row in noted(run, "steps")]
