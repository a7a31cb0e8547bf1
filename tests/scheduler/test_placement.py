"""Contiguous placement: every planner is valid, `exact` is exact, and the public instances come out as stated."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.budget import smallest_num_chunks
from scheduler.placement import (
    Buffer,
    Placement,
    PlacementError,
    PlacementFileError,
    Problem,
    chunked,
    exact,
    faults_of,
    in_chunks,
    lower_bound,
    place,
    planner_names,
    problem_from_plan,
    problem_from_trace,
    read_problem,
    require_valid,
    rounding_cost,
    search,
    write_problem,
)
from scheduler.placement.descents import Descents
from scheduler.placement.greedy import lowest_fit
from scheduler.placement.problem import placement_of
from scheduler.plan import Kept, occupied_ticks
from scheduler.planning import make_plan
from scheduler.trace import Op, Trace, Variable
from tests.scheduler.placement_instances import tiled, training_step
from tests.scheduler.random_traces import random_machine, random_trace

INSTANCES = Path(__file__).parent / "instances"
CAPACITY = 1_048_576
NEVER = 1 << 60


def problem_of(*rows: tuple[int, int, int], alignment: int = 1, capacity: int | None = None) -> Problem:
    """From rows of (start, stop, nbytes)."""
    buffers = tuple(Buffer(start=start, stop=stop, nbytes=nbytes) for start, stop, nbytes in rows)
    return Problem(buffers=buffers, alignment=alignment, capacity=capacity)


def minimalloc(name: str, capacity: int | None = None) -> Problem:
    return read_problem(INSTANCES / "minimalloc" / f"{name}.{CAPACITY}.csv", capacity=capacity)


@st.composite
def problems(draw: st.DrawFn, max_buffers: int = 24) -> Problem:
    num_times = draw(st.integers(1, 12))
    largest = draw(st.sampled_from((2, 7, 40, 10_000)))
    rows = []
    for _ in range(draw(st.integers(0, max_buffers))):
        start = draw(st.integers(0, num_times - 1))
        rows.append((start, draw(st.integers(start + 1, num_times)), draw(st.integers(1, largest))))
    return problem_of(*rows, alignment=draw(st.sampled_from((1, 1, 4, 16))))


def tight_problem(seed: int) -> Problem:
    """Tiny, and occupied to the brim at every time: the kind whose optimum may lie above the bound."""
    rng = random.Random(seed)
    capacity, num_times = rng.randint(4, 8), rng.randint(4, 9)
    room = [capacity] * num_times
    rows = []
    for _ in range(rng.randint(4, 14)):
        start = rng.randrange(num_times)
        stop = min(num_times, start + rng.choice((1, 1, 2, 2, 3, 4, 5)))
        nbytes = min(*room[start:stop], rng.choice((1, 1, 2, 2, 3, 4)), 99)
        if nbytes:
            for time in range(start, stop):
                room[time] -= nbytes
            rows.append((start, stop, nbytes))
    rows += [(time, time + 1, left) for time, left in enumerate(room) if left]
    return problem_of(*rows)


# Seeds of `tight_problem` whose optimum lies above the most bytes alive; one seed in 500 does.
ABOVE_THE_BOUND = (24, 95, 207, 631, 1689, 2043, 2966, 3655, 3929, 4286, 4381, 4619, 6111, 6184, 6628)


def brute_force_height(problem: Problem) -> int:
    """The least height, by trying every offset of every buffer."""
    sizes = problem.occupied_nbytes()
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i] * problem.buffers[i].duration)
    height = lower_bound(problem)
    while not _any_offsets_fit(problem, sizes, order, {}, height):
        height += problem.alignment
    return height


def _any_offsets_fit(
    problem: Problem, sizes: tuple[int, ...], order: list[int], occupied: dict[int, int], height: int
) -> bool:
    if not order:
        return True
    buffer, nbytes = problem.buffers[order[0]], sizes[order[0]]
    times = range(buffer.start, buffer.stop)
    for offset in range(0, height - nbytes + 1, problem.alignment):
        own = ((1 << nbytes) - 1) << offset
        if not any(occupied.get(time, 0) & own for time in times):
            after = dict(occupied) | {time: occupied.get(time, 0) | own for time in times}
            if _any_offsets_fit(problem, sizes, order[1:], after, height):
                return True
    return False


# -- every planner ---------------------------------------------------------------------------------


def run(name: str, problem: Problem) -> tuple[Problem, Placement]:
    """A planner's placement, and the problem that it solves (`chunked` rounds)."""
    if name == "chunked":
        nbytes = 8 * problem.alignment
        return in_chunks(problem, nbytes), place(problem, name, chunk_nbytes=nbytes)
    return problem, place(problem, name)


@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_every_planner_is_valid_and_never_below_the_bound(problem: Problem) -> None:
    for name in planner_names():
        solved, placement = run(name, problem)
        require_valid(solved, placement)
        assert lower_bound(solved) <= placement.bound <= placement.height
        assert placement.planner == name


def test_every_planner_on_hundreds_of_problems() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        rows = []
        for _ in range(rng.randint(0, 30)):
            start = rng.randrange(20)
            rows.append((start, start + rng.choice((1, 2, 3, 20)), int(10 ** rng.uniform(0, 4))))
        problem = problem_of(*rows, alignment=rng.choice((1, 64)))
        heights = {}
        for name in planner_names():
            solved, placement = run(name, problem)
            require_valid(solved, placement)
            heights[name] = placement.height
        assert heights["search"] <= min(heights["melon"], heights["first_fit_by_size"])
        assert heights["exact"] <= min(heights[name] for name in heights if name != "chunked")


@pytest.mark.parametrize("name", planner_names())
def test_the_same_problem_gives_the_same_placement(name: str) -> None:
    problem = minimalloc("B")
    assert run(name, problem) == run(name, problem)


def test_an_empty_problem_and_an_unknown_planner() -> None:
    for name in planner_names():
        assert place(problem_of(), name).height == 0
    with pytest.raises(ValueError, match=r"no placement planner 'worst_fit'; there are chunked, nntrainer, "):
        place(problem_of(), "worst_fit")


# -- one by one ------------------------------------------------------------------------------------


def test_nntrainer_asks_for_a_fitting_size() -> None:
    # As printed, the second buffer takes over the first one's slot, which is too small for it.
    assert place(problem_of((0, 1, 2), (1, 2, 5)), "nntrainer").offsets == (0, 2)


def test_nntrainer_does_not_let_a_slot_twice() -> None:
    # The first buffer's slot goes to the second. As printed, the third compares with the first one's last
    # use, which is past, and takes the slot too, while the second is alive in it.
    assert place(problem_of((0, 1, 5), (1, 4, 5), (2, 3, 5)), "nntrainer").offsets == (0, 0, 5)


def test_melon_puts_long_lifetimes_beneath_short_ones() -> None:
    assert place(problem_of((0, 1, 9), (0, 4, 1), (2, 4, 3)), "melon").offsets == (1, 0, 1)


def test_first_fit_by_size_puts_large_ones_first() -> None:
    assert place(problem_of((0, 4, 1), (0, 1, 9), (2, 4, 3)), "first_fit_by_size").offsets == (9, 0, 0)


def test_best_fit_takes_the_smallest_hole_that_is_large_enough() -> None:
    # holes of 5, 3 and 2 bytes are left at time 1 between three walls of 1 byte; 3 are wanted, then 6
    rows = ((0, 1, 5), (0, 9, 1), (0, 1, 3), (0, 9, 1), (0, 1, 2), (0, 9, 1), (1, 9, 3), (2, 9, 6))
    assert place(problem_of(*rows), "best_fit").offsets == (0, 5, 6, 9, 10, 12, 6, 13)


def test_chunks_reach_the_bound_in_pieces_and_cost_their_rounding() -> None:
    # after time 1 chunks 0 and 2 are free, and 2 chunks are wanted: one piece in each
    problem = problem_of((0, 1, 4), (0, 3, 3), (0, 1, 4), (1, 3, 8))
    placement = chunked(problem, chunk_nbytes=4)
    require_valid(in_chunks(problem, 4), placement)
    assert placement.runs is not None
    assert placement.runs[3] == ((0, 4), (8, 4))
    assert (placement.height, placement.bound, lower_bound(problem)) == (12, 12, 11)
    assert rounding_cost(problem, 4) == pytest.approx(1 / 11)
    with pytest.raises(ValueError, match=r"chunks of 6 bytes: must be a multiple of the alignment 4"):
        chunked(replace(problem, alignment=4), chunk_nbytes=6)


# -- exact -----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1_000_000))
def test_exact_equals_brute_force_on_tiny_problems(seed: int) -> None:
    problem = tight_problem(seed)
    placement = exact(problem)
    assert placement.height == placement.bound == brute_force_height(problem)


@pytest.mark.parametrize("seed", ABOVE_THE_BOUND)
def test_exact_proves_optima_above_the_most_bytes_alive(seed: int) -> None:
    problem = tight_problem(seed)
    least = brute_force_height(problem)
    assert least > lower_bound(problem)
    placement = exact(problem)
    assert placement.is_optimal
    assert placement.height == least
    refused = exact(replace(problem, capacity=least - 1))
    assert refused.bound > least - 1
    assert not refused.fits(least - 1)
    assert exact(replace(problem, capacity=least)).fits(least)


@settings(max_examples=100, deadline=None)
@given(seed=st.sampled_from(ABOVE_THE_BOUND) | st.integers(0, 10_000), order=st.randoms(use_true_random=False))
def test_the_tree_decides_right_whatever_is_tried_first(seed: int, order: random.Random) -> None:
    problem = tight_problem(seed)
    descents = Descents(problem)
    least = brute_force_height(problem) // descents.unit
    priority = [order.random() for _ in problem.buffers]
    assert descents.skyline.fit(least, priority=priority, max_dead_ends=NEVER) is not None
    assert descents.skyline.fit(least - 1, priority=priority, max_dead_ends=NEVER) is None


def test_exact_without_nodes_or_time_returns_what_it_has() -> None:
    problem = minimalloc("D", capacity=990_000)
    no_nodes = exact(problem, max_nodes=0)
    ticks = iter(range(NEVER))
    no_time = exact(problem, time_limit_s=3, clock=lambda: next(ticks))
    for placement in (no_nodes, no_time):
        require_valid(problem, placement)
        assert placement.bound <= 990_000 < placement.height
        assert not placement.is_optimal


# -- public instances ------------------------------------------------------------------------------


def test_the_small_example_fits_its_capacity() -> None:
    problem = read_problem(INSTANCES / "minimalloc" / "input.12.csv", capacity=12)
    placement = exact(problem)
    require_valid(problem, placement)
    assert placement.height == 12


@pytest.mark.parametrize("name", "ABCDEF")
def test_search_is_near_the_bound_on_minimalloc(name: str) -> None:
    problem = minimalloc(name)
    placement = search(problem)
    require_valid(problem, placement)
    assert placement.height <= 1.16 * lower_bound(problem)


@pytest.mark.parametrize("name", ["A", "B", "C", "D", "E", "F"])
def test_exact_solves_minimalloc_at_its_capacity(name: str) -> None:
    problem = minimalloc(name, capacity=CAPACITY)
    placement = exact(problem)
    require_valid(problem, placement)
    assert placement.fits(CAPACITY)


def test_exact_reaches_the_bound_of_c() -> None:
    placement = exact(minimalloc("C"))
    assert (placement.height, placement.is_optimal) == (1_039_360, True)


@pytest.mark.slow
def test_exact_reaches_the_bound_of_e() -> None:
    placement = exact(minimalloc("E"))
    assert (placement.height, placement.is_optimal) == (CAPACITY, True)


def test_resnet50_of_somas_is_solved_to_the_byte() -> None:
    problem = read_problem(INSTANCES / "somas" / "resnet50.csv")
    placement = search(problem)
    require_valid(problem, placement)
    assert placement.height == lower_bound(problem) == 1_515_472_556


# -- the checker, files, errors --------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(problem=problems(max_buffers=6), data=st.data())
def test_the_checker_agrees_with_painting_every_byte(problem: Problem, data: st.DataObject) -> None:
    largest = min(max(problem.occupied_nbytes(), default=1), 40)
    problem = replace(problem, buffers=tuple(replace(b, nbytes=min(b.nbytes, 40)) for b in problem.buffers))
    offsets = tuple(data.draw(st.integers(-1, 3 * largest)) for _ in problem.buffers)
    height = data.draw(st.integers(0, 4 * largest))
    painted: set[tuple[int, int]] = set()
    is_right = True
    for offset, buffer, nbytes in zip(offsets, problem.buffers, problem.occupied_nbytes(), strict=True):
        own = {(t, byte) for t in range(buffer.start, buffer.stop) for byte in range(offset, offset + nbytes)}
        is_right &= offset % problem.alignment == 0 and offset >= 0 and offset + nbytes <= height
        is_right &= not own & painted
        painted |= own
    placement = Placement(offsets=offsets, height=height, bound=0, planner="drawn")
    assert (not faults_of(problem, placement)) == is_right


def test_the_checker_looks_at_pieces() -> None:
    problem = problem_of((0, 1, 4), (0, 1, 4))
    good = Placement(offsets=(0, 2), height=8, bound=8, planner="x", runs=(((0, 2), (6, 2)), ((2, 4),)))
    assert not faults_of(problem, good)
    for runs, complaint in (
        ((((0, 2), (6, 1)), ((2, 4),)), "do not make 4 bytes"),
        ((((0, 2), (5, 2)), ((2, 4),)), "buffers 0 and 1 share"),
        ((((0, 2), (1, 2)), ((2, 4),)), "buffers 0 and 0 share"),
        ((((0, 2), (7, 2)), ((2, 4),)), "outside the height 8"),
        ((((6, 2), (0, 2)), ((2, 4),)), "first piece is not at its offset 0"),
    ):
        assert any(complaint in fault for fault in faults_of(problem, replace(good, runs=runs)))
    with pytest.raises(PlacementError, match=r"placement by 'x': the height 8 is below its own bound 9"):
        require_valid(problem, replace(good, bound=9))
    assert faults_of(problem, replace(good, offsets=(0,))) == ["1 offsets for 2 buffers"]


def test_files_round_trip(tmp_path: Path) -> None:
    problem = minimalloc("A")
    write_problem(tmp_path / "a.csv", problem)
    assert (tmp_path / "a.csv").read_text() == (INSTANCES / "minimalloc" / f"A.{CAPACITY}.csv").read_text()
    assert read_problem(tmp_path / "a.csv") == problem
    placement = place(problem, "melon")
    write_problem(tmp_path / "b.csv", problem, placement)
    first = (tmp_path / "b.csv").read_text().splitlines()[1]
    assert first == f"0,995328,1000448,656384,{placement.offsets[0]}"
    with pytest.raises(ValueError, match=r"'chunked' lies in pieces"):
        write_problem(tmp_path / "c.csv", problem, chunked(problem, chunk_nbytes=4096))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("id,lower,end,size\n0,0,1,1\n", r"no column \['upper'\]; needed are"),
        ("id,lower,upper,size\n0,0,1,1\n1,0,x,1\n", r"line 3: invalid literal"),
        ("id,lower,upper,size\n0,0,1\n", r"line 2: int\(\) argument"),
        ("id,lower,upper,size\n7,3,3,1\n", r"line 2: buffer '7': lifetime \[3, 3\) is empty"),
        ("id,lower,upper,size\n7,0,1,-5\n", r"line 2: buffer '7': nbytes must be at least 1, is -5"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(PlacementFileError, match=complaint):
        read_problem(tmp_path / "bad.csv")


def test_bad_problems_are_refused() -> None:
    with pytest.raises(ValueError, match=r"alignment must be at least 1 byte, is 0"):
        problem_of((0, 1, 1), alignment=0)
    with pytest.raises(ValueError, match=r"capacity must not be negative, is -1 bytes"):
        problem_of((0, 1, 1), capacity=-1)


# -- traces and plans ------------------------------------------------------------------------------


def require_no_shared_bytes(
    stays: list[tuple[int, int, int]], offsets: list[int], num_ticks: int, *, cyclic: bool
) -> None:
    """Paint the bytes of every stay (start, stop, nbytes) at every tick of two steps in a row."""
    painted: set[tuple[int, int]] = set()
    for step in range(2 if cyclic else 1):
        for (start, stop, nbytes), offset in zip(stays, offsets, strict=True):
            for tick in range(start + step * num_ticks, stop + step * num_ticks):
                own = {(tick, byte) for byte in range(offset, offset + nbytes)}
                assert not own & painted
                painted |= own


def test_a_trace_becomes_a_problem_that_holds_for_all_its_variables() -> None:
    for seed in range(60):
        trace = random_trace(seed)
        step = problem_from_trace(trace)
        placement = place(step.problem, "best_fit")
        require_valid(step.problem, placement)
        offsets = [placement.offsets[buffer] for buffer in step.buffer_of]
        stays = [(*trace.lifetime(i), v.nbytes) for i, v in enumerate(trace.variables)]
        require_no_shared_bytes(stays, offsets, trace.num_ticks, cyclic=trace.cyclic)
        assert lower_bound(step.problem) >= trace.peak_nbytes()
        if not step.num_widened:
            assert lower_bound(step.problem) == trace.peak_nbytes()


def test_what_is_freed_in_one_step_and_allocated_in_the_one_before_is_one_buffer() -> None:
    # A gradient: freed at tick 2, allocated anew at tick 6. Cut between, it costs nothing while it is away.
    ops = tuple(Op(name="op", start_tick=t, stop_tick=t + 1, duration_ns=1, uses=()) for t in range(10))
    variables = (
        Variable(nbytes=8, birth_tick=None, death_tick=2, label="old gradient"),
        Variable(nbytes=8, birth_tick=6, death_tick=None, becomes=0, label="gradient"),
        Variable(nbytes=8, birth_tick=3, death_tick=5, label="activation"),
    )
    step = problem_from_trace(Trace(ops=ops, variables=variables, num_ticks=10))
    assert step.buffer_of == (0, 0, 1)
    assert step.num_widened == 0
    assert [(b.stop - b.start, b.name) for b in step.problem.buffers] == [(6, "gradient"), (2, "activation")]
    assert lower_bound(step.problem) == 8


def test_a_plan_becomes_a_problem_that_holds_for_all_its_residencies() -> None:
    num_moved = 0
    for seed in range(40):
        trace = random_trace(seed)
        machine = random_machine(seed, 0)
        machine = replace(machine, num_chunks=int(1.3 * smallest_num_chunks(trace, machine)) + 1)
        plan = make_plan(trace, machine, "on_demand")
        step = problem_from_plan(plan, trace, alignment=machine.chunk_nbytes)
        placement = place(step.problem, "first_fit_by_size")
        require_valid(step.problem, placement)
        offsets = [placement.offsets[buffer] for buffer in step.buffer_of]
        stays = [(*occupied_ticks(r, trace), trace.variables[r.variable].nbytes) for r in plan.residencies]
        require_no_shared_bytes(stays, offsets, trace.num_ticks, cyclic=trace.cyclic)
        ends = {
            trace.variables[r.variable].becomes: i for i, r in enumerate(plan.residencies) if isinstance(r.stop, Kept)
        }
        for index, r in enumerate(plan.residencies):
            if isinstance(r.start, Kept):
                assert offsets[index] == offsets[ends[r.variable]]
                num_moved += index != ends[r.variable]
    assert num_moved > 10


# -- instances that nobody tuned for ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_tilings_are_full_at_every_time(seed: int) -> None:
    """The generator's promise: the least height is the rectangle's, so that a ratio says how good a planner is."""
    problem = tiled(seed, num_buffers=300)
    assert lower_bound(problem) == 1 << 20
    area = sum(b.nbytes * b.duration for b in problem.buffers)
    assert area == (1 << 20) * (max(b.stop for b in problem.buffers) - min(b.start for b in problem.buffers))


@pytest.mark.parametrize(
    "problem",
    [tiled(0, num_buffers=250), tiled(4, num_buffers=800, num_times=800, num_huge=6), training_step(3, num_layers=40)],
    ids=["tiled", "chains", "training"],
)
def test_search_is_never_worse_than_an_order_of_its_kind(problem: Problem) -> None:
    """Size-ordered first fit with ties by birth beat the search on a large model's trace; it is one of its orders."""
    sizes, buffers = problem.occupied_nbytes(), problem.buffers
    keys = (
        lambda i: (-sizes[i], buffers[i].start, i),
        lambda i: (-sizes[i], -buffers[i].duration, i),
        lambda i: (-(sizes[i].bit_length()), buffers[i].start, i),
        lambda i: (buffers[i].start, -buffers[i].duration, i),
    )
    found = search(problem, max_rounds=0)  # the orders alone
    require_valid(problem, found)
    for key in keys:
        offsets = lowest_fit(problem, sorted(range(len(sizes)), key=key))
        assert found.height <= max(offset + size for offset, size in zip(offsets, sizes, strict=True))


@pytest.mark.parametrize("seed", [2, 7])
def test_a_capacity_never_leaves_a_worse_placement_than_none(seed: int) -> None:
    """A fit under the capacity may not be found in the same time; then what is left is as good as without one."""
    problem = tiled(seed, num_buffers=220)
    plain = exact(problem, max_nodes=8_000)
    for capacity in (lower_bound(problem), lower_bound(problem) * 33 // 32):
        aimed = exact(replace(problem, capacity=capacity), max_nodes=8_000)
        require_valid(problem, aimed)
        assert aimed.height <= plain.height or aimed.fits(capacity)


def test_a_capacity_above_the_bound_keeps_what_is_found_under_the_bound() -> None:
    """It ended at 1.038 of the bound with a capacity of 1.01, and at the bound itself with none."""
    problem = tiled(2, num_buffers=260)
    bound = lower_bound(problem)
    found = exact(replace(problem, capacity=bound * 101 // 100), max_nodes=15_000)
    require_valid(problem, found)
    assert found.height == bound


def test_while_a_capacity_is_out_of_reach_the_best_height_goes_on_falling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descents under the capacity are made to fail here; the other turns lower what will be left in the end."""
    problem = minimalloc("E", capacity=CAPACITY)
    attempt, turns = Descents.attempt, iter(range(3000))

    def unlucky(self: Descents, height: int, **limits: Any) -> tuple[int, ...] | None:
        assert next(turns, None) is not None, "the capacity is tried for ever, and nothing else"
        return None if height == CAPACITY and not limits["is_short"] else attempt(self, height, **limits)

    monkeypatch.setattr(Descents, "attempt", unlucky)
    found = exact(problem, max_nodes=40_000)
    require_valid(problem, found)
    assert found.height < search(problem).height


@pytest.mark.parametrize("seed", [2, 8])
def test_buffers_that_fit_their_valley_come_first_in_a_tiling(seed: int) -> None:
    """Without that preference `search` ended 5.3 and 4.9 % above the rectangle's height; with it 1.0 and 2.4 %."""
    problem = tiled(seed, num_buffers=400)
    found = search(problem)
    require_valid(problem, found)
    assert found.height <= 1.03 * lower_bound(problem)


def test_the_tightest_gap_is_a_placement_too() -> None:
    for seed in range(20):
        problem = tiled(seed, num_buffers=60)
        order = sorted(range(len(problem.buffers)), key=lambda i: -problem.buffers[i].nbytes)
        require_valid(problem, placement_of(problem, lowest_fit(problem, order, tightest=True), planner="search"))
    # Gaps of 3 and of 1 between buffers that go on: one of 1 goes into the small gap, though the other is lower.
    problem = problem_of((0, 9, 2), (0, 3, 3), (0, 9, 2), (0, 3, 1), (0, 9, 2), (4, 9, 1))
    order = list(range(6))
    assert lowest_fit(problem, order)[5] == 2
    assert lowest_fit(problem, order, tightest=True)[5] == 7


def test_twenty_thousand_buffers() -> None:
    """One order of each kind, without overlaps at any of 40 times."""
    problem = tiled(5, num_buffers=20_000, num_times=8_000, height=1 << 26, unit=256)
    order = sorted(range(len(problem.buffers)), key=lambda i: (-problem.buffers[i].nbytes, problem.buffers[i].start))
    offsets = lowest_fit(problem, order)
    height = max(offset + b.nbytes for offset, b in zip(offsets, problem.buffers, strict=True))
    assert height <= lower_bound(problem) * 1.1
    for time in range(0, 8_000, 200):
        alive = sorted(
            (o, o + b.nbytes) for o, b in zip(offsets, problem.buffers, strict=True) if b.start <= time < b.stop
        )
        assert all(a[1] <= b[0] for a, b in pairwise(alive))
