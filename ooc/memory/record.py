"""The record of one variable (a live storage): where its bytes are, and the transitions by which that changes.

A record is in one of four states. The bytes of a resident one are in chunks of the pool, those of an away one in the
store, a loading one is on its way in, and a discarded one has bytes nowhere: ops are run again to make them. Each
transition is a method named for what has happened; it checks what it assumes and raises `InconsistentRecord`
otherwise. Nobody outside this file assigns what transitions change:

    transition                  from                  to         chunks      the store's copy
    born                        any                   resident   as given    stale
    born_away                   away, without chunks  away       none        current: whoever fills it writes it there
    write_started               resident              resident   stay        current, once the transfer has ended
    write_ended, write_failed   resident, away        the same   stay        as it was; stale if it failed
    released                    resident, stored      away       given up    current, once the transfer has ended
    restored                    away                  resident   as before   stale: the write had failed
    trimmed                     resident              resident   the first   as it was
    relocated                   resident              resident   as given    as it was
    load_started                away                  loading    as given    as it was
    loaded                      loading               resident   stay        as it was
    load_failed                 loading               away       given up    as it was
    load_undone                 resident              away       given up    counts: it may be newer than the chunks
    discarded                   resident, away        discarded  given up    stale
    recomputed                  discarded, away       resident   as given    as it was
    written                     any                   the same   stay        stale
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ooc.errors import InconsistentRecord
from vmm.addresses import Reservation
from vmm.store import Slot, Transfer

NO_GUARD = -1
"""`VariableRecord.guard` of a record without a guard."""

Runs = tuple[tuple[int, int], ...]
"""Chunks of the pool as `(first, count)`, in the order of the variable's bytes."""
Segments = Sequence[tuple[int, int]]
"""The same bytes as `(address, nbytes)` of the linear view of all chunks."""


class State(enum.Enum):
    """Where a variable's bytes are, and so what memory it holds."""

    RESIDENT = "resident"
    """In its chunks, mapped at its address. Holds its chunks."""
    LOADING = "loading"
    """On the way in; its chunks fill up and may not be touched yet. Holds its chunks."""
    AWAY = "away"
    """In the store only. Holds no chunk."""
    DISCARDED = "discarded"
    """Nowhere: the executor knows which ops make them again, and does so before anybody may ask. Holds no chunk."""

    @property
    def holds_chunks(self) -> bool:
        """Whether a variable in this state takes room in the pool."""
        return self in (State.RESIDENT, State.LOADING)


# As globals they are read in half the time that an enum's attribute takes; transitions are on the path of each op.
_RESIDENT, _LOADING, _AWAY = State.RESIDENT, State.LOADING, State.AWAY
_DISCARDED = State.DISCARDED


class VariableRecord:
    """What a session knows of one variable: a live storage at or above the threshold.

    Attributes:
        address: Of the storage: its reservation's, for life.
        nbytes: Of the storage. Of one that an elastic plan allocated, what the plan holds for it until its own size
            is asked for (`ooc.replay.elastic`).
        origin: Where it was born, if that was in the period before this one: the sequence's family, the position in
            the step, and which of the allocations there. None: longer ago, or not known.
        birthplace: The same, however long ago.
        slot: Its place in the store, once it has one. Given by the residency manager.
        checksum: In debug mode, of the bytes that the store has.
        guard: Entry of its guard in `ooc.memory.guards`, or `NO_GUARD`. Changed there alone.
        is_workspace: Whether an op on the session's thread allocated it. As long as it is unseen, only ops
            there use it, so between two ops its bytes may go to other chunks.
        serial: Order of allocation in the session; the identity of this storage.
        variable_index: Index of the active plan's variable that is bound to it, or -1.
        used_ns: When an op on demand last used it (`time.monotonic_ns`); native code notes it, too.

    Changed by transitions alone, and so read-only for everybody else:
        state: Where its bytes are.
        runs: Its chunks while it holds any.
        stored: Whether the store's copy is current (a loading or away record's may be called stale in advance: its
            next op will write it).
        transfer: A write or load that may be under way.
        pins: Ops in progress (and `resident` blocks) that use it. Pinned records stay.
        exports: Pointers given to the outside (`.numpy()`): the store's copy of a resident record is never taken to be
            current, and it is moved still (`ooc.memory.still_moves`).
        seen: Whether an op has named it as operand or result. Until then it may be in use unseen (a library's
            workspace) and stays.
    """

    __slots__ = (
        "_exports",
        "_pins",
        "_runs",
        "_seen",
        "_state",
        "_stored",
        "_transfer",
        "address",
        "birthplace",
        "checksum",
        "guard",
        "is_workspace",
        "kind",
        "label",
        "nbytes",
        "origin",
        "reservation",
        "serial",
        "slot",
        "used_ns",
        "variable_index",
    )

    def __init__(self, *, nbytes: int, reservation: Reservation, serial: int) -> None:
        self.address = reservation.address
        self.nbytes = nbytes
        self.reservation = reservation
        self.serial = serial
        self.slot: Slot | None = None
        self.checksum: int | None = None
        self.guard = NO_GUARD
        self.is_workspace = False
        self.variable_index = -1
        self.used_ns = 0
        self.kind = ""
        self.label = ""
        self.origin: tuple[str, int, int] | None = None
        self.birthplace: tuple[str, int, int] | None = None
        self._state = State.AWAY
        self._runs: Runs = ()
        self._stored = False
        self._transfer: Transfer | None = None
        self._pins = 0
        self._exports = 0
        self._seen = False

    def __repr__(self) -> str:
        return (
            f"<VariableRecord {self.serial} {self.label!r} at {self.address:#x}, {self.nbytes} bytes, "
            f"{self._state.value}, stored={self._stored}, pins={self._pins}, exports={self._exports}, "
            f"variable={self.variable_index}>"
        )

    # To a type checker these are read-only properties. At run time each is the private slot's own descriptor (set below
    # the class), since ops of a planned step read them and a property takes eight times as long (70 against 9 ns); a
    # test holds that nobody outside this file assigns one.
    if TYPE_CHECKING:

        @property
        def state(self) -> State: ...
        @property
        def runs(self) -> Runs: ...
        @property
        def stored(self) -> bool: ...
        @property
        def transfer(self) -> Transfer | None: ...
        @property
        def pins(self) -> int: ...
        @property
        def exports(self) -> int: ...
        @property
        def seen(self) -> bool: ...

    # -- its chunks

    def born(self, runs: Runs) -> None:
        """A storage was allocated in these chunks, which its addresses show from now on.

        From any state: in a planned step nobody tells a record that its storage was freed, and the next storage of the
        same plan variable takes it over as it was left.
        """
        self._state = _RESIDENT
        self._runs = runs
        self._stored = False
        self._transfer = None

    def born_away(self) -> None:
        """A storage was allocated whose bytes are in the store from its first one on: it has a slot, and no chunks."""
        if self._state is not _AWAY or self._runs:
            self._refuse("born_away")
        self._stored = True
        self._transfer = None

    def released(self, transfer: Transfer | None = None) -> None:
        """Its chunks were given up, since the store has its bytes, or will when `transfer` has ended."""
        if self._state is not _RESIDENT or not self._stored:
            self._refuse("released")
        self._state = _AWAY
        self._runs = ()
        self._transfer = transfer

    def restored(self, runs: Runs) -> None:
        """Its release was undone: the write had failed, and nobody else was let into its chunks meanwhile."""
        if self._state is not _AWAY:
            self._refuse("restored")
        self._state = _RESIDENT
        self._runs = runs
        self._stored = False

    # -- discarding and recomputing

    def discarded(self) -> None:
        """Its chunks were given up although the store has no current copy: from here on its bytes are nowhere."""
        if self._state not in (_RESIDENT, _AWAY):
            self._refuse("discarded")
        self._state = _DISCARDED
        self._runs = ()
        self._stored = False
        self._transfer = None

    def recomputed(self, runs: Runs) -> None:
        """Its bytes are about to be made again in these chunks, by the ops that made them first."""
        if self._state not in (_DISCARDED, _AWAY):
            self._refuse("recomputed")
        self._state = _RESIDENT
        self._runs = runs
        self._transfer = None

    def trimmed(self, runs: Runs) -> None:
        """It keeps the first of its chunks, these, which hold all of its bytes; the others were given up."""
        if self._state is not _RESIDENT:
            self._refuse("trimmed")
        self._runs = runs

    def relocated(self, runs: Runs) -> None:
        """Its bytes were copied to these chunks, which its addresses show from now on; the others were given up."""
        if self._state is not _RESIDENT:
            self._refuse("relocated")
        self._runs = runs

    # -- transfers

    def write_started(self, transfer: Transfer) -> None:
        """The store began to write its bytes; they stay where they are until it is released."""
        if self._state is not _RESIDENT:
            self._refuse("write_started")
        self._transfer = transfer
        self._stored = True

    def write_ended(self) -> None:
        """The write under way has ended well."""
        if self._state in (_LOADING, _DISCARDED):
            self._refuse("write_ended")
        self._transfer = None

    def write_failed(self) -> None:
        """The write under way has failed: the store's copy is of no use."""
        if self._state in (_LOADING, _DISCARDED):
            self._refuse("write_failed")
        self._transfer = None
        self._stored = False

    def load_started(self, runs: Runs, transfer: Transfer) -> None:
        """The store began to read its bytes into these chunks."""
        if self._state is not _AWAY:
            self._refuse("load_started")
        self._state = _LOADING
        self._runs = runs
        self._transfer = transfer

    def loaded(self) -> None:
        """Its bytes have arrived in its chunks."""
        if self._state is not _LOADING:
            self._refuse("loaded")
        self._state = _RESIDENT
        self._transfer = None

    def load_failed(self) -> None:
        """Its bytes could not be read: it holds no chunks again, and the store's copy is as it was."""
        if self._state is not _LOADING:
            self._refuse("load_failed")
        self._state = _AWAY
        self._runs = ()
        self._transfer = None

    def load_undone(self) -> None:
        """It had arrived, and its chunks are given up at once, unused: the store's copy is what counts.

        Either the store's copy was touched while it was read, or the chunks cannot be mapped.
        """
        if self._state is not _RESIDENT:
            self._refuse("load_undone")
        self._state = _AWAY
        self._runs = ()

    # -- uses

    def written(self) -> None:
        """Its bytes have changed, or will before anybody asks: the store's copy is stale."""
        self._stored = False

    def note_seen(self) -> None:
        """An op has named it as operand or result."""
        self._seen = True

    def pin(self) -> None:
        """It must stay where it is until it is unpinned as often."""
        self._pins += 1

    def unpin(self) -> None:
        """One of those that had it pinned needs it no more."""
        if self._pins <= 0:
            self._refuse("unpin")
        self._pins -= 1

    def export(self) -> None:
        """A pointer to its bytes is about to be given out, through which they may be written at any time."""
        self._exports += 1

    def end_export(self) -> None:
        """A pointer that was given out is held no more. What was written through it is in the chunks.

        (Of an away record it is in the store's file, which its addresses show.)
        """
        if self._exports <= 0:
            self._refuse("end_export")
        self._exports -= 1
        self.checksum = None  # of a copy in the store that may have been written through the pointer since
        if self._state is not _AWAY:
            self._stored = False

    def cancel_export(self) -> None:
        """The pointer was not given out after all."""
        if self._exports <= 0:
            self._refuse("cancel_export")
        self._exports -= 1

    def _refuse(self, transition: str) -> NoReturn:
        raise InconsistentRecord(record=repr(self), state=self._state.value, transition=transition)


for _name in ("state", "runs", "stored", "transfer", "pins", "exports", "seen"):
    setattr(VariableRecord, _name, VariableRecord.__dict__[f"_{_name}"])
