"""`search`: several orders, then improvement of the best: seconds, near the bound, no proof."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from scheduler.placement.descents import NUM_RULES, Descents, descent_cost
from scheduler.placement.greedy import lowest_fit
from scheduler.placement.problem import Placement, Problem, placement_of
from scheduler.placement.registry import planner

# Above this, one descent of the skyline tree takes more than a second: improve the order instead.
_MAX_DESCENT_COST = 4_000_000
# Buffers squared, over all rounds: a first fit of 50,000 takes 2.4 s, so that these are 5 s.
_MAX_FIRST_FIT_COST = 5_000_000_000
_NUM_TIGHTEST = 2
# A descent that succeeds looks at 1 to 3 states a buffer; this only guards against the odd endless one.
_MAX_NODES_PER_BUFFER = 8


@planner("search")
def search(
    problem: Problem,
    *,
    seed: int = 0,
    max_rounds: int = 16,
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Placement:
    """Ours: the best of several first-fit orders, improved in rounds.

    The orders are by size, lifetime, area, and by conflicts (bytes of all buffers alive at some time
    together with this one) alone and times size; by size and by its power of two, ties in order of birth; and by birth
    alone. Melon's and size-ordered first fit are among them. Equal sizes are common, so the rule for ties decides: on
    steps of transformers birth is better than its opposite by up to a tenth. The best two orders are tried once more
    with the tightest gap instead of the lowest.

    A round of improvement descends the skyline tree (`scheduler.placement.skyline`) under a height between the
    bound and the best so far: first the bound itself, then, as descents fail, ever closer to the
    best. Where the tree is too large for that, a round takes the buffers that stick out at the top, moves each
    to a random earlier position in the order, and places anew ("squeaky wheel optimisation", Joslin and
    Clements 1999).

    Args:
        problem: What to place; its capacity, if any, does not matter.
        seed: Of all that is random.
        max_rounds: Rounds of improvement at most.
        time_limit_s: Seconds of `clock` after which no more is tried. With a limit, two runs may differ.
        clock: Tells the time in seconds.
    """
    deadline = None if time_limit_s is None else clock() + time_limit_s

    def out_of_time() -> bool:
        return deadline is not None and clock() >= deadline

    orders = _orders(problem)
    placed: list[tuple[list[int], Placement]] = []
    for order in orders:
        placed.append((order, placement_of(problem, lowest_fit(problem, order), planner="search")))
        if placed[-1][1].is_optimal:
            return placed[-1][1]
        if out_of_time():
            break
    placed.sort(key=lambda entry: entry[1].height)
    order, best = placed[0]
    for again, _ in placed[:_NUM_TIGHTEST]:
        if out_of_time():
            break
        tight = placement_of(problem, lowest_fit(problem, again, tightest=True), planner="search")
        best = min(best, tight, key=lambda placement: placement.height)
    if best.is_optimal:
        return best
    if descent_cost(problem) <= _MAX_DESCENT_COST:
        return _descend(problem, best, seed=seed, max_rounds=max_rounds, out_of_time=out_of_time)
    max_rounds = min(max_rounds, max(_MAX_FIRST_FIT_COST // max(len(problem.buffers), 1) ** 2, 1))
    return _squeak(problem, best, order, random.Random(seed), max_rounds=max_rounds, out_of_time=out_of_time)


class Targets:
    """Which height to try next: the bound, then half way between what failed and the best.

    Args:
        bound: Proven lower bound in bytes.

    Attributes:
        height: The height to try.
    """

    def __init__(self, bound: int) -> None:
        self.height = bound
        self._failed = bound  # tried in vain, if not proven to be impossible
        self._num_failures = 0

    def update(self, *, bound: int, best: int, succeeded: bool) -> None:
        """After an attempt under `height`: every rule of priority gets its turn before it is given up."""
        self._num_failures = 0 if succeeded else self._num_failures + 1
        if not succeeded and self._num_failures < NUM_RULES:
            self.height = max(self.height, bound)
            return
        if not succeeded:
            self._num_failures = 0
            self._failed = self.height
        middle = (self._failed + best) // 2
        if best - middle <= best // 500:  # near enough: from the bound again
            self._failed = middle = bound
        self.height = max(middle, bound)


def _descend(
    problem: Problem, best: Placement, *, seed: int, max_rounds: int, out_of_time: Callable[[], bool]
) -> Placement:
    descents = Descents(problem, seed=seed)
    targets = Targets(descents.bound)
    max_nodes = _MAX_NODES_PER_BUFFER * len(problem.buffers)
    for _ in range(max_rounds):
        if out_of_time() or best.height <= descents.bound:
            break
        offsets = descents.attempt(targets.height, is_short=True, max_nodes=max_nodes, out_of_time=out_of_time)
        if offsets is not None:
            best = placement_of(problem, offsets, planner="search")
        targets.update(bound=descents.bound, best=best.height, succeeded=offsets is not None)
    return placement_of(problem, best.offsets, planner="search", bound=descents.bound)


def _squeak(
    problem: Problem,
    best: Placement,
    order: Sequence[int],
    rng: random.Random,
    *,
    max_rounds: int,
    out_of_time: Callable[[], bool],
) -> Placement:
    sizes = problem.occupied_nbytes()
    best_order, placed = list(order), best
    for _ in range(max_rounds):
        if out_of_time() or best.is_optimal:
            break
        edge = placed.height - rng.random() * (best.height - best.bound)
        order = list(best_order)
        for index in [i for i in order if placed.offsets[i] + sizes[i] > edge]:
            position = order.index(index)
            order.insert(rng.randint(0, position), order.pop(position))
        placed = placement_of(problem, lowest_fit(problem, order), planner="search")
        if placed.height <= best.height:
            best, best_order = placed, order
        else:
            placed = best
    return best


def _orders(problem: Problem) -> list[list[int]]:
    sizes = np.array(problem.occupied_nbytes(), dtype=np.float64)
    durations = np.array([b.duration for b in problem.buffers], dtype=np.float64)
    starts = np.array([b.start for b in problem.buffers], dtype=np.int64)
    stops = np.array([b.stop for b in problem.buffers], dtype=np.int64)
    # bytes alive together with a buffer: all that are born before its end, but for the dead before its start
    by_stop, by_start = np.argsort(stops, kind="stable"), np.argsort(starts, kind="stable")
    dead = np.concatenate(([0.0], np.cumsum(sizes[by_stop])))[np.searchsorted(stops[by_stop], starts, side="right")]
    born = np.concatenate(([0.0], np.cumsum(sizes[by_start])))[np.searchsorted(starts[by_start], stops, side="left")]
    conflicts = born - dead
    classes = np.floor(np.log2(np.maximum(sizes, 1.0)))
    births = -starts.astype(np.float64)
    keys = (
        (sizes, durations),
        (sizes, births),
        (classes, births),
        (classes, durations),
        (births, durations),
        (durations, sizes),
        (sizes * durations, sizes),
        (conflicts, sizes),
        (sizes * conflicts, durations),
    )
    return [np.lexsort((-second, -first)).tolist() for first, second in keys]
