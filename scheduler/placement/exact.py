"""`exact`: the least height, or a fit under a capacity, with proofs; and what it has when time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from scheduler.placement.descents import Descents
from scheduler.placement.problem import Placement, Problem, placement_of
from scheduler.placement.registry import planner
from scheduler.placement.search import Targets, search


@planner("exact")
def exact(
    problem: Problem,
    *,
    seed: int = 0,
    max_nodes: int = 2_000_000,
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Placement:
    """Branch and bound with restarts, after minimalloc (see `scheduler.placement.skyline`).

    Without a capacity it looks for the least height: descents under the proven bound take turns with
    descents between the bound and the best height so far. A descent that comes to its end without a fit
    raises the bound. With a capacity, only that is tried, until there is a fit or the proof that there is none.

    Args:
        problem: What to place.
        seed: Of the restarts.
        max_nodes: States of the tree to look at, in all.
        time_limit_s: Seconds of `clock` to use. With a limit, two runs may differ.
        clock: Tells the time in seconds.

    Returns:
        The best placement found, always a valid one. `is_optimal` says that its height is proven to be
        the least. Where the problem has a capacity: `fits(capacity)`, or `bound > capacity`, which
        proves that nothing fits, or neither, if the limits came first.
    """
    deadline = None if time_limit_s is None else clock() + time_limit_s

    def out_of_time() -> bool:
        return deadline is not None and clock() >= deadline

    best = replace(search(problem, seed=seed, time_limit_s=time_limit_s, clock=clock), planner="exact")
    goal = problem.capacity
    low, high = Descents(problem, seed=seed), Descents(problem, seed=seed + 1)
    low.bound = high.bound = best.bound
    targets = Targets(best.bound)
    is_low = False
    while not _is_answered(best, goal, low.bound) and not out_of_time():
        left = max_nodes - low.skyline.num_nodes - high.skyline.num_nodes
        if left <= 0:
            break
        is_low = not is_low or goal is not None
        descents = low if is_low else high
        height = goal if goal is not None else descents.bound if is_low else targets.height
        offsets = descents.attempt(height, is_short=False, max_nodes=left, out_of_time=out_of_time)
        low.bound = high.bound = max(low.bound, high.bound)
        if offsets is not None:
            best = placement_of(problem, offsets, planner="exact")
        if not is_low:
            targets.update(bound=low.bound, best=best.height, succeeded=offsets is not None)
    return placement_of(problem, best.offsets, planner="exact", bound=low.bound)


def _is_answered(best: Placement, goal: int | None, bound: int) -> bool:
    return best.height <= bound or (goal is not None and (best.fits(goal) or bound > goal))
