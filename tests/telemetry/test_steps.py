"""The log of steps: what it says of steps of which nothing is recorded."""

from __future__ import annotations

import torch
from torch import nn

import ooc
from ooc.units import MIB


def test_a_step_that_is_not_recorded_counts_for_what_is_needed_in_core() -> None:
    """Where everything fits nothing is learned after some steps, and the model may grow then."""
    with ooc.Session("64MiB", plan_cache=False, step_boundary="optimizer", background_planning=False) as session:
        session.engine.steps.note_recording = lambda recording: None  # type: ignore[method-assign]
        net = nn.Linear(1024, 1024)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 1024)).sum().backward()
            optimizer.step()
        needed = session.report()["in_core_peak_nbytes"]
        assert 8 * MIB <= needed <= 9 * MIB  # the weight and its gradient
