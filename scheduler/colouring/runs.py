"""Runs of neighbouring chunks: which to take so that few are broken, and where they start in what was taken."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.budget import IntArray

BoolArray = npt.NDArray[np.bool_]

NO_CHUNKS: IntArray = np.empty(0, dtype=np.int64)


def best_runs(good: BoolArray, size: int) -> IntArray:
    """`size` of the good chunks: from the shortest run that is long enough, else from the longest runs."""
    bounded = np.zeros(len(good) + 2, dtype=np.bool_)
    bounded[1:-1] = good
    edges = (bounded[1:] != bounded[:-1]).nonzero()[0]
    firsts = edges[::2]
    lengths = edges[1::2] - firsts
    enough = (lengths >= size).nonzero()[0]
    if len(enough):
        first = int(firsts[enough[lengths[enough].argmin()]])
        return np.arange(first, first + size)
    order = np.argsort(-lengths, kind="stable")
    last = int(np.searchsorted(np.cumsum(lengths[order]), size)) + 1
    return np.concatenate([np.arange(firsts[i], firsts[i] + lengths[i]) for i in order[:last]])[:size]


def least(keys: IntArray, count: int) -> IntArray:
    """Positions of the `count` least keys; of equal ones, the first."""
    if not count:
        return NO_CHUNKS
    last = np.partition(keys, count - 1)[count - 1]
    less = np.flatnonzero(keys < last)
    return np.concatenate([less, np.flatnonzero(keys == last)[: count - len(less)]])


def all_runs(places: list[IntArray]) -> list[tuple[tuple[int, int], ...]]:
    """For each list of chunks in order, its `(first chunk, count)` runs."""
    is_first = run_starts(places)
    if not len(is_first):
        return [() for _ in places]
    at = np.flatnonzero(is_first)
    lengths = np.diff(at, append=len(is_first))
    runs = list(zip(np.concatenate(places)[at].tolist(), lengths.tolist(), strict=True))
    ends = np.searchsorted(at, np.cumsum([len(chunks) for chunks in places])).tolist()
    return [tuple(runs[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]


def run_starts(places: list[IntArray]) -> BoolArray:
    """With the lists of chunks one after another: where each run of neighbouring chunks starts."""
    if not places:
        return np.empty(0, dtype=np.bool_)
    chunks = np.concatenate(places)
    is_first = np.ones(len(chunks), dtype=np.bool_)
    is_first[1:] = chunks[1:] - chunks[:-1] != 1
    starts = np.cumsum([len(own) for own in places])[:-1]
    is_first[starts[starts < len(chunks)]] = True
    return is_first
