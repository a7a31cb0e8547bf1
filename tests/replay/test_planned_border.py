"""What a plan's copies at the border move, and whom they wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.replay.planned_border import PlannedBorder, planned_border
from scheduler.plan import BorderCopy, Evicted, Kept, Loaded, Machine, Plan, PlanError, Residency
from scheduler.trace import Op, Trace, Use, Variable

TRACE = Trace(
    ops=tuple(
        Op(
            name=str(index),
            start_tick=index,
            stop_tick=index + 1,
            duration_ns=1,
            uses=(Use(variable=0, reads=True, writes=False),),
        )
        for index in range(4)
    ),
    variables=(Variable(nbytes=2, birth_tick=None, death_tick=None, becomes=0),),
    num_ticks=4,
)
BACK = BorderCopy(source=2, target=0, num_chunks=2)


def border(*copies: BorderCopy, is_standing: bool = False, write_op: int = 0) -> PlannedBorder | None:
    """Of a plan that starts with a variable in chunks 0 and 1, and ends with it in 2 and 3."""
    leaves = Evicted(write_op=write_op, release_op=2)
    stays = (
        Residency(variable=0, start=Kept(), stop=leaves, chunks=((0, 2),)),
        Residency(variable=0, start=Loaded(2), stop=Kept(), chunks=((2, 2),)),
    )
    machine = Machine(chunk_nbytes=1, num_chunks=6)
    plan = Plan(trace_fingerprint="", policy="", machine=machine, residencies=stays, border_copies=copies)
    variable = PlanVariable(index=0, trace=TRACE)
    if is_standing:
        variable.is_persistent, variable.is_standing = False, True
    variable.residencies = [ExecutableResidency(variable=variable, planned=stay, segments=[]) for stay in stays]
    return planned_border(plan, TRACE, [variable], variable.residencies, lambda residency: residency.is_kept_at_start)


def test_a_plan_without_copies_has_no_border() -> None:
    assert border() is None


@pytest.mark.parametrize("is_standing", [False, True])
def test_what_exists_throughout_is_moved_whether_it_is_the_same_storage_or_another_each_time(is_standing: bool) -> None:
    found = border(BACK, is_standing=is_standing)
    assert found is not None
    assert [(ends.runs, starts.runs) for ends, starts in found.moved] == [(((2, 2),), ((0, 2),))]
    assert found.num_chunks == 4


def test_the_chunks_that_a_ring_goes_by_way_of_are_the_plan_s() -> None:
    ring = (BorderCopy(source=3, target=5, num_chunks=1), BorderCopy(source=5, target=1, num_chunks=1))
    found = border(*ring, replace(BACK, num_chunks=1))
    assert found is not None and found.num_chunks == 6


def test_a_write_over_the_border_is_waited_for_where_its_variable_lay() -> None:
    found = border(BACK, write_op=-1)
    assert found is not None and found.waits == (), "it is written out of chunks 2 and 3, which nothing fills"
    found = border(BACK)
    assert found is not None and len(found.waits) == 1, "the write of this step, out of chunks 0 and 1"


def test_copies_of_what_nobody_has_are_refused() -> None:
    with pytest.raises(PlanError, match="no variable"):
        border(BorderCopy(source=4, target=0, num_chunks=1))
