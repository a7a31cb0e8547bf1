"""All policies on shapes that none was tuned for: legal plans within the budget, and `auto` behind no other one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.plan import Machine
from scheduler.planning import make_plan
from scheduler.policies import POLICIES
from scheduler.trace import Trace
from tests.scheduler.unseen_traces import UNSEEN

SMALL: dict[str, dict[str, int]] = {
    "dense_blocks": {"blocks": 2, "layers": 3},
    "ragged_trees": {"trees": 1, "leaves": 6},
    "unrolled_gan": {"looks": 2, "layers": 3},
    "u_net": {"depth": 2, "convs": 1},
    "experts": {"layers": 1, "num_experts": 2},
}
MOST_BEHIND = 1e-4  # a plan that waits for less than 0.002 % of the step is not improved on


def step(shape: str) -> Trace:
    return UNSEEN[shape](seed=1, **SMALL[shape])


@pytest.mark.parametrize("share", [0.45])
@pytest.mark.parametrize("shape", UNSEEN)
def test_auto_is_behind_no_other_policy(shape: str, share: float) -> None:
    trace = step(shape)
    machine = Machine(chunk_nbytes=1 << 20, num_chunks=1, load_bytes_per_s=2e9, evict_bytes_per_s=1e9)
    least = smallest_num_chunks(trace, machine)
    machine = replace(machine, num_chunks=max(least, int(trace.peak_nbytes() * share) >> 20))
    steps_ns = {}
    for policy in ("auto", "capuchin", "window", "on_demand", "lms", "vdnn", "dtr", "melon"):
        own: dict[str, Any] = {"recompute": True, "exact": False, "search_smallest": False}
        own = {name: value for name, value in own.items() if name in POLICIES[policy].parameters}
        try:
            plan = make_plan(trace, machine, policy, **own)  # verifies
        except BudgetTooSmall:
            assert policy != "auto"
            continue
        assert plan.predicted["peak_nbytes"] <= machine.budget_nbytes
        assert plan.step_ns >= plan.bounds["duration_ns"]
        steps_ns[policy] = plan.step_ns
    assert steps_ns["auto"] <= min(steps_ns.values()) * (1 + MOST_BEHIND)
