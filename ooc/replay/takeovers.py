"""Takeovers of chunks within a plan: which residencies held a residency's chunks before it, and what to wait for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np

from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.replay.planned_reruns import PlannedRerun
from scheduler.plan import Born, Dropped, Evicted, Kept, Loaded, occupied_ticks
from scheduler.trace import Trace


class Takeovers:
    """Finds the takeovers of one plan's residencies, and notes them there.

    Args:
        deaths: When variables are freed in the step, and which, in order.
        written_out: Identities of residencies that are written out although re-runs make their bytes again.
    """

    def __init__(
        self,
        trace: Trace,
        variables: Sequence[PlanVariable],
        deaths: Sequence[tuple[int, int]],
        written_out: Container[int],
    ) -> None:
        self._trace = trace
        self._variables = variables
        self._deaths = deaths
        self._written_out = written_out

    def __repr__(self) -> str:
        return f"<Takeovers of {len(self._variables)} variables>"

    def find(
        self,
        residencies: Sequence[ExecutableResidency],
        num_chunks: int,
        written_early: Iterable[tuple[ExecutableResidency, ExecutableResidency]],
    ) -> None:
        """Find for each residency which ones held its chunks before it, across the step boundary, too.

        A residency waits for the transfers of the one before it. Where that one may not have waited
        itself (kept over the boundary, left out, or born between ops and perhaps not born this time),
        it waits for those before that, too. A load that is left out waits all the same. What was copied away at the
        border may still be on its way out from there.
        """
        last = np.full(num_chunks, -1, dtype=np.int64)
        passed_on: list[set[int]] = [set() for _ in residencies]
        number_of = {id(residency): number for number, residency in enumerate(residencies)}
        early = {number_of[id(ends)]: number_of[id(starts)] for ends, starts in written_early}
        for lap in range(2):
            for number, residency in enumerate(residencies):
                before: set[int] = set()
                for first, count in residency.runs:
                    before.update(np.unique(last[first : first + count]).tolist())
                    last[first : first + count] = number
                before.discard(-1)
                before.discard(number)
                before |= {early[n] for n in before if n in early} - {number}
                waits = {n for n in before if self.has_transfer(residencies[n])}.union(*(passed_on[n] for n in before))
                waits.discard(number)
                op = self.birth_op(residency)
                is_between = isinstance(residency.planned.start, Born) and op is None
                if isinstance(residency.planned.start, Kept) or is_between or residency.is_left_out:
                    passed_on[number] = waits
                if lap and not isinstance(residency.planned.start, Kept):
                    residency.waits = tuple(residencies[n] for n in sorted(waits))
                if lap and op is not None:
                    start_tick = self._trace.ops[op].start_tick
                    residency.dead = tuple(self._freed_inside(residency, start_tick))

    def has_transfer(self, residency: ExecutableResidency) -> bool:
        """Whether a load or write of this residency may be under way when its chunks are passed on."""
        planned = residency.planned
        if residency.is_left_out:
            return False
        is_written = isinstance(planned.stop, Evicted | Dropped) or id(residency) in self._written_out
        return isinstance(planned.start, Loaded) or is_written

    def wait_for_scratch(self, reruns: Iterable[PlannedRerun], residencies: Sequence[ExecutableResidency]) -> None:
        """Find for each re-run which residencies held its scratch chunks before: theirs may be under way."""
        for rerun in reruns:
            chunks = {c for runs in rerun.scratch.values() for first, n in runs for c in range(first, first + n)}
            rerun.waits = tuple(
                r for r in residencies if self.has_transfer(r) and not chunks.isdisjoint(r.planned.chunk_indices())
            )

    def birth_op(self, residency: ExecutableResidency) -> int | None:
        """The op inside which a residency begins with a birth; None if it begins otherwise, or between ops."""
        if not isinstance(residency.planned.start, Born):
            return None
        tick, _ = occupied_ticks(residency.planned, self._trace)
        op = bisect_right(self._trace.ops, tick, key=lambda o: o.start_tick) - 1
        return op if op >= 0 and tick < self._trace.ops[op].stop_tick else None

    def _freed_inside(self, residency: ExecutableResidency, start_tick: int) -> Iterator[int]:
        """Variables that die between an op's start and the residency's birth inside it and held a chunk of it.

        All that dies earlier is seen dead before the op (`deaths`).
        """
        birth_tick, _ = occupied_ticks(residency.planned, self._trace)
        chunks = set(residency.planned.chunk_indices())
        low = bisect_left(self._deaths, (start_tick + 1, -1))
        high = bisect_left(self._deaths, (birth_tick + 1, -1))
        for _, index in self._deaths[low:high]:
            final = self._variables[index].residencies[-1] if self._variables[index].residencies else None
            if final is not None and not chunks.isdisjoint(final.planned.chunk_indices()):
                yield index
