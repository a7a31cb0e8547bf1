"""Other names for a plan's chunks: the plan stays what it is, whichever chunk of the pool is called by which number.

A plan says which of its variables share chunks, one after another. Which numbers these have is of no matter to it, as
long as two that differ go on differing. So whoever begins to play a plan where memory is not empty can let what is
there stay where it is, instead of copying it to where the plan happens to have it: chunks are renamed once, and plans
that take turns agree from then on where a variable is that all of them keep in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from scheduler.plan import BorderCopy, Plan

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
    """The plan under other names.

    Args:
        plan: A coloured plan.
        names: For each chunk that it uses the new one: a permutation.
    """
    copies = (
        BorderCopy(source=source, target=target, num_chunks=count)
        for copy in plan.border_copies
        for source, target, count in _pieces(copy, names)
    )
    return replace(
        plan,
        residencies=tuple(replace(r, chunks=renamed_runs(r.chunks, names)) for r in plan.residencies),
        scratch=tuple(replace(room, chunks=renamed_runs(room.chunks, names)) for room in plan.scratch),
        border_copies=tuple(copies),
    )


def renamed_runs(runs: Runs, names: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The same chunks under other names, neighbours in one run."""
    found: list[tuple[int, int]] = []
    for chunk in _chunks(runs):
        now = names[chunk]
        if found and sum(found[-1]) == now:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((now, 1))
    return tuple(found)


def _pieces(copy: BorderCopy, names: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """A copy as copies of neighbours to neighbours. Its source and its target do not overlap, so neither do theirs."""
    start = 0
    for index in range(1, copy.num_chunks + 1):
        source, target = names[copy.source + start], names[copy.target + start]
        length = index - start
        if index == copy.num_chunks or (
            names[copy.source + index] != source + length or names[copy.target + index] != target + length
        ):
            yield source, target, length
            start = index


def _chunks(runs: Runs) -> Iterator[int]:
    return (chunk for first, count in runs for chunk in range(first, first + count))
