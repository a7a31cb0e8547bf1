"""In which order the ops of a union come: what only one of two has among what both have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ooc.replay.union_parts import UnionOp, UnionVariable
from ooc.tracing.call_sites import is_of_backward


def longest_ascent(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of pairs whose first numbers ascend, as many as can be had so that the second ones do, too."""
    ends: list[int] = []  # by length: the pair that ends the best ascent so far
    lasts: list[int] = []
    before: list[int] = []
    for number, (_, last) in enumerate(pairs):
        length = bisect_left(lasts, last)
        before.append(ends[length - 1] if length else -1)
        lasts[length : length + 1] = [last]
        ends[length : length + 1] = [number]
    found = []
    number = ends[-1] if ends else -1
    while number >= 0:
        found.append(pairs[number])
        number = before[number]
    return found[::-1]


class Forward:
    """Where, among the ops that came so far, what a backward pass uses was made, or was used going forward.

    Args:
        ops: They may become more; `note` looks at those that have come since.
    """

    def __init__(self, ops: Sequence[UnionOp]) -> None:
        self._ops = ops
        self._num_seen = 0
        self._places: dict[UnionOp, int] = {}
        self._uses: dict[UnionVariable, int | None] = {}  # None: several ops have used it

    def __repr__(self) -> str:
        return f"<Forward: {len(self._places)} ops>"

    def note(self) -> None:
        """Look at the ops that have come."""
        for place in range(self._num_seen, len(self._ops)):
            op = self._ops[place]
            if is_of_backward(op.where):
                continue
            self._places[op] = place
            for variable in op.operands:
                if not variable.is_born:
                    self._uses[variable] = place if variable not in self._uses else None
        self._num_seen = len(self._ops)

    def place(self, op: UnionOp) -> int | None:
        """Of an op of a backward pass: that of the op whose gradient it is a part of, or what its operands tell of."""
        if not is_of_backward(op.where):
            return None
        if op.forward is not None and (place := self._places.get(op.forward)) is not None:
            return place
        births = (self._places.get(v.birth) for v in op.operands if v.birth is not None)
        uses = (self._uses.get(v) for v in op.operands)
        return max((place for place in (*births, *uses) if place is not None), default=None)


def in_order(
    ours: Sequence[UnionOp],
    theirs: Sequence[UnionOp],
    before: int | None,
    after: int | None,
    forward: Forward,
) -> list[UnionOp]:
    """Two runs of ops that come between the same two, of which no step has shown which comes first.

    Going back, those that use what was made last, as `forward` tells. Going forward, those that use the oldest storages
    first, where what is older is used first in what is around them: layers are mostly made in the order in which they
    run, and run backward in the other one.
    """
    if not ours or not theirs:
        return [*ours, *theirs]
    saved = [_forward_places(run, forward) for run in (ours, theirs)]
    if all(saved):
        return _merged(ours, theirs, *saved, sign=-1)
    is_backward = before is not None and after is not None and before > after
    return _merged(ours, theirs, _ages(ours), _ages(theirs), sign=-1 if is_backward else 1)


def _merged(
    ours: Sequence[UnionOp], theirs: Sequence[UnionOp], one: Sequence[int], other: Sequence[int], *, sign: int
) -> list[UnionOp]:
    found: list[UnionOp] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        if sign * one[i] <= sign * other[j]:
            found.append(ours[i])
            i += 1
        else:
            found.append(theirs[j])
            j += 1
    return [*found, *ours[i:], *theirs[j:]]


def _forward_places(run: Sequence[UnionOp], forward: Forward) -> list[int]:
    """For each op of a run what `Forward.place` tells; of an op of which it tells nothing, the next one's.

    Empty: it tells nothing of any.
    """
    found = [forward.place(op) for op in run]
    present = next((each for each in reversed(found) if each is not None), None)
    if present is None:
        return []
    filled = []
    for each in reversed(found):
        present = each if each is not None else present
        filled.append(present)
    return filled[::-1]


def age(op: UnionOp) -> int | None:
    """The serial of the oldest storage among an op's operands that exist when the step starts."""
    return min((v.serial for v in op.operands if not v.is_born and v.serial is not None), default=None)


def latest_known(ages: Sequence[int | None]) -> list[int | None]:
    """Before each of them, and after the last, the last one that is known."""
    found: list[int | None] = [None]
    for each in ages:
        found.append(found[-1] if each is None else each)
    return found


def _ages(ops: Sequence[UnionOp]) -> list[int]:
    """For each op of a run its age, or that of the last one before it that has one; of the first ones, the next's."""
    ages = [age(op) for op in ops]
    present = next((each for each in ages if each is not None), 0)
    found = []
    for each in ages:
        present = each if each is not None else present
        found.append(present)
    return found


def interleaved(union: Sequence[UnionOp], found: Sequence[UnionOp], are_new: Sequence[bool]) -> list[UnionOp]:
    """A union's ops, and a step's new ones among them.

    Args:
        union: The union's ops, at their places.
        found: The step's, in order: the union's, and new ones.
        are_new: Which of the step's are new.
    """
    ops: list[UnionOp] = []
    at, run = 0, list[UnionOp]()
    forward = Forward(ops)
    ages = [age(op) for op, is_new in zip(found, are_new, strict=True) if not is_new]
    before, after = latest_known(ages), latest_known(ages[::-1])[::-1]
    number = 0
    for op, is_new in zip(found, are_new, strict=True):
        if is_new:
            run.append(op)
            continue
        ops += in_order(union[at : op.place], run, before[number], after[number], forward)
        ops.append(op)
        forward.note()
        at, run, number = op.place + 1, [], number + 1
    return ops + in_order(union[at:], run, before[number], after[number], forward)
