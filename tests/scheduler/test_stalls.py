"""How good `auto` is on steps in the shape of real models: simulated stalls, remaps and bytes moved.

Virtual time, so the same everywhere. The store moves 3.4 GB/s each way, as the machine of the design's trial.
"""

from __future__ import annotations

from functools import cache

import pytest

from scheduler.plan import Machine, Plan
from scheduler.planning import make_plan
from tests.scheduler.model_traces import conv_net, resnet50, transformer

CHUNK_NBYTES = 1 << 18


CASES = {
    "conv": (conv_net(), 0.32),
    "resnet50": (resnet50(), 0.25),
    "resnet50, activations only": (resnet50(with_parameters=False), 0.25),
    "transformer": (transformer(), 0.5),
    "transformer, quarter": (transformer(layers=4), 0.25),
    "transformer, double buffers": (transformer(layers=4, gradients_kept=True), 0.5),
}


THINNED = [pytest.param(case, marks=[pytest.mark.slow] if case == "resnet50" else []) for case in CASES]


@cache
def plan(case: str, policy: str = "auto", rate: float = 3.4e9) -> Plan:
    trace, share = CASES[case]
    machine = Machine(
        chunk_nbytes=CHUNK_NBYTES,
        num_chunks=int(trace.peak_nbytes() * share) // CHUNK_NBYTES,
        load_bytes_per_s=rate,
        evict_bytes_per_s=rate,
        latency_ns=100_000,
    )
    return make_plan(trace, machine, policy)


@pytest.mark.parametrize("case", THINNED)
def test_stalls_below_three_percent(case: str) -> None:
    assert plan(case).predicted["stall_ns"] < 0.03 * CASES[case][0].duration_ns


@pytest.mark.parametrize("case", ["conv", "resnet50, activations only", "transformer"])
def test_nothing_is_remapped(case: str) -> None:
    assert plan(case).predicted["num_remapped_chunks"] == 0


@pytest.mark.parametrize(
    "case",
    ["conv", "transformer, double buffers", pytest.param("transformer, quarter", marks=pytest.mark.slow)],
)
def test_paging_without_foresight_is_slower(case: str) -> None:
    slow = 1e9  # a store that does not hide every mistake
    own = plan(case, rate=slow).predicted["duration_ns"]
    assert own < plan(case, "on_demand", slow).predicted["duration_ns"]
    assert own < 1.02 * plan(case, "window", slow).predicted["duration_ns"]


@pytest.mark.parametrize("case", THINNED)
def test_moves_little_more_than_it_must(case: str) -> None:
    own = plan(case)
    assert own.predicted["evicted_nbytes"] <= 1.4 * own.bounds["evicted_nbytes"]
