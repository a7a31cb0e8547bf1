"""Marks: how a recording says where the operands of an op in parts are needed, so that planners need to know no more.

An op in parts (`ooc.dispatch.ops_in_parts`) reads slices of its *sliced* operands, wherever these are: in memory, or in
the store. Plans do not know such operands: an op's are in memory. So in a recording the op does not use them. After it
there stands a mark for each, an op that no step has and that uses this operand alone. So its bytes are kept up to
there, in memory or in the store. All together may need far more memory than the op and each of its marks.
"""

from __future__ import annotations

from typing import Any

from ooc.tracing.recorded_ops import OpRecord


class OperandMark:
    """Stands for an op's operand in recordings, in place of an op; nobody calls it.

    Attributes:
        func: The op in parts.
    """

    __slots__ = ("func",)

    def __init__(self, func: Any) -> None:
        self.func = func

    def __str__(self) -> str:
        return f"{self.func}, operand"

    def __repr__(self) -> str:
        return f"<OperandMark of {self.func}>"


ROOM_ORDINAL = (1 << 16) - 1
"""Which allocation of an op in parts it is that stands in a recording for the memory in which its parts ran."""

_marks: dict[Any, OperandMark] = {}
"""One for each op: sequences are compared by identity, and there are as many ops as torch has."""


def marks_of(op: OpRecord) -> list[OpRecord]:
    """What is to be recorded after an op that has `sliced` operands."""
    assert op.sliced is not None
    mark = _marks.setdefault(op.func, OperandMark(op.func))
    return [OpRecord(func=mark, where=op.where, occurrences=(address,), written=()) for address in op.sliced]
