"""Marks: how a recording says where the operands of an op in parts are needed, so that planners need to know no more.

An op in parts (`ooc.dispatch.ops_in_parts`) uses slices of its *sliced* operands, wherever these are: in memory, or in
the store. What it changes in place is to stay in memory meanwhile, and to be written out after it. Plans know neither:
an op's operands are in memory. So in a recording such an op does not use its sliced operands. Beside it stand marks,
ops that no step has, each of which uses one of them:

- after it one for each, so that its bytes are kept up to there, in memory or in the store;
- before it one for each that it changes, which the planner then has no reason to move until the other.

All together may need far more memory than the op and each of its marks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ooc.tracing.recorded_ops import OpRecord


class OperandMark:
    """Stands for an op's operand in recordings, in place of an op; nobody calls it.

    Attributes:
        func: The op in parts.
        is_after: Whether it comes after the op.
    """

    __slots__ = ("func", "is_after")

    def __init__(self, func: Any, *, is_after: bool) -> None:
        self.func = func
        self.is_after = is_after

    def __str__(self) -> str:
        return f"{self.func}, operand"

    def __repr__(self) -> str:
        return f"<OperandMark {'after' if self.is_after else 'before'} {self.func}>"


ROOM_ORDINAL = (1 << 16) - 1
"""Which allocation of an op in parts it is that stands in a recording for the memory in which its parts ran."""

_marks: dict[tuple[Any, bool], OperandMark] = {}
"""One of a kind: sequences are compared by identity, and there are as many ops as torch has."""


def _mark(func: Any, *, is_after: bool) -> OperandMark:
    return _marks.setdefault((func, is_after), OperandMark(func, is_after=is_after))


def marks_before(op: OpRecord) -> list[OpRecord]:
    """What is to be recorded before an op that has `sliced` operands."""
    assert op.sliced is not None
    return [_record(op, address, is_after=False) for address in op.sliced if address in op.written]


def marks_after(op: OpRecord) -> list[OpRecord]:
    """What is to be recorded after it."""
    assert op.sliced is not None
    return [_record(op, address, is_after=True) for address in op.sliced]


def _record(op: OpRecord, address: int, *, is_after: bool) -> OpRecord:
    written: Sequence[int] = (address,) if is_after and address in op.written else ()
    return OpRecord(func=_mark(op.func, is_after=is_after), where=op.where, occurrences=(address,), written=written)
