"""Copies within memory at the step's border: in which order what is kept comes to where the next step starts with it.

Chunk by chunk, the moves are paths and rings: each chunk has one source and one target at most. A chunk is filled once
what it held has been copied away, so a path is copied from its end; a ring needs one free chunk beside it, by way of
which one of its chunks goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.budget import IntArray
from scheduler.plan import BorderCopy


def border_copies(kept: Sequence[tuple[IntArray, IntArray]], num_chunks: int) -> tuple[BorderCopy, ...] | None:
    """Copies, in order, that bring all that is kept from where it ends a step to where it starts the next.

    Args:
        kept: For each variable, its chunks at the step's end and at its start, in the order of its bytes.
        num_chunks: Of the pool.

    Returns:
        None: chunks change places in a ring, and none is free.
    """
    held: set[int] = set()
    target_of: dict[int, int] = {}
    for ends, starts in kept:
        held.update(ends.tolist())
        target_of.update((a, b) for a, b in zip(ends.tolist(), starts.tolist(), strict=True) if a != b)
    source_of = {target: source for source, target in target_of.items()}
    copies: list[BorderCopy] = []
    ready = [(source_of[target], target) for target in source_of if target not in held]
    _copy_paths(ready, source_of, held, copies)
    while source_of:  # rings
        free = next((chunk for chunk in range(num_chunks) if chunk not in held), None)
        if free is None:
            return None
        target = min(source_of)
        copies += _copied([(target, free)], held)  # what the ring's first chunk holds, so that it can be filled
        source_of[target_of[target]] = free
        _copy_paths([(source_of[target], target)], source_of, held, copies)
    return tuple(copies)


def _copy_paths(
    ready: list[tuple[int, int]], source_of: dict[int, int], held: set[int], copies: list[BorderCopy]
) -> None:
    """Copy `ready`, then what can go to the chunks that are free by then, and so on. Done ones leave `source_of`."""
    while ready:
        copies += _copied(ready, held)
        for _, target in ready:
            del source_of[target]
        ready = [(source_of[source], source) for source, _ in ready if source in source_of]


def _copied(pairs: list[tuple[int, int]], held: set[int]) -> list[BorderCopy]:
    """Copies of single chunks, none of which fills what another empties, as runs of neighbours. Updates `held`."""
    held.difference_update(source for source, _ in pairs)
    held.update(target for _, target in pairs)
    return copies_of(pairs)


def copies_of(pairs: Iterable[tuple[int, int]]) -> list[BorderCopy]:
    """Copies of single chunks, source and target, as runs of neighbours. None of them fills what another empties."""
    runs: list[BorderCopy] = []
    for source, target in sorted(pairs):
        last = runs[-1] if runs else None
        if last is not None and (source - last.source, target - last.target) == (last.num_chunks, last.num_chunks):
            runs[-1] = BorderCopy(source=last.source, target=last.target, num_chunks=last.num_chunks + 1)
        else:
            runs.append(BorderCopy(source=source, target=target, num_chunks=1))
    return runs
