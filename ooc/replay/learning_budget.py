"""`LearningBudget`: how much time learning and planning may take while everything fits in memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from ooc.memory.counters import Counters

LEARNING_FRACTION = 0.05
"""Where nothing has to move, learning takes at most this part of the time so far. A planned op saves about 7 us, and
learning one takes 50 us (reinforce in benchmarks/scripts: 35 of 51 ms a step were spent on building traces)."""
MOST_FRACTION = 0.15
"""Where things have to move, so much of the time so far, once `FREE_SEQUENCES` were learned. A mixture of experts whose
sizes lay about the threshold was never alike twice, and learning took half of each step."""
FREE_SEQUENCES = 64
_CALM_PERIODS = 4
"""Periods in a row that had to move nothing before all is taken to fit: an evaluation may move what steps do not."""
_LONGEST_PAUSE = 64


class LearningBudget:
    """Decides at each boundary whether to learn from the period that ends, and whether to enter a plan for the next.

    A plan saves waiting for what is moved. Where nothing had to be moved for some periods it only saves a few
    microseconds an op, so learning may take a small part of the time so far. After a step that left its plan there,
    plans are not entered for a while, which doubles each time. As soon as anything moves for want of room, all plans
    are entered, and learning may take a larger part of the time, and any at first. What plans themselves move says
    nothing: layers skipped at random left a plan in each step, and each time what had outlived it was evicted, at four
    times the memory that the step needs.

    Args:
        counters: Of what is moved.
        is_limited: Whether there are limits at all; without, what is learned does not depend on the clock.
        clock: The time, in seconds.
    """

    def __init__(self, counters: Counters, *, is_limited: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._is_limited = is_limited
        self._clock = clock
        self._opened = clock()
        self._spent_s = 0.0
        self._num_learned = 0
        self._num_crowded = 0
        self._num_calm = 0
        self._pause = 0  # periods without a plan after the last step that left its plan
        self._num_paused = 0

    def __repr__(self) -> str:
        return f"<LearningBudget, {self._num_calm} periods moved nothing, {self._spent_s:.2f} s spent>"

    @property
    def everything_fits(self) -> bool:
        """Whether nothing had to be moved for some periods, so that plans are of little use."""
        return self._is_limited and self._num_calm >= _CALM_PERIODS

    def end_period(self, *, has_left_plan: bool, has_replayed: bool) -> None:
        """Note that a period ends: whether it left the plan that it began on, or was replayed to its end."""
        self._num_calm = self._num_calm + 1 if self._counters.num_crowded == self._num_crowded else 0
        if has_replayed:
            self._pause = 0
        elif has_left_plan:
            self._pause = min(max(2 * self._pause, 1), _LONGEST_PAUSE)
            self._num_paused = 0

    def begin_period(self) -> None:
        """Note that a period begins: what entering its plan has moved was not for want of room."""
        self._num_crowded = self._counters.num_crowded

    def may_learn(self) -> bool:
        """Whether to learn from the period that ends."""
        if self.everything_fits:
            return self._is_within(LEARNING_FRACTION)
        return not self._is_limited or self._num_learned < FREE_SEQUENCES or self._is_within(MOST_FRACTION)

    def _is_within(self, fraction: float) -> bool:
        return self._spent_s <= fraction * (self._clock() - self._opened)

    def may_enter(self) -> bool:
        """Whether to enter a plan for the period that begins, if there is one."""
        if not self.everything_fits or self._num_paused >= self._pause:
            return True
        self._num_paused += 1
        return False

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time in this block as spent on learning."""
        started = self._clock()
        self._num_learned += 1
        try:
            yield
        finally:
            self._spent_s += self._clock() - started
