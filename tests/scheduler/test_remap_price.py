"""What a remap costs is the machine's: by bytes on the CPU, by calls and a stop of the host on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.budget import smallest_num_chunks
from scheduler.cost.evaluate import remap_ns
from scheduler.plan import Machine, Plan
from scheduler.planning import make_plan
from tests.scheduler.random_traces import random_machine, random_trace

SEEDS = (7, 10, 16)
"""Of random steps whose plans remap where that costs nothing."""

MACHINE = Machine(chunk_nbytes=1 << 16, num_chunks=1)


def test_by_bytes_or_by_chunk() -> None:
    assert remap_ns(6, MACHINE) == 2 * remap_ns(3, MACHINE) > 0
    assert remap_ns(3, replace(MACHINE, chunk_nbytes=1 << 17)) == 2 * remap_ns(3, MACHINE)
    card = replace(MACHINE, remap_ns=100_000)
    assert remap_ns(3, card) == remap_ns(3, replace(card, chunk_nbytes=1 << 21)) == 300_000
    with pytest.raises(ValueError, match="remap_ns=-1"):
        replace(MACHINE, remap_ns=-1)


def planned(seed: int, price_ns: int) -> Plan:
    """Of a random step, in a pool a sixth of the way from the least possible to everything."""
    trace = random_trace(seed, num_ops=20)
    machine = random_machine(seed, 0)
    least = smallest_num_chunks(trace, machine)
    most = sum(machine.chunks_of(variable.nbytes) for variable in trace.variables)
    return make_plan(trace, replace(machine, num_chunks=least + (most - least) // 6, remap_ns=price_ns))


def test_it_survives_the_file_and_counts_in_the_predicted_time() -> None:
    plan = planned(3, 7)
    assert Plan.from_json(plan.to_json()).machine.remap_ns == 7
    assert plan.predicted["remap_ns"] == 7 * plan.predicted["num_remapped_chunks"]
    assert plan.step_ns == plan.predicted["duration_ns"] + plan.predicted["remap_ns"]


def test_dear_remaps_are_few() -> None:
    """Over some steps together: one plan may happen on fewer by luck."""
    cheap, dear = (
        sum(planned(seed, price_ns).predicted["num_remapped_chunks"] for seed in SEEDS) for price_ns in (0, 50_000_000)
    )
    assert dear < cheap
