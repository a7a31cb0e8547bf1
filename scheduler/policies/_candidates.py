"""Which budgets `auto` makes candidates for beside the real one, and which of its candidates is the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from scheduler.budget import smallest_num_chunks
from scheduler.colouring.colouring import Shortage
from scheduler.colouring.scratch import schedule_that_colours
from scheduler.cost.evaluate import Evaluation, evaluate
from scheduler.plan import Machine, Residency
from scheduler.trace import Trace

# Budgets for which plans are made beside the real one: the least that works times powers of 2 ** _GRID, the next
# _NUM_GRID below the real one. They depend on the step alone, so that a budget profits from what a smaller one found.
_GRID = 0.125
_NUM_GRID = 2


def smaller_budgets(trace: Trace, machine: Machine, share: float) -> list[int]:
    """That share of the budget, and the next grid points below it, in chunks."""
    least = max(smallest_num_chunks(trace, machine), 1)
    if machine.num_chunks <= least:
        return []
    top = math.ceil(math.log2(machine.num_chunks / least) / _GRID) - 1
    grid = [math.ceil(least * 2 ** (step * _GRID)) for step in range(top, max(top - _NUM_GRID, -1), -1)]
    return [max(int(machine.num_chunks * share), least), *grid]


def planned_for_less(
    policy: ModuleType,
    parameters: Mapping[str, Any],
    proposal: tuple[Residency, ...],
    trace: Trace,
    machine: Machine,
) -> tuple[Residency, ...] | None:
    """As `make_plan` would have it from a policy whose proposal falls short of chunks: for a smaller pool."""

    def schedule(logical: Machine) -> tuple[Residency, ...]:
        if logical is machine:
            return proposal
        found: tuple[Residency, ...] = policy.schedule(trace, logical, **parameters)
        return found

    found = schedule_that_colours(schedule, trace, machine)
    return None if found is None else found[0]


def fastest_of(
    groups: Iterable[Sequence[Evaluation]], trace: Trace, machine: Machine, *, most: int
) -> Evaluation | None:
    """The fastest candidate, coloured as the finished plan will be: of each group, `most` at most are coloured so.

    Until then a candidate's remaps are an estimate. So all are coloured that could still be the fastest.
    """
    own = [sorted(group, key=lambda found: found.rank) for group in groups]
    waiting = [found for group in own for found in group]
    if len(waiting) < 2:
        return next(iter(waiting), None)
    best: Evaluation | None = None
    for group in own:
        seen: set[tuple[Residency, ...]] = set()
        for found in group:
            if found.proposal in seen or len(seen) == most:
                continue
            if best is not None and found.simulation.duration_ns >= best.duration_ns:
                continue
            seen.add(found.proposal)
            final = found if found.is_final else evaluate(found.proposal, trace, machine, is_final=True)
            if not isinstance(final, Shortage) and (best is None or final.rank < best.rank):
                best = final
    return best or min(waiting, key=lambda found: found.rank)
