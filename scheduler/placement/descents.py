"""Repeated descents of the skyline tree, each with other priorities: restarts against bad first choices."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from scheduler.placement.problem import Problem, lower_bound
from scheduler.placement.skyline import OutOfLuck, Skyline

# Dead ends per buffer after which the shortest descents are given up. On minimalloc's A-F and SOMAS'
# ResNet-50 (capacities from the bound to 1.2 of it) half of the descents that succeed within 5 have met
# fewer than 0.05, nine tenths fewer than 0.5.
_DEAD_ENDS_PER_BUFFER = 0.5

# Which buffer first: exponents of its size and of its duration in sections. Each of them is the best one on
# some of those problems and fails on others.
_RULES = ((1.0, 0.0), (0.0, 1.0), (0.5, 1.0), (1.0, 0.5), (1.0, 1.0))
NUM_RULES = len(_RULES)

# How much it counts that a buffer's sides meet those of the valley: in the first two turns of the rules, then at
# random. On 20 tilings of 400 buffers, 40 short descents under the bound found 14 with 4, 11 with 1 (it does not
# count), in part others; `search` ended 2.7 % above the bound on average with 1 alone, and 1.8 % with these.
_FIRST_FIT_WEIGHTS = (1.0, 4.0)
_FIT_WEIGHTS = (1.0, 2.0, 4.0, 16.0)


class Descents:
    """Tries to fit a problem under capacities, descent by descent. Deterministic for a seed.

    Which buffer is tried first in a valley decides how fast a fit is found, and no one rule is good on all
    problems. So the rules take turns: first as they are, then with a preference for buffers that meet their
    valley's sides (the fitness of skyline heuristics in strip packing; Wei et al. 2011), then blurred at random.
    The lengths follow Luby's sequence, which is within a logarithm of the best cut-off for any distribution of
    search times.

    Args:
        problem: What is to be placed.
        seed: Of the blur.

    Attributes:
        bound: Proven lower bound on the height in bytes; grows with the proofs found.
    """

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        sizes = problem.occupied_nbytes()
        self.unit = math.gcd(*sizes) or 1  # the heights of canonical placements are sums of sizes
        spans = [(b.start, b.stop) for b in problem.buffers]
        self.skyline = Skyline(spans, [nbytes // self.unit for nbytes in sizes])
        self.bound = lower_bound(problem)
        self._random = random.Random(seed)
        self._num_rounds = 0

    def attempt(
        self, height: int, *, is_short: bool, max_nodes: int, out_of_time: Callable[[], bool]
    ) -> tuple[int, ...] | None:
        """One descent under `height` bytes, not below `bound`.

        Args:
            height: What the highest end may be.
            is_short: Give up early, whatever Luby's sequence says.
            max_nodes: States to look at at most.
            out_of_time: Asked now and then.

        Returns:
            Offsets in bytes; or None, where none were found. `bound` then tells whether there are none:
            it lies above `height`.
        """
        self._num_rounds += 1
        length = 1 if is_short else _luby(self._num_rounds)
        capacity = height // self.unit
        try:
            found = self.skyline.fit(
                capacity,
                priority=self._priority(),
                fit_weight=self._fit_weight(),
                max_dead_ends=1 + int(_DEAD_ENDS_PER_BUFFER * len(self.skyline.sizes) * length),
                max_nodes=max_nodes,
                out_of_time=out_of_time,
            )
        except OutOfLuck:
            return None
        if found is None:
            self.bound = max(self.bound, (capacity + 1) * self.unit)
            return None
        return tuple(offset * self.unit for offset in found)

    def _fit_weight(self) -> float:
        """For `Skyline.fit`."""
        turn = (self._num_rounds - 1) // NUM_RULES
        return _FIRST_FIT_WEIGHTS[turn] if turn < len(_FIRST_FIT_WEIGHTS) else self._random.choice(_FIT_WEIGHTS)

    def _priority(self) -> list[float]:
        turn, rule = divmod(self._num_rounds - 1, NUM_RULES)
        by_size, by_duration = _RULES[rule]
        blur = self._random.uniform(0.3, 1.0) if turn >= len(_FIRST_FIT_WEIGHTS) else 0.0
        skyline = self.skyline
        return [
            size**by_size * (last - first) ** by_duration * math.exp(self._random.gauss(0.0, blur))
            for size, first, last in zip(skyline.sizes, skyline.first, skyline.last, strict=True)
        ]


def descent_cost(problem: Problem) -> int:
    """Upper estimate of the sections that one descent looks at, at about 0.5 us each."""
    return len(problem.buffers) * len({b.start for b in problem.buffers})


def _luby(position: int) -> int:
    """1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ..., from position 1 (Luby, Sinclair, Zuckerman 1993)."""
    while True:
        length = position.bit_length()
        if position == (1 << length) - 1:
            return 1 << (length - 1)
        position -= (1 << (length - 1)) - 1
