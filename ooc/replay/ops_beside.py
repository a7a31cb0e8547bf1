"""Ops without any variable that come while a plan is replayed which does not have them: they run beside it.

Those at the plan's head may already be the first of something else. That shows when one of them has a variable made,
for which the plan leaves no room. The plan is left then, and the recording, which is to tell the next time what begins,
needs them all. Where the plan is left for anything else they are none of what is to be known again: another number of
them may come in each step.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recording import MOST_HEAD_OPS
from vmm.table import between_ops, op_at
from vmm.torch_cpu import Event


class OpsBeside:
    """Those of the present replay, as far as they came at its plan's head.

    Attributes:
        is_running: One is running now, which the plan does not have.
        func: The one that is running, or ran last.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.func: Any = None
        self._cursors: list[int] = []  # the plan's op that came next
        self._ops: list[OpRecord] = []

    def __repr__(self) -> str:
        return f"<OpsBeside, {len(self._ops)} at the head>"

    def begin(self) -> None:
        """A replay begins."""
        self._cursors.clear()
        self._ops.clear()

    @contextlib.contextmanager
    def running(self, func: Any) -> Iterator[None]:
        """One runs in the block, `func`."""
        self.is_running, self.func = True, func
        try:
            yield
        finally:
            self.is_running = False

    def note(self, cursor: int, num_idle: int, func: Any, where: str, results: Sequence[int]) -> None:
        """Note one that has run while op `cursor` of a plan with `num_idle` ops at its head was due."""
        if cursor <= num_idle and len(self._ops) < MOST_HEAD_OPS:
            self._cursors.append(cursor)
            self._ops.append(OpRecord(func=func, where=where, occurrences=(), written=(), results=results))

    def joined(
        self, ops: Sequence[OpRecord], events: list[Event], omitted: Sequence[int]
    ) -> tuple[list[OpRecord], list[Event]]:
        """The ops that were replayed, with these in between, and the events at their places then.

        `ops` and `events` do not count those that were `omitted`.
        """
        places = [cursor - bisect_left(omitted, cursor) for cursor in self._cursors]
        found, start = list[OpRecord](), 0
        for place, op in zip(places, self._ops, strict=True):
            found += ops[start:place]
            found.append(op)
            start = max(start, place)
        return [*found, *ops[start:]], [event._replace(position=_moved(event.position, places)) for event in events]


def _moved(position: int, places: Sequence[int]) -> int:
    """A position among ops of which some were not counted. What was between two ops stays before those in between."""
    index = op_at(position)
    is_between = position == between_ops(index)
    return position + between_ops((bisect_left if is_between else bisect_right)(places, index))
