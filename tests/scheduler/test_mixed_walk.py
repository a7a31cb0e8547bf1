"""Walks that page and recompute at once: their plans are legal, and better where neither alone is enough."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.budget import smallest_num_chunks
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import evaluate
from scheduler.plan import Discarded, Evicted, Machine, Recomputed
from scheduler.planning import make_plan
from scheduler.policies import _recompute
from scheduler.policies._mixed_walk import mixed
from scheduler.residency_builder import with_last_copies
from scheduler.trace import Trace
from scheduler.verify import verify
from tests.scheduler.model_traces import transformer
from tests.scheduler.random_traces import random_machine, random_trace, replayable

CHUNK_NBYTES = 1 << 20


def trained_network() -> tuple[Trace, Machine]:
    """A step with AdamW in a third of its memory, and a store slower than its ops."""
    trace = replayable(transformer())
    num_chunks = int(trace.peak_nbytes() * 0.35) // CHUNK_NBYTES
    return trace, Machine(chunk_nbytes=CHUNK_NBYTES, num_chunks=num_chunks, load_bytes_per_s=3e8, evict_bytes_per_s=3e8)


@pytest.mark.parametrize("seed", range(20))
def test_random_steps(seed: int) -> None:
    """Whatever is proposed either does not colour or is a legal plan."""
    trace = replayable(random_trace(seed), share=0.7, rng=random.Random(seed))
    machine = random_machine(seed, 1)
    least = smallest_num_chunks(trace, machine)
    machine = random_machine(seed, least + seed % 5)
    for proposal in mixed(trace, machine, wrap=seed % 3 != 0):
        assert with_last_copies(proposal, trace) == proposal  # what the executor would write is written in the plan
        found = evaluate(proposal, trace, machine)
        if not isinstance(found, Shortage):
            verify(replace(found.plan, trace_fingerprint=trace.fingerprint()), trace)


def test_both_in_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of what does not fit are dear to make again, others to move: the plan does both, and takes less time."""
    trace, machine = trained_network()
    plan = make_plan(trace, machine, "auto", recompute=True, thorough=False)
    assert any(isinstance(r.start, Recomputed) for r in plan.residencies)
    assert any(isinstance(r.stop, Discarded) for r in plan.residencies)
    assert any(isinstance(r.stop, Evicted) for r in plan.residencies)
    monkeypatch.setattr(_recompute, "mixed", lambda *_, **__: [])
    assert plan.step_ns < 0.9 * make_plan(trace, machine, "auto", recompute=True, thorough=False).step_ns


def test_the_same_step_gives_the_same_proposals() -> None:
    trace, machine = trained_network()
    assert mixed(trace, machine, wrap=True) == mixed(trace, machine, wrap=True)
