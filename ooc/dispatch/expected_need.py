"""Guesses what the rest of a step will need at once, when one of its ops did not fit: so that one restart is enough.

Where an earlier step began with the same ops, its remaining ops tell, scaled by how much larger sizes are this time.
Where there is none, the backward pass of the ops so far does: each needs the gradient of its result and makes that of
its operands. Both are guesses: of ops that nobody has seen, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.trace import Op, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedNeed:
    """A guess.

    Attributes:
        nbytes: At once.
        reason: What it is for.
    """

    nbytes: int
    reason: str


def expected_need(
    so_far: Trace, needed_nbytes: int, operands: Sequence[int], earlier: Iterable[Trace], *, has_backward: bool
) -> ExpectedNeed | None:
    """What the step's other ops will need, where that can be guessed.

    Args:
        so_far: The ops before the one that failed.
        needed_nbytes: What that one needs.
        operands: Sizes of its operands.
        earlier: Steps that were recorded, the latest first.
        has_backward: Whether a backward pass may follow: gradients are recorded, and none is under way.
    """
    index = len(so_far.ops)
    names = [op.name for op in so_far.ops]
    for trace in earlier:
        if len(trace.ops) > index and [op.name for op in trace.ops[:index]] == names:
            return _as_before(so_far, needed_nbytes, trace)
    if not has_backward:
        return None
    needs = [_need(op, so_far) + _largest_operand(op, so_far) for op in so_far.ops]
    needs.append(needed_nbytes + max(operands, default=0))
    return ExpectedNeed(nbytes=max(needs), reason="the backward pass of the ops so far (a guess)")


def _as_before(so_far: Trace, needed_nbytes: int, trace: Trace) -> ExpectedNeed:
    index = len(so_far.ops)
    needs = [_need(op, trace) for op in trace.ops]
    ratios = [_need(op, so_far) / before for op, before in zip(so_far.ops, needs, strict=False) if before]
    if needs[index]:
        ratios.append(needed_nbytes / needs[index])
    ratio = max(ratios, default=1.0)
    scale = f", sizes now being {ratio:.2f} times as large" if ratio > 1 else ""
    return ExpectedNeed(
        nbytes=int(max(needs[index:]) * max(ratio, 1.0)),
        reason=f"the rest of the step, as in an earlier one with the same beginning{scale} (a guess)",
    )


def _need(op: Op, trace: Trace) -> int:
    return sum(trace.variables[use.variable].nbytes for use in op.uses)


def _largest_operand(op: Op, trace: Trace) -> int:
    return max((trace.variables[use.variable].nbytes for use in op.uses if use.reads), default=0)
