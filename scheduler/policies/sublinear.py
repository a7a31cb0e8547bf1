"""`sublinear`: checkpointing by segments (Chen et al. 2016, "Training deep nets with sublinear memory cost").

The forward pass is cut into segments. Results that a later segment reads are kept (the paper's checkpoints);
all others are dropped after their last use in the forward pass, and when the backward pass first needs one
of a segment, the whole segment's are made again at once. With segments of about sqrt(n) ops memory is O(sqrt(n))
for one more forward pass (section 4.1). The segment's length is searched, as the paper's Algorithm 3 does with its
budget.

The paper cuts a layer graph; a trace does not say where its forward pass ends. It is taken to end where most
bytes of variables that die in the step are alive. Nothing is swapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.budget import BudgetTooSmall
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import evaluate
from scheduler.plan import Machine, Residency
from scheduler.policies._greedy import Advice, Early, Facts, Stuck, Victim, Walk
from scheduler.policies._rerun_policies import or_too_small
from scheduler.trace import Trace

# Segment lengths tried, in square roots of the number of forward ops.
_LENGTHS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def schedule(
    trace: Trace,
    machine: Machine,
    *,
    segment_num_ops: int,
    wrap: bool = True,
    search_smallest: bool = True,
) -> tuple[Residency, ...]:
    """Checkpointing.

    Args:
        trace: The step.
        machine: The budget; rates do not matter, because nothing is swapped.
        segment_num_ops: Length of a segment of the forward pass.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        search_smallest: Whether a refusal names a budget that works, which takes up to 20 attempts.

    Raises:
        BudgetTooSmall: What is kept does not fit the budget.
        ValueError: `segment_num_ops` is not positive.
    """
    if segment_num_ops < 1:
        raise ValueError(f"segment_num_ops is {segment_num_ops}; a segment has at least one op")

    def attempt(within: Machine) -> tuple[Residency, ...]:
        facts = Facts(trace, within)
        return Walk(facts, _Checkpoints(facts, segment_num_ops)).schedule(wrap=wrap)

    return or_too_small(attempt, trace, machine, search_smallest=search_smallest)


def tune(trace: Trace, machine: Machine, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Choose `segment_num_ops` by simulation, unless it is given."""
    if "segment_num_ops" in parameters:
        return dict(parameters)
    turn = turning_op(trace)
    root = max(turn, 1) ** 0.5
    try:
        facts = Facts(trace, machine)
    except BudgetTooSmall:  # `schedule` says so, with a budget that works
        return {**parameters, "segment_num_ops": max(round(root), 1)}
    best: tuple[tuple[int, int, int], int] | None = None
    for length in sorted({max(round(root * factor), 1) for factor in _LENGTHS}):
        try:
            proposal = Walk(facts, _Checkpoints(facts, length)).schedule(wrap=parameters.get("wrap", True))
        except Stuck:
            continue
        outcome = evaluate(proposal, trace, machine)
        if not isinstance(outcome, Shortage) and (best is None or (outcome.rank, length) < best):
            best = outcome.rank, length
    return {**parameters, "segment_num_ops": best[1] if best is not None else max(round(root), 1)}


def turning_op(trace: Trace) -> int:
    """The op at which most bytes of variables that die in the step are alive: the forward pass ends about there."""
    change: dict[int, int] = {}
    for index, v in enumerate(trace.variables):
        if v.birth_tick is not None and v.death_tick is not None:
            start, stop = trace.lifetime(index)
            change[start] = change.get(start, 0) + v.nbytes
            change[stop] = change.get(stop, 0) - v.nbytes
    alive = most = at = 0
    for tick in sorted(change):
        alive += change[tick]
        if alive > most:
            most, at = alive, tick
    return max(sum(op.start_tick <= at for op in trace.ops) - 1, 0)


class _Checkpoints(Advice):
    """Discards what is no checkpoint; what of it is not needed soonest, first."""

    early = Early.ANY

    def __init__(self, facts: Facts, segment_num_ops: int) -> None:
        self.turn = turning_op(facts.trace)
        last = self.turn // segment_num_ops  # this segment's results are needed at once
        self.segment = [
            None if maker is None or maker // segment_num_ops >= last else maker // segment_num_ops
            for maker in facts.graph.maker
        ]
        self.members: dict[int, list[int]] = {}
        self.is_checkpoint = [False] * len(self.segment)
        for v, segment in enumerate(self.segment):
            if segment is None:
                continue
            forward = [op for op in facts.pin_ops[v] if op <= self.turn]
            self.is_checkpoint[v] = bool(forward) and forward[-1] // segment_num_ops > segment
            if not self.is_checkpoint[v]:
                self.members.setdefault(segment, []).append(v)

    def eager(self, walk: Walk, op_index: int, candidates: Sequence[int]) -> Iterable[Victim]:
        """What has had its last use in the forward pass, and is no checkpoint, goes at once."""
        return [
            Victim(v, True)
            for v in candidates
            if self.segment[v] is not None
            and not self.is_checkpoint[v]
            and op_index <= self.turn < walk.next_use(v, op_index)
            and walk.may_discard(v, op_index)
        ]

    def victims(self, walk: Walk, op_index: int, candidates: Sequence[int]) -> Iterable[Victim]:  # noqa: ARG002
        """Nothing else is ever released."""
        return ()

    def companions(self, walk: Walk, op_index: int, remade: Sequence[int]) -> Sequence[int]:
        """The rest of the segments that are made again, what is needed soonest first."""
        segments = {self.segment[v] for v in remade}
        rest = [v for s in segments if s is not None for v in self.members.get(s, ()) if v in walk.discarded]
        return sorted((v for v in rest if v not in remade), key=lambda v: (walk.next_use(v, op_index), v))
