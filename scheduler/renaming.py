"""Other names for a plan's chunks: the plan stays what it is, whichever chunk of the pool is called by which number.

A plan says which of its variables share chunks, one after another. Which numbers these have is of no matter to it, as
long as two that differ go on differing. So whoever begins to play a plan where memory is not empty can let what is
there stay where it is, instead of copying it to where the plan happens to have it: chunks are renamed once, and plans
that take turns agree from then on where a variable is that all of them keep in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from scheduler.colouring.border_copies import copies_of
from scheduler.colouring.runs import all_runs
from scheduler.plan import Plan, Residency, Scratch

Runs = Sequence[tuple[int, int]]
"""`(first chunk, count)` in the order of a variable's bytes."""


def names_that_match(pairs: Iterable[tuple[Runs, Runs]], num_chunks: int) -> list[int]:
    """Names under which as much as possible of a plan's memory is where its bytes are now.

    Args:
        pairs: For each variable the chunks in which the plan has it, and those in which it is. The latter may have
            fewer, and may lie beyond the plan's. The former are disjoint, and so are the latter.
        num_chunks: The plan's chunks are those below.

    Returns:
        For each of the plan's chunks its new name: each of them once. Chunks of which nothing is said keep their order,
        so that most of what was in one run stays so.
    """
    names = [-1] * num_chunks
    taken = bytearray(num_chunks)
    for planned, present in pairs:
        for name, now in zip(_chunks(planned), _chunks(present), strict=False):
            if name < num_chunks and now < num_chunks:
                names[name], taken[now] = now, 1
    free = (chunk for chunk in range(num_chunks) if not taken[chunk])
    return [next(free) if now < 0 else now for now in names]


def renamed(plan: Plan, names: Sequence[int]) -> Plan:
    """The plan under other names, neighbours in one run.

    Args:
        plan: A coloured plan.
        names: For each chunk that it uses the new one: a permutation.
    """
    residencies, rooms = _renamed_runs(plan.residencies, names), _renamed_runs(plan.scratch, names)
    copies = (
        copies_of((names[copy.source + k], names[copy.target + k]) for k in range(copy.num_chunks))
        for copy in plan.border_copies
    )
    return replace(
        plan,
        residencies=tuple(replace(r, chunks=runs) for r, runs in zip(plan.residencies, residencies, strict=True)),
        scratch=tuple(replace(room, chunks=runs) for room, runs in zip(plan.scratch, rooms, strict=True)),
        border_copies=tuple(chain.from_iterable(copies)),
    )


def is_renamed(plan: Plan, other: Plan) -> bool:
    """Whether two plans of a step have the same residencies, but for the names of chunks."""
    if len(plan.residencies) != len(other.residencies):
        return False
    pairs: set[tuple[int, int]] = set()
    for ours, theirs in zip(plan.residencies, other.residencies, strict=True):
        chunks, others = ours.chunk_indices(), theirs.chunk_indices()
        if replace(ours, chunks=()) != replace(theirs, chunks=()) or len(chunks) != len(others):
            return False
        pairs.update(zip(chunks, others, strict=True))
    return len(pairs) == len({name for name, _ in pairs}) == len({name for _, name in pairs})


def _renamed_runs(stays: Sequence[Residency | Scratch], names: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    new = np.asarray(names, dtype=np.int64)
    return all_runs([new[np.fromiter(_chunks(stay.chunks), dtype=np.int64)] for stay in stays])


def _chunks(runs: Runs) -> Iterator[int]:
    return (chunk for first, count in runs for chunk in range(first, first + count))
