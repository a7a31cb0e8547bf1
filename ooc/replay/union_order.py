"""In which order the ops of a union come: what only one of two has among what both have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ooc.replay.union_parts import UnionOp


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


def in_order(
    ours: Sequence[UnionOp], theirs: Sequence[UnionOp], before: int | None, after: int | None
) -> list[UnionOp]:
    """Two runs of ops that come between the same two, of which no step has shown which comes first.

    Those that use what was made first, where what is older is used first in what is around them: layers are mostly made
    in the order in which they run, and run backward in the other one.
    """
    if not ours or not theirs:
        return [*ours, *theirs]
    is_backward = before is not None and after is not None and before > after
    sign = -1 if is_backward else 1
    one, other = _ages(ours), _ages(theirs)
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
