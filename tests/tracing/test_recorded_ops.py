"""`RecordedOps` beside a plain list: whatever comes through Python or is logged, and whoever looks in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

import ooc
from ooc.memory.step_uses import Operands
from ooc.tracing.op_log import Entry, OpLog
from ooc.tracing.recorded_ops import OpRecord, RecordedOps, forward_ops
from ooc.tracing.recorder import StepRecorder


class _Log:
    """Stands for the native log."""

    has_begun = False

    def __init__(self, ops: Sequence[OpRecord] = ()) -> None:
        self.ops = list(ops)

    def __len__(self) -> int:
        return len(self.ops)

    def detach(self) -> OpLog:
        found, self.ops = _Log(self.ops), []
        return found

    def entries(self) -> list[Entry]:
        return [
            (op.func, op.where, tuple(op.occurrences), tuple(op.written), tuple(op.results), op.duration_ns, False, 0)
            for op in self.ops
        ]

    def entry(self, place: int) -> Entry:
        return self.entries()[place]

    def operands(self, start: int) -> Operands:
        return Operands.of((op.func, tuple(op.occurrences)) for op in self.ops[start:])

    def signature(self, start: int) -> int:
        for op in self.ops:
            start = start * 31 + op.func
        return start


def _op(number: int) -> OpRecord:
    """Every other one uses something."""
    used = (number, number + 1) if number % 2 else ()
    return OpRecord(func=number, where="", occurrences=used, written=used[:1], results=(number + 2,))


@given(
    st.lists(st.sampled_from(["python", "native", "look", "compact", "last", "drop"]), max_size=40), st.integers(0, 40)
)
def test_as_a_list_of_records(acts: list[str], start: int) -> None:
    recorded, log, flat = RecordedOps(), _Log(), []
    recorded.log = log
    for number, act in enumerate(acts):
        if act == "python":
            recorded.extend([_op(number)])
            flat.append(_op(number))
        elif act == "native":
            log.ops.append(_op(number))
            flat.append(_op(number))
        elif act == "look":
            assert recorded.records() == flat
            assert recorded.records() is recorded.records() or not flat  # they are kept
        elif act == "compact":
            assert recorded.as_records() == flat
        elif act == "last":
            assert recorded.last() == (flat[-1] if flat else None)
        else:
            recorded.drop_last()
            del flat[-1:]
        assert len(recorded) == len(flat)
    assert [recorded.at(index) for index in range(len(flat))] == flat
    wanted = Operands.of((op.func, tuple(op.occurrences)) for op in flat[start:])
    assert recorded.operands_since(min(start, len(flat))) == wanted
    expected = 7
    for op in flat:
        expected = expected * 31 + op.func
    assert recorded.hashed(7, lambda found, func: found * 31 + func) == expected


def test_the_last_record_may_be_changed() -> None:
    recorded, log = RecordedOps(), _Log()
    recorded.log = log
    log.ops.append(_op(1))
    last = recorded.last()
    assert last is not None
    last.is_held = True
    log.ops.append(_op(2))
    assert [op.is_held for op in recorded.records()] == [True, False]


def test_native_code_logs_what_the_records_say() -> None:
    """Logged ops and those through Python (a list op in parts), looked at in between."""
    with ooc.Session("4MiB", recompute=False) as session, session.step():
        recorder = session.engine.runner.recording.recorder
        assert recorder is not None
        assert recorder.log is not None
        _compare(recorder)


def _compare(recorder: StepRecorder) -> None:
    weights = [torch.ones(1 << 16) for _ in range(3)]
    first = recorder.operands_since(0)
    with torch.no_grad():
        torch._foreach_mul_(weights, 2.0)
        total = weights[0] + weights[1]
        total.sum()
    found = recorder.operands_since(0)
    assert found.funcs[: len(first.funcs)] == first.funcs
    assert found.used[: len(first.used)] == first.used
    assert len(found.funcs) == recorder.num_ops
    compact = recorder.as_records()
    wanted = Operands.of((op.func, tuple(op.occurrences)) for op in compact)
    assert found.funcs == wanted.funcs
    assert [(place, tuple(used)) for place, used in found.used] == wanted.used
    signature = recorder.signature()
    assert list(recorder.ops) == list(compact)
    assert recorder.signature() == signature
    total_op = next(op for op in recorder.ops if op.func is torch.ops.aten.add.Tensor)
    assert total_op.results
    assert total_op.occurrences[:2] == (weights[0].data_ptr(), weights[1].data_ptr())


def test_backward_ops_are_those_of_the_first_op_that_made_their_node() -> None:
    """Of two ops with one number the first one has made the node."""
    nodes = [1, 2, 2, 0, 3, -2, -2, -7, -1]
    ops = [OpRecord(func=n, where="", occurrences=(), written=(), node=node) for n, node in enumerate(nodes)]
    assert forward_ops(ops) == (-1, -1, -1, -1, -1, 1, 1, -1, 0)


def test_a_node_that_is_made_when_its_op_is_over_is_of_that_op() -> None:
    """A write to a view makes one for all of the storage. What comes after the last op going forward is nobody's."""
    ops = [
        OpRecord(func=n, where="", occurrences=(), written=(), node=node)
        for n, node in enumerate([1, 3, 5, -2, -4, -5, -6])
    ]
    assert forward_ops(ops) == (-1, -1, -1, 0, 1, 2, -1)
