"""What replayed steps tell of op times and of the store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ooc.replay.op_timings import OpTimings
from scheduler.plan import Machine
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


def noted(*op_ns: list[int]) -> list[int]:
    """The op times that are planned with after these steps."""
    timings, store = OpTimings(), Odometer()
    for each in op_ns:
        timings.note(np.array(each), store)  # type: ignore[arg-type]
    ops = tuple(Op(name="op", start_tick=i, stop_tick=i + 1, duration_ns=7, uses=()) for i in range(len(op_ns[0])))
    return [op.duration_ns for op in timings.timed(Trace(ops=ops, variables=(), num_ticks=len(ops))).ops]


def test_median_times_without_the_first_step() -> None:
    assert noted([900, 900]) == [7, 7]
    assert noted([900, 900], [10, 40]) == [10, 40]
    assert noted([900, 900], [10, 40], [20, 30]) == [10, 30]  # of two the shorter
    assert noted([900, 900], [10, 40], [20, 30], [500, 20]) == [20, 30]


def test_rates_are_those_since_the_last_plan() -> None:
    timings, before = OpTimings(), Machine(chunk_nbytes=1, num_chunks=1)
    store: Any = Odometer()
    timings.note(np.array([1]), store)
    assert timings.machine(before, store) == before
    store.nbytes, store.busy_ns = 300, 10**9
    burst = timings.machine(before, store)
    assert (burst.load_bytes_per_s, burst.evict_bytes_per_s) == (300, 300)
    store.nbytes, store.busy_ns = 400, 2 * 10**9
    assert timings.machine(burst, store).load_bytes_per_s == 100
    assert timings.machine(burst, store) == burst  # nothing was moved meanwhile


def test_rates_grow_by_degrees() -> None:
    """A disk that lets bursts through seems ten times as fast while little is asked of it."""
    timings = OpTimings()
    before = Machine(chunk_nbytes=1, num_chunks=1, load_bytes_per_s=100.0, evict_bytes_per_s=200.0)
    store: Any = Odometer()
    timings.note(np.array([1]), store)
    store.nbytes, store.busy_ns = 1000, 10**9
    first = timings.machine(before, store)
    assert (first.load_bytes_per_s, first.evict_bytes_per_s) == (150, 300)
    store.nbytes, store.busy_ns = 1050, 2 * 10**9
    second = timings.machine(first, store)
    assert (second.load_bytes_per_s, second.evict_bytes_per_s) == (50, 50)  # slower is believed at once
