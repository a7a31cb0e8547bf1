"""Re-runs in the plan: what the checker accepts and refuses, what the simulator makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.colouring.scratch import ScratchColouring, colour_with_scratch
from scheduler.cost.actions import step_actions
from scheduler.cost.simulate import TimelineEntry, simulate
from scheduler.plan import (
    Born,
    Dies,
    Discarded,
    Dropped,
    Evicted,
    Loaded,
    Machine,
    Plan,
    Recomputed,
    Residency,
    Scratch,
    occupied_ticks,
)
from scheduler.reruns import ReplayGraph, reruns_of
from scheduler.residency_builder import ordered, with_last_copies
from scheduler.trace import Op, Trace, TraceError, Use, Variable
from scheduler.verify import IllegalPlan, verify

MACHINE = Machine(chunk_nbytes=100, num_chunks=5, load_bytes_per_s=1e9, evict_bytes_per_s=1e9, latency_ns=10)


def op(index: int, *uses: Use, replayable: bool = True) -> Op:
    return Op(
        name=f"op{index}",
        start_tick=10 * index,
        stop_tick=10 * index + 9,
        duration_ns=100 + index,
        uses=uses,
        replayable=replayable,
    )


def reads(variable: int) -> Use:
    return Use(variable=variable, reads=True, writes=False)


def changes(variable: int) -> Use:
    return Use(variable=variable, reads=True, writes=True)


def makes(variable: int) -> Use:
    return Use(variable=variable, reads=False, writes=True)


# x (from outside) -> op 0 makes a (with a temporary t) -> op 1 makes b from a, a dies -> op 2 changes b -> op 3
# needs nothing -> op 4 reads b.
X, A, T, B = range(4)
VARIABLES = (
    Variable(nbytes=100, birth_tick=None, death_tick=None, label="x"),
    Variable(nbytes=100, birth_tick=2, death_tick=19, label="a"),
    Variable(nbytes=100, birth_tick=1, death_tick=5, label="t"),
    Variable(nbytes=100, birth_tick=11, death_tick=49, label="b"),
)


def chain(variables: tuple[Variable, ...] = VARIABLES, **changed: Op) -> Trace:
    ops = {
        "op0": op(0, reads(X), makes(A), makes(T)),
        "op1": op(1, reads(A), makes(B)),
        "op2": op(2, changes(B)),
        "op3": op(3),
        "op4": op(4, reads(B)),
    }
    return Trace(ops=tuple((ops | changed).values()), variables=variables, num_ticks=50, cyclic=False)


def plan_of(trace: Trace, *residencies: Residency, scratch: tuple[Scratch, ...] = ()) -> Plan:
    return Plan(
        trace_fingerprint=trace.fingerprint(),
        policy="by hand",
        machine=MACHINE,
        residencies=ordered(residencies, trace),
        scratch=scratch,
    )


def stay(variable: int, start: object, stop: object, chunk: int) -> Residency:
    return Residency(variable=variable, start=start, stop=stop, chunks=((chunk, 1),))  # type: ignore[arg-type]


STAYS = (
    stay(X, Loaded(0), Dropped(after_op=4), 0),
    stay(T, Born(), Dies(), 1),
    stay(A, Born(), Dies(), 2),
    stay(B, Born(), Discarded(after_op=2), 3),
    stay(B, Recomputed(4, (0, 1, 2)), Dies(), 3),
)
ROOM = Scratch(before_op=4, chunks=((1, 2),))


def test_a_chain_is_run_again_with_its_in_place_op() -> None:
    trace = chain()
    plan = plan_of(trace, *STAYS, scratch=(ROOM,))
    verify(plan, trace)
    assert plan.recomputes


def test_the_simulator_charges_time_and_room() -> None:
    trace = chain()
    result = simulate(plan_of(trace, *STAYS, scratch=(ROOM,)), trace)
    assert result.recompute_ns == 100 + 101 + 102
    assert result.discarded_nbytes == 100
    assert result.stall_ns == 110  # op 0 waits for x
    assert result.duration_ns == trace.duration_ns + 110 + result.recompute_ns
    assert result.op_start_ns[4] == result.duration_ns - 104
    assert TimelineEntry(kind="recompute", index=4, start_ns=516, stop_ns=819) in result.timeline
    assert result.peak_nbytes == 400  # x, b and two chunks of scratch


def test_a_rerun_takes_the_ops_own_times_and_what_goes_with_each() -> None:
    """Not what the program did before they ran first."""
    trace = chain(op1=replace(chain().ops[1], duration_ns=161, host_ns=60))
    plan = plan_of(trace, *STAYS, scratch=(ROOM,))
    plan = replace(plan, machine=replace(MACHINE, rerun_op_ns=7))
    assert simulate(plan, trace).recompute_ns == 100 + 101 + 102 + 3 * 7


def test_what_is_discarded_for_good_and_still_held_is_written() -> None:
    """Right after its last write. What comes back, what is freed right then, and a ghost are discarded as they were."""
    trace = chain()
    first, again = STAYS[3], stay(B, Recomputed(4, (0, 1, 2)), Discarded(after_op=4), 3)
    assert with_last_copies((first, again), trace) == (first, again)  # freed right after op 4
    only = with_last_copies((first,), trace)
    assert only == (replace(first, stop=Evicted(write_op=2, release_op=3)),)
    verify(plan_of(chain(op4=op(4)), *STAYS[:3], *only), chain(op4=op(4)))
    assert with_last_copies(STAYS, trace) == ordered(STAYS, trace)
    ghost = stay(A, Recomputed(4, (0,)), Discarded(after_op=4), 2)
    assert with_last_copies((STAYS[2], ghost), trace) == (STAYS[2], ghost)


def test_a_rerun_waits_for_its_sources_and_for_the_writes_of_its_chunks() -> None:
    trace = chain()
    late = (
        stay(X, Loaded(0), Dropped(after_op=0), 0),
        stay(X, Loaded(4), Dropped(after_op=4), 0),
        *STAYS[1:],
    )
    plan = plan_of(trace, *late, scratch=(ROOM,))
    verify(plan, trace)
    result = simulate(plan, trace)
    assert result.op_stall_ns[4] == 110
    work = step_actions(plan, trace).reruns[4]
    assert work.ops == (0, 1, 2)
    assert [plan.residencies[r].start for r in work.sources] == [Loaded(4)]
    w = Variable(nbytes=500, birth_tick=31, death_tick=None, label="w")
    busy = replace(trace, variables=(*VARIABLES, w))
    written = replace(
        plan_of(
            busy,
            *late,
            Residency(variable=4, start=Born(), stop=Evicted(write_op=3, release_op=4), chunks=((5, 5),)),
            scratch=(Scratch(before_op=4, chunks=((5, 2),)),),
        ),
        machine=replace(MACHINE, num_chunks=10),
    )
    verify(written, busy)
    assert step_actions(written, busy).reruns[4].scratch_waits_for != ()
    assert simulate(written, busy).op_stall_ns[4] == 510


def test_plans_with_reruns_survive_json_and_others_are_written_as_before() -> None:
    trace = chain()
    plan = plan_of(trace, *STAYS, scratch=(ROOM,))
    assert Plan.from_json(plan.to_json()) == plan
    assert '"schema_version":2' in plan.to_json()
    plain = plan_of(trace, *STAYS[:3], stay(B, Born(), Dies(), 3))
    assert '"schema_version":1' in plain.to_json()
    assert "scratch" not in plain.to_json()


def test_replayable_survives_json_and_is_not_part_of_the_identity() -> None:
    trace = chain()
    unmarked = replace(trace, ops=tuple(replace(o, replayable=False) for o in trace.ops))
    assert Trace.from_json(trace.to_json()) == trace
    assert Trace.from_json(unmarked.to_json()) == unmarked
    assert '"schema_version":2' in trace.to_json()
    assert '"schema_version":1' in unmarked.to_json()
    assert trace.fingerprint() == unmarked.fingerprint()
    with pytest.raises(TraceError, match="reads 1 to 2"):
        Trace.from_json(trace.to_json().replace('"schema_version":2', '"schema_version":3'))


def refused(trace: Trace, *residencies: Residency, scratch: tuple[Scratch, ...], match: str) -> None:
    with pytest.raises(IllegalPlan, match=match):
        verify(plan_of(trace, *residencies, scratch=scratch), trace)


def test_refuses_an_op_that_is_not_replayable() -> None:
    trace = chain(op1=op(1, reads(A), makes(B), replayable=False))
    refused(trace, *STAYS, scratch=(ROOM,), match="op 1 .* is not replayable")


def test_refuses_to_leave_an_in_place_op_out() -> None:
    stays = (*STAYS[:4], stay(B, Recomputed(4, (0, 1)), Dies(), 3))
    refused(chain(), *stays, scratch=(ROOM,), match=r"does not make the present state of variable 3 \(b\)")


def test_refuses_a_source_that_is_away() -> None:
    stays = (stay(X, Loaded(0), Dropped(after_op=0), 0), *STAYS[1:])
    refused(chain(), *stays, scratch=(ROOM,), match=r"reads variable 0 \(x\), which is not resident then")


def test_refuses_a_source_that_was_changed_since() -> None:
    trace = chain(op3=op(3, changes(X)))
    stays = (stay(X, Loaded(0), Evicted(write_op=3, release_op=5), 0), *STAYS[1:])
    refused(trace, *stays, scratch=(ROOM,), match=r"reads variable 0 \(x\), which was changed since")


def test_refuses_a_rerun_that_changes_what_it_did_not_make() -> None:
    trace = chain(op0=op(0, changes(X), makes(A), makes(T)))
    stays = (stay(X, Loaded(0), Evicted(write_op=0, release_op=5), 0), *STAYS[1:])
    refused(trace, *stays, scratch=(ROOM,), match=r"changes variable 0 \(x\), which it did not make")


def test_refuses_too_little_and_unneeded_scratch() -> None:
    trace = chain()
    refused(trace, *STAYS, scratch=(), match="holds 0 chunks of scratch; it needs 2")
    refused(trace, *STAYS, scratch=(Scratch(before_op=4, chunks=((0, 2),)),), match="the scratch of op 4")
    unneeded = (Scratch(before_op=3, chunks=((1, 1),)), ROOM)
    refused(trace, *STAYS, scratch=unneeded, match="scratch room before op 3, but no re-run")


def test_refuses_to_load_what_was_discarded_and_to_discard_for_good_what_lives_on() -> None:
    trace = chain()
    loaded = (*STAYS[:4], stay(B, Loaded(4), Dies(), 3))
    refused(trace, *loaded, scratch=(), match="was discarded, not written out")
    lives_on = replace(trace, variables=(*VARIABLES[:3], replace(VARIABLES[3], death_tick=None)))
    stays = (*STAYS[:4], stay(B, Recomputed(4, (0, 1, 2)), Discarded(after_op=4), 3))
    refused(lives_on, *stays, scratch=(ROOM,), match="is alive at the end of the step")


def test_refuses_to_drop_recomputed_bytes_that_the_store_lacks() -> None:
    trace = chain()
    stays = (*STAYS[:4], stay(B, Recomputed(4, (0, 1, 2)), Dropped(after_op=4), 3))
    refused(trace, *stays, scratch=(ROOM,), match="no current copy")
    written = (
        *STAYS[:3],
        stay(B, Born(), Evicted(write_op=2, release_op=3), 3),
        stay(B, Recomputed(4, (0, 1, 2)), Dropped(after_op=4), 3),
    )
    verify(plan_of(trace, *written, scratch=(ROOM,)), trace)


def test_colouring_finds_room_for_scratch_within_the_peak() -> None:
    trace = chain()
    bare = ordered((replace(r, chunks=()) for r in STAYS), trace)
    machine = replace(MACHINE, num_chunks=4)
    outcome = colour_with_scratch(bare, trace, machine)
    assert isinstance(outcome, ScratchColouring)
    plan = plan_of(trace, *outcome.colouring.residencies, scratch=outcome.scratch)
    verify(replace(plan, machine=machine), trace)
    assert not isinstance(colour_with_scratch(bare, trace, replace(machine, num_chunks=3)), ScratchColouring)


def test_the_graph_says_which_ops_bring_a_variable_back() -> None:
    trace = chain()
    graph = ReplayGraph(trace)
    assert graph.ops_for([B], 4, lambda v: v == X) == (0, 1, 2)
    assert graph.ops_for([B], 4, lambda v: v == A) == (1, 2)
    assert graph.ops_for([B], 2, lambda v: v == X) == (0, 1)  # before op 2 has changed it
    assert graph.ops_for([B], 4, lambda _: False) is None
    assert graph.ops_for([X], 4, lambda _: False) is None
    assert graph.ops_for([B], 4, lambda v: v == X, most_ops=2) is None
    (rerun,) = reruns_of(STAYS, trace, MACHINE)
    assert (rerun.ops, rerun.made, rerun.sources, rerun.num_scratch_chunks) == ((0, 1, 2), (B,), (X,), 2)


def test_a_source_that_must_be_remade_for_another_op_is_made_in_full() -> None:
    """Op 2 changes b in place and makes c; d reads b as it was after that: remade once, with both writes."""
    c = Variable(nbytes=100, birth_tick=21, death_tick=49, label="c")
    d = Variable(nbytes=100, birth_tick=31, death_tick=49, label="d")
    trace = chain(
        variables=(VARIABLES[0], replace(VARIABLES[1], death_tick=49), *VARIABLES[2:], c, d),
        op2=op(2, changes(B), makes(4)),
        op3=op(3, reads(B), makes(5)),
        op4=op(4, reads(4), reads(5)),
    )
    graph = ReplayGraph(trace)
    assert graph.ops_for([5], 4, lambda v: v == B) == (3,)
    assert graph.ops_for([4, 5], 4, lambda v: v in (A, B)) == (1, 2, 3)
    stays = (
        stay(X, Loaded(0), Dropped(after_op=0), 0),
        stay(T, Born(), Dies(), 1),
        stay(A, Born(), Dies(), 2),
        stay(B, Born(), Dies(), 3),
        stay(4, Born(), Discarded(after_op=2), 0),
        stay(5, Born(), Discarded(after_op=3), 0),
        stay(4, Recomputed(4, (1, 2)), Dies(), 0),
        stay(5, Recomputed(4, (3,)), Dies(), 1),
    )
    verify(plan_of(trace, *stays, scratch=(Scratch(before_op=4, chunks=((4, 1),)),)), trace)
    assert occupied_ticks(stays[6], trace) == (40, 49)
