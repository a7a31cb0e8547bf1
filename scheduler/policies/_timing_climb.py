"""Transfers of a short step timed by trial: room withheld around a few ops drawn at random; what takes less time stays.

The rules of `_slack` look at one transfer after another. Where both links are busy most of the time it matters which
of them take the little room there is, and how much stays free: for writes to be done before their chunks are loaded
into, and for what comes back to find its old chunks. That nobody knows beforehand, so it is tried.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from scheduler.budget import IntArray
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import Evaluation, evaluate
from scheduler.plan import Residency
from scheduler.policies._slack import shortest, timed_with_less
from scheduler.trace import Trace

# The most ops of a step that is timed so, and what it loses at least to waits and remaps, as a share of its time.
_MOST_OPS = 300
_MUCH_LOST = 0.02

# Shares of the memory that are tried first, around all ops; and how near the best of these must come to what is known,
# as a factor of its time. What is further behind did not get ahead.
_SHARES = (1.0, 0.94, 0.87, 0.8, 0.75, 0.7)
_NEAR = 1.01

# A bound on the search, in ops simulated, and in candidates: two seconds of a core for 231 ops.
_MOST_OPS_SIMULATED = 20_000
_MOST_TRIED = 80

# How many stretches are changed at once, the longest of them as a share of the step's ops, and the most that is
# withheld, or given back, in each as a share of the memory.
_NUM_STRETCHES = (1, 3, 6)
_LONGEST = 1 / 16
_MOST_WITHHELD = 1 / 4

# So many of what was the best so far are returned: until they are coloured for good, their remaps are an estimate.
_MOST_RETURNED = 3


def climbed(candidates: Sequence[Evaluation], trace: Trace) -> list[Evaluation]:
    """The fastest of the candidates with its transfers timed anew: the best of what was tried, the best one last.

    Empty for a long step, for one that hardly waits, and where less room around all ops is no way to come near.
    """
    found = min(candidates, key=lambda own: own.rank)
    lost_ns = found.duration_ns - trace.duration_ns - found.simulation.recompute_ns
    if len(trace.ops) > _MOST_OPS or lost_ns <= _MUCH_LOST * trace.duration_ns:
        return []
    search = _Climb(found, trace)
    search.try_shares()
    if not search.steps or search.steps[-1].duration_ns > _NEAR * found.duration_ns:
        return []
    search.climb()
    return search.steps[-_MOST_RETURNED:]


class _Climb:
    """The best timing so far.

    Attributes:
        steps: What was the best so far at some time, in order.
        withheld, puts_off: How the last of them was timed.
    """

    def __init__(self, found: Evaluation, trace: Trace) -> None:
        self.trace = trace
        self.machine = found.plan.machine
        self.stays = shortest(found.proposal, trace, self.machine)
        self.steps: list[Evaluation] = []
        self.withheld: IntArray = np.zeros(len(trace.ops), dtype=np.int64)
        self.puts_off = False
        self.seen: set[tuple[Residency, ...]] = set()

    def try_shares(self) -> None:
        """As much withheld around each op."""
        nothing = self.withheld
        for puts_off in (False, True):
            for share in _SHARES:
                self._try(nothing + int(self.machine.num_chunks * (1 - share)), puts_off=puts_off)

    def climb(self) -> None:
        """More or less withheld around some ops."""
        rng, num_ops, memory = random.Random(0), len(self.trace.ops), self.machine.num_chunks
        for _ in range(min(_MOST_TRIED, _MOST_OPS_SIMULATED // num_ops)):
            withheld = self.withheld.copy()
            for _ in range(rng.choice(_NUM_STRETCHES)):
                start = rng.randrange(num_ops)
                stop = start + rng.randrange(1, max(int(num_ops * _LONGEST), 2))
                withheld[start:stop] += int(memory * rng.uniform(-_MOST_WITHHELD, _MOST_WITHHELD))
            self._try(np.maximum(withheld, 0), puts_off=self.puts_off)

    def _try(self, withheld: IntArray, *, puts_off: bool) -> None:
        proposal = timed_with_less(self.stays, self.trace, self.machine, withheld, puts_off=puts_off)
        if proposal in self.seen:
            return
        self.seen.add(proposal)
        outcome = evaluate(proposal, self.trace, self.machine)
        if isinstance(outcome, Shortage) or (self.steps and outcome.rank >= self.steps[-1].rank):
            return
        self.steps.append(outcome)
        self.withheld, self.puts_off = withheld, puts_off
