"""Other names for a plan's chunks: the same plan, and as much as can be where it is now."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.cost.simulate import simulate
from scheduler.plan import BorderCopy, PlanError
from scheduler.planning import make_plan
from scheduler.renaming import is_renamed, names_that_match, renamed
from scheduler.verify import IllegalPlan, verify
from tests.scheduler.random_traces import TIMES, random_machine, random_trace, replayable


@pytest.mark.parametrize("seed", range(40 * TIMES))
def test_a_plan_under_other_names_is_legal_and_costs_the_same(seed: int) -> None:
    rng = random.Random(seed)
    trace = replayable(random_trace(seed), rng=rng) if seed % 2 else random_trace(seed)
    machine = random_machine(seed, num_chunks=rng.randint(40, 120))
    try:
        plan = make_plan(trace, machine, rng.choice(["window", "capuchin", "auto"]))
    except PlanError:
        pytest.skip("no plan fits")
    names = list(range(machine.num_chunks))
    rng.shuffle(names)
    other = renamed(plan, names)
    verify(other, trace)
    for old, new in zip(plan.residencies, other.residencies, strict=True):
        assert [names[chunk] for chunk in old.chunk_indices()] == list(new.chunk_indices())
        assert replace(new, chunks=old.chunks) == old
    assert simulate(other, trace) == simulate(plan, trace)
    back = [names.index(chunk) for chunk in range(machine.num_chunks)]
    assert renamed(other, back).residencies == renamed(plan, range(machine.num_chunks)).residencies
    assert is_renamed(plan, other) and is_renamed(other, plan)


def test_two_chunks_of_one_name_are_no_plan() -> None:
    trace = random_trace(3)
    machine = random_machine(3, num_chunks=60)
    plan = make_plan(trace, machine, "window")
    assert not is_renamed(plan, renamed(plan, [0] * machine.num_chunks))
    with pytest.raises(IllegalPlan):
        verify(renamed(plan, [0] * machine.num_chunks), trace)


def test_what_is_there_stays_and_the_rest_keeps_its_order() -> None:
    names = names_that_match([([(0, 3)], [(4, 2), (9, 1)]), ([(6, 2)], [(0, 1)])], 10)
    assert sorted(names) == list(range(10))
    assert names[:3] == [4, 5, 9] and names[6] == 0  # it is smaller now than planned
    assert [names[chunk] for chunk in (3, 4, 5, 7, 8, 9)] == [1, 2, 3, 6, 7, 8]


def test_what_is_beyond_the_plans_chunks_cannot_stay() -> None:
    assert names_that_match([([(0, 2)], [(1, 1), (7, 1)])], 4) == [1, 0, 2, 3]


def test_a_copy_at_the_border_is_of_neighbours() -> None:
    plan = make_plan(random_trace(3), random_machine(3, num_chunks=60), "window")
    copied = replace(plan, border_copies=(BorderCopy(source=0, target=4, num_chunks=4),))
    names = [0, 1, 6, 7, 2, 3, 4, 5, *range(8, 60)]
    assert renamed(copied, names).border_copies == (
        BorderCopy(source=0, target=2, num_chunks=2),
        BorderCopy(source=6, target=4, num_chunks=2),
    )
