"""Moves variables on demand before somebody waits for them: writes behind, and reads ahead.

Both follow `ooc.memory.foresight`. What will probably go next is written while ops run, so that making room is a drop.
What is probably used next is read into chunks that are free, or that clean variables with later uses give up. Nothing
that an op needs now is ever refused for the sake of either: loads under way count as room that can be made.

Rules that keep bits: a record that is read ahead is `LOADING`, so no op runs on it before `ResidencyManager.load` has
mapped it; one that is written behind stays resident, and an op that writes it meanwhile makes the store's copy stale as
ever. `ResidencyManager.land` ends all of it before anybody else looks: a plan, a resize, the end of the session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ooc.errors import StoreFailed
from ooc.memory.flights import Flights
from ooc.memory.foresight import Foresight
from ooc.memory.record import Runs, State, VariableRecord
from vmm.chunks import ChunkPool
from vmm.driver import MemoryFault
from vmm.store import StoreError

_MOST_OPS = 64
"""So many ops ahead are looked at."""
_LOADING_FRACTION = 4
"""At most a quarter of the pool is on its way in."""
_WRITING_FRACTION = 4
"""At most a quarter of the pool is written behind."""


class Movers(Protocol):
    """What it needs of the residency manager; see there."""

    is_host: bool
    flights: Flights
    foresight: Foresight

    @property
    def records(self) -> Mapping[int, VariableRecord]: ...
    @property
    def pool(self) -> ChunkPool: ...
    @property
    def num_free(self) -> int: ...
    def chunks_of(self, nbytes: int) -> int: ...
    def settle(self, record: VariableRecord) -> None: ...
    def start_write(self, record: VariableRecord) -> Any: ...
    def start_load(self, record: VariableRecord, runs: Runs) -> None: ...
    def evict(self, records: Sequence[VariableRecord]) -> None: ...
    def cool(self, num_chunks: int) -> None: ...
    def by_next_use(self, index: int) -> list[tuple[VariableRecord, int]]: ...


class Ahead:
    """Starts moves of one residency manager that nobody waits for yet."""

    def __init__(self, manager: Movers) -> None:
        self._manager = manager
        self._has_failed = False
        self.num_read = 0
        """Variables read ahead so far."""
        self.num_written = 0
        """Variables written behind so far."""

    def __repr__(self) -> str:
        return f"<Ahead: {self.num_read} read, {self.num_written} written>"

    def write_behind(self, likely: Iterable[VariableRecord]) -> None:
        """Start writing the likely next victims, in their order."""
        manager = self._manager
        if not manager.is_host or self._has_failed:
            return
        left = manager.pool.num_chunks // _WRITING_FRACTION
        for record in likely:
            left -= manager.chunks_of(record.nbytes)
            if left < 0 or record.exports:
                return
            if record.stored or manager.flights.holds(record):
                continue
            if record.transfer is not None and not record.transfer.done():
                continue  # of bytes that have changed since
            try:
                manager.settle(record)
                manager.start_write(record)
            except (StoreError, StoreFailed):  # full, or failing: whoever must write will say so
                self._has_failed = True
                return
            self.num_written += 1

    def read_ahead(self, index: int, loading: dict[int, VariableRecord]) -> None:
        """Start loading what the ops after `index` will probably use; notes it in `loading`, by address."""
        manager, foresight = self._manager, self._manager.foresight
        if not manager.is_host or self._has_failed or foresight.reference() is None:
            return
        left = manager.pool.num_chunks // _LOADING_FRACTION
        left -= sum(manager.chunks_of(record.nbytes) for record in loading.values())
        by_serial = {record.serial: record for record in manager.records.values()}
        for later, serial in foresight.upcoming(index, _MOST_OPS):
            record = by_serial.get(serial)
            if record is None or record.state is not State.AWAY or record.exports or record.pins:
                continue
            num_chunks = manager.chunks_of(record.nbytes)
            left -= num_chunks
            if left < 0 or not self._drop_for(num_chunks, index, later):
                return
            runs = manager.pool.take(num_chunks)
            try:
                manager.settle(record)
                manager.start_load(record, runs)
            except (StoreFailed, MemoryFault):
                manager.pool.give(runs)
                self._has_failed = True
                return
            loading[record.address] = record
            self.num_read += 1

    def _drop_for(self, num_chunks: int, index: int, later: int) -> bool:
        """Make room out of free chunks, and of clean variables that are used after op `later`. Nobody waits."""
        manager = self._manager
        missing = num_chunks - manager.num_free
        if missing > 0:
            victims = []
            for record, next_use in manager.by_next_use(index):
                if next_use <= later or record.exports:
                    return False
                is_written = record.transfer is None or record.transfer.done()
                if not record.stored or not is_written:
                    continue
                victims.append(record)
                missing -= manager.chunks_of(record.nbytes)
                if missing <= 0:
                    break
            else:
                return False
            try:
                manager.evict(victims)
            except StoreFailed:
                self._has_failed = True
                return False
        manager.cool(num_chunks)
        return manager.pool.num_free >= num_chunks
