"""Written in one step, kept over its border, released in the next: what may be, what it costs, and who asks for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from scheduler.cost.actions import step_actions
from scheduler.cost.simulate import simulate
from scheduler.plan import Born, Dies, Dropped, Evicted, Kept, Loaded, Machine, Plan, Residency, Stop
from scheduler.planning import make_plan
from scheduler.policies._border import written_over_border
from scheduler.trace import Op, Trace, Use, Variable
from scheduler.verify import IllegalPlan, verify

MS = 1_000_000
FORWARD, OTHER, BACKWARD, CROWDED, UPDATE, LAST = range(6)
"""The parameter is read by the first op and the third, written by the fifth. In the fourth there is no room for it."""

PARAMETER, CROWD = range(2)
MACHINE = Machine(chunk_nbytes=1000, num_chunks=10, load_bytes_per_s=1e6, evict_bytes_per_s=1e6, latency_ns=0)
"""A chunk takes a millisecond each way."""


def _trace(*, becomes: int | None = PARAMETER, cyclic: bool = True) -> Trace:
    def op(name: str, start: int, *uses: Use, stop: int = 0) -> Op:
        return Op(name=name, start_tick=start, stop_tick=stop or start + 1, duration_ns=10 * MS, uses=uses)

    read = Use(variable=PARAMETER, reads=True, writes=False)
    update = Use(variable=PARAMETER, reads=True, writes=True)
    crowd = Use(variable=CROWD, reads=False, writes=True)
    return Trace(
        ops=(
            op("forward", 0, read),
            op("other", 1),
            op("backward", 2, read),
            op("crowded", 3, crowd, stop=6),
            op("update", 6, update),
            op("last", 7),
        ),
        variables=(
            Variable(nbytes=4000, birth_tick=None, death_tick=None, becomes=becomes, label="parameter"),
            Variable(nbytes=8000, birth_tick=4, death_tick=5, label="crowd"),
        ),
        num_ticks=8,
        cyclic=cyclic,
    )


def _plan(trace: Trace, stop: Stop, *others: Residency) -> Plan:
    """The parameter leaves by `stop` after its second use, and comes back for its update."""
    mine, crowd = ((0, 4),), ((2, 8),)
    stays = [
        Residency(variable=PARAMETER, start=Kept(), stop=stop, chunks=mine),
        *others,
        Residency(variable=CROWD, start=Born(), stop=Dies(), chunks=crowd),
        Residency(variable=PARAMETER, start=Loaded(UPDATE), stop=Kept(), chunks=mine),
    ]
    return Plan(trace_fingerprint=trace.fingerprint(), policy="", machine=MACHINE, residencies=tuple(stays))


def _legal() -> tuple[Plan, Trace]:
    trace = _trace()
    return _plan(trace, Evicted(write_op=UPDATE - len(trace.ops), release_op=CROWDED)), trace


def _refused(plan: Plan, trace: Trace) -> str:
    with pytest.raises(IllegalPlan) as refusal:
        verify(plan, trace)
    return str(refusal.value)


def test_a_write_in_the_step_before_is_legal_and_read_back() -> None:
    plan, trace = _legal()
    verify(plan, trace)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert json.loads(text)["schema_version"] == 3, "an older ooc would take the write for one of this step"
    own = _plan(trace, Evicted(write_op=FORWARD, release_op=CROWDED))
    assert json.loads(own.to_json())["schema_version"] == 1


def test_it_may_not_be_dropped_unless_something_writes_it() -> None:
    trace = _trace()
    assert "no current copy" in _refused(_plan(trace, Dropped(after_op=BACKWARD)), trace)


@pytest.mark.parametrize(("write_op", "complaint"), [(-7, "is written after op -7"), (-4, "changes it later there")])
def test_it_is_written_after_its_last_change_in_that_step(write_op: int, complaint: str) -> None:
    trace = _trace()
    assert complaint in _refused(_plan(trace, Evicted(write_op=write_op, release_op=CROWDED)), trace)


def test_it_must_be_in_the_pool_when_it_is_written() -> None:
    trace = _trace()
    idle = replace(trace.ops[UPDATE], uses=())
    trace = replace(trace, ops=(*trace.ops[:UPDATE], idle, trace.ops[LAST]))
    refusal = _refused(_plan(trace, Evicted(write_op=CROWDED - len(trace.ops), release_op=CROWDED)), trace)
    assert "when it is not in the pool" in refusal


def test_nothing_changes_it_between_the_write_and_the_release() -> None:
    trace = _trace()
    changed = replace(trace.ops[BACKWARD], uses=(Use(variable=PARAMETER, reads=True, writes=True),))
    trace = replace(trace, ops=(*trace.ops[:BACKWARD], changed, *trace.ops[CROWDED:]))
    refusal = _refused(_plan(trace, Evicted(write_op=UPDATE - len(trace.ops), release_op=CROWDED)), trace)
    assert "changes it before it is released" in refusal


def test_only_what_is_kept_is_written_in_the_step_before() -> None:
    plan, trace = _legal()
    first, crowd, last = plan.residencies
    away = replace(last, stop=Evicted(write_op=UPDATE, release_op=len(trace.ops)))
    loaded = replace(plan, residencies=(replace(first, start=Loaded(FORWARD)), crowd, away))
    assert "does not start kept" in _refused(loaded, trace)


def test_only_the_same_storage_is_written_in_the_step_before() -> None:
    """A variable and its heir have records of their own: the write would be another variable's."""
    trace = Trace(
        ops=tuple(
            Op(name=str(i), start_tick=2 * i, stop_tick=2 * i + 2, duration_ns=MS, uses=uses)
            for i, uses in enumerate(
                [(Use(variable=1, reads=True, writes=False),), (), (Use(variable=0, reads=False, writes=True),)]
            )
        ),
        variables=(
            Variable(nbytes=1000, birth_tick=5, death_tick=None, becomes=1),
            Variable(nbytes=1000, birth_tick=None, death_tick=3),
        ),
        num_ticks=6,
        cyclic=True,
    )
    plan = Plan(
        trace_fingerprint=trace.fingerprint(),
        policy="",
        machine=MACHINE,
        residencies=(
            Residency(variable=1, start=Kept(), stop=Evicted(write_op=-1, release_op=1), chunks=((0, 1),)),
            Residency(variable=0, start=Born(), stop=Kept(), chunks=((0, 1),)),
        ),
    )
    assert "another variable there" in _refused(plan, trace)


def test_the_write_takes_the_link_in_the_step_before() -> None:
    """It is issued after the update, in time for the release; a write in this step is not, and the crowd waits."""
    plan, trace = _legal()
    actions = step_actions(plan, trace)
    assert actions.writes[UPDATE] == (0,) and not any(actions.writes[:UPDATE])
    early = simulate(plan, trace)
    assert early.stall_ns == 4 * MS, "the load for the update alone"
    assert early.evicted_nbytes == early.loaded_nbytes == 4000
    late = simulate(_plan(trace, Evicted(write_op=BACKWARD, release_op=CROWDED)), trace)
    assert late.stall_ns == 8 * MS


def test_whoever_takes_the_chunks_waits_for_a_write_that_is_still_on_its_way() -> None:
    plan, trace = _legal()
    slow = replace(MACHINE, evict_bytes_per_s=1e5)  # 40 ms: 10 in the step before, 30 in this one
    result = simulate(replace(plan, machine=slow), trace)
    assert result.op_stall_ns[CROWDED] == 0 and result.op_stall_ns[UPDATE] == 4 * MS
    slower = replace(MACHINE, evict_bytes_per_s=8e4)
    assert simulate(replace(plan, machine=slower), trace).op_stall_ns[CROWDED] == 10 * MS


def test_what_is_evicted_at_the_end_and_loaded_at_the_start_is_kept_if_there_is_room() -> None:
    trace = _trace()
    crowd = Residency(variable=CROWD, start=Born(), stop=Dies())
    first = Residency(variable=PARAMETER, start=Loaded(FORWARD), stop=Dropped(after_op=BACKWARD))
    last = Residency(variable=PARAMETER, start=Loaded(UPDATE), stop=Evicted(write_op=UPDATE, release_op=6))
    found = written_over_border([first, crowd, last], trace, MACHINE)
    write = Evicted(write_op=UPDATE - 6, release_op=CROWDED)
    assert found == (replace(first, start=Kept(), stop=write), crowd, replace(last, stop=Kept()))
    short = replace(last, stop=Evicted(write_op=UPDATE, release_op=LAST))
    assert written_over_border([first, crowd, short], trace, replace(MACHINE, num_chunks=3)) is None


def test_what_is_kept_dirty_is_written_in_the_step_before() -> None:
    trace = _trace()
    crowd = Residency(variable=CROWD, start=Born(), stop=Dies())
    first = Residency(variable=PARAMETER, start=Kept(), stop=Evicted(write_op=FORWARD, release_op=CROWDED))
    last = Residency(variable=PARAMETER, start=Loaded(UPDATE), stop=Kept())
    found = written_over_border([first, crowd, last], trace, MACHINE)
    assert found == (replace(first, stop=replace(first.stop, write_op=UPDATE - 6)), crowd, last)
    assert written_over_border(found, trace, MACHINE) is None, "it is written so already"


def test_auto_writes_over_the_border_where_that_saves_a_wait() -> None:
    plan = make_plan(_trace(), replace(MACHINE, evict_bytes_per_s=1e5), "auto")
    assert plan.writes_over_border
    assert plan.predicted["stall_ns"] == 4 * MS
