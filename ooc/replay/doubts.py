"""Ops of a plan that the present step is going to leave out, for it has left out what they belong to.

A step that has skipped a turn of a loop going forward skips it going back. There the first op of each turn may look
like that of any other (`ooc.replay.turns`): without doubts the step's op would be taken for the skipped turn's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.replay.turns import repeated, turn_variables
from ooc.replay.union_parts import StepBirths
from ooc.tracing.observed import Observed

_DOUBTED = np.uint32(256)
"""`kDoubted` of native/dispatcher.h: not the next op, whatever its operands."""


class Doubts:
    """Of a plan that may be played with ops left out; of another plan there are none.

    Args:
        observed: What the plan is for.
        flags: The ops' flags, for native code; it sets and clears one of them.
        may_omit: Whether ops may be left out.
    """

    def __init__(self, observed: Observed, flags: npt.NDArray[Any], *, may_omit: bool) -> None:
        self._flags = flags
        self._doubted: set[int] = set()
        self._of_turn: dict[int, list[int]] = {}  # by the op that makes their turn variable, or before which it is born
        if may_omit:
            self._find(observed)

    def __repr__(self) -> str:
        return f"<Doubts: {len(self._doubted)} ops>"

    def __contains__(self, op: int) -> bool:
        return op in self._doubted

    def _find(self, observed: Observed) -> None:
        for op, forward in enumerate(observed.forward):
            if forward >= 0:
                self._of_turn.setdefault(forward, []).append(op)
        born = StepBirths(observed).by_variable()
        places = [op.where for op in observed.trace.ops]
        variables = turn_variables(observed.funcs, observed.occurrences, places, born)
        turns = repeated(observed.funcs, observed.occurrences)
        for op, variable in enumerate(variables):
            if variable is None or variable in observed.replaceable:
                continue
            if observed.forward and observed.forward[op] >= 0:
                continue  # that is certain
            if (observed.funcs[op], observed.occurrences[op]) in turns:
                self._of_turn.setdefault(born[variable], []).append(op)

    def ordered(self, ops: Sequence[int]) -> Iterator[int]:
        """Those without doubts first."""
        doubted = self._doubted
        yield from (op for op in ops if op not in doubted)
        yield from (op for op in ops if op in doubted)

    def note_omitted(self, start: int, stop: int) -> None:
        """These ops were left out."""
        of_turn = self._of_turn
        for op in range(start, stop):
            for other in of_turn.get(op, ()):
                self._doubted.add(other)
                self._flags[other] |= _DOUBTED

    def trust(self, op: int) -> None:
        """This op comes, all the same."""
        self._doubted.discard(op)
        self._flags[op] &= ~_DOUBTED

    def clear(self) -> None:
        """Another step begins."""
        for op in self._doubted:
            self._flags[op] &= ~_DOUBTED
        self._doubted.clear()
