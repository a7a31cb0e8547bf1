"""The program over gaps: brute force on tiny steps, `poet` against its rivals, deadlines, and what its notes say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler.budget import smallest_num_chunks
from scheduler.chains import Away, Gap, chains_of, residencies_of
from scheduler.cost.bounds import lower_bounds
from scheduler.milp.from_trace import Power
from scheduler.milp.gaps import GapRequest, choose_gaps
from scheduler.milp.program import Status
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.policies._gaps import joules_of
from scheduler.reruns import ReplayGraph
from scheduler.selection import Selection
from scheduler.trace import Trace
from tests.scheduler.model_traces import conv_net, transformer
from tests.scheduler.random_traces import TIMES, random_machine, random_trace, replayable
from tests.scheduler.test_rerun_policies import line, machine_of

MIB = 1 << 20
WATTS = {"compute_w": 2.0, "load_w": 3.0, "evict_w": 4.0}
POWER = Power(compute_w=2.0, load_w=3.0, evict_w=4.0)
RIVALS = ("capuchin", "checkmate", "dtr", "melon", "on_demand")
seeds = st.integers(0, 2**31)


def energy_of(plan: Plan, trace: Trace) -> float:
    return joules_of(plan.residencies, trace, plan.machine, POWER)


def away_throughout(gap: Gap) -> Away:
    return Away(gap=gap, release=max(gap.earliest_release, 0), load=gap.latest_load)


def least_joules(trace: Trace, machine: Machine) -> float:
    """By trying every subset of the gaps."""
    chains = chains_of(trace, machine)
    gaps = [gap for chain in chains for gap in chain.gaps]
    best = float("inf")
    for picked in itertools.product((False, True), repeat=len(gaps)):
        if any(gap.forced and not is_away for gap, is_away in zip(gaps, picked, strict=True)):
            continue
        selection = Selection(trace, chains)
        for gap, is_away in zip(selection.gaps, picked, strict=True):
            if is_away and not gap.forced:
                selection.occupancy.add(gap.start_tick, gap.stop_tick, -gap.num_chunks)
        if int(selection.occupancy.held.max(initial=0)) > machine.num_chunks:
            continue
        aways = [away_throughout(gap) for gap, is_away in zip(gaps, picked, strict=True) if is_away]
        best = min(best, joules_of(residencies_of(chains, aways, trace), trace, machine, POWER))
    return best


@settings(max_examples=60 * TIMES, deadline=None)
@given(seed=seeds)
@example(seed=3624401)  # a gap that is away by force was counted twice
def test_without_reruns_the_program_finds_the_least_energy_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    trace = random_trace(seed, num_ops=rng.randint(2, 4), max_nbytes=20)
    machine = replace(random_machine(seed, 0), load_bytes_per_s=2e7, evict_bytes_per_s=1e7)
    machine = replace(machine, num_chunks=smallest_num_chunks(trace, machine) + rng.choice([0, 1, 4]))
    chains = chains_of(trace, machine)
    if sum(len(chain.gaps) for chain in chains) > 10:
        return
    choice = choose_gaps(trace, machine, chains, ReplayGraph(trace), GapRequest(power=POWER, relative_gap=1e-9))
    assert choice.status is Status.OPTIMAL
    assert choice.joules == pytest.approx(least_joules(trace, machine), rel=1e-6)


def machine_with(share: float, trace: Trace, *, rate: float = 2e8) -> Machine:
    machine = Machine(chunk_nbytes=MIB, num_chunks=1, load_bytes_per_s=rate, evict_bytes_per_s=rate)
    return replace(machine, num_chunks=int(lower_bounds(trace, machine)["in_core_nbytes"] * share) // MIB)


@pytest.mark.parametrize(
    ("make", "share"),
    [
        pytest.param(lambda: conv_net(num_blocks=3), 0.67, id="conv_net, two thirds"),
        pytest.param(lambda: conv_net(num_blocks=3), 0.5, id="conv_net, half", marks=pytest.mark.slow),
        pytest.param(lambda: transformer(layers=1), 0.5, id="transformer, half"),
    ],
)
def test_poet_uses_no_more_energy_than_its_rivals(make: Callable[[], Trace], share: float) -> None:
    trace = replayable(make())
    machine = machine_with(share, trace)
    poet = make_plan(trace, machine, "poet", objective="energy", **WATTS)
    (note,) = poet.notes
    assert "in seconds" not in note
    for rival in RIVALS:
        try:
            plan = make_plan(trace, machine, rival)
        except PlanError:
            continue
        assert energy_of(poet, trace) <= energy_of(plan, trace) * 1.0001, rival
    assert make_plan(trace, machine, "poet", objective="energy", **WATTS).to_json() == poet.to_json()


def test_a_deadline_is_kept_at_a_price_or_said_to_be_missed() -> None:
    """Transfers take next to no energy here and more than the ops' time, re-runs the other way round."""
    trace = line(num_forward=6, durations=[10_000_000] * 6)
    machine = machine_of(4, load_bytes_per_s=2e7, evict_bytes_per_s=2e7)
    watts = {"compute_w": 40.0, "load_w": 0.003, "evict_w": 0.004}
    power = Power(**watts)
    free = make_plan(trace, machine, "poet", objective="energy", **watts)
    assert not free.recomputes
    limit_s = (free.step_ns + trace.duration_ns) / 2e9
    timely = make_plan(trace, machine, "poet", objective="energy", deadline_s=limit_s, **watts)
    assert timely.recomputes
    assert timely.step_ns / 1e9 <= limit_s < free.step_ns / 1e9
    assert joules_of(timely.residencies, trace, machine, power) > joules_of(free.residencies, trace, machine, power)
    (note,) = make_plan(trace, machine, "poet", objective="energy", deadline_s=1e-6, **watts).notes
    assert "no schedule fits the budget and the deadline" in note
    assert "no plan was found within 0.001 ms, this one is the fastest" in note


def test_a_limit_in_seconds_that_strikes_is_said() -> None:
    trace = replayable(conv_net(num_blocks=4))
    machine = machine_with(0.5, trace)
    (note,) = make_plan(trace, machine, "poet", objective="energy", time_limit_s=1e-4, **WATTS).notes
    assert "its limit in seconds struck" in note
    assert "the plan is that of" in note
