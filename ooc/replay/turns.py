"""Which turn of a loop an op belongs to, where its operands do not say: turn variables.

Going back through a loop, the first ops of each turn use what all turns share: a parameter, the gradients of all
outputs. What tells the turns apart comes a few ops later: an activation that one turn alone has saved. That is the
*turn variable* of these ops. If a step has left out the op that makes it, it will leave them out, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from ooc.tracing.call_sites import is_of_backward

_MOST_USES = 8
"""A variable with more uses is of no one turn."""
_REACH = 32
"""So many ops that touch variables, at most, come before a turn variable's use."""

V = TypeVar("V", bound=Hashable)


def repeated(funcs: Sequence[Any], operands: Sequence[Sequence[V]]) -> set[tuple[Any, tuple[V, ...]]]:
    """What is called with the same operands more than once: the same in each turn."""
    counts = Counter((func, tuple(used)) for func, used in zip(funcs, operands, strict=True) if used)
    return {call for call, count in counts.items() if count > 1}


def turn_variables(
    funcs: Sequence[Any], operands: Sequence[Sequence[V]], places: Sequence[str], births: Mapping[V, int]
) -> list[V | None]:
    """For each op of a backward pass its turn variable: one that was made going forward, and that a next op uses.

    Args:
        funcs: Per op, what it calls.
        operands: Per op.
        places: Per op, where in the program it comes from (`CallSites`).
        births: The op in which, or before which, a variable is born; of those that are.

    Returns:
        None for an op that uses what few ops use, and so needs none, for one that touches nothing, for one that
        has none, for one that comes several times in a turn, and for those of forward passes.
    """
    num_uses = Counter(v for used in operands for v in set(used))
    are_backward = [is_of_backward(place) for place in places]
    found: list[V | None] = [None] * len(operands)
    waiting: list[tuple[int, int]] = []  # ops without one so far, and how many that touch variables came before
    num_touching = 0
    for index, used in enumerate(operands):
        if not used or not are_backward[index]:
            continue
        num_touching += 1
        private = [v for v in used if v in births and num_uses[v] <= _MOST_USES]
        if not private:
            waiting.append((index, num_touching))
            continue
        saved = [v for v in private if births[v] < len(operands) and not are_backward[births[v]]]
        waiting, earlier = [], waiting
        for op, number in earlier:
            found[op] = next((v for v in saved if births[v] < op), None)
            if found[op] is None and num_touching - number < _REACH:
                waiting.append((op, number))
    calls = [(func, tuple(used), v) for func, used, v in zip(funcs, operands, found, strict=True)]
    counts = Counter(calls)  # all outputs of a loop are taken apart before its last turn: that is of no turn
    return [v if counts[call] == 1 else None for v, call in zip(found, calls, strict=True)]
