"""Lets native code serve births on demand from memory that lies ready (native/births.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ooc.memory.births import LOOP_BIRTHS, READY_FRACTION
from ooc.memory.record import NO_GUARD, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.dispatcher import Dispatcher
from vmm.addresses import Reservation
from vmm.table import AllocatorTable

if TYPE_CHECKING:
    from ooc.dispatch.part_runs import PartMemory

_BIRTH_SLOTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        VariableRecord,
        ("_state", "_runs", "_exports", "guard", "slot", "reservation", "address", "nbytes", "serial", "used_ns")
        + ("is_workspace",),
    ),
    (Reservation, ("address", "nbytes", "num_chunks", "_given", "_is_protected", "_is_file")),
)
"""In the order of `BirthSlot` in native/births.h."""


def bear_natively(
    dispatcher: Dispatcher, *, manager: ResidencyManager, allocator: AllocatorTable, parts: PartMemory
) -> None:
    """Tell native code where it finds what `OpRunner.cold_allocate` looks at and notes. Of the host's memory alone.

    Args:
        dispatcher: Native code, which knows how to run ops on demand.
        manager: The session's.
        allocator: Its allocator, which is open; nobody asks native code for memory once that is closed.
        parts: The memory of ops in parts, which is Python's to serve.
    """
    births, resident, ready = manager.books_of_births()
    prototype = VariableRecord(nbytes=0, reservation=Reservation(0, 0, 0), serial=0)
    prototype.born(())
    dispatcher.prepare_births(
        manager,
        births,
        parts,
        (resident, ready, allocator.detached),
        prototype,
        (manager.chunk_nbytes, READY_FRACTION, LOOP_BIRTHS, NO_GUARD),
        allocator.log_functions,
        tuple(owner.__dict__[name] for owner, names in _BIRTH_SLOTS for name in names),
        tuple(VariableRecord.__dict__[name] for name in VariableRecord.__slots__),
    )
