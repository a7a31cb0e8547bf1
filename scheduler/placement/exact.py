"""`exact`: the least height, or a fit under a capacity, with proofs; and what it has when time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from scheduler.placement.descents import Descents
from scheduler.placement.problem import Placement, Problem, placement_of
from scheduler.placement.registry import planner
from scheduler.placement.search import Targets, search

_LOW_TURNS = 3
"""Of so many turns one lowers the best height; the others are for the bound, or the capacity. Of 16 tilings of 260
buffers all met the bound within 15,000 states with 3 and with 4, and 15 with 2."""


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

    It looks for the least height: descents under the proven bound take turns with descents between the bound and the
    best height so far. A descent that comes to its end without a fit raises the bound. With a capacity above the bound,
    descents under the capacity come in between, until there is a fit or the proof that there is none. They
    change nothing for the others and have states of their own, so that what is left where the limits come first is no
    worse than without a capacity: a tiling is often found under its bound only, since more room leaves more ways to go
    wrong.

    Args:
        problem: What to place.
        seed: Of the restarts.
        max_nodes: States of the tree to look at, in all; with a capacity above the bound, as many again at most.
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
    low, high, aimed = (Descents(problem, seed=seed + own) for own in range(3))
    low.bound = high.bound = aimed.bound = best.bound
    targets = Targets(best.bound)
    turn = 0
    while not _is_answered(best, goal, low.bound) and not out_of_time():
        left = max_nodes - low.skyline.num_nodes - high.skyline.num_nodes
        if left <= 0:
            break
        turn += 1
        is_low = turn % _LOW_TURNS != 0
        tries = [(low, low.bound, left) if is_low else (high, targets.height, left)]
        if is_low and goal is not None and goal > low.bound:
            tries.append((aimed, goal, max_nodes - aimed.skyline.num_nodes))
        for descents, height, most in tries:
            if most <= 0 or _is_answered(best, goal, low.bound):
                continue
            offsets = descents.attempt(height, is_short=False, max_nodes=most, out_of_time=out_of_time)
            low.bound = high.bound = aimed.bound = max(low.bound, high.bound, aimed.bound)
            if offsets is not None:
                best = min(best, placement_of(problem, offsets, planner="exact"), key=lambda found: found.height)
            if descents is high:
                targets.update(bound=low.bound, best=best.height, succeeded=offsets is not None)
    return placement_of(problem, best.offsets, planner="exact", bound=low.bound)


def _is_answered(best: Placement, goal: int | None, bound: int) -> bool:
    return best.height <= bound or (goal is not None and (best.fits(goal) or bound > goal))
