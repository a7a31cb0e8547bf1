"""Going over from one plan to another in the middle of a step: played out, version by version."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.adapt import Switch, SwitchKind, plan_within, plans_for, switch
from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.cost.bounds import lower_bounds
from scheduler.plan import Discarded, Dropped, Evicted, Kept, Loaded, Machine, Plan, PlanError, Recomputed
from scheduler.planning import make_plan
from scheduler.trace import Trace
from tests.scheduler.model_traces import conv_net
from tests.scheduler.random_traces import TIMES, random_machine, random_trace, replayable

MIB = 1 << 20
POLICIES = ("auto", "capuchin", "dtr", "melon", "on_demand", "window")


@dataclass
class World:
    """What is where. A version counts the writes to a variable; a copy is current if its version is."""

    trace: Trace
    versions: dict[int, int]
    memory: set[int]
    store: dict[int, int]

    @classmethod
    def at_start(cls, plan: Plan, trace: Trace) -> World:
        """As an executor prepares it: whatever exists has a copy in the store, and what the plan keeps is in memory."""
        alive = {v: 0 for v, variable in enumerate(trace.variables) if variable.birth_tick is None}
        kept = {r.variable for r in plan.residencies if isinstance(r.start, Kept)}
        before = [
            v
            for v, variable in enumerate(trace.variables)
            if variable.birth_tick is not None and variable.birth_tick < trace.ops[0].start_tick
        ]
        born = {v for v in before if trace.lifetime(v)[1] > trace.ops[0].start_tick}
        versions = alive | dict.fromkeys(before, 1)
        return cls(trace=trace, versions=versions, memory=kept | born, store=dict(alive))

    def is_stored(self, v: int) -> bool:
        return self.store.get(v) == self.versions[v]

    def play(self, plan: Plan, first_op: int, stop_op: int) -> None:
        """Ops `[first_op, stop_op)` under `plan`, with what it does before and after each."""
        for index in range(first_op, stop_op):
            self._before(plan, index)
            op = self.trace.ops[index]
            following = self.trace.ops[index + 1].start_tick if index + 1 < len(self.trace.ops) else None
            for v, variable in enumerate(self.trace.variables):
                birth = variable.birth_tick
                if birth is not None and birth >= op.start_tick and (following is None or birth < following):
                    self.versions[v] = 1
                    self.memory.add(v)
            for use in op.uses:
                assert use.variable in self.memory, f"op {index} uses {use.variable}, which is not in memory"
                self.versions[use.variable] += use.writes
            self._after(plan, index)
            for v, variable in enumerate(self.trace.variables):
                death = variable.death_tick
                if death is not None and death >= op.start_tick and (following is None or death <= following):
                    self.memory.discard(v)

    def _before(self, plan: Plan, index: int) -> None:
        for r in plan.residencies:
            if isinstance(r.stop, Evicted) and r.stop.release_op == index:
                self.memory.discard(r.variable)
        for r in plan.residencies:
            if isinstance(r.start, Loaded) and r.start.before_op == index:
                assert self.is_stored(r.variable), f"op {index} loads {r.variable}, whose copy is not current"
                self.memory.add(r.variable)
            if isinstance(r.start, Recomputed) and r.start.before_op == index:
                self.memory.add(r.variable)

    def _after(self, plan: Plan, index: int) -> None:
        for r in plan.residencies:
            match r.stop:
                case Evicted(write_op=write_op) if write_op == index:
                    assert r.variable in self.memory
                    self.store[r.variable] = self.versions[r.variable]
                case Dropped(after_op=after_op) if after_op == index:
                    assert self.is_stored(r.variable), f"{r.variable} is dropped after op {index} without a copy"
                    self.memory.discard(r.variable)
                case Discarded(after_op=after_op) if after_op == index:
                    self.memory.discard(r.variable)

    def go_over(self, way: Switch) -> None:
        """Carry out a switch on the fly, checking that each act is possible."""
        assert way.kind is SwitchKind.ON_THE_FLY
        assert {*way.stays, *way.moves, *way.drops} <= self.memory
        for v in way.loads:
            assert self.is_stored(v)
        made: set[int] = set()
        for index in way.ops:
            op = self.trace.ops[index]
            born = {
                v for v, variable in enumerate(self.trace.variables) if self._is_born_in(variable.birth_tick, index)
            }
            for use in op.uses:
                assert use.variable in self.memory | made | born | set(way.loads)
            made |= born
        assert set(way.recomputes) <= made
        for v in way.writes:
            assert v in self.memory | made
            self.store[v] = self.versions[v]
        self.memory = {*way.stays, *way.moves, *way.loads, *way.recomputes}

    def _is_born_in(self, birth_tick: int | None, index: int) -> bool:
        op = self.trace.ops[index]
        return birth_tick is not None and op.start_tick <= birth_tick < op.stop_tick


@settings(max_examples=50 * TIMES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_after_a_switch_the_rest_of_the_step_finds_what_it_needs(seed: int) -> None:
    rng = random.Random(seed)
    trace = replayable(random_trace(seed, num_ops=rng.randint(2, 18)), share=0.9, rng=rng)
    machine = random_machine(seed, 0)
    least = smallest_num_chunks(trace, machine)
    most = sum(machine.chunks_of(v.nbytes) for v in trace.variables)
    small = rng.randint(least, most)
    try:
        old = make_plan(trace, replace(machine, num_chunks=rng.randint(small + 1, most + 2)), rng.choice(POLICIES))
        new = make_plan(trace, replace(machine, num_chunks=small), rng.choice(POLICIES))
    except PlanError:
        return
    op_index = rng.randrange(len(trace.ops))
    way = switch(old, new, trace, op_index, keeps_prefix_only=rng.random() < 0.5)
    assert way.duration_ns >= 0
    if way.kind is SwitchKind.RESTART:
        assert way.reason
        assert way.duration_ns == way.restart_ns
        return
    world = World.at_start(old, trace)
    world.play(old, 0, op_index)
    world.go_over(way)
    world.play(new, op_index, len(trace.ops))


def conv(num_blocks: int = 6) -> tuple[Trace, Machine, int]:
    trace = replayable(conv_net(num_blocks=num_blocks))
    machine = Machine(chunk_nbytes=MIB, num_chunks=1)
    return trace, machine, lower_bounds(trace, machine)["in_core_nbytes"] // MIB


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_on_a_network_the_step_goes_on_at_a_part_of_the_cost_of_starting_anew(share: float) -> None:
    trace, machine, in_core = conv()
    plans = plans_for(trace, machine, [in_core * 3 // 4, in_core * 9 // 10])
    old, new = plans[in_core * 9 // 10], plans[in_core * 3 // 4]
    way = switch(old, new, trace, int(len(trace.ops) * share))
    assert way.kind is SwitchKind.ON_THE_FLY
    assert way.duration_ns < 0.5 * way.restart_ns
    as_in_the_paper = switch(old, new, trace, way.op_index, keeps_prefix_only=True)
    assert as_in_the_paper.kind is not SwitchKind.LAZY
    assert len(as_in_the_paper.recomputes) >= len(way.recomputes)


def test_a_growing_budget_waits_for_the_next_step() -> None:
    trace, machine, in_core = conv()
    plans = plans_for(trace, machine, [in_core, in_core * 3 // 4])
    way = switch(plans[in_core * 3 // 4], plans[in_core], trace, 3)
    assert (way.kind, way.duration_ns) == (SwitchKind.LAZY, 0)


def test_plans_for_a_set_of_budgets_leave_out_what_cannot_be_and_answer_for_those_between() -> None:
    trace, machine, in_core = conv()
    plans = plans_for(trace, machine, [1, in_core, in_core * 3 // 4])
    assert sorted(plans) == [in_core * 3 // 4, in_core]
    assert plan_within(plans, in_core - 1) is plans[in_core * 3 // 4]
    assert plan_within(plans, in_core * 3 // 4 - 1) is None
    with pytest.raises(BudgetTooSmall):
        make_plan(trace, replace(machine, num_chunks=1), "melon")


def test_what_cannot_be_switched_is_refused() -> None:
    trace, machine, in_core = conv()
    plans = plans_for(trace, machine, [in_core, in_core * 3 // 4])
    old, new = plans[in_core], plans[in_core * 3 // 4]
    with pytest.raises(ValueError, match="the step has ops 0 to"):
        switch(old, new, trace, len(trace.ops))
    with pytest.raises(ValueError, match="plans of this trace"):
        switch(old, new, replayable(conv_net(num_blocks=2)), 0)
    other = replace(new, machine=replace(new.machine, chunk_nbytes=2 * MIB))
    with pytest.raises(ValueError, match="they must agree"):
        switch(old, other, trace, 0)
