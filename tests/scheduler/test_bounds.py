"""Lower bounds against every plan of tiny steps, and the least wait against cases worked out by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.budget import smallest_num_chunks
from scheduler.chains import Away, Gap, chains_of, residencies_of
from scheduler.colouring.colouring import Shortage
from scheduler.colouring.scratch import colour_with_scratch
from scheduler.cost import least_wait
from scheduler.cost.bounds import lower_bounds
from scheduler.cost.least_wait import least_wait_ns
from scheduler.cost.simulate import simulate
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.trace import Op, Trace, Use, Variable
from scheduler.verify import verify
from tests.scheduler.random_traces import TIMES, random_machine, random_trace

seeds = st.integers(0, 2**31)
_MOST_PLANS = 1_500


def tiny_case(seed: int) -> tuple[Trace, Machine]:
    """A step of few ops, on a machine whose links are about as fast as the ops, at the least budget or little more."""
    rng = random.Random(seed)
    trace = random_trace(seed, num_ops=rng.randint(2, 4), max_nbytes=12)
    machine = random_machine(seed, 0)
    rate = rng.choice([5e6, 2e7, 1e8])
    machine = replace(machine, load_bytes_per_s=rate, evict_bytes_per_s=rate * rng.choice([0.5, 1, 2]))
    machine = replace(machine, shared_bytes_per_s=rng.choice([None, rate * 1.5]), latency_ns=rng.choice([0, 30, 400]))
    return trace, replace(machine, num_chunks=smallest_num_chunks(trace, machine) + rng.choice([0, 0, 1, 3]))


def answers(gap: Gap, num_ops: int) -> list[Away | None]:
    """In memory throughout, or away from any position to any other."""
    stop = gap.latest_load if gap.latest_load is not None else max(num_ops, gap.earliest_release)
    found: list[Away | None] = [] if gap.forced else [None]
    for release in range(gap.earliest_release, stop + (gap.latest_load is None)):
        if gap.latest_load is None:
            found.append(Away(gap=gap, release=release, load=None))
            continue
        found += [Away(gap=gap, release=release, load=load) for load in range(release, gap.latest_load + 1)]
    return found


def every_plan(trace: Trace, machine: Machine) -> Iterator[Plan]:
    """All coloured and legal plans without re-runs; of a step with many, as many picked by chance."""
    chains = chains_of(trace, machine)
    choices = [answers(gap, len(trace.ops)) for chain in chains for gap in chain.gaps]
    every: Iterator[tuple[Away | None, ...]] = itertools.product(*choices)
    if math.prod(len(own) for own in choices) > _MOST_PLANS:
        rng = random.Random(len(choices))
        every = (tuple(rng.choice(own) for own in choices) for _ in range(_MOST_PLANS))
    for picked in every:
        proposal = residencies_of(chains, [away for away in picked if away is not None], trace)
        try:
            outcome = colour_with_scratch(proposal, trace, machine)
            if isinstance(outcome, Shortage):
                continue
            plan = Plan(
                trace_fingerprint=trace.fingerprint(),
                policy="all",
                machine=machine,
                residencies=outcome.colouring.residencies,
            )
            verify(plan, trace)
        except (PlanError, AssertionError):
            continue
        yield plan


@settings(max_examples=20 * TIMES, deadline=None)
@given(seed=seeds)
def test_no_plan_of_a_tiny_step_is_below_a_bound(seed: int) -> None:
    trace, machine = tiny_case(seed)
    bounds = lower_bounds(trace, machine)
    for plan in every_plan(trace, machine):
        result = simulate(plan, trace, with_timeline=False)
        assert result.duration_ns >= bounds["duration_ns"], plan.residencies
        assert result.loaded_nbytes >= bounds["loaded_nbytes"], plan.residencies
        assert result.evicted_nbytes >= bounds["evicted_nbytes"], plan.residencies


def test_a_full_op_leaves_its_neighbours_to_wait() -> None:
    """Memory has room for one op's operands only, so that op hides nothing: each write and each load is waited for.

    `a` is made, goes out for `b`, which fills memory for a long op, and comes back: 60 bytes each way at 10 bytes a us.
    """
    trace = Trace(
        ops=(
            _op("make a", 0, 2, 5_000, (0, False, True)),
            _op("fill", 2, 4, 90_000, (1, False, True)),
            _op("use a", 5, 6, 5_000, (0, True, False)),
        ),
        variables=(
            Variable(nbytes=60, birth_tick=1, death_tick=6),
            Variable(nbytes=100, birth_tick=3, death_tick=4),
        ),
        num_ticks=7,
        cyclic=False,
    )
    machine = Machine(chunk_nbytes=10, num_chunks=10, load_bytes_per_s=1e7, evict_bytes_per_s=1e7, latency_ns=0)
    assert least_wait_ns(trace, machine, frozenset(), discards=False) == 12_000
    bounds = lower_bounds(trace, machine)
    assert bounds["duration_ns"] == 112_000
    plan = make_plan(trace, machine)
    assert plan.predicted["duration_ns"] == 112_000
    roomy = replace(machine, num_chunks=15)  # room for most of `a`, but no part of it can stay or move alone
    assert least_wait_ns(trace, roomy, frozenset(), discards=False) == 12_000
    assert least_wait_ns(trace, replace(machine, num_chunks=16), frozenset(), discards=False) == 0


def test_links_that_share_a_rate_share_it_in_every_window() -> None:
    """`a` and `c` fill memory one at a time: between them 100 bytes leave and 100 come, then 100 come back."""
    trace = Trace(
        ops=(
            _op("make a", 0, 2, 5_000, (0, False, True)),
            _op("use c", 2, 4, 5_000, (1, True, False)),
            _op("use a", 4, 6, 5_000, (0, True, False)),
        ),
        variables=(
            Variable(nbytes=100, birth_tick=1, death_tick=6),
            Variable(nbytes=100, birth_tick=None, death_tick=None),
        ),
        num_ticks=7,
        cyclic=False,
    )
    machine = Machine(chunk_nbytes=10, num_chunks=10, load_bytes_per_s=1e7, evict_bytes_per_s=1e7, latency_ns=0)
    assert least_wait_ns(trace, machine, frozenset(), discards=False) == 20_000
    shared = replace(machine, shared_bytes_per_s=1.25e7)
    assert least_wait_ns(trace, shared, frozenset(), discards=False) == 26_000
    slow = replace(machine, shared_bytes_per_s=5e6)  # one after the other, both are faster than together
    assert least_wait_ns(trace, slow, frozenset(), discards=False) == 30_000
    for own in (machine, shared, slow):
        assert make_plan(trace, own).predicted["duration_ns"] == 45_000


def test_a_link_alone_moves_no_more_than_its_own_rate() -> None:
    """100 bytes leave and 50 come between the first two ops: while nothing comes, what both share is no use."""
    trace = Trace(
        ops=(
            _op("make a", 0, 2, 5_000, (0, False, True)),
            _op("use c", 2, 4, 5_000, (1, True, False), (2, False, True)),
            _op("use a", 4, 6, 5_000, (0, True, False)),
        ),
        variables=(
            Variable(nbytes=100, birth_tick=1, death_tick=6),
            Variable(nbytes=50, birth_tick=None, death_tick=None),
            Variable(nbytes=50, birth_tick=3, death_tick=4),
        ),
        num_ticks=7,
        cyclic=False,
    )
    machine = Machine(chunk_nbytes=10, num_chunks=10, load_bytes_per_s=1e7, evict_bytes_per_s=1e7, latency_ns=0)
    assert least_wait_ns(trace, machine, frozenset(), discards=False) == 20_000
    shared = replace(machine, shared_bytes_per_s=1.25e7)  # 5 us of either link take 8 us beside the other
    assert least_wait_ns(trace, shared, frozenset(), discards=False) == 8_000 + 5_000 + 10_000
    for own in (machine, shared):
        assert make_plan(trace, own).predicted["stall_ns"] == 25_000  # `c` comes where `a` was


def test_each_transfer_that_must_be_waits_for_its_latency() -> None:
    """As where a full op leaves its neighbours to wait, but two variables go and come back, each with its latency."""
    trace = Trace(
        ops=(
            _op("make a", 0, 2, 5_000, (0, False, True), (1, False, True)),
            _op("fill", 2, 4, 90_000, (2, False, True)),
            _op("use a", 5, 6, 5_000, (0, True, False), (1, True, False)),
        ),
        variables=(
            Variable(nbytes=40, birth_tick=1, death_tick=6),
            Variable(nbytes=40, birth_tick=1, death_tick=6),
            Variable(nbytes=100, birth_tick=3, death_tick=4),
        ),
        num_ticks=7,
        cyclic=False,
    )
    machine = Machine(chunk_nbytes=10, num_chunks=10, load_bytes_per_s=1e7, evict_bytes_per_s=1e7, latency_ns=700)
    assert least_wait_ns(trace, machine, frozenset(), discards=False) == 2 * (8_000 + 2 * 700)
    assert make_plan(trace, machine).predicted["stall_ns"] == 2 * (8_000 + 2 * 700)
    one = replace(machine, num_chunks=15)  # one stays; to the bound, the other comes back in the room that it has
    assert least_wait_ns(trace, one, frozenset(), discards=False) == 4_000 + 700
    assert make_plan(trace, one).predicted["stall_ns"] == 2 * (4_000 + 700)
    shared = replace(machine, shared_bytes_per_s=1.25e7)
    assert least_wait_ns(trace, shared, frozenset(), discards=False) == 2 * (8_000 + 2 * 700)


def test_what_may_be_made_again_waits_for_nothing() -> None:
    trace, machine = tiny_case(3)
    every = frozenset(range(len(trace.variables)))
    assert least_wait_ns(trace, machine, every, discards=True) == 0


@settings(max_examples=30 * TIMES, deadline=None)
@given(seed=seeds)
def test_looking_at_fewer_moments_never_raises_the_bound(seed: int) -> None:
    trace = random_trace(seed, num_ops=14)
    machine = replace(random_machine(seed, 0), load_bytes_per_s=2e7, evict_bytes_per_s=1e7)
    machine = replace(machine, num_chunks=smallest_num_chunks(trace, machine) + 1)
    whole = least_wait_ns(trace, machine, frozenset(), discards=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(least_wait, "_MOST_MOMENTS", 6)
        assert least_wait_ns(trace, machine, frozenset(), discards=False) <= whole


def _op(name: str, start: int, stop: int, duration_ns: int, *uses: tuple[int, bool, bool]) -> Op:
    own = tuple(Use(variable=v, reads=reads, writes=writes) for v, reads, writes in uses)
    return Op(name=name, start_tick=start, stop_tick=stop, duration_ns=duration_ns, uses=own)
