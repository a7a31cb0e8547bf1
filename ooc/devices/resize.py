"""Resizes a session's pool while training goes on (as in Melon, section 4, when other programs need memory).

This may happen between any two ops. The session bails out of its plan, what lies beyond the new end of the pool moves
to the store, and the chunks there are returned to the system before the call returns. The rest of the step runs on
demand; at its end the sequence is planned for the new budget (or its plan comes from the cache). No bit of the
training depends on when that happens.
"""

from __future__ import annotations

import logging

from ooc.devices.protocols import Memory
from ooc.errors import SessionError
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import NoRoom, ResidencyManager
from ooc.units import format_nbytes
from vmm.chunks import ChunkPool

_log = logging.getLogger(__name__)


def resize_pool(manager: ResidencyManager, memory: Memory, num_chunks: int) -> None:
    """Resize the pool to `num_chunks` chunks. No plan may be in replay or keep chunks mapped, and no op under way.

    Raises:
        SessionError: What must stay in memory does not fit, or lies beyond the new end. Nothing has changed, except
            that some variables may be in the store now.
        StoreFailed, StoreFull: Something could not be written out. The pool is as it was.
        vmm.driver.MemoryFault: The memory for a larger pool is not there. The pool is as it was.
    """
    if num_chunks < memory.num_chunks:
        _vacate(manager, memory.num_chunks, num_chunks)
    try:
        memory.resize(num_chunks)
    finally:
        manager.retake_pool(ChunkPool(memory.num_chunks))
    _log.info("the pool has %d chunks now", memory.num_chunks)


def _vacate(manager: ResidencyManager, num_before: int, num_after: int) -> None:
    """Empty all chunks from `num_after` on, and end the residency manager's pool there."""
    manager.end_exports()
    leaving = [r for r in manager.records.values() if r.state is not State.AWAY and _end(r) > num_after]
    workspaces = [r for r in manager.workspaces() if r.state is not State.AWAY and _end(r) > num_after and not r.pins]
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
    staying = [r for r in manager.records.values() if r.state is not State.AWAY and not manager.may_be_evicted(r)]
    num_staying = sum(manager.chunks_of(r.nbytes) for r in staying)
    if num_staying > num_after:
        raise _does_not_fit(manager, num_after, num_staying)
    for record in leaving:
        if manager.may_be_evicted(record) or record in workspaces:
            continue
        is_held = record.pins > 0
        why = "a session.resident() block holds it" if is_held else "it may be in use unseen: no op has named it yet"
        raise SessionError(
            f"set_budget: a variable of {format_nbytes(record.nbytes)} lies in chunks that would go, and must stay "
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
