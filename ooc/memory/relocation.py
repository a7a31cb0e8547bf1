"""Moves resident variables to other chunks of the pool by copying them, where a plan that is entered wants them.

What is in memory already need not go through the store to change its place: a copy within the pool takes a fraction of
the time of a write and a read. Host memory only.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ooc.memory.record import Runs, State, VariableRecord
from vmm.driver import MemoryFault

if TYPE_CHECKING:
    from ooc.memory.residency import ResidencyManager


def relocate(
    manager: ResidencyManager, targets: Mapping[int, Runs], others: Sequence[VariableRecord], area: int
) -> None:
    """Bring resident variables to their target chunks, and others out of the area, as far as there is room for that.

    Nothing is under way for any of them, and none is pinned or given out. Afterwards the manager has to take its pool
    again (`ResidencyManager.retake_pool`): until then it does not know which chunks are free.

    Args:
        targets: By address, the chunks to which a managed resident record shall move. Disjoint from each other.
        others: Resident records that shall leave the chunks below `area`.
        area: The first chunk that is not in the way.
    """
    records = manager.records
    started_ns, before = time.monotonic_ns(), {address: r.runs for address, r in records.items()}
    try:
        _relocate(manager, targets, others, area)
    finally:
        nbytes = sum(r.nbytes for address, r in records.items() if r.runs != before[address])
        if nbytes:
            manager.counters.note_relocation(started_ns, nbytes)


def _relocate(
    manager: ResidencyManager, targets: Mapping[int, Runs], others: Sequence[VariableRecord], area: int
) -> None:
    records = manager.records
    taken = {c for r in records.values() if r.state is State.RESIDENT for c in _chunks(r.runs)}
    free = set(range(manager.num_chunks)) - taken
    for record in others:
        _move_to(manager, record, _some(free, len(_chunks(record.runs)), at_least=area), free)
    pending = [records[address] for address in targets]
    wanted = {c for runs in targets.values() for c in _chunks(runs)}
    bounced: set[int] = set()
    while pending:
        ready = [r for r in pending if free.issuperset(_chunks(targets[r.address]))]
        for record in ready:
            if free.issuperset(_chunks(targets[record.address])):
                _move_to(manager, record, targets[record.address], free)
                pending.remove(record)
        if ready:
            continue
        # Each waits for another's chunks. One of them gives way; if there is no room for that, the rest stays.
        blocked = next((r for r in pending if r.address not in bounced), None)
        if blocked is None:
            return
        bounced.add(blocked.address)
        _move_to(manager, blocked, _some(free - wanted, len(_chunks(blocked.runs))), free)


def _move_to(manager: ResidencyManager, record: VariableRecord, runs: Runs | None, free: set[int]) -> None:
    """Copy a variable to free chunks, and let its addresses show them. Stays where it is if it cannot be mapped."""
    if runs is None:
        return
    _copy(manager.segments(record.runs, record.nbytes), manager.segments(runs, record.nbytes))
    try:
        manager.guards.lift(record)
        manager.space.map(record.reservation, runs)
    except MemoryFault:
        manager.space.map(record.reservation, record.runs)
        return
    free.update(_chunks(record.runs))
    free.difference_update(_chunks(runs))
    record.relocated(runs)


def _copy(sources: Sequence[tuple[int, int]], destinations: Sequence[tuple[int, int]]) -> None:
    """Copy the bytes of one list of ranges to another of the same length in all; the two do not overlap."""
    there = iter(destinations)
    address, left = 0, 0
    for source, nbytes in sources:
        start, rest = source, nbytes
        while rest:
            if not left:
                address, left = next(there)
            step = min(rest, left)
            ctypes.memmove(address, start, step)
            address, left, start, rest = address + step, left - step, start + step, rest - step


def _some(free: set[int], num_chunks: int, *, at_least: int = 0) -> Runs | None:
    """So many free chunks, the first ones; None: there are not enough."""
    found = sorted(chunk for chunk in free if chunk >= at_least)[:num_chunks]
    if len(found) < num_chunks:
        return None
    runs: list[tuple[int, int]] = []
    for chunk in found:
        if runs and runs[-1][0] + runs[-1][1] == chunk:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((chunk, 1))
    return tuple(runs)


def _chunks(runs: Runs) -> list[int]:
    return [chunk for first, count in runs for chunk in range(first, first + count)]
