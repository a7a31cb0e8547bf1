"""Moves of memory that was given out: nobody writes to it between two of its places.

Whoever has a pointer (an array of `.numpy()`, say) may write through it on any thread at any time, and what is written
just while the bytes are copied would be in neither place. So they are moved still (`vmm.faults.FaultTable.move`): at
once, and before anything else goes on. Where the kernel refuses (too many mappings), they are moved like all else.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ooc.errors import StoreFailed
from ooc.memory.record import Runs, VariableRecord
from ooc.memory.record_transfers import RecordTransfers, transfer_failed
from vmm.driver import MemoryFault

if TYPE_CHECKING:
    from ooc.memory.protocols import AddressGuards


class StillMoves:
    """Moves records between their chunks and the store. Which chunks are free is the caller's to know."""

    def __init__(self, transfers: RecordTransfers, guards: AddressGuards) -> None:
        self._transfers = transfers
        self._guards = guards

    def __repr__(self) -> str:
        return f"<StillMoves over {self._guards!r}>"

    def leave(self, record: VariableRecord, segments: Any = None) -> None:
        """Evict a resident record that was given out; its addresses show the store's file from then on.

        Raises:
            StoreFailed, StoreFull, MemoryFault: It is still resident.
        """
        transfers = self._transfers
        with contextlib.suppress(StoreFailed):  # of bytes that may have changed since
            transfers.settle(record)
        transfers.prepare_slot(record)
        if segments is None:
            segments = transfers.segments(record.runs, record.nbytes)
        try:
            transfer = self._guards.leave(record, segments)
        except OSError as error:
            raise transfer_failed(record, error, is_load=False) from error
        except MemoryFault:
            transfers.start_write(record, segments)
            transfers.settle(record)
        else:
            record.write_started(transfer)
            record.write_ended()
            record.checksum = None  # of what it has from now on nobody can tell
            transfers.note_move(record, transfer)
        record.released()
        if not record.reservation.is_file:
            self._guards.hide(record)

    def arrive(self, record: VariableRecord, runs: Runs, segments: Any = None) -> None:
        """Load an away record that was given out into these chunks, which its addresses show from then on.

        Raises:
            StoreFailed, MemoryFault: It is still away, and the chunks are the caller's to give back.
        """
        transfers = self._transfers
        if segments is None:
            segments = transfers.segments(runs, record.nbytes)
        try:
            transfer = self._guards.arrive(record, runs, segments)
        except OSError as error:
            raise transfer_failed(record, error, is_load=True) from error
        except MemoryFault:
            transfers.settle_load(record, runs)
            self._guards.lift(record)
            try:
                transfers.space.map(record.reservation, runs)
            except MemoryFault:
                record.load_undone()
                raise
        else:
            record.load_started(runs, transfer)
            record.loaded()
            transfers.note_move(record, transfer, is_load=True)
