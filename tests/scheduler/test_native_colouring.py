"""The colouring in C++ and the one in Python find the same chunks, shortages and exchanges."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given

from ooc.replay import native_colouring
from ooc.replay.background import BackgroundPlanner, PlanRequest
from scheduler import worker
from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.colouring import native
from scheduler.colouring.colouring import Colouring, colour
from scheduler.colouring.exchange import Holder, exchange_chunks
from scheduler.plan import Machine
from scheduler.planning import make_plan
from scheduler.policies import POLICIES
from tests.scheduler.random_traces import random_machine, random_trace
from tests.scheduler.test_exchange import NUM_TICKS, timetables
from tests.scheduler.unseen_traces import UNSEEN

SMALLER: dict[str, dict[str, int]] = {
    "dense_blocks": {"blocks": 2},
    "ragged_trees": {"trees": 2},
    "u_net": {"depth": 3},
    "experts": {"layers": 2},
}

_Found = TypeVar("_Found")


@pytest.fixture(autouse=True)
def library() -> None:
    if not native.is_used():
        pytest.skip("it cannot be compiled here")


@contextmanager
def in_python() -> Iterator[None]:
    native.use(None)
    try:
        yield
    finally:
        native.use(native_colouring.colour_natively())


def both(find: Callable[[], _Found]) -> tuple[_Found, _Found]:
    assert native.is_used()
    by_library = find()
    with in_python():
        assert not native.is_used()
        return by_library, find()


@pytest.mark.parametrize("cyclic", [False, True])
def test_the_same_chunks_and_shortages(cyclic: bool) -> None:
    num_short = num_given_up = num_others = 0
    for seed in range(40):
        trace = random_trace(seed, num_ops=15 + seed % 30, cyclic=cyclic)
        machine = random_machine(seed, 0)
        least = smallest_num_chunks(trace, machine)
        machine = replace(machine, num_chunks=int(least * random.Random(seed).choice([1, 1.2, 1.5, 2])))
        for policy in "on_demand", "window":
            try:
                own = {"window_nbytes": machine.budget_nbytes // 4} if policy == "window" else {}
                residencies = POLICIES[policy].schedule(trace, machine, **own)
            except BudgetTooSmall:
                continue
            for fewer, quick in ((0, False), (0, True), (1, False), (2, False)):
                smaller = replace(machine, num_chunks=max(machine.num_chunks - fewer, 0))
                one, other = both(lambda r=residencies, t=trace, m=smaller, q=quick: colour(r, t, m, quick=q))  # type: ignore[misc]
                assert one == other
                num_short += not isinstance(one, Colouring)
                num_given_up += isinstance(one, Colouring) and bool(one.given_up or one.border_copies)
                num_others += isinstance(one, Colouring) and one.other is not None
    assert num_short > 30
    assert num_others > 30
    assert num_given_up > 10 or not cyclic, "arcs were cut at the boundary"


@pytest.mark.parametrize("shape", UNSEEN)
def test_the_same_plans(shape: str) -> None:
    trace = UNSEEN[shape](seed=3, **SMALLER.get(shape, {}))
    machine = Machine(chunk_nbytes=1 << 20, num_chunks=1, load_bytes_per_s=2e9, evict_bytes_per_s=1e9)
    least = smallest_num_chunks(trace, machine)
    machine = replace(machine, num_chunks=max(least, int(trace.peak_nbytes() * 0.45) >> 20))
    one, other = both(lambda: make_plan(trace, machine, thorough=False, with_bounds=False))
    assert one.to_json() == other.to_json()


@given(timetables())
def test_the_same_exchanges(holders: list[Holder]) -> None:
    for cyclic in (False, True):
        one, other = both(lambda c=cyclic: exchange_chunks(holders, NUM_TICKS, cyclic=c))  # type: ignore[misc]
        assert len(one) == len(other) == len(holders)
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_nothing_to_colour() -> None:
    assert both(lambda: exchange_chunks([], NUM_TICKS, cyclic=True)) == ([], [])
    trace = random_trace(1, num_ops=5)
    machine = replace(random_machine(1, 0), num_chunks=0)
    one, other = both(lambda: colour((), trace, machine))
    assert one == other
    assert isinstance(one, Colouring)


def _request(**more: Any) -> dict[str, Any]:
    trace = random_trace(3, num_ops=20)
    machine = random_machine(3, smallest_num_chunks(trace, random_machine(3, 0)))
    body = {"trace": trace.to_json(), "machine": asdict(machine), "policy": "auto", "parameters": {"thorough": False}}
    return body | more


def test_the_worker_colours_by_the_library_that_it_is_told(tmp_path: Path) -> None:
    library = native_colouring.colour_natively()
    with in_python():
        without = worker.answer(_request())
        assert not native.is_used()
        assert worker.answer(_request(colouring=str(tmp_path / "gone.so"))) == without, "it plans without"
        assert not native.is_used()
        assert worker.answer(_request(colouring=str(library))) == without
        assert native.is_used()
    assert "plan" in without


def test_the_background_planner_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_colouring.colour_natively()
    planner = BackgroundPlanner(policy="auto", parameters={"thorough": False}, colouring=library)
    asked: list[dict[str, Any]] = []
    dumps = json.dumps

    def noted(body: Any, **options: Any) -> str:
        if "policy" in body:
            asked.append(body)
        return dumps(body, **options)

    monkeypatch.setattr("ooc.replay.background.json.dumps", noted)
    trace = random_trace(3, num_ops=20)
    machine = random_machine(3, smallest_num_chunks(trace, random_machine(3, 0)))
    try:
        assert planner.ask(PlanRequest(key="x", trace=trace, machine=machine))
        planner.wait()
        found = planner.take()
    finally:
        planner.close()
    assert found is not None
    assert [body["colouring"] for body in asked] == [str(library)]
    expected = make_plan(trace, machine, thorough=False, with_bounds=False)
    assert found[1].to_json() == expected.to_json()


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    before = native.is_used()
    with pytest.raises(OSError, match="scheduler_walk"):
        native.use(Path("libc.so.6"))
    with pytest.raises(OSError, match="gone"):
        native.use(tmp_path / "gone.so")
    assert native.is_used() == before


def test_without_a_compiler_plans_are_made_in_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    false = shutil.which("false")
    assert false is not None
    native_colouring.colour_natively.cache_clear()
    native.use(None)
    try:
        with monkeypatch.context() as patch:
            patch.setenv("OOC_CACHE_DIR", str(tmp_path))
            patch.setenv("CXX", false)
            assert native_colouring.colour_natively() is None
            assert not native.is_used()
            assert "plan" in worker.answer(_request())
    finally:
        native_colouring.colour_natively.cache_clear()
        native.use(native_colouring.colour_natively())
