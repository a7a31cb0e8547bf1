"""What a session knows of one live storage: where its bytes are, and who must not be surprised by a move."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from vmm.addresses import Reservation
from vmm.store import Slot, Transfer

NO_GUARD = -1
"""`VariableRecord.guard` of a record without one."""

Runs = tuple[tuple[int, int], ...]
Segments = Sequence[tuple[int, int]]


class State(enum.Enum):
    """Where a variable's bytes are, and so what memory it holds."""

    RESIDENT = "resident"
    """In its chunks, mapped at its address. Holds its chunks."""
    LOADING = "loading"
    """On the way in; its chunks fill up and may not be touched yet. Holds its chunks."""
    AWAY = "away"
    """In the store only. Holds no chunk."""


class VariableRecord:
    """One live storage.

    Attributes:
        address, nbytes: Of the storage; the address is its reservation's, for life.
        runs: Its chunks while it holds any.
        slot: Its place in the store, once it has one.
        stored: Whether the store's copy is current.
        checksum: In debug mode, of the bytes that the store has.
        transfer: A write or read that may be under way.
        pins: Ops in progress that use it. Pinned records stay.
        exports: Pointers given to the outside (`.numpy()`): no plan may move such a record, and the
            store's copy is never taken to be current.
        guard: Entry of its guard in `ooc.memory.guards`, or -1.
        seen: Whether an op has named it as operand or result. Until then it may be in use
            unseen (a library's workspace) and stays.
        is_workspace: Whether an op on the session's thread allocated it. As long as it is unseen, only ops
            there use it, so between two ops its bytes may go to other chunks.
        serial: Order of allocation in the session; the identity of this storage.
        variable_index: Of the variable of the plan being played that it stands for, or -1.
    """

    __slots__ = (
        "address",
        "checksum",
        "exports",
        "guard",
        "is_workspace",
        "kind",
        "label",
        "nbytes",
        "pins",
        "reservation",
        "variable_index",
        "runs",
        "seen",
        "serial",
        "slot",
        "state",
        "stored",
        "transfer",
    )

    def __init__(self, *, nbytes: int, reservation: Reservation, serial: int) -> None:
        self.address = reservation.address
        self.nbytes = nbytes
        self.reservation = reservation
        self.serial = serial
        self.runs: Runs = ()
        self.slot: Slot | None = None
        self.stored = False
        self.checksum: int | None = None
        self.state = State.AWAY
        self.transfer: Transfer | None = None
        self.pins = 0
        self.exports = 0
        self.guard = NO_GUARD
        self.seen = False
        self.is_workspace = False
        self.variable_index = -1
        self.kind = ""
        self.label = ""

    def __repr__(self) -> str:
        return (
            f"<VariableRecord {self.serial} {self.label!r} at {self.address:#x}, {self.nbytes} bytes, "
            f"{self.state.value}, stored={self.stored}, pins={self.pins}, exports={self.exports}, "
            f"variable={self.variable_index}>"
        )
