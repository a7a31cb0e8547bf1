"""The `window` policy's invariants, as its specification states them, on thousands of tiny traces."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.budget import BudgetTooSmall
from scheduler.plan import Machine
from scheduler.planning import make_plan
from scheduler.policies.window import Whereabouts, WindowAct, WindowWalk
from scheduler.trace import Trace
from tests.scheduler.random_traces import random_machine, random_trace


class WatchedWalk(WindowWalk):
    """Checks I + O <= M and the window's books around every op."""

    num_backtracks = 0

    def _swap_out(self, index: int) -> None:
        self.check_sums(index)
        fixed = self.fixed[index]
        assert all(self.state.where[v] is Whereabouts.IN or v in fixed for v in self.operands[index])  # f_i runs here
        head = self.state.head
        super()._swap_out(index)
        assert self.state.head == head
        self.check_sums(index)
        for v, where in enumerate(self.state.where):
            if where is not Whereabouts.NONE:
                assert (where is Whereabouts.IN) == (self.state.count[v] > 0)

    def _swap_in(self, index: int) -> int | None:
        head = self.state.head
        missing = super()._swap_in(index)
        assert self.state.head >= head
        return missing

    def _backtrack(self, index: int, missing: int) -> int:
        before = list(self.stop)
        again = super()._backtrack(index, missing)
        assert all(new >= old for new, old in zip(self.stop, before, strict=True))
        assert sum(self.stop) > sum(before)
        assert again <= index
        self.num_backtracks += 1
        return again

    def check_sums(self, index: int) -> None:
        s = self.state
        where = {state: [v for v, w in enumerate(s.where) if w is state] for state in Whereabouts}
        assert s.num_in == sum(self.chunks[v] for v in where[Whereabouts.IN])
        assert s.num_out == sum(self.chunks[v] for v in where[Whereabouts.OUT])
        handed_over = sum(self.chunks[v] for v in self.fixed[index] if s.where[v] in (Whereabouts.IN, Whereabouts.OUT))
        assert s.num_in + s.num_out - handed_over <= self.room[index]
        assert sorted(s.fifo) == where[Whereabouts.OUT]


def sums_of_operands(trace: Trace, machine: Machine) -> list[int]:
    """B(V_i) for each op: operands, results and temporaries, whether or not alive at the same tick."""
    sums = []
    for op in trace.ops:
        own = {u.variable for u in op.uses}
        own |= {i for i, v in enumerate(trace.variables) if op.start_tick <= (v.birth_tick or -1) < op.stop_tick}
        sums.append(sum(machine.chunks_of(trace.variables[v].nbytes) for v in own))
    return sums


def check_decisions(walk: WatchedWalk) -> None:
    """No load while a write is pending; every write is waited for, cancelled, or ended by a free; once."""
    pending: set[int] = set()
    resident: set[int] = set()
    for act, variable, _ in walk.decisions:
        match act:
            case WindowAct.LOAD | WindowAct.BIRTH:
                assert variable not in pending
                assert variable not in resident
                resident.add(variable)
            case WindowAct.EVICT:
                assert variable in resident
                assert variable not in pending
                pending.add(variable)
            case WindowAct.WITHDRAW:
                pending.remove(variable)
            case WindowAct.RELEASE:
                pending.remove(variable)
                resident.remove(variable)
            case WindowAct.DEATH:
                pending.discard(variable)
                resident.remove(variable)
    assert not pending
    assert not resident


def test_invariants_and_feasibility() -> None:
    num_failed = num_backtracks = 0
    for seed in range(2500):
        rng = random.Random(seed)
        odd = seed % 3 == 0  # with allocations between ops, and variables that can never be away
        trace = random_trace(seed, num_ops=rng.randint(1, 9), between_ops=odd, not_evictable=odd)
        machine = random_machine(seed, 0)
        sums = sums_of_operands(trace, machine)
        machine = replace(machine, num_chunks=max(0, round(max(sums) * rng.choice([0.8, 1, 1, 1.2, 2]))))
        window_nbytes = rng.choice([0, rng.randint(0, 60), rng.randint(0, 400)])
        walk = WatchedWalk(trace, machine, window_nbytes)
        if not odd and max(sums) > machine.num_chunks:
            with pytest.raises(BudgetTooSmall):
                walk.run()
            num_failed += 1
            continue
        try:
            walk.run()
        except BudgetTooSmall as error:
            if not odd or error.needed_nbytes <= error.budget_nbytes:
                raise
            num_failed += 1
            continue
        state = walk.state
        assert state.num_in == state.num_out == state.window_nbytes == 0
        assert state.head == len(walk.sequence)
        check_decisions(walk)
        num_backtracks += walk.num_backtracks
    assert num_failed > 100
    assert num_backtracks > 100


class LimitedWalk(WindowWalk):
    """Checks that the window holds at most its length, or the op's own variables."""

    def _swap_out(self, index: int) -> None:
        own = sum(self.nbytes[v] for v in self.operands[index])
        assert self.state.window_nbytes <= max(self.limit_nbytes, own)
        super()._swap_out(index)


def test_the_window_never_exceeds_its_length_beyond_the_op_itself() -> None:
    for seed in range(200):
        trace = random_trace(seed, num_ops=8, between_ops=False, not_evictable=False)
        LimitedWalk(trace, Machine(chunk_nbytes=4, num_chunks=10_000), 100).run()


def test_a_longer_snapshot_distance_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def plans(every: int) -> list[str]:
        monkeypatch.setattr("scheduler.policies.window._SNAPSHOT_EVERY", every)
        found = []
        for seed in range(60):
            trace = random_trace(seed, num_ops=15, between_ops=False, not_evictable=False)
            machine = replace(random_machine(seed, 0), chunk_nbytes=4)
            machine = replace(machine, num_chunks=max(sums_of_operands(trace, machine)))
            found.append(make_plan(trace, machine, "window", window_nbytes=300).to_json())
        return found

    assert plans(1) == plans(4) == plans(1000)


def test_the_search_finds_the_best_length_it_tries() -> None:
    for seed in range(10):
        trace = random_trace(seed, num_ops=15, not_evictable=False)
        machine = Machine(chunk_nbytes=4, num_chunks=60, load_bytes_per_s=3e7, evict_bytes_per_s=3e7, latency_ns=0)
        chosen = make_plan(trace, machine, "window")
        assert chosen.parameters["window_nbytes"] >= 0
        for window_nbytes in (0, 60, 120, 240):
            other = make_plan(trace, machine, "window", window_nbytes=window_nbytes)
            assert chosen.predicted["duration_ns"] <= other.predicted["duration_ns"]
