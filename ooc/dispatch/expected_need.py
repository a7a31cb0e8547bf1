"""Guesses what the rest of a step will need at once, when one of its ops did not fit: so that one restart is enough.

Where an earlier step began with the same ops, its remaining ops tell, scaled by how much larger sizes are this time.
Where there is none, the backward pass of the ops so far does: each needs the gradient of its result and makes that of
its operands. Both are guesses: of ops that nobody has seen, nothing is known.

Recurrent layers and convolutions have rules of their own, for the copies that oneDNN makes (`_PACKED_COPIES`,
`_CONVOLUTION`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ooc.tracing.own_memory import RNN_WORKSPACE_OUTPUTS
from scheduler.trace import Op, Trace

_RECURRENT = "aten.mkldnn_rnn_layer."
_PACKED_COPIES = 2
"""oneDNN's LSTM layer holds two copies of what it reads (weights in layouts of its own), and its backward op two more
(their gradients, in both layouts). Found on four shapes of 20 to 100 steps, widths of 64 to 512, one and two
directions: 0.4 to 1.7 and 1.3 to 2.0 copies were held."""

_CONVOLUTION = "aten.convolution.default"
"""oneDNN copies operands and result of a convolution to layouts of its own: twice as much in all, and a little more
where three channels are padded to sixteen. The derivative is made in such a layout, too, beside the result's copy or
the derivative itself."""

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
"""In the backward pass of a product of matrices each op has two of three: the operands and the result's gradient."""

_BATCH_NORM = "aten.native_batch_norm.default"
"""Its backward op makes a copy of its operand for itself."""


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
    so_far: Trace,
    failed: str,
    needed_nbytes: int,
    operands: Sequence[int],
    results: Sequence[int],
    earlier: Iterable[Trace],
    *,
    may_go_back: bool,
    is_going_back: bool,
) -> ExpectedNeed | None:
    """What the step's other ops will need, where that can be guessed.

    Args:
        so_far: The ops before the one that failed.
        failed: Name of that one.
        needed_nbytes: What that one needs.
        operands: Sizes of its operands.
        results: Sizes of its results, as far as they are known.
        earlier: Steps that were recorded, the latest first.
        may_go_back: Whether a backward pass may follow: gradients are recorded.
        is_going_back: Whether one is under way: what it has still to do is among what the forward pass tells.
    """
    index = len(so_far.ops)
    names = [op.name for op in so_far.ops]
    for trace in earlier:
        if len(trace.ops) > index and [op.name for op in trace.ops[:index]] == names:
            return _as_before(so_far, needed_nbytes, trace)
    needs = backward_needs(so_far) if may_go_back or is_going_back else []
    if failed == _CONVOLUTION:
        made = sum(operands) + sum(results)
        needed_nbytes = max(needed_nbytes, 2 * made + max(results, default=0) // 4)
        if may_go_back:
            needs += [needed_nbytes, made + _derivative_nbytes(operands, max(results, default=0))]
    elif may_go_back and failed.startswith(_RECURRENT):
        made = sum(operands) + sum(results) + RNN_WORKSPACE_OUTPUTS * max(results, default=0)
        needs.append(max(needed_nbytes, made) + 2 * _PACKED_COPIES * sum(operands))
    elif may_go_back and failed.startswith(_PRODUCTS):
        needs.append(needed_nbytes)
    elif may_go_back:
        needs.append(needed_nbytes + max(operands, default=0))
    if failed == _CONVOLUTION and not may_go_back:
        return ExpectedNeed(nbytes=needed_nbytes, reason="this op's own copies of its operands and result (a guess)")
    if not needs:
        return None
    return ExpectedNeed(nbytes=max(needs), reason="the backward pass of the ops so far (a guess)")


def backward_needs(trace: Trace) -> list[int]:
    """What the backward pass of each op of a forward pass needs."""
    return [_backward_need(op, trace) for op in trace.ops if not op.where.startswith("backward")]


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


def _backward_need(op: Op, trace: Trace) -> int:
    operands = _operands(op, trace)
    if op.name.startswith(_RECURRENT):
        return _need(op, trace) + _PACKED_COPIES * sum(operands)
    if op.name == _CONVOLUTION:
        made = [trace.variables[use.variable] for use in op.uses if not use.reads]
        results = [v.nbytes for v in made if v.death_tick is None or v.death_tick > op.stop_tick]
        copies = sum(v.nbytes for v in made) - sum(results)
        derivative = _derivative_nbytes(operands, max(results, default=0)) if copies else max(operands, default=0)
        return sum(operands) + sum(results) + derivative
    if op.name.startswith(_PRODUCTS):
        return _need(op, trace)
    num_more = 2 if op.name == _BATCH_NORM else 1
    return _need(op, trace) + num_more * max(operands, default=0)


def _derivative_nbytes(operands: Sequence[int], result_nbytes: int) -> int:
    """A convolution's derivative, and the copies that are there while it is made."""
    x_nbytes = max(operands, default=0)
    return x_nbytes + max(x_nbytes, result_nbytes)


def _operands(op: Op, trace: Trace) -> list[int]:
    return [trace.variables[use.variable].nbytes for use in op.uses if use.reads]
