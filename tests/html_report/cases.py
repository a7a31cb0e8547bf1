"""Documents that tests of reports and timelines draw: a real run, and planned synthetic steps."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import ooc
from scheduler.plan import Machine, Plan
from scheduler.planning import make_plan
from scheduler.trace import Trace
from tests.scheduler.model_traces import conv_net

MIB = 1 << 20


def net() -> nn.Sequential:
    """Eight wide layers: 2 MiB of parameters, and activations of 256 KiB each."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(256, 8))


@functools.cache
def recorded_text(num_steps: int = 8, budget: str = "6MiB") -> str:
    """The report of a real run of `net` that does not fit in core, as JSON text."""
    torch.manual_seed(0)
    with ooc.Session(budget, plan_cache=False) as session:
        train(session, num_steps)
        return json.dumps(session.report(with_timeline=True))


def train(session: ooc.Session, num_steps: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Train `net` under a session; returns the model and its optimizer."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(num_steps):
        with session.step():
            loss = model(torch.randn(256, 256)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return model, optimizer


def recorded(**changed: Any) -> dict[str, Any]:
    """The same as data, with top-level keys changed."""
    document: dict[str, Any] = json.loads(recorded_text())
    return {**document, **changed}


@functools.cache
def synthetic(
    num_blocks: int = 6, share: float = 0.4, policy: str = "auto", *, replayable: bool = False
) -> tuple[Trace, Plan]:
    """A step of `conv_net` and a plan for a share of its peak; its ops may be run again if `replayable`."""
    trace = conv_net(num_blocks=num_blocks)
    trace = replace(trace, ops=tuple(replace(op, replayable=replayable) for op in trace.ops))
    machine = Machine(chunk_nbytes=MIB, num_chunks=int(trace.peak_nbytes() * share) // MIB, load_bytes_per_s=1e9)
    return trace, make_plan(trace, machine, policy)
