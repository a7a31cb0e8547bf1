"""The simulator against runs worked out by hand. One byte takes one nanosecond, a transfer 10 more."""

from __future__ import annotations

from dataclasses import replace

from scheduler.cost.bounds import lower_bounds
from scheduler.cost.simulate import Simulation, TimelineEntry, simulate
from scheduler.plan import Born, Dies, Dropped, Evicted, Kept, Loaded, Machine, Plan, Residency
from scheduler.trace import Op, Trace, Use, Variable
from scheduler.verify import verify

MACHINE = Machine(chunk_nbytes=100, num_chunks=4, load_bytes_per_s=1e9, evict_bytes_per_s=1e9, latency_ns=10)


def op(index: int, *uses: Use, duration_ns: int = 100) -> Op:
    return Op(name=f"op{index}", start_tick=10 * index, stop_tick=10 * index + 9, duration_ns=duration_ns, uses=uses)


def reads(variable: int) -> Use:
    return Use(variable=variable, reads=True, writes=False)


def makes(variable: int) -> Use:
    return Use(variable=variable, reads=False, writes=True)


def run(trace: Trace, *residencies: Residency, machine: Machine = MACHINE) -> Simulation:
    plan = Plan(trace_fingerprint=trace.fingerprint(), policy="by hand", machine=machine, residencies=residencies)
    verify(plan, trace)
    result = simulate(plan, trace)
    bounds = lower_bounds(trace, machine)
    assert result.duration_ns >= bounds["duration_ns"]
    assert result.loaded_nbytes >= bounds["loaded_nbytes"]
    assert result.evicted_nbytes >= bounds["evicted_nbytes"]
    return result


def test_an_op_waits_for_its_load() -> None:
    carried = Variable(nbytes=100, birth_tick=None, death_tick=None)
    trace = Trace(ops=(op(0), op(1, reads(0))), variables=(carried,), num_ticks=20, cyclic=False)
    result = run(trace, Residency(variable=0, start=Loaded(0), stop=Dropped(after_op=1), chunks=((0, 1),)))
    assert result.op_stall_ns == (0, 10)  # loaded at 110
    assert result.op_start_ns == (0, 110)
    assert (result.duration_ns, result.stall_ns) == (210, 10)
    assert (result.loaded_nbytes, result.evicted_nbytes, result.dropped_nbytes) == (100, 0, 100)
    assert result.peak_nbytes == 100
    assert result.timeline == (
        TimelineEntry(kind="op", index=0, start_ns=0, stop_ns=100),
        TimelineEntry(kind="load", index=0, start_ns=0, stop_ns=110),
        TimelineEntry(kind="stall", index=1, start_ns=100, stop_ns=110),
        TimelineEntry(kind="op", index=1, start_ns=110, stop_ns=210),
    )


def test_what_comes_before_an_op_keeps_no_link_waiting() -> None:
    """The load is issued once the host has come to its op; the host's time before the next op is time for it."""
    carried = Variable(nbytes=100, birth_tick=None, death_tick=None)
    ops = tuple(replace(each, duration_ns=130, host_ns=30) for each in (op(0), op(1, reads(0))))
    trace = Trace(ops=ops, variables=(carried,), num_ticks=20, cyclic=False)
    assert Trace.from_json(trace.to_json()) == trace
    result = run(trace, Residency(variable=0, start=Loaded(0), stop=Dropped(after_op=1), chunks=((0, 1),)))
    assert result.op_start_ns == (30, 160)  # the load: from 30 to 140
    assert result.op_stall_ns == (0, 0)
    assert (result.duration_ns, result.stall_ns) == (260, 0)
    assert [(e.start_ns, e.stop_ns) for e in result.timeline if e.kind == "op"] == [(30, 130), (160, 260)]


def away_and_back() -> Trace:
    """Variable 0 is made by op 0 and read by op 3; variable 1 is made by op 1 and gone with it."""
    variables = (
        Variable(nbytes=100, birth_tick=1, death_tick=38),
        Variable(nbytes=100, birth_tick=11, death_tick=18),
    )
    ops = (op(0, makes(0)), op(1, makes(1)), op(2), op(3, reads(0)))
    return Trace(ops=ops, variables=variables, num_ticks=40, cyclic=False)


def stays(chunk_of_the_newcomer: int) -> tuple[Residency, ...]:
    return (
        Residency(variable=0, start=Born(), stop=Evicted(write_op=0, release_op=1), chunks=((0, 1),)),
        Residency(variable=1, start=Born(), stop=Dies(), chunks=((chunk_of_the_newcomer, 1),)),
        Residency(variable=0, start=Loaded(2), stop=Dies(), chunks=((0, 1),)),
    )


def test_a_birth_waits_for_the_write_of_its_chunks() -> None:
    result = run(away_and_back(), *stays(0))
    # op 0 until 100; the write until 210; op 1 from 210 to 310; the load issued then is done at 420.
    assert result.op_start_ns == (0, 210, 310, 420)
    assert result.op_stall_ns == (0, 110, 0, 10)
    assert result.peak_nbytes == 100


def test_a_birth_elsewhere_does_not_wait() -> None:
    result = run(away_and_back(), *stays(1))
    # The write ends at 210, just after op 1; the load, issued at 200, waits for it and ends at 320.
    assert result.op_start_ns == (0, 100, 200, 320)
    assert result.op_stall_ns == (0, 0, 0, 20)


def test_a_blocked_load_is_overtaken() -> None:
    variables = (
        Variable(nbytes=100, birth_tick=1, death_tick=None),
        Variable(nbytes=100, birth_tick=None, death_tick=None),
        Variable(nbytes=100, birth_tick=None, death_tick=None),
    )
    ops = (op(0, makes(0)), op(1), op(2, reads(1)), op(3, reads(2)))
    trace = Trace(ops=ops, variables=variables, num_ticks=40, cyclic=False)
    result = run(
        trace,
        Residency(variable=0, start=Born(), stop=Evicted(write_op=0, release_op=1), chunks=((0, 1),)),
        Residency(variable=1, start=Loaded(1), stop=Dropped(after_op=2), chunks=((0, 1),)),  # waits for 0's write
        Residency(variable=2, start=Loaded(1), stop=Dropped(after_op=3), chunks=((1, 1),)),
    )
    loads = {e.index: (e.start_ns, e.stop_ns) for e in result.timeline if e.kind == "load"}
    assert loads == {2: (100, 210), 1: (210, 320)}
    assert result.op_start_ns == (0, 100, 320, 420)


def test_a_shared_rate_slows_both_links() -> None:
    variables = (
        Variable(nbytes=100, birth_tick=1, death_tick=None),
        Variable(nbytes=100, birth_tick=None, death_tick=None),
    )
    ops = (op(0, makes(0)), op(1, duration_ns=0), op(2, reads(1)))
    trace = Trace(ops=ops, variables=variables, num_ticks=30, cyclic=False)
    residencies = (
        Residency(variable=0, start=Born(), stop=Evicted(write_op=0, release_op=3), chunks=((0, 1),)),
        Residency(variable=1, start=Loaded(1), stop=Dropped(after_op=2), chunks=((1, 1),)),
    )
    assert run(trace, *residencies).op_start_ns == (0, 100, 210)
    shared = replace(MACHINE, shared_bytes_per_s=1e9)  # half the sum: both at half speed
    assert run(trace, *residencies, machine=shared).op_start_ns == (0, 100, 310)


def test_a_step_alone_ends_when_its_last_write_is_done() -> None:
    made = Variable(nbytes=100, birth_tick=1, death_tick=None)
    trace = Trace(ops=(op(0, makes(0)),), variables=(made,), num_ticks=10, cyclic=False)
    stop = Evicted(write_op=0, release_op=1)
    assert run(trace, Residency(variable=0, start=Born(), stop=stop, chunks=((0, 1),))).duration_ns == 210


def test_a_cyclic_step_is_reported_in_its_steady_state() -> None:
    """The parameter is written after op 0 and loaded for the next step; the load runs under op 1."""
    parameter = Variable(nbytes=150, birth_tick=None, death_tick=None, becomes=0)
    change = Use(variable=0, reads=True, writes=True)
    trace = Trace(ops=(op(0, change), op(1, duration_ns=200), op(2)), variables=(parameter,), num_ticks=30)
    result = run(
        trace,
        Residency(variable=0, start=Kept(), stop=Evicted(write_op=0, release_op=1), chunks=((0, 2),)),
        Residency(variable=0, start=Loaded(2), stop=Kept(), chunks=((0, 2),)),
    )
    # Written from 100 to 260, loaded from 300 to 460; op 0 of the next step waits for that, from 400 on.
    assert result.op_stall_ns == (60, 0, 0)
    assert (result.duration_ns, result.stall_ns) == (460, 60)
    assert result.peak_nbytes == 200


def test_a_step_cannot_be_faster_than_its_links() -> None:
    """No op ever waits here, but the out-link needs longer than the step for what each step writes."""
    parameter = Variable(nbytes=150, birth_tick=None, death_tick=None, becomes=0)
    change = Use(variable=0, reads=True, writes=True)
    trace = Trace(ops=(op(0, change, duration_ns=1), op(1, duration_ns=1)), variables=(parameter,), num_ticks=20)
    result = run(
        trace, Residency(variable=0, start=Loaded(0), stop=Evicted(write_op=0, release_op=1), chunks=((0, 2),))
    )
    assert result.duration_ns >= 320  # there and back, one after the other


def test_the_memory_curve_follows_the_residencies() -> None:
    result = run(away_and_back(), *stays(1))
    held = dict(result.memory_curve)
    assert held[0] == 0
    assert max(held.values()) == result.peak_nbytes == 100
    assert [nbytes for _, nbytes in result.memory_curve] == [0, 100, 0, 100, 0, 100, 0]
