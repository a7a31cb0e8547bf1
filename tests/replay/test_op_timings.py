"""What replayed steps tell of op times and of the store."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ooc.replay.op_timings import Between, OpTimings, Times, told_anew
from scheduler.plan import Machine, Plan
from scheduler.trace import Op, Trace


@pytest.fixture(scope="module", autouse=True)
def store_of_usual_speed() -> None:
    """What is measured is measured here."""


class Odometer:
    """A store that tells what it was told that it has done."""

    def __init__(self) -> None:
        self.nbytes = self.busy_ns = 0

    def statistics(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(nbytes=self.nbytes, busy_ns=self.busy_ns)


def of_ops(num_ops: int) -> Trace:
    """A step of so many ops of 7 ns."""
    ops = tuple(Op(name="op", start_tick=i, stop_tick=i + 1, duration_ns=7, uses=()) for i in range(num_ops))
    return Trace(ops=ops, variables=(), num_ticks=num_ops)


def clock(op_ns: list[int], host_ns: int = 0) -> tuple[Times, Times]:
    """When ops of these durations begin and end, with so much before each but the first."""
    stop_ns = np.cumsum(np.array(op_ns) + host_ns)
    return stop_ns - np.array(op_ns), stop_ns


def note(timings: OpTimings, op_ns: list[int], store: Any) -> None:
    """Note a step of these durations, one op right after another."""
    timings.note(*clock(op_ns), Between(), store)


def noted(*op_ns: list[int]) -> list[int]:
    """The op times that are planned with after these steps."""
    timings, store = OpTimings(), Odometer()
    for each in op_ns:
        note(timings, each, store)
    return [op.duration_ns for op in timings.timed(of_ops(len(op_ns[0]))).ops]


def test_median_times_without_the_first_step() -> None:
    assert noted([900, 900]) == [7, 7]
    assert noted([900, 900], [10, 40]) == [10, 40]
    assert noted([900, 900], [10, 30], [20, 40]) == [10, 30]  # of two the shorter
    assert noted([900, 900], [10, 30], [20, 40], [15, 35]) == [15, 35]


def test_ops_add_up_to_the_median_step() -> None:
    """Each is slow in another step: their medians promise 30, and no step took less than 120."""
    assert noted([9, 9, 9], [100, 10, 10], [10, 100, 10], [10, 10, 100]) == [40, 40, 40]


def test_what_lies_between_ops_comes_with_them() -> None:
    """Less what was waited for and what was run again there, which the simulator adds."""
    timings, store = OpTimings(), Odometer()
    for _ in range(2):
        between = Between()
        between.begin()
        between.note_wait(1, 30)
        start_ns, stop_ns = clock([10, 20, 30], host_ns=100)
        between.note_rerun(2, (0, 1), 90, stop_ns - start_ns)
        timings.note(start_ns, stop_ns, between, store)  # type: ignore[arg-type]
    ops = timings.timed(of_ops(3)).ops
    assert [(op.duration_ns, op.host_ns, op.own_ns) for op in ops] == [(10, 0, 10), (90, 70, 20), (40, 10, 30)]
    machine = timings.machine(Machine(chunk_nbytes=1, num_chunks=1), store)  # type: ignore[arg-type]
    assert machine.rerun_op_ns == (90 - 10 - 20) // 2


def test_a_plan_that_stays_promises_what_was_measured() -> None:
    """Not what was measured when it was made: a plan made for the ops of cold steps promised 1.4 of its step."""
    plan = Plan(trace_fingerprint="", policy="", machine=Machine(chunk_nbytes=1, num_chunks=1), residencies=())
    plan = replace(plan, predicted={"duration_ns": 900, "remap_ns": 5}, bounds={"duration_ns": 800})
    anew = told_anew(plan, of_ops(3), plan.machine)
    assert anew.step_ns == 21 + 5
    assert not anew.bounds


def rates(*seen: tuple[int, int, int]) -> list[tuple[float, float]]:
    """Load and eviction rates, from 100 and 200 on, after each: bytes each way, seconds busy, of the step."""
    timings, store = OpTimings(), Odometer()
    machine = Machine(chunk_nbytes=1, num_chunks=1, load_bytes_per_s=100.0, evict_bytes_per_s=200.0)
    note(timings, [1], store)
    found = []
    for nbytes, busy_s, step_s in seen:
        store.nbytes += nbytes
        store.busy_ns += busy_s * 10**9
        if step_s:
            note(timings, [step_s * 10**9], store)
        machine = timings.machine(machine, store)  # type: ignore[arg-type]
        found.append((machine.load_bytes_per_s, machine.evict_bytes_per_s))
    return found


def test_rates_are_those_since_the_last_plan() -> None:
    assert rates((60, 1, 1)) == [(60, 60)]  # slower is believed at once
    assert rates((60, 1, 1), (50, 1, 1)) == [(60, 60), (50, 50)]
    assert rates((60, 1, 1), (0, 0, 1)) == [(60, 60), (60, 60)]  # nothing was moved meanwhile


def test_a_burst_is_no_rate() -> None:
    """A disk that lets bursts through seems ten times as fast while little is asked of it."""
    assert rates((1000, 1, 100)) == [(100, 200)]
    assert rates((1000, 1, 0)) == [(100, 200)]  # in a step that was not timed, as for trials
    assert rates((1000, 1, 4)) == [(250, 250)]  # so much goes through, whatever the bursts
    assert rates((1000, 1, 1)) == [(1000, 1000)]
