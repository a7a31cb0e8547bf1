"""Resizes a session's pool while training goes on (as in Melon, section 4, when other programs need memory).

This may happen between any two ops. The session bails out of its plan, what lies beyond the new end of the pool moves
to the store, and the chunks there are returned to the system before the call returns. The rest of the step runs on
demand; at its end the sequence is planned for the new budget (or its plan comes from the cache). No bit of the
training depends on when that happens.
"""

from __future__ import annotations

import logging

from ooc.devices.protocols import Memory
from ooc.errors import OocError, SessionError
from ooc.memory.no_room import NoRoom
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.units import format_nbytes
from vmm.chunks import ChunkPool
from vmm.driver import MemoryFault

_log = logging.getLogger(__name__)


def resize_pool(manager: ResidencyManager, memory: Memory, num_chunks: int, num_small_chunks: int) -> None:
    """Resize the pool to `num_chunks` chunks. No plan may be in replay or keep chunks mapped, and no op under way.

    Small blocks get so many chunks beside the pool (`Memory.split_budget`).

    Raises:
        SessionError: What must stay in memory does not fit, or lies beyond the new end. Nothing has changed, except
            that some variables may be in the store now.
        StoreFailed, StoreFull: Something could not be written out. The pool is as it was.
        vmm.driver.MemoryFault: The memory for a larger pool is not there. The pool is as it was.
    """
    manager.foresight.begin(None)  # nothing is to be on its way in
    manager.land()
    manager.store.wait_all()  # what was freed may still be written
    if num_chunks < memory.num_chunks:
        _vacate(manager, memory.num_chunks, num_chunks)
    try:
        memory.resize(num_chunks, num_small_chunks)
    finally:
        manager.retake_pool(ChunkPool(memory.num_chunks))
    _log.info("the pool has %d chunks now", memory.num_chunks)


def yield_pool(manager: ResidencyManager, memory: Memory) -> list[VariableRecord]:
    """Move every variable to the store, and give all of the pool's memory back. Under the same conditions.

    Also variables that no op has named yet, and workspaces of libraries: nothing runs until they are back at their
    addresses.

    Returns:
        Those that were resident, for `refill_pool`.

    Raises:
        SessionError: A variable must stay in memory. Nothing has changed.
        StoreFailed, StoreFull, vmm.driver.MemoryFault: Something could not be written out, or a call failed. All
            that was resident is resident again, unless the note at the error says otherwise.
    """
    manager.end_exports()
    present = [r for r in manager.records.values() if r.state is not State.AWAY]
    for record in present:
        if record.pins or (record.exports and not manager.is_host):
            raise _must_stay("yielded", record)
    try:
        manager.evict(present)
        manager.retake_pool(ChunkPool(0))
        memory.resize(0)
    except BaseException as error:
        manager.retake_pool(ChunkPool(memory.num_chunks))
        try:
            manager.load(present)
        except (NoRoom, OocError, MemoryFault) as second:
            error.add_note(f"Not all could be loaded again; what is left comes when an op needs it: {second}")
        raise
    _log.info("all memory is given back; %d variables were resident", len(present))
    return present


def refill_pool(
    manager: ResidencyManager, memory: Memory, num_chunks: int, num_small_chunks: int, present: list[VariableRecord]
) -> None:
    """After `yield_pool`: take memory again, and load what was resident and is still alive, as far as it fits.

    Raises:
        vmm.driver.MemoryFault: The memory is not there; the pool is still empty. Another call tries it again.
        StoreFailed: Something could not be loaded; it stays in the store, and comes when an op needs it.
    """
    try:
        memory.resize(num_chunks, num_small_chunks)
    finally:
        manager.retake_pool(ChunkPool(memory.num_chunks))
    num_free = memory.num_chunks
    coming = []
    alive = [r for r in present if manager.manages(r) and r.state is State.AWAY]
    for record in sorted(alive, key=lambda r: r.seen):  # what may be in use unseen must come
        num_free -= manager.chunks_of(record.nbytes)
        if num_free >= 0 or not record.seen:
            coming.append(record)
    try:
        manager.load(coming)
    except NoRoom as no_room:
        raise _does_not_fit(manager, memory.num_chunks, no_room.num_needed) from no_room


def _vacate(manager: ResidencyManager, num_before: int, num_after: int) -> None:
    """Empty all chunks from `num_after` on, and end the residency manager's pool there."""
    manager.end_exports()
    leaving = [r for r in manager.records.values() if r.state.holds_chunks and _end(r) > num_after]
    workspaces = [r for r in manager.workspaces() if r.state.holds_chunks and _end(r) > num_after and not r.pins]
    _check_staying(manager, leaving, workspaces, num_after)
    for record in workspaces:
        record.pin()
    try:
        manager.evict(leaving)
        try:
            manager.retake_pool(ChunkPool(num_after))
            manager.load(workspaces)  # ops alone use them unseen: between two ops they may move to other chunks
        except BaseException:
            manager.retake_pool(ChunkPool(num_before))
            manager.load(workspaces)
            raise
    except NoRoom as no_room:
        raise _does_not_fit(manager, num_after, no_room.num_pinned) from no_room
    finally:
        for record in workspaces:
            record.unpin()


def _check_staying(
    manager: ResidencyManager, leaving: list[VariableRecord], workspaces: list[VariableRecord], num_after: int
) -> None:
    """Raise `SessionError` if something that must stay does not fit, or lies beyond the end."""
    staying = [r for r in manager.records.values() if r.state.holds_chunks and not manager.may_be_evicted(r)]
    num_staying = sum(manager.chunks_of(r.nbytes) for r in staying)
    if num_staying > num_after:
        raise _does_not_fit(manager, num_after, num_staying)
    for record in leaving:
        if manager.may_be_evicted(record) or record in workspaces:
            continue
        raise _must_stay("set_budget", record)


def _must_stay(act: str, record: VariableRecord) -> SessionError:
    if record.pins:
        why = "a session.resident() block, or an array of another library, holds it"
    elif record.exports:
        why = "its memory was given out (data_ptr, dlpack), and no touch of a device's memory can be served"
    else:
        why = "it may be in use unseen: no op has named it yet"
    return SessionError(
        f"{act}: a variable of {format_nbytes(record.nbytes)} lies in chunks that would go, and must stay "
        f"where it is: {why}.\n  Options: call it outside session.resident(), between steps; a larger budget; "
        "again after the next step."
    )


def _does_not_fit(manager: ResidencyManager, num_after: int, num_staying: int) -> SessionError:
    chunk = manager.chunk_nbytes
    return SessionError(
        f"set_budget({format_nbytes(num_after * chunk)}): what must stay in memory takes "
        f"{format_nbytes(num_staying * chunk)} (variables that session.resident() holds, workspaces of libraries).\n"
        f"  Options: a budget of more than {format_nbytes(num_staying * chunk)}; call it outside session.resident()."
    )


def _end(record: VariableRecord) -> int:
    """One past the last chunk of a record."""
    return max((first + count for first, count in record.runs), default=0)
