"""Plans of the mixed-integer policies, played: the re-runs that they ask for, with the bits of in-core training."""

from __future__ import annotations

import pytest
from torch import nn

from tests.session.recomputed import Case, compare, many_images, noted


def small() -> nn.Module:
    """Few ops, since a program has a variable for each pair of them."""
    layers = [nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.Tanh()) for i in range(3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


@pytest.mark.parametrize("policy", ["checkmate", "poet"])
def test_a_program_s_plan_is_played(policy: str) -> None:
    run = compare(Case(model=small, num_chunks=30, batch=many_images, policy=policy), num_steps=5)
    assert noted(run, "num_reruns") > 0
    assert "planned" in [row["mode"] for row in noted(run, "steps")]
