"""What the recomputing policies share: playing a choice of gaps, and the error when a walk does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from scheduler.budget import BudgetTooSmall, budget_too_small, smallest_num_chunks
from scheduler.colouring.scratch import schedule_that_colours
from scheduler.cost.bounds import lower_bounds
from scheduler.plan import Machine, Residency
from scheduler.policies._greedy import Advice, Early, Stuck, Victim, Walk
from scheduler.trace import Trace

# The smallest budget that works is looked for to this share of the budget in core.
_RESOLUTION = 0.02
# Of more chunks than this no colouring is tried for the message's sake: a budget far too small has small chunks.
_MOST_COLOURED = 1 << 16


def or_too_small(
    attempt: Callable[[Machine], tuple[Residency, ...]],
    trace: Trace,
    machine: Machine,
    *,
    probe: Callable[[Machine], tuple[Residency, ...]] | None = None,
    search_smallest: bool = True,
) -> tuple[Residency, ...]:
    """`attempt(machine)`, with `Stuck` turned into the error for users.

    Args:
        probe: A quicker attempt to look for the smallest budget with; what it finds is tried by `attempt` itself.
        search_smallest: Whether to look for it. A caller that does not read the error saves most of the time.

    Raises:
        BudgetTooSmall: The policy found nothing; with the op, what was held there, and the smallest
            budget found with which it does (if not looked for: with which everything fits at once).
    """
    try:
        return attempt(machine)
    except BudgetTooSmall as refused:
        if not search_smallest:
            raise
        smallest = _smallest(attempt, probe or attempt, trace, machine)
        raise refused.naming(smallest * machine.chunk_nbytes) from None
    except Stuck as stuck:
        raise budget_too_small(
            trace,
            machine,
            tick=trace.ops[stuck.op_index].start_tick,
            variables=list(stuck.held),
            smallest_num_chunks=(
                _smallest(attempt, probe or attempt, trace, machine)
                if search_smallest
                else lower_bounds(trace, machine)["in_core_nbytes"] // machine.chunk_nbytes
            ),
            num_missing_chunks=stuck.num_missing_chunks,
        ) from stuck


def _smallest(
    attempt: Callable[[Machine], tuple[Residency, ...]],
    probe: Callable[[Machine], tuple[Residency, ...]],
    trace: Trace,
    machine: Machine,
) -> int:
    """A number of chunks that works: the least of all if it does, else by bisection up to everything at once."""
    least = smallest_num_chunks(trace, machine)
    if least > machine.num_chunks and _leads_to_a_plan(attempt, trace, replace(machine, num_chunks=least)):
        return least
    most = sum(machine.chunks_of(v.nbytes) for v in trace.variables)
    works = min(most, lower_bounds(trace, machine)["in_core_nbytes"] // machine.chunk_nbytes)
    fails = machine.num_chunks
    resolution = max(int(works * _RESOLUTION), 1)
    while not _fits(probe, machine, works):
        fails, works = works, min(most, works + resolution) if works < most else 2 * works
    while works - fails > resolution:
        middle = (works + fails) // 2
        if _fits(probe, machine, middle):
            works = middle
        else:
            fails = middle
    while not _leads_to_a_plan(attempt, trace, replace(machine, num_chunks=works)):
        works = min(most, works + resolution) if works < most else 2 * works
    return works


def _leads_to_a_plan(attempt: Callable[[Machine], tuple[Residency, ...]], trace: Trace, machine: Machine) -> bool:
    """Whether what is proposed also gets chunks, as `scheduler.planning` gives them."""
    if machine.num_chunks > _MOST_COLOURED:
        return _fits(attempt, machine, machine.num_chunks)
    try:
        return schedule_that_colours(attempt, trace, machine) is not None
    except (Stuck, BudgetTooSmall):
        return False


def _fits(attempt: Callable[[Machine], tuple[Residency, ...]], machine: Machine, num_chunks: int) -> bool:
    try:
        attempt(replace(machine, num_chunks=num_chunks))
    except (Stuck, BudgetTooSmall):
        return False
    return True


class AsChosen(Advice):
    """Releases each chosen gap as soon as it begins.

    Args:
        discarded, swapped: `(variable, op of its next use)` of each; ops of the next step count on, and twice the
            number of ops stands for "none".
        kept: Variables to start the step with in memory; None: as many as fit.
    """

    early = Early.TOUCHED

    def __init__(
        self,
        discarded: Iterable[tuple[int, int]],
        swapped: Iterable[tuple[int, int]],
        kept: Iterable[int] | None = None,
    ) -> None:
        self.discarded = set(discarded)
        self.swapped = set(swapped)
        self.kept = None if kept is None else set(kept)
        self._variables = {v for v, _ in self.discarded | self.swapped}

    def eager(self, walk: Walk, op_index: int, candidates: Sequence[int]) -> Iterable[Victim]:
        """What was chosen."""
        found = []
        for v in candidates:
            if v not in self._variables:
                continue
            key = v, walk.next_use(v, op_index)
            if key in self.discarded and walk.may_discard(v, op_index):
                found.append(Victim(v, True))
            elif key in self.swapped or key in self.discarded:
                found.append(Victim(v, False))
        return found

    def start(self) -> set[int] | None:
        """What was chosen."""
        return self.kept
