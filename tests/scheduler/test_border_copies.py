"""Copies within memory at the step's border: their order, what may be planned, what it costs, and when it is chosen."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from scheduler.colouring.border_copies import border_copies
from scheduler.colouring.colouring import Colouring, colour
from scheduler.cost.actions import step_actions
from scheduler.cost.evaluate import Evaluation, evaluate
from scheduler.cost.simulate import simulate
from scheduler.plan import BorderCopy, Born, Dies, Evicted, Kept, Loaded, Machine, Plan, PlanError, Residency
from scheduler.trace import Op, Trace, Use, Variable
from scheduler.verify import IllegalPlan, verify
from tests.scheduler.test_colouring import most_held, some_schedule

MS = 1_000_000
FIRST, CROWDED, UPDATE, LAST = range(4)
PARAMETER, CROWD, LATE = range(3)
MACHINE = Machine(
    chunk_nbytes=1000,
    num_chunks=10,
    load_bytes_per_s=1e6,
    evict_bytes_per_s=1e6,
    latency_ns=0,
    remap_ns=0,
    copy_bytes_per_s=4e6,
)
"""A chunk takes a millisecond each way, and a fourth of one within memory."""


def _trace(*, evictable: bool = True, cyclic: bool = True) -> Trace:
    """A parameter is away in the second op. At its end something is born that lasts into the update."""

    def op(name: str, start: int, stop: int, *uses: Use) -> Op:
        return Op(name=name, start_tick=start, stop_tick=stop, duration_ns=10 * MS, uses=uses)

    parameter = Use(variable=PARAMETER, reads=True, writes=False)
    update = Use(variable=PARAMETER, reads=True, writes=True)
    heir = PARAMETER if cyclic else None
    born = tuple(Use(variable=v, reads=False, writes=True) for v in (CROWD, LATE))
    return Trace(
        ops=(op("first", 0, 2, parameter), op("crowded", 2, 7, *born), op("update", 7, 9, update), op("last", 10, 11)),
        variables=(
            Variable(nbytes=4000, birth_tick=None, death_tick=None, becomes=heir, evictable=evictable),
            Variable(nbytes=6000, birth_tick=3, death_tick=6),
            Variable(nbytes=4000, birth_tick=5, death_tick=9),
        ),
        num_ticks=12,
        cyclic=cyclic,
    )


def _plan(*copies: BorderCopy, ends: tuple[tuple[int, int], ...] = ((4, 4),), write_op: int = FIRST) -> Plan:
    """The parameter comes back to chunks 4 to 7, while another has 0 to 3; the step starts with it in these."""
    trace = _trace()
    stays = (
        Residency(
            variable=PARAMETER, start=Kept(), stop=Evicted(write_op=write_op, release_op=CROWDED), chunks=((0, 4),)
        ),
        Residency(variable=CROWD, start=Born(), stop=Dies(), chunks=((4, 6),)),
        Residency(variable=LATE, start=Born(), stop=Dies(), chunks=((0, 4),)),
        Residency(variable=PARAMETER, start=Loaded(UPDATE), stop=Kept(), chunks=ends),
    )
    return Plan(
        trace_fingerprint=trace.fingerprint(), policy="", machine=MACHINE, residencies=stays, border_copies=copies
    )


BACK = BorderCopy(source=4, target=0, num_chunks=4)


def _refused(plan: Plan, trace: Trace | None = None) -> str:
    with pytest.raises(IllegalPlan) as refusal:
        verify(plan, trace or _trace())
    return str(refusal.value)


def test_a_copy_that_brings_all_back_is_legal_and_read_back() -> None:
    plan = _plan(BACK)
    verify(plan, _trace())
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert json.loads(text)["schema_version"] == 4, "an older ooc would leave the bytes where they are"
    assert json.loads(text)["machine"]["copy_bytes_per_s"] == 4e6


def test_plans_without_copies_are_written_as_before() -> None:
    plan = replace(_plan(ends=((0, 4),)), machine=Machine(chunk_nbytes=1000, num_chunks=10))
    document = json.loads(plan.to_json())
    assert document["schema_version"] == 1
    assert "border_copies" not in document and "copy_bytes_per_s" not in document["machine"]
    assert Plan.from_json(plan.to_json()) == plan


def test_a_later_schema_version_is_refused() -> None:
    text = _plan(BACK).to_json().replace('"schema_version":4', '"schema_version":5')
    with pytest.raises(PlanError, match="reads 1 to 4"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("copies", "why"),
    [
        ((), "no copies bring them there"),
        ((BorderCopy(source=4, target=0, num_chunks=3),), "no copies bring them there"),
        ((BorderCopy(source=4, target=0, num_chunks=2), BorderCopy(source=6, target=3, num_chunks=1)), "no copies"),
        ((BorderCopy(source=4, target=3, num_chunks=4),), "overlaps itself"),
        ((BorderCopy(source=4, target=0, num_chunks=0),), "is of none"),
        ((BorderCopy(source=4, target=8, num_chunks=4),), "leaves the pool"),
        ((BorderCopy(source=8, target=0, num_chunks=1), BACK), "in which nothing is kept"),
        ((BACK, BACK), "overwrites chunk 0"),
        ((BorderCopy(source=4, target=6, num_chunks=1), BACK), "overwrites chunk 6"),
        (
            (BorderCopy(source=4, target=1, num_chunks=1), BorderCopy(source=5, target=0, num_chunks=1))
            + (BorderCopy(source=6, target=2, num_chunks=2),),
            "no copies bring them there",
        ),
    ],
)
def test_copies_that_do_not_bring_all_where_it_starts_are_refused(copies: tuple[BorderCopy, ...], why: str) -> None:
    assert why in _refused(_plan(*copies))


def test_what_can_never_be_away_is_not_moved() -> None:
    trace = _trace(evictable=False)
    plan = replace(_plan(BACK), trace_fingerprint=trace.fingerprint())
    assert "must not change chunks" in _refused(plan, trace)


def test_a_step_taken_alone_has_no_border() -> None:
    trace = _trace(cyclic=False)
    plan = _plan(BACK)
    first, *others, last = plan.residencies
    first = replace(first, start=Loaded(FIRST))
    last = replace(last, stop=Evicted(write_op=UPDATE, release_op=LAST))
    plan = replace(plan, residencies=(first, *others, last), trace_fingerprint=trace.fingerprint())
    verify(replace(plan, border_copies=()), trace)
    assert "there are copies at the step's border, but the trace is not cyclic" in _refused(plan, trace)


def test_copies_keep_compute_busy_before_the_first_op() -> None:
    plan, trace = _plan(BACK), _trace()
    result = simulate(plan, trace)
    assert result.relocated_nbytes == 4000 and result.relocate_ns == 1 * MS
    assert result.op_stall_ns == (0, 4 * MS, 4 * MS, 0), "the write for what is born, the load for the update"
    assert result.stall_ns == 8 * MS and result.duration_ns == trace.duration_ns + 9 * MS
    assert [(e.start_ns, e.stop_ns) for e in result.timeline if e.kind == "relocate"] == [(0, 1 * MS)]
    assert result.loaded_nbytes == 4000, "bytes moved within memory are not loads"


def test_a_copy_waits_for_who_held_its_target_last() -> None:
    """The parameter's write of the step before is still on its way out of chunks 0 to 3: nobody else came since."""
    plan, trace = _plan(BACK), _trace()
    assert step_actions(plan, trace).border.waits_for == (), "they were another's meanwhile, who has waited"
    alone = replace(plan, residencies=tuple(r for r in plan.residencies if r.variable != LATE))
    bare = replace(
        trace,
        ops=tuple(replace(op, uses=tuple(u for u in op.uses if u.variable != LATE)) for op in trace.ops),
        variables=trace.variables[:LATE],
    )
    slow = replace(alone, machine=replace(MACHINE, evict_bytes_per_s=1e5))
    assert step_actions(slow, bare).border.waits_for == (0,)
    # The write takes 40 ms, the load 4 ms after it, and the update comes 10 after the first op: then it is long over.
    assert simulate(slow, bare).op_stall_ns == (0, 0, 34 * MS, 0)


def test_a_copy_waits_for_the_load_of_what_it_copies() -> None:
    plan, trace = _plan(BACK), _trace()
    late = replace(plan.residencies[-1], start=Loaded(LAST))
    unused = replace(trace.ops[UPDATE], uses=())
    trace = replace(trace, ops=(*trace.ops[:UPDATE], unused, trace.ops[LAST]))
    slow = replace(MACHINE, load_bytes_per_s=2e5)  # 20 ms; the last op takes 10
    plan = replace(plan, residencies=(*plan.residencies[:-1], late), machine=slow)
    plan = replace(plan, trace_fingerprint=trace.fingerprint())
    verify(plan, trace)
    assert step_actions(plan, trace).border.loads == (3,)
    result = simulate(plan, trace)
    assert result.op_stall_ns[FIRST] == 10 * MS
    assert [(e.start_ns, e.stop_ns) for e in result.timeline if e.kind == "relocate"] == [(10 * MS, 11 * MS)]
    assert next((e.start_ns, e.stop_ns) for e in result.timeline if e.kind == "stall") == (0, 10 * MS)


def test_what_is_written_over_the_border_leaves_chunks_that_wait_for_the_write() -> None:
    """It is written out of chunks 4 to 7, copied to 0 to 3, and the crowd takes 4 to 9."""
    plan, trace = _plan(BACK, write_op=UPDATE - 4), _trace()
    verify(plan, trace)
    actions = step_actions(plan, trace)
    assert actions.waits_for[1] == (0,), "the crowd waits, although the parameter itself lies elsewhere by then"
    slow = replace(plan, machine=replace(MACHINE, evict_bytes_per_s=1e5))  # 10 ms in the step before, 30 in this one
    assert simulate(slow, trace).op_stall_ns[CROWDED] == 30 * MS - 1 * MS - 10 * MS


def test_a_copy_into_chunks_that_are_written_out_of_waits() -> None:
    """The parameter moves by two chunks: two of those that it leaves are filled while they are written out."""
    plan = _plan(
        BorderCopy(source=2, target=0, num_chunks=2),
        BorderCopy(source=4, target=2, num_chunks=2),
        ends=((2, 4),),
        write_op=UPDATE - 4,
    )
    stays = tuple(r for r in plan.residencies if r.variable != LATE)
    trace = _trace()
    trace = replace(
        trace,
        ops=tuple(replace(op, uses=tuple(u for u in op.uses if u.variable != LATE)) for op in trace.ops),
        variables=trace.variables[:LATE],
    )
    plan = replace(plan, residencies=stays, trace_fingerprint=trace.fingerprint())
    verify(plan, trace)
    assert step_actions(plan, trace).border.waits_for == (0,)
    slow = replace(plan, machine=replace(MACHINE, evict_bytes_per_s=1e5))  # 40 ms, of which the last op hides 10
    assert simulate(slow, trace).op_stall_ns[FIRST] == 30 * MS


# -- their order


def _arrives(kept: list[tuple[list[int], list[int]]], num_chunks: int) -> tuple[BorderCopy, ...] | None:
    """Copies of these, checked on paper."""
    arrays = [(np.array(ends), np.array(starts)) for ends, starts in kept]
    copies = border_copies(arrays, num_chunks)
    if copies is None:
        return None
    memory: list[object] = [None] * num_chunks
    for index, (ends, _) in enumerate(kept):
        for place, chunk in enumerate(ends):
            memory[chunk] = index, place
    for copy in copies:
        target, source = slice(copy.target, copy.target + copy.num_chunks), copy.source
        assert memory[target] == [None] * copy.num_chunks, "it overwrites something"
        memory[target] = memory[source : source + copy.num_chunks]
        memory[source : source + copy.num_chunks] = [None] * copy.num_chunks
    for index, (_, starts) in enumerate(kept):
        assert [memory[chunk] for chunk in starts] == [(index, place) for place in range(len(starts))]
    return copies


def test_neighbours_go_together_and_paths_from_their_ends() -> None:
    assert _arrives([([4, 5, 6], [0, 1, 2])], 8) == (BorderCopy(source=4, target=0, num_chunks=3),)
    copies = _arrives([([4, 5], [0, 1]), ([6, 7], [4, 5])], 8)
    assert copies is not None and [c.num_chunks for c in copies] == [2, 2]
    assert _arrives([([0, 1], [0, 1])], 2) == ()


def test_a_ring_goes_by_way_of_a_free_chunk_or_not_at_all() -> None:
    copies = _arrives([([0, 1], [1, 0])], 3)
    assert copies is not None and sum(c.num_chunks for c in copies) == 3
    assert _arrives([([0, 1], [1, 0])], 2) is None
    assert _arrives([([0, 1], [1, 0]), ([2], [3])], 4) is not None, "the path leaves a free chunk behind"


def test_any_permutation_arrives() -> None:
    rng = random.Random(1)
    for _ in range(300):
        num_chunks = rng.randrange(1, 24)
        num_held = rng.randrange(num_chunks + 1)
        ends, starts = rng.sample(range(num_chunks), num_held), rng.sample(range(num_chunks), num_held)
        cut = rng.randrange(num_held + 1)
        copies = _arrives([(ends[:cut], starts[:cut]), (ends[cut:], starts[cut:])], num_chunks)
        assert (copies is not None) or num_held == num_chunks


# -- where they come from


def test_where_no_colouring_exists_what_is_kept_is_copied_where_there_is_room() -> None:
    """Of random steps in just as much memory as they hold: nothing more is moved over the store than was proposed."""
    num_copied = 0
    for seed in range(300):
        residencies, trace, machine = some_schedule(seed, cyclic=True)
        exact = replace(machine, num_chunks=most_held(residencies, trace, machine))
        outcome = colour(residencies, trace, exact)
        if isinstance(outcome, Colouring) and outcome.border_copies:
            num_copied += 1
            assert [replace(r, chunks=()) for r in outcome.residencies] == list(residencies)
            evicting = outcome.evicting(trace)
            assert not evicting.border_copies
            assert len(evicting.residencies) <= len(residencies) and evicting.residencies != outcome.residencies
    assert num_copied > 10


def test_the_faster_of_copies_and_evictions_is_chosen() -> None:
    for seed in range(300):
        residencies, trace, machine = some_schedule(seed, cyclic=True)
        exact = replace(machine, num_chunks=most_held(residencies, trace, machine))
        outcome = colour(residencies, trace, exact)
        if not isinstance(outcome, Colouring) or not outcome.border_copies:
            continue
        fast = evaluate(residencies, trace, replace(exact, copy_bytes_per_s=1e15), is_final=True)
        slow = evaluate(residencies, trace, replace(exact, copy_bytes_per_s=1.0), is_final=True)
        assert isinstance(fast, Evaluation) and isinstance(slow, Evaluation)
        assert fast.plan.border_copies and not slow.plan.border_copies
        assert fast.duration_ns <= slow.duration_ns
        return
    raise AssertionError("nothing gave way")
