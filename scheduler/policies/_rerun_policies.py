"""What the recomputing policies share: running a walk, and the error when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from scheduler.bounds import lower_bounds
from scheduler.budget import BudgetTooSmall, budget_too_small
from scheduler.plan import Machine, Residency
from scheduler.policies._walk import Stuck
from scheduler.trace import Trace

# The smallest budget that works is looked for to this share of the budget in core.
_RESOLUTION = 0.02


def or_too_small(
    attempt: Callable[[Machine], tuple[Residency, ...]], trace: Trace, machine: Machine
) -> tuple[Residency, ...]:
    """`attempt(machine)`, with `Stuck` turned into the error for users.

    Raises:
        BudgetTooSmall: The policy found nothing; with the op, what was held there, and the smallest
            budget found with which it does.
    """
    try:
        return attempt(machine)
    except Stuck as stuck:
        raise budget_too_small(
            trace,
            machine,
            tick=trace.ops[stuck.op_index].start_tick,
            variables=list(stuck.held),
            smallest_num_chunks=_smallest(attempt, trace, machine),
        ) from stuck


def _smallest(attempt: Callable[[Machine], tuple[Residency, ...]], trace: Trace, machine: Machine) -> int:
    """A number of chunks that works, by bisection; everything at once is the upper end, and always works."""
    most = sum(machine.chunks_of(v.nbytes) for v in trace.variables)
    works = min(most, lower_bounds(trace, machine)["in_core_nbytes"] // machine.chunk_nbytes)
    fails = machine.num_chunks
    resolution = max(int(works * _RESOLUTION), 1)
    while not _fits(attempt, machine, works):
        fails, works = works, min(most, works + resolution) if works < most else 2 * works
    while works - fails > resolution:
        middle = (works + fails) // 2
        if _fits(attempt, machine, middle):
            works = middle
        else:
            fails = middle
    return works


def _fits(attempt: Callable[[Machine], tuple[Residency, ...]], machine: Machine, num_chunks: int) -> bool:
    try:
        attempt(replace(machine, num_chunks=num_chunks))
    except (Stuck, BudgetTooSmall):
        return False
    return True
