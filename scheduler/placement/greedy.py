"""Planners that decide once and never look back: NNTrainer's, Melon's, size-ordered first fit, best fit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from scheduler.placement.problem import Placement, Problem, placement_of
from scheduler.placement.registry import planner


def lowest_fit(problem: Problem, order: Iterable[int], *, tightest: bool = False) -> list[int]:
    """Offsets that arise if buffers are placed in `order`, each as low as those before it allow.

    O(n) numpy work a buffer: 2.4 s of processor time for 50,000 buffers.

    Args:
        order: All buffers.
        tightest: Of the gaps that are large enough, take the smallest one instead of the lowest.
    """
    num_buffers = len(problem.buffers)
    sizes = problem.occupied_nbytes()
    starts = np.empty(num_buffers, dtype=np.int64)  # of those placed, in order of their offsets
    stops = np.empty(num_buffers, dtype=np.int64)
    lows = np.empty(num_buffers, dtype=np.int64)
    highs = np.empty(num_buffers, dtype=np.int64)
    offsets = [0] * num_buffers
    for count, index in enumerate(order):
        buffer, nbytes = problem.buffers[index], sizes[index]
        alive = np.flatnonzero((starts[:count] < buffer.stop) & (stops[:count] > buffer.start))
        ceilings = lows[alive]
        floors = np.concatenate(([0], np.maximum.accumulate(highs[alive])))
        gaps = np.flatnonzero(ceilings - floors[:-1] >= nbytes)
        chosen = gaps[(ceilings - floors[:-1])[gaps].argmin()] if tightest and len(gaps) else gaps[:1]
        offset = int(floors[chosen].item() if len(gaps) else floors[-1])
        at = int(np.searchsorted(lows[:count], offset))
        for column, value in (
            (starts, buffer.start),
            (stops, buffer.stop),
            (lows, offset),
            (highs, offset + nbytes),
        ):
            column[at + 1 : count + 1] = column[at:count]
            column[at] = value
        offsets[index] = offset
    return offsets


@planner("nntrainer")
def nntrainer(problem: Problem) -> Placement:
    """NNTrainer's sorting planner (ICSE'24 and arXiv 2022, section 4, Algorithm 2), made sound.

    Buffers in order of first use, at equal first use the one used longest first. Each takes over the
    slot of the first earlier tensor that is dead by then, or a new slot on top of the arena.

    As printed, the algorithm compares with the earlier *tensor's* last use, though its slot may have
    been let again since, and it does not compare sizes. Here a slot keeps its latest last use, and
    must be large enough. A slot never splits or grows, which is what this planner pays for its simplicity.
    """
    sizes = problem.occupied_nbytes()
    slots: list[tuple[int, int, int]] = []  # offset, size, latest last use
    offsets = [0] * len(sizes)
    height = 0
    for index in sorted(range(len(sizes)), key=lambda i: (problem.buffers[i].start, -problem.buffers[i].stop, i)):
        buffer, nbytes = problem.buffers[index], sizes[index]
        slot = next((k for k, (_, size, last) in enumerate(slots) if last <= buffer.start and size >= nbytes), None)
        if slot is None:
            offsets[index] = height
            slots.append((height, nbytes, buffer.stop))
            height += nbytes
        else:
            offsets[index] = slots[slot][0]
            slots[slot] = (*slots[slot][:2], buffer.stop)
    return placement_of(problem, offsets, planner="nntrainer")


@planner("melon")
def melon(problem: Problem) -> Placement:
    """Melon's lifetime-aware pool (MobiSys'22, section 4.2.2).

    The buffer with the longest lifetime goes first, to the lowest offset where it fits, so that
    long-lived ones lie beneath short-lived ones. Equal lifetimes: the larger one first.
    """
    sizes = problem.occupied_nbytes()
    order = sorted(range(len(sizes)), key=lambda i: (-problem.buffers[i].duration, -sizes[i], i))
    return placement_of(problem, lowest_fit(problem, order), planner="melon")


@planner("first_fit_by_size")
def first_fit_by_size(problem: Problem) -> Placement:
    """Largest first, each as low as it fits: the usual greedy of inference runtimes.

    "Greedy by size" of Pisarchyk and Lee, "Efficient memory management for deep neural net inference"
    (2020); Melon calls it "large tensor first". Equal sizes: the longer lifetime first.
    """
    sizes = problem.occupied_nbytes()
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], -problem.buffers[i].duration, i))
    return placement_of(problem, lowest_fit(problem, order), planner="first_fit_by_size")


@planner("best_fit")
def best_fit(problem: Problem) -> Placement:
    """Best fit in order of allocation, as an online allocator without foresight does it.

    At each allocation, what is dead by then is free; the smallest hole that is large enough is taken
    from its low end, else the arena grows. This is on-demand layout, the baseline that Melon's section
    4.2 compares with; no caching and no splitting limits, which only make it worse.
    """
    sizes = problem.occupied_nbytes()
    lows = highs = stops = np.empty(0, dtype=np.int64)  # of those alive, in order of offset
    offsets = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (problem.buffers[i].start, i)):
        buffer, nbytes = problem.buffers[index], sizes[index]
        lives = stops > buffer.start
        if not lives.all():
            lows, highs, stops = lows[lives], highs[lives], stops[lives]
        floors = np.concatenate(([0], highs))
        gaps = lows - floors[:-1]
        large = np.flatnonzero(gaps >= nbytes)
        at = int(large[gaps[large].argmin()]) if len(large) else len(lows)
        offset = offsets[index] = int(floors[at])
        lows, highs = np.insert(lows, at, offset), np.insert(highs, at, offset + nbytes)
        stops = np.insert(stops, at, buffer.stop)
    return placement_of(problem, offsets, planner="best_fit")
