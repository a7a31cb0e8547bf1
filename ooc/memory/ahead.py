"""Moves variables on demand before somebody waits for them: writes behind, and reads ahead.

Both follow `ooc.memory.foresight`. What will probably go next is written while ops run, so that making room is a drop.
What is probably used next is read into chunks that are free, or that clean variables with later uses give up. Nothing
that an op needs now is ever refused for the sake of either: loads under way count as room that can be made.

Rules that keep bits: a record that is read ahead is `LOADING`, so no op runs on it before `ResidencyManager.load` has
mapped it; one that is written behind stays resident, and an op that writes it meanwhile makes the store's copy stale as
ever. `ResidencyManager.land` ends all of it before anybody else looks: a plan, a resize, the end of the session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ooc.errors import StoreFailed
from ooc.memory.flights import Flights
from ooc.memory.foresight import Foresight
from ooc.memory.record import Runs, State, VariableRecord
from vmm.chunks import ChunkPool
from vmm.driver import MemoryFault
from vmm.store import StoreError

_MOST_OPS_AHEAD = 64
"""So many ops ahead are looked at."""
_LOADING_FRACTION = 4
"""At most a quarter of the pool is on its way in. It is looked for more as soon as that is half of it: to find out what
comes next, and what goes for it, takes as long for many as for one."""
_WRITING_FRACTIONS = 4, 64
"""Between a quarter and a sixty-fourth of the pool is written behind: the more, the more often somebody had to wait for
a write of late. With a quarter at all times, a fifth of what was written was freed, or written anew, before it had to
go (twelve layers of 192, all in each step, at half of their memory: 101 MiB a step instead of 78)."""
_FASTER, _SLOWER = 0.5, 1.1
_SPARE_FRACTION = 32
"""Whoever needs room makes up to so much of the pool more, where that takes no writing."""


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
    def num_chunks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    def chunks_of(self, nbytes: int) -> int: ...
    def take(self, num_chunks: int) -> Runs: ...
    def settle(self, record: VariableRecord) -> None: ...
    def start_write(self, record: VariableRecord) -> Any: ...
    def start_load(self, record: VariableRecord, runs: Runs) -> None: ...
    def evict(self, records: Sequence[VariableRecord]) -> None: ...
    def by_next_use(self, index: int) -> list[tuple[VariableRecord, int]]: ...


class Ahead:
    """Starts moves of one residency manager that nobody waits for yet."""

    def __init__(self, manager: Movers) -> None:
        self._manager = manager
        self._has_failed = False
        self._writing_fraction = float(_WRITING_FRACTIONS[0])
        self.num_read = 0
        """Variables read ahead so far."""
        self.num_written = 0
        """Variables written behind so far."""

    def __repr__(self) -> str:
        return f"<Ahead: {self.num_read} read, {self.num_written} written>"

    def note_eviction(self, *, has_waited: bool) -> None:
        """Room was made on demand; whether a write had to be waited for."""
        most, least = _WRITING_FRACTIONS
        self._writing_fraction *= _FASTER if has_waited else _SLOWER
        self._writing_fraction = min(max(self._writing_fraction, most), least)

    def write_behind(self, likely: Iterable[VariableRecord], index: int) -> None:
        """Start writing the likely next victims, in their order, while op `index` runs or comes next.

        Not what is freed before it is used again: nobody would read it.
        """
        manager = self._manager
        if not manager.is_host or self._has_failed:
            return
        left = int(manager.num_chunks / self._writing_fraction)
        for record in likely:
            left -= manager.chunks_of(record.nbytes)
            if left < 0 or record.exports:
                return
            if record.stored or manager.flights.holds(record) or manager.foresight.is_over(record.serial, index):
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

    def spare(self, candidates: Iterable[tuple[VariableRecord, int]], index: int) -> list[VariableRecord]:
        """Of the next victims, those that may go at once with the present ones: they are written, and not used soon.

        To find room for a few births takes hardly longer than for one.
        """
        found: list[VariableRecord] = []
        left = self._manager.num_chunks // _SPARE_FRACTION
        for record, later in candidates:
            if later <= index + _MOST_OPS_AHEAD:
                break
            if not _may_be_dropped(record):
                continue
            left -= self._manager.chunks_of(record.nbytes)
            if left < 0:
                break
            found.append(record)
        return found

    def read_ahead(self, index: int, loading: dict[int, VariableRecord]) -> None:
        """Start loading what the ops after `index` will probably use; notes it in `loading`, by address."""
        manager, foresight = self._manager, self._manager.foresight
        if not manager.is_host or self._has_failed or foresight.reference() is None:
            return
        most = manager.num_chunks // _LOADING_FRACTION
        left = most - sum(manager.chunks_of(record.nbytes) for record in loading.values())
        if 2 * left < most:
            return
        by_serial = {record.serial: record for record in manager.records.values()}
        victims: Iterator[tuple[VariableRecord, int]] | None = None
        for later, serial in foresight.upcoming(index, _MOST_OPS_AHEAD):
            record = by_serial.get(serial)
            if record is None or record.state is not State.AWAY or record.exports or record.pins:
                continue
            num_chunks = manager.chunks_of(record.nbytes)
            left -= num_chunks
            if left < 0:
                return
            if num_chunks > manager.num_free:
                if victims is None:  # the order stays as it is while this goes on
                    victims = self._clean(index)
                if not self._drop_for(num_chunks, victims, later):
                    return
            runs = manager.take(num_chunks)
            try:
                manager.settle(record)
                manager.start_load(record, runs)
            except (StoreFailed, MemoryFault):
                manager.pool.give(runs)
                self._has_failed = True
                return
            loading[record.address] = record
            self.num_read += 1

    def _clean(self, index: int) -> Iterator[tuple[VariableRecord, int]]:
        """What may be dropped at once, in the order in which it should go, with its next use."""
        for record, next_use in self._manager.by_next_use(index):
            if _may_be_dropped(record):
                yield record, next_use

    def _drop_for(self, num_chunks: int, victims: Iterator[tuple[VariableRecord, int]], later: int) -> bool:
        """Make room out of those that are used after op `later`. Nobody waits."""
        manager = self._manager
        missing = num_chunks - manager.num_free
        going: list[VariableRecord] = []
        for record, next_use in victims:
            if next_use <= later:
                return False
            going.append(record)
            missing -= manager.chunks_of(record.nbytes)
            if missing <= 0:
                break
        if missing > 0:
            return False
        try:
            manager.evict(going)
        except StoreFailed:
            self._has_failed = True
            return False
        return manager.num_free >= num_chunks


def _may_be_dropped(record: VariableRecord) -> bool:
    """Whether nobody would have to wait for its eviction: the store has its bytes."""
    return record.stored and not record.exports and (record.transfer is None or record.transfer.done())
