"""Placement in pieces: chunk colouring, for targets with virtual addressing.

Any set of free chunks will do for any buffer, so a walk in order of start needs exactly as many
chunks as are occupied at the worst moment: no search, no fragmentation, no gap to the bound. What it costs
is rounding each buffer up to whole chunks, less than one chunk a buffer. `rounding_cost` says how much
that is at the peak.

`scheduler.colouring.colouring` does the same for a plan's residencies, where a step's end meets its start.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from scheduler.placement.problem import Placement, Problem, lower_bound
from scheduler.placement.registry import planner

DEFAULT_CHUNK_NBYTES = 2 << 20


@planner("chunked")
def chunked(problem: Problem, *, chunk_nbytes: int = DEFAULT_CHUNK_NBYTES) -> Placement:
    """Interval colouring with chunks; the height is the most chunk bytes alive at once, always.

    Among free runs of chunks a buffer takes the smallest that holds it whole, else the longest ones, so
    that it lies in few pieces.

    Args:
        problem: What to place.
        chunk_nbytes: Size of a chunk; a multiple of the problem's alignment.

    Returns:
        A placement with `runs`. They make up whole chunks, so that it is valid for
        `in_chunks(problem, chunk_nbytes)`.
    """
    rounded = in_chunks(problem, chunk_nbytes)
    sizes = rounded.occupied_nbytes()
    height = lower_bound(rounded)
    free = _FreeRuns(height)
    runs: list[tuple[tuple[int, int], ...]] = [()] * len(sizes)
    alive: list[tuple[int, int]] = []  # stop, index, the first to stop last
    for index in sorted(range(len(sizes)), key=lambda i: (rounded.buffers[i].start, i)):
        while alive and -alive[-1][0] <= rounded.buffers[index].start:
            free.give(runs[alive.pop()[1]])
        runs[index] = free.take(sizes[index])
        insort(alive, (-rounded.buffers[index].stop, index))
    return Placement(
        offsets=tuple(own[0][0] for own in runs),
        height=height,
        bound=height,
        planner="chunked",
        runs=tuple(runs),
    )


def in_chunks(problem: Problem, chunk_nbytes: int) -> Problem:
    """The same buffers with whole chunks as their alignment."""
    if chunk_nbytes < 1 or chunk_nbytes % problem.alignment:
        raise ValueError(f"chunks of {chunk_nbytes} bytes: must be a multiple of the alignment {problem.alignment}")
    return replace(problem, alignment=chunk_nbytes)


def rounding_cost(problem: Problem, chunk_nbytes: int) -> float:
    """What rounding to chunks adds to the most bytes alive at once, as a fraction of them."""
    unrounded = lower_bound(problem)
    return lower_bound(in_chunks(problem, chunk_nbytes)) / unrounded - 1.0 if unrounded else 0.0


class _FreeRuns:
    """Free bytes of the arena as runs `(offset, nbytes)`, neighbours merged, in order of offset."""

    def __init__(self, height: int) -> None:
        self.runs: list[tuple[int, int]] = [(0, height)] if height else []

    def take(self, nbytes: int) -> tuple[tuple[int, int], ...]:
        whole = [run for run in self.runs if run[1] >= nbytes]
        chosen = [min(whole, key=lambda run: (run[1], run[0]))] if whole else sorted(self.runs, key=lambda r: -r[1])
        taken = []
        for offset, length in chosen:
            own = min(length, nbytes)
            self.runs.remove((offset, length))
            if own < length:
                insort(self.runs, (offset + own, length - own))
            taken.append((offset, own))
            nbytes -= own
            if not nbytes:
                break
        assert not nbytes, "more is occupied at once than the bound says"
        return tuple(taken)

    def give(self, runs: tuple[tuple[int, int], ...]) -> None:
        for run in runs:
            insort(self.runs, run)
        merged: list[tuple[int, int]] = []
        for offset, length in self.runs:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((offset, length))
        self.runs = merged
