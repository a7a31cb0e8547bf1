"""Transfers timed by trial: the same transfers, within memory, each step of the climb better than the one before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import evaluate
from scheduler.plan import Machine
from scheduler.policies import POLICIES
from scheduler.policies._timing_climb import climbed
from scheduler.trace import Trace
from scheduler.verify import verify
from tests.scheduler.model_traces import conv_net, transformer
from tests.scheduler.random_traces import TIMES, random_machine, random_trace, replayable


def check_climb(trace: Trace, machine: Machine, policy: str) -> int:
    """Climb from a policy's plan; the number of steps that it returns."""
    try:
        found = evaluate(POLICIES[policy].schedule(trace, machine), trace, machine)
    except BudgetTooSmall:
        return 0
    if isinstance(found, Shortage):
        return 0
    steps = climbed([found], trace)
    assert [own.proposal for own in steps] == [own.proposal for own in climbed([found], trace)]
    assert [own.rank for own in steps] == sorted((own.rank for own in steps), reverse=True)
    kinds = sorted((r.variable, type(r.start).__name__, type(r.stop).__name__) for r in found.proposal)
    for own in steps:
        assert sorted((r.variable, type(r.start).__name__, type(r.stop).__name__) for r in own.proposal) == kinds
        verify(replace(own.plan, trace_fingerprint=trace.fingerprint(), policy=policy), trace)
    return len(steps)


@settings(max_examples=15 * TIMES, deadline=None)
@given(seed=st.integers(0, 2**31), policy=st.sampled_from(["capuchin", "on_demand", "dtr"]))
def test_each_step_is_legal_and_better(seed: int, policy: str) -> None:
    trace = replayable(random_trace(seed))
    machine = random_machine(seed, 0)
    check_climb(trace, random_machine(seed, smallest_num_chunks(trace, machine) + seed % 20), policy)


@pytest.mark.parametrize("trace", [conv_net(num_blocks=4), transformer(layers=2)], ids=["conv", "transformer"])
def test_short_steps_that_wait_are_climbed(trace: Trace) -> None:
    machine = Machine(chunk_nbytes=1 << 20, num_chunks=1, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)
    num_chunks = smallest_num_chunks(trace, machine) * 5 // 4
    assert check_climb(trace, replace(machine, num_chunks=num_chunks), "capuchin")


def test_long_steps_are_left_alone() -> None:
    trace = transformer(layers=20)
    machine = Machine(chunk_nbytes=1 << 20, num_chunks=1, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)
    num_chunks = smallest_num_chunks(trace, machine) * 5 // 4
    assert not check_climb(trace, replace(machine, num_chunks=num_chunks), "capuchin")
