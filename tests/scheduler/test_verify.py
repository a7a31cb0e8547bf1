"""The checker accepts what the policies make, and catches each kind of damage to it."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.budget import smallest_num_chunks
from scheduler.plan import Born, Dies, Dropped, Evicted, Kept, Loaded, Machine, Plan, Residency, occupied_ticks
from scheduler.planning import make_plan
from scheduler.trace import Op, Trace, Use, Variable
from scheduler.verify import IllegalPlan, verify
from tests.scheduler.random_traces import random_machine, random_trace

Mutation = Callable[[Plan, Trace, random.Random], Plan | None]


def use_ops(residency: Residency, trace: Trace, *, writes: bool = False) -> list[int]:
    """Ops that use (or write) the variable during the residency."""
    start, stop = occupied_ticks(residency, trace)
    return [
        index
        for index, op in enumerate(trace.ops)
        if op.stop_tick > start
        and op.start_tick < stop
        and any(u.variable == residency.variable and (u.writes or not writes) for u in op.uses)
    ]


def exchange(plan: Plan, old: Residency, *new: Residency) -> Plan:
    rest = [r for r in plan.residencies if r is not old]
    return replace(plan, residencies=(*rest, *new))


def pick(plan: Plan, rng: random.Random, wanted: Callable[[Residency], bool]) -> Residency | None:
    found = [r for r in plan.residencies if wanted(r)]
    return rng.choice(found) if found else None


def load_after_the_use(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda r: isinstance(r.start, Loaded) and len(use_ops(r, trace)) > 0)
    if r is None or use_ops(r, trace)[0] + 1 >= len(trace.ops):
        return None
    return exchange(plan, r, replace(r, start=Loaded(use_ops(r, trace)[0] + 1)))


def release_before_the_use(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda r: isinstance(r.stop, Evicted) and max(use_ops(r, trace), default=0) > 0)
    if r is None:
        return None
    last = use_ops(r, trace)[-1]
    return exchange(plan, r, replace(r, stop=Evicted(write_op=last - 1, release_op=last)))


def drop_dirty(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    def is_dirty(r: Residency) -> bool:
        return isinstance(r.stop, Evicted) and (isinstance(r.start, Born) or bool(use_ops(r, trace, writes=True)))

    r = pick(plan, rng, is_dirty)
    if r is None or not isinstance(r.stop, Evicted):
        return None
    return exchange(plan, r, replace(r, stop=Dropped(after_op=r.stop.release_op - 1)))


def write_before_the_change(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda r: isinstance(r.stop, Evicted) and max(use_ops(r, trace, writes=True), default=0) > 0)
    if r is None or not isinstance(r.stop, Evicted):
        return None
    return exchange(
        plan, r, replace(r, stop=replace(r.stop, write_op=rng.randrange(use_ops(r, trace, writes=True)[-1])))
    )


def share_a_chunk(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    pairs = [
        (a, b)
        for a in plan.residencies
        for b in plan.residencies
        if a is not b
        and occupied_ticks(a, trace)[0] < occupied_ticks(b, trace)[1]
        and occupied_ticks(b, trace)[0] < occupied_ticks(a, trace)[1]
        and not isinstance(a.start, Kept)
        and not isinstance(a.stop, Kept)
    ]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    mine = [rng.choice(b.chunk_indices()), *a.chunk_indices()[1:]]
    return exchange(plan, a, replace(a, chunks=tuple((chunk, 1) for chunk in mine)))


def forget_a_residency(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda r: isinstance(r.start, Born) or len(use_ops(r, trace)) > 0)
    return None if r is None else exchange(plan, r)


def repeat_a_residency(plan: Plan, _trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda _: True)
    return None if r is None else replace(plan, residencies=(*plan.residencies, r))


def keep_elsewhere(plan: Plan, _trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(
        plan,
        rng,
        lambda r: isinstance(r.start, Kept) and not isinstance(r.stop, Kept) and len(r.chunk_indices()) > 1,
    )
    if r is None:
        return None
    return exchange(plan, r, replace(r, chunks=tuple((chunk, 1) for chunk in reversed(r.chunk_indices()))))


def evict_what_the_heir_keeps(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda r: isinstance(r.stop, Kept))
    if r is None:
        return None
    stop = Evicted(write_op=len(trace.ops) - 1, release_op=len(trace.ops))
    return exchange(plan, r, replace(r, stop=stop))


def load_the_unborn(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda r: isinstance(r.start, Born))
    return None if r is None else exchange(plan, r, replace(r, start=Loaded(rng.randrange(len(trace.ops)))))


def hold_too_few_chunks(plan: Plan, _trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda _: True)
    if r is None:
        return None
    return exchange(plan, r, replace(r, chunks=tuple((chunk, 1) for chunk in r.chunk_indices()[1:])))


def hold_a_chunk_outside_the_pool(plan: Plan, _trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda _: True)
    if r is None:
        return None
    chunks = [rng.choice([-1, plan.machine.num_chunks]), *r.chunk_indices()[1:]]
    return exchange(plan, r, replace(r, chunks=tuple((chunk, 1) for chunk in chunks)))


def outlive_the_free(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda r: isinstance(r.stop, Dies) and occupied_ticks(r, trace)[1] < trace.num_ticks)
    if r is None:
        return None
    stop = Evicted(write_op=len(trace.ops) - 1, release_op=len(trace.ops))
    return exchange(plan, r, replace(r, stop=stop))


def die_without_a_free(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda r: trace.variables[r.variable].death_tick is None)
    return None if r is None else exchange(plan, r, replace(r, stop=Dies()))


def send_away_the_fixed(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    r = pick(plan, rng, lambda r: not trace.variables[r.variable].evictable)
    if r is None:
        return None
    start, stop = occupied_ticks(r, trace)
    inside = [i for i, op in enumerate(trace.ops) if start < op.start_tick < stop and i > 0]
    inside = [i for i in inside if trace.ops[i - 1].stop_tick > start]
    if not inside:
        return None
    op = rng.choice(inside)
    first = replace(r, stop=Evicted(write_op=op - 1, release_op=op))
    return exchange(plan, r, first, replace(r, start=Loaded(op)))


def plan_of_another_trace(plan: Plan, _trace: Trace, _rng: random.Random) -> Plan | None:
    return replace(plan, trace_fingerprint="0" * 32)


MUTATIONS: tuple[Mutation, ...] = (
    load_after_the_use,
    release_before_the_use,
    drop_dirty,
    write_before_the_change,
    share_a_chunk,
    forget_a_residency,
    repeat_a_residency,
    keep_elsewhere,
    evict_what_the_heir_keeps,
    load_the_unborn,
    hold_too_few_chunks,
    hold_a_chunk_outside_the_pool,
    outlive_the_free,
    die_without_a_free,
    send_away_the_fixed,
    plan_of_another_trace,
)


def sorted_plan(plan: Plan, trace: Trace) -> Plan:
    """The plan with its residencies in order, so that disorder is not what gets caught."""

    def key(r: Residency) -> tuple[int, int]:
        if isinstance(r.start, Born) and trace.variables[r.variable].birth_tick is None:
            return 0, r.variable
        return occupied_ticks(replace(r, stop=Evicted(write_op=0, release_op=len(trace.ops))), trace)[0], r.variable

    return replace(plan, residencies=tuple(sorted(plan.residencies, key=key)))


@functools.cache
def _planned(seed: int) -> tuple[Trace, Plan, random.Random]:
    """A random trace, a plan of it, and what is left to choose."""
    trace = random_trace(seed, num_ops=8)
    machine = random_machine(seed, 0)
    rng = random.Random(seed)
    machine = replace(machine, num_chunks=int(smallest_num_chunks(trace, machine) * rng.choice([1, 1.3, 2])))
    return trace, make_plan(trace, machine, rng.choice(["capuchin", "on_demand"])), rng


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_catches(mutation: Mutation) -> None:
    caught: Counter[str] = Counter()
    for seed in range(60):
        trace, plan, rng = _planned(seed)
        damaged = mutation(plan, trace, copy.deepcopy(rng))
        if damaged is None:
            continue
        with pytest.raises(IllegalPlan) as caught_error:
            verify(sorted_plan(damaged, trace), trace)
        assert caught_error.value.violations
        caught["illegal"] += 1
    assert caught["illegal"] >= 5


def test_wants_the_residencies_in_order() -> None:
    trace = random_trace(3, num_ops=8)
    machine = replace(random_machine(3, 0), num_chunks=10_000)
    plan = make_plan(trace, machine, "auto")
    with pytest.raises(IllegalPlan, match="not ordered"):
        verify(replace(plan, residencies=plan.residencies[::-1]), trace)


# -- rules at the step boundary, by hand -----------------------------------------------------


def op(index: int, *uses: Use) -> Op:
    return Op(name=f"op{index}", start_tick=10 * index, stop_tick=10 * index + 9, duration_ns=100, uses=uses)


def reads(variable: int) -> Use:
    return Use(variable=variable, reads=True, writes=False)


def changes(variable: int) -> Use:
    return Use(variable=variable, reads=True, writes=True)


def plan_for(trace: Trace, *residencies: Residency) -> Plan:
    machine = Machine(chunk_nbytes=1, num_chunks=8)
    return Plan(trace_fingerprint=trace.fingerprint(), policy="by hand", machine=machine, residencies=residencies)


PARAMETER = Variable(nbytes=1, birth_tick=None, death_tick=None, becomes=0)


def frozen_parameter(first_use: Use) -> tuple[Trace, Plan]:
    """Kept over the boundary, dropped after op 0, loaded before op 2."""
    trace = Trace(ops=(op(0, first_use), op(1), op(2, reads(0))), variables=(PARAMETER,), num_ticks=30)
    return trace, plan_for(
        trace,
        Residency(variable=0, start=Kept(), stop=Dropped(after_op=0), chunks=((0, 1),)),
        Residency(variable=0, start=Loaded(2), stop=Kept(), chunks=((0, 1),)),
    )


def test_clean_bytes_stay_clean_over_the_boundary() -> None:
    trace, plan = frozen_parameter(reads(0))
    verify(plan, trace)


def test_changed_bytes_are_not_clean() -> None:
    trace, plan = frozen_parameter(changes(0))
    with pytest.raises(IllegalPlan, match="no current copy"):
        verify(plan, trace)


def test_bytes_born_and_kept_are_not_clean() -> None:
    old = Variable(nbytes=1, birth_tick=None, death_tick=15)
    new = Variable(nbytes=1, birth_tick=21, death_tick=None, becomes=0)
    trace = Trace(ops=(op(0, reads(0)), op(1), op(2, changes(1))), variables=(old, new), num_ticks=30)
    plan = plan_for(
        trace,
        Residency(variable=0, start=Kept(), stop=Dropped(after_op=0), chunks=((0, 1),)),
        Residency(variable=1, start=Born(), stop=Kept(), chunks=((0, 1),)),
    )
    with pytest.raises(IllegalPlan, match="no current copy"):
        verify(plan, trace)
    verify(replace(plan, residencies=(replace(plan.residencies[0], stop=Dies()), plan.residencies[1])), trace)


def test_double_buffers_must_be_away_at_the_boundary() -> None:
    old = Variable(nbytes=1, birth_tick=None, death_tick=25)
    new = Variable(nbytes=1, birth_tick=11, death_tick=None, becomes=0)
    trace = Trace(ops=(op(0, reads(0)), op(1, changes(1)), op(2)), variables=(old, new), num_ticks=30)
    kept = plan_for(
        trace,
        Residency(variable=0, start=Kept(), stop=Dies(), chunks=((0, 1),)),
        Residency(variable=1, start=Born(), stop=Kept(), chunks=((0, 1),)),
    )
    with pytest.raises(IllegalPlan, match="double-buffered"):
        verify(kept, trace)
    away = plan_for(
        trace,
        Residency(variable=0, start=Loaded(0), stop=Dies(), chunks=((0, 1),)),
        Residency(variable=1, start=Born(), stop=Evicted(write_op=1, release_op=3), chunks=((1, 1),)),
    )
    verify(away, trace)


def test_a_step_alone_starts_and_ends_away() -> None:
    carried = Variable(nbytes=1, birth_tick=None, death_tick=None)
    trace = Trace(ops=(op(0, changes(0)),), variables=(carried,), num_ticks=10, cyclic=False)
    kept = plan_for(trace, Residency(variable=0, start=Kept(), stop=Kept(), chunks=((0, 1),)))
    with pytest.raises(IllegalPlan, match="starts away"):
        verify(kept, trace)
    away = Residency(variable=0, start=Loaded(0), stop=Evicted(write_op=0, release_op=1), chunks=((0, 1),))
    verify(plan_for(trace, away), trace)


def test_lists_every_violation() -> None:
    trace, plan = frozen_parameter(changes(0))
    worse = replace(plan, residencies=(replace(plan.residencies[0], chunks=((1, 1),)), plan.residencies[1]))
    with pytest.raises(IllegalPlan) as caught:
        verify(worse, trace)
    assert len(caught.value.violations) == 2
