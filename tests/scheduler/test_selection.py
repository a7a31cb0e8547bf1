"""The quick choice of gaps is that of the rule as its docstring has it; what `auto` hands on is what would be found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.budget import IntArray, pinned_chunks, pins_of, smallest_num_chunks
from scheduler.chains import chains_of
from scheduler.colouring.colouring import Shortage
from scheduler.colouring.scratch import colour_with_scratch
from scheduler.cost.actions import step_actions
from scheduler.cost.bounds import lower_bounds
from scheduler.cost.evaluate import Evaluation, best_way
from scheduler.cost.simulate import simulate
from scheduler.plan import Evicted, Kept, Loaded, Machine, Residency
from scheduler.planning import make_plan
from scheduler.policies import auto
from scheduler.selection import Selection
from scheduler.trace import Trace
from tests.scheduler.model_traces import conv_net, transformer
from tests.scheduler.random_traces import TIMES, random_machine, random_trace
from tests.thinned import thinned


def chosen_by_the_rule(
    selection: Selection, trace: Trace, limit: IntArray, *, by_length: bool, price: float
) -> list[int]:
    """Indices in order of choice: for the worst tick, the gap that relieves most for its price."""
    weight = np.full(trace.num_ticks, 1.0)
    for op in trace.ops:
        weight[op.start_tick : op.stop_tick] += op.duration_ns / (op.stop_tick - op.start_tick)
    held, found = selection.occupancy.held.copy(), []
    free = {i for i in range(len(selection.gaps)) if not selection.chosen[i]}
    while True:
        over = held - limit
        tick = int(over.argmax())
        if over[tick] <= 0:
            return found
        relief = np.concatenate([[0.0], np.cumsum(np.tile(weight * (over > 0), 2))])
        best, most = -1, -1.0
        for i in sorted(free):
            gap = selection.gaps[i]
            if any(gap.start_tick <= at < gap.stop_tick for at in (tick, tick + trace.num_ticks)):
                needed = gap.num_chunks if by_length else min(gap.num_chunks, int(over[tick]))
                share = needed / (gap.num_chunks + price)
                covered = float(relief[gap.stop_tick] - relief[gap.start_tick]) * share
                if covered > most:
                    best, most = i, covered
        found.append(best)
        free.remove(best)
        gap = selection.gaps[best]
        for at in range(gap.start_tick, gap.stop_tick):
            held[at % trace.num_ticks] -= gap.num_chunks


@pytest.mark.parametrize("price", [0.0, 1.5])
@pytest.mark.parametrize("by_length", [False, True])
def test_gaps_are_chosen_by_the_rule(by_length: bool, price: float) -> None:
    num_chosen = 0
    for seed in range(60 * TIMES):
        trace = random_trace(seed, num_ops=4 + seed % 25)
        machine = random_machine(seed, 1)
        limit = np.maximum(
            pinned_chunks(trace, machine, pins_of(trace)), smallest_num_chunks(trace, machine) + seed % 3
        )
        chains = chains_of(trace, machine, wrap=seed % 4 > 0)
        selection = Selection(trace, chains)
        before = selection.chosen.copy()
        expected = chosen_by_the_rule(selection, trace, limit, by_length=by_length, price=price)
        selection.choose(limit, by_length=by_length, price=price)
        assert sorted(expected) == np.flatnonzero(selection.chosen & ~before).tolist(), seed
        assert (selection.occupancy.held <= limit).all()
        num_chosen += len(expected)
    assert num_chosen > 60


def test_a_price_of_transfers_has_few_large_gaps_away() -> None:
    trace = transformer(layers=3)
    machine = Machine(chunk_nbytes=1 << 16, num_chunks=trace.peak_nbytes() // 2 >> 16)
    limit = np.maximum(pinned_chunks(trace, machine, pins_of(trace)), machine.num_chunks)
    away = {}
    for price in (0.0, 20.0):
        selection = Selection(trace, chains_of(trace, machine, wrap=True))
        selection.choose(limit, by_length=False, price=price)
        assert (selection.occupancy.held <= limit).all()
        away[price] = [gap.num_chunks for gap in selection.gaps_chosen]
    assert len(away[20.0]) < len(away[0.0])
    assert min(away[20.0]) > min(away[0.0])


@thinned("share,thorough", [0.2, 0.5, 0.95], [False, True])
def test_chunks_that_are_handed_on_are_those_that_would_be_found(share: float, thorough: bool) -> None:
    handed = 0
    for trace in (conv_net(num_blocks=6), transformer(layers=3)):
        machine = Machine(chunk_nbytes=1 << 20, num_chunks=1)
        bounds = lower_bounds(trace, machine)
        least = max(bounds["smallest_budget_nbytes"], int(bounds["in_core_nbytes"] * share))
        machine = replace(machine, num_chunks=least >> 20)
        evaluations: dict[tuple[Residency, ...], Evaluation] = {}
        residencies = auto.schedule(trace, machine, thorough=thorough, evaluations=evaluations)
        if residencies in evaluations:
            handed += 1
            ((proposal, found),) = evaluations.items()
            assert proposal == residencies
            coloured = colour_with_scratch(residencies, trace, machine)
            assert not isinstance(coloured, Shortage)
            assert found.coloured == best_way(coloured, trace, machine)[0]
            assert found.simulation == simulate(found.plan, trace, with_timeline=False)
    assert handed


def waits_by_walking(trace: Trace, residencies: tuple[Residency, ...]) -> list[tuple[int, ...]]:
    """For each residency the writes that it waits for, by walking through two steps chunk by chunk."""
    occupant: dict[int, int] = {}
    last_stay: dict[int, int] = {}
    found: list[tuple[int, ...]] = [()] * len(residencies)
    for _ in range(2 if trace.cyclic else 1):
        heirs = {v: variable.becomes for v, variable in enumerate(trace.variables)}
        last_stay = {heir: last_stay[v] for v, heir in heirs.items() if heir is not None and v in last_stay}
        for index, stay in enumerate(residencies):
            before = {occupant[chunk] for chunk in stay.chunk_indices() if chunk in occupant}
            if isinstance(stay.start, Loaded) and stay.variable in last_stay:
                before.add(last_stay[stay.variable])
            waits = tuple(sorted(other for other in before if isinstance(residencies[other].stop, Evicted)))
            found[index] = () if isinstance(stay.start, Kept) else waits
            occupant |= dict.fromkeys(stay.chunk_indices(), index)
            last_stay[stay.variable] = index
    return found


@pytest.mark.parametrize(("policy", "num_seeds"), [("on_demand", 40), ("auto", 12)])
def test_who_waits_for_whom(policy: str, num_seeds: int) -> None:
    num_waits = 0
    for seed in range(num_seeds * TIMES):
        trace = random_trace(seed, num_ops=4 + seed % 20)
        machine = random_machine(seed, 1)
        machine = replace(machine, num_chunks=smallest_num_chunks(trace, machine) + seed % 4)
        plan = make_plan(trace, machine, policy)
        waits = step_actions(plan, trace).waits_for
        assert list(waits) == waits_by_walking(trace, plan.residencies), seed
        num_waits += sum(map(len, waits))
    assert num_waits > num_seeds
