"""In a trace, a collective uses its operands until an op names them, they are freed, or the program has waited."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ooc.memory.record import VariableRecord
from ooc.tracing.observed import Observed
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recorder import StepRecorder
from scheduler.trace import Trace
from vmm.table import ALLOC, FREE, Event

_A, _B, _C, _D = 1 << 16, 2 << 16, 3 << 16, 9 << 16
_NBYTES = 100


def observe(ops: list[OpRecord], *, events: tuple[Event, ...] = (), limit_nbytes: int = 1000) -> Observed:
    records = {}
    for serial, address in enumerate((_A, _B, _C)):
        reservation: Any = SimpleNamespace(address=address)
        records[address] = VariableRecord(nbytes=_NBYTES, reservation=reservation, serial=serial)
    recorder = StepRecorder(records)
    recorder.flight_nbytes = limit_nbytes
    recorder.extend(ops)
    recorder.events = list(events)
    return recorder.build(records)


def op(*operands: int, launches: tuple[int, ...] = (), landed: tuple[int, ...] = (), is_held: bool = False) -> OpRecord:
    return OpRecord(
        func="op", where="", occurrences=operands, written=launches, in_flight=launches, is_held=is_held, landed=landed
    )


def uses(observed: Observed) -> list[set[int]]:
    """By op, the variables in use, in the order in which ops name them."""
    return [{use.variable for use in op.uses} for op in observed.trace.ops]


def test_until_an_op_names_it() -> None:
    observed = observe([op(_A, launches=(_A,)), op(_B), op(_B), op(_A), op(_B)])
    assert uses(observed) == [{0}, {1, 0}, {1, 0}, {0}, {1}]


def test_it_is_written_all_the_while_but_matched_by_no_operand() -> None:
    observed = observe([op(_A, launches=(_A,)), op(_B), op(_A)])
    assert [use.writes for use in observed.trace.ops[1].uses if use.variable == 0] == [True]
    assert observed.occurrences[1] == (1,)


def test_until_the_program_has_waited() -> None:
    """And through the next op: what is written out after the op before it would be written out before the wait."""
    observed = observe([op(_A, launches=(_A,)), op(_B), op(_B, landed=(_A,)), op(_B), op(_A)])
    assert uses(observed) == [{0}, {1, 0}, {1, 0}, {1}, {0}]


def test_the_op_that_names_it_first_counts_as_writing_it() -> None:
    """The collective has written until just before: what was written out earlier is old."""
    observed = observe([op(_A, launches=(_A,)), op(_B), op(_A), op(_A)])
    assert [use.writes for step in observed.trace.ops for use in step.uses if use.variable == 0] == [True] * 3 + [False]


def test_until_it_is_freed() -> None:
    freed = Event(_A, 0, FREE, 4)
    observed = observe([op(_A, launches=(_A,)), op(_B), op(_B)], events=(freed,))
    assert uses(observed) == [{0}, {1, 0}, {1}]


def test_to_the_end_of_the_step() -> None:
    observed = observe([op(_A, launches=(_A,)), op(_B), op(_B)])
    assert uses(observed) == [{0}, {1, 0}, {1, 0}]


def test_the_oldest_give_way_beyond_the_limit_but_never_a_send() -> None:
    ops = [op(_A, launches=(_A,)), op(_B, launches=(_B,)), op(_C)]
    assert uses(observe(ops, limit_nbytes=_NBYTES)) == [{0}, {1, 0}, {2, 1}]
    ops[0] = op(_A, launches=(_A,), is_held=True)
    assert uses(observe(ops, limit_nbytes=_NBYTES)) == [{0}, {1, 0}, {2, 0}]


def test_what_a_collective_makes_is_in_use_too() -> None:
    made = Event(9 << 16, _NBYTES, ALLOC, 1)
    observed = observe([op(_A, launches=(_A, 9 << 16)), op(_B)], events=(made,))
    assert uses(observed)[1] == {0, 1, 2}


def _freed_before(index: int, *events: Event, num_ops: int = 50, is_launched: bool = True) -> Trace:
    """What op 0 has made, a collective has used, and op 1 has named last, is freed before op `index`."""
    made, freed = Event(_D, _NBYTES, ALLOC, 1), Event(_D, 0, FREE, 2 * index)
    ops = [op(_A, launches=(_D,) if is_launched else ()), op(_D, landed=(_D,)), *(op(_B) for _ in range(num_ops - 2))]
    return observe(ops, events=(made, freed, *events)).trace


def _dies_before(trace: Trace) -> int:
    """The op before which the first variable that is born dies; as many as there are: after the last."""
    death = next(v.death_tick for v in trace.variables if v.birth_tick is not None)
    assert death is not None
    return sum(op.start_tick < death for op in trace.ops)


def test_whenever_a_collective_lets_go_of_it_recordings_are_alike() -> None:
    """Its threads may be the last to hold it."""
    alike = [_freed_before(index) for index in (3, 4, 17, 30)]
    assert len({trace.fingerprint() for trace in alike}) == 1
    assert {_dies_before(trace) for trace in alike} == {33}
    assert [_dies_before(_freed_before(index)) for index in (39, 40)] == [39, 40]  # so late the program decides


def test_its_addresses_may_be_another_variables_before_it_dies() -> None:
    trace = _freed_before(5, Event(_D, _NBYTES, ALLOC, 13), Event(_D, 0, FREE, 20))
    assert _dies_before(trace) == 33
    second = [v for v in trace.variables if v.birth_tick is not None][1]
    assert second.death_tick is not None
    assert sum(op.start_tick < second.death_tick for op in trace.ops) == 10


def test_what_is_due_after_the_last_op_dies_with_the_step() -> None:
    assert [_dies_before(_freed_before(index, num_ops=20)) for index in (5, 12)] == [20, 20]


def test_what_no_collective_has_used_dies_where_it_was_freed() -> None:
    assert [_dies_before(_freed_before(index, is_launched=False)) for index in (3, 4)] == [3, 4]
