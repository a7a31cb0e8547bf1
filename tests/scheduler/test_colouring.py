"""Chunk assignment: exact where nothing wraps, right where something does, and mindful of remaps and runs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from scheduler.budget import smallest_num_chunks
from scheduler.colouring.colouring import Colouring, Shortage, colour
from scheduler.plan import Born, Dies, Evicted, Kept, Loaded, Machine, Plan, Residency, occupied_ticks
from scheduler.policies import POLICIES
from scheduler.residency_builder import ordered
from scheduler.trace import Op, Trace, Use, Variable
from scheduler.verify import verify
from tests.scheduler.random_traces import random_machine, random_trace


def most_held(residencies: tuple[Residency, ...], trace: Trace, machine: Machine) -> int:
    held = np.zeros(trace.num_ticks + 1, dtype=int)
    for r in residencies:
        start, stop = occupied_ticks(r, trace)
        held[start:stop] += machine.chunks_of(trace.variables[r.variable].nbytes)
    return int(held.max())


def as_plan(coloured: Colouring, trace: Trace, machine: Machine) -> Plan:
    residencies = ordered(coloured.residencies, trace)
    copies = coloured.border_copies
    fingerprint = trace.fingerprint()
    return Plan(
        trace_fingerprint=fingerprint, policy="x", machine=machine, residencies=residencies, border_copies=copies
    )


def some_schedule(seed: int, *, cyclic: bool) -> tuple[tuple[Residency, ...], Trace, Machine]:
    rng = random.Random(seed)
    trace = random_trace(seed, num_ops=15, cyclic=cyclic)
    machine = random_machine(seed, 0)
    least = smallest_num_chunks(trace, machine)
    machine = replace(machine, num_chunks=int(least * rng.choice([1, 1.2, 1.5, 2])))
    return POLICIES["on_demand"].schedule(trace, machine), trace, machine


def test_a_step_alone_needs_exactly_what_is_held_at_the_worst_tick() -> None:
    for seed in range(200):
        residencies, trace, machine = some_schedule(seed, cyclic=False)
        exact = replace(machine, num_chunks=most_held(residencies, trace, machine))
        outcome = colour(residencies, trace, exact)
        assert isinstance(outcome, Colouring)
        assert [replace(r, chunks=()) for r in outcome.residencies] == list(residencies)
        verify(as_plan(outcome, trace, exact), trace)
        if exact.num_chunks:
            one_less = replace(exact, num_chunks=exact.num_chunks - 1)
            assert isinstance(colour(residencies, trace, one_less), Shortage)


def test_circles_colour_legally_and_give_way_where_they_must() -> None:
    num_copied = 0
    for seed in range(200):
        residencies, trace, machine = some_schedule(seed, cyclic=True)
        exact = replace(machine, num_chunks=most_held(residencies, trace, machine))
        outcome = colour(residencies, trace, exact)
        if isinstance(outcome, Shortage):
            assert any(not v.evictable for v in trace.variables)
            continue
        verify(as_plan(outcome, trace, exact), trace)
        verify(as_plan(outcome.evicting(trace), trace, exact), trace)
        bare = tuple(replace(residency, chunks=()) for residency in outcome.residencies)
        assert bare == residencies or not outcome.border_copies, "copied, or evicted"
        num_copied += bool(outcome.border_copies)
    assert 0 < num_copied < 100


def test_internal_waste_is_below_one_chunk_each() -> None:
    """The window paper's equations 1 and 2: waste < chunk for each allocation, < N_max chunks in all."""
    for seed in range(50):
        residencies, trace, machine = some_schedule(seed, cyclic=False)
        outcome = colour(residencies, trace, machine)
        assert isinstance(outcome, Colouring)
        waste = np.zeros(trace.num_ticks + 1, dtype=int)
        resident = np.zeros(trace.num_ticks + 1, dtype=int)
        for r in outcome.residencies:
            own = len(r.chunk_indices()) * machine.chunk_nbytes - trace.variables[r.variable].nbytes
            assert 0 <= own < machine.chunk_nbytes
            start, stop = occupied_ticks(r, trace)
            waste[start:stop] += own
            resident[start:stop] += 1
        assert waste.max() <= resident.max() * (machine.chunk_nbytes - 1)


def roomy_links(num_chunks: int) -> Machine:
    """Chunks of one byte, and writes that take no time, so that nothing else weighs on the choice of chunks."""
    return Machine(chunk_nbytes=1, num_chunks=num_chunks, load_bytes_per_s=1e15, evict_bytes_per_s=1e15, latency_ns=0)


def op(index: int, *variables: int) -> Op:
    uses = tuple(Use(variable=v, reads=True, writes=True) for v in variables)
    return Op(name=f"op{index}", start_tick=10 * index, stop_tick=10 * index + 9, duration_ns=100, uses=uses)


def test_a_home_is_reserved_for_the_way_back() -> None:
    """Variable 0 goes away for op 1 and comes back for op 2; the newcomers take other chunks if they can."""
    variables = (
        Variable(nbytes=2, birth_tick=1, death_tick=29),  # home: chunks 0 and 1
        Variable(nbytes=2, birth_tick=11, death_tick=18),  # gone before 0 comes back
        Variable(nbytes=2, birth_tick=12, death_tick=28),  # not gone: must not sit in the home
    )
    trace = Trace(ops=(op(0, 0), op(1, 1, 2), op(2, 0, 2)), variables=variables, num_ticks=30)
    away = Evicted(write_op=0, release_op=1)
    residencies = ordered(
        [
            Residency(variable=0, start=Born(), stop=away),
            Residency(variable=0, start=Loaded(2), stop=Dies()),
            Residency(variable=1, start=Born(), stop=Dies()),
            Residency(variable=2, start=Born(), stop=Dies()),
        ],
        trace,
    )
    outcome = colour(residencies, trace, roomy_links(num_chunks=4))
    assert isinstance(outcome, Colouring)
    assert outcome.num_remapped_chunks == 0
    first, second = (r for r in outcome.residencies if r.variable == 0)
    assert first.chunks == second.chunks
    assert outcome.num_runs == 3


def test_remaps_are_counted_there_and_back() -> None:
    """A newcomer finds nothing free but variable 0's home, and is still there when 0 comes back."""
    variables = (
        Variable(nbytes=2, birth_tick=1, death_tick=29),
        Variable(nbytes=1, birth_tick=2, death_tick=18),  # beside 0, until the newcomer has come
        Variable(nbytes=1, birth_tick=11, death_tick=28),
    )
    trace = Trace(ops=(op(0, 0, 1), op(1, 2), op(2, 0, 2)), variables=variables, num_ticks=30)
    residencies = ordered(
        [
            Residency(variable=0, start=Born(), stop=Evicted(write_op=0, release_op=1)),
            Residency(variable=0, start=Loaded(2), stop=Dies()),
            Residency(variable=1, start=Born(), stop=Dies()),
            Residency(variable=2, start=Born(), stop=Dies()),
        ],
        trace,
    )
    outcome = colour(residencies, trace, roomy_links(num_chunks=3))
    assert isinstance(outcome, Colouring)
    assert outcome.num_remapped_chunks == 2
    assert colour(residencies, replace(trace, cyclic=False), roomy_links(num_chunks=3)) == replace(
        outcome, num_remapped_chunks=1
    )
    roomy = colour(residencies, trace, roomy_links(num_chunks=4))
    assert isinstance(roomy, Colouring)
    assert roomy.num_remapped_chunks == 0


def test_a_kept_variable_ends_where_it_starts() -> None:
    parameter = Variable(nbytes=2, birth_tick=None, death_tick=None, becomes=0)
    passing = Variable(nbytes=2, birth_tick=11, death_tick=18)
    trace = Trace(ops=(op(0, 0), op(1, 1), op(2, 0)), variables=(parameter, passing), num_ticks=30)
    residencies = (
        Residency(variable=0, start=Kept(), stop=Evicted(write_op=0, release_op=1)),
        Residency(variable=1, start=Born(), stop=Dies()),
        Residency(variable=0, start=Loaded(2), stop=Kept()),
    )
    outcome = colour(residencies, trace, roomy_links(num_chunks=2))
    assert isinstance(outcome, Colouring)
    assert len({r.chunks for r in outcome.residencies}) == 1
    assert outcome.num_remapped_chunks == 0


@pytest.mark.parametrize("num_chunks", [64, 65])
def test_long_runs_are_preferred(num_chunks: int) -> None:
    """Eight variables of eight chunks in 64 or 65 chunks: one mapping each, although others come and go."""
    variables = tuple(Variable(nbytes=8, birth_tick=10 * i + 1, death_tick=min(10 * i + 75, 199)) for i in range(20))
    ops = tuple(op(i, i) for i in range(20))
    trace = Trace(ops=ops, variables=variables, num_ticks=200)
    residencies = tuple(Residency(variable=i, start=Born(), stop=Dies()) for i in range(20))
    outcome = colour(residencies, trace, roomy_links(num_chunks=num_chunks))
    assert isinstance(outcome, Colouring)
    assert outcome.num_runs == 20
