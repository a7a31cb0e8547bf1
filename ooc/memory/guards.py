"""Controls what the addresses of an away variable show: its part of the store's file, or nothing until touched.

On demand, an evicted variable's reservation shows the store's file, so that any code on any thread
may read and write it, system calls too, without a chunk and without us. Inside a planned step it
aliases other variables' chunks. At a step's end away variables are guarded: their addresses show nothing,
and a fault handler maps the file there at the first stray touch (vmm/faults.py). A guard lasts until
the variable is next loaded. See ooc/DESIGN.md, "Access from outside".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from ooc.memory.record import NO_GUARD, Runs, Segments, State, VariableRecord
from vmm.addresses import AddressSpace
from vmm.driver import MemoryFault, Still
from vmm.faults import SERVED, FaultTable, Guard
from vmm.store import FileStore, Transfer
from vmm.transfers import Direction, Job


class Guards:
    """The page guards of one session's away variables. One thread at a time (the session's lock).

    Args:
        space, store: The session's.
        debug: On demand, too, an away variable shows nothing, so that a missed use faults: touches are
            served between steps only.
    """

    def __init__(self, *, space: AddressSpace, store: FileStore, debug: bool = False) -> None:
        self._space = space
        self._store = store
        self._debug = debug
        self._opened: FaultTable | None = None
        self._served_before = 0
        self._guarded: dict[int, VariableRecord] = {}  # by entry

    def __repr__(self) -> str:
        return f"<Guards of {len(self._guarded)} variables, {self.num_served} touches served>"

    def open(self) -> None:
        """Install the fault handler, before there are records. Raises OSError."""
        self._opened = FaultTable(self._space.driver.arena, self._store.descriptor, self._store.engine.finished_ring)
        self._served_before = self._opened.num_served

    @property
    def _table(self) -> FaultTable:
        assert self._opened is not None
        return self._opened

    @property
    def num_served(self) -> int:
        """Stray touches served so far, each the first of its variable since it went away."""
        return self._opened.num_served - self._served_before if self._opened is not None else 0

    @property
    def num_calls(self) -> int:
        """System calls made so far to protect ranges and to make them accessible again."""
        return self._table.num_calls

    def hide(self, record: VariableRecord) -> None:
        """Let an evicted on-demand variable's addresses show the store's file, or in debug mode nothing.

        Its write to the store has ended. Exported memory shows the file in debug mode, too: it may be used
        at any time.
        """
        assert record.slot is not None, record
        if not self._debug or record.exports:
            with contextlib.suppress(MemoryFault):  # too many mappings: show nothing, and serve a touch if there is one
                self.show_file(record)
                return
        self._space.unmap(record.reservation)
        self._end(record)
        self._guard([record], protects=False)

    def show_file(self, record: VariableRecord) -> None:
        """Let an away record's addresses show the store's file. Raises `MemoryFault`: they show what they showed."""
        assert record.slot is not None, record
        shown_nbytes = self._shown_nbytes(record)
        self._space.map_file(record.reservation, self._store.descriptor, record.slot.offset, shown_nbytes)
        self._end(record)

    def leave(self, record: VariableRecord, segments: Segments) -> Transfer:
        """Write what was given out, a resident record, to its slot, and let its addresses show it there.

        Nobody can write to it meanwhile: whoever does waits, and writes to the file.

        Returns:
            The transfer, which is over.

        Raises:
            OSError: The write failed.
            MemoryFault: Its addresses cannot show the file. In both cases they show what they showed.
        """
        slot, nbytes = record.slot, self._shown_nbytes(record)
        assert slot is not None, record

        def show(still: Still) -> None:
            self._space.map_file(record.reservation, self._store.descriptor, slot.offset, nbytes, still=still)

        return self._move(record, "write", segments, show)

    def arrive(self, record: VariableRecord, runs: Runs, segments: Segments) -> Transfer:
        """Read what was given out, an away record, into these chunks, and let its addresses show them. As `leave`."""
        if not _shows_its_file(record):
            self.hide(record)
        if not _shows_its_file(record):
            raise MemoryFault(f"the file cannot be shown at {record.address:#x}")
        return self._move(
            record, "read", segments, lambda still: self._space.map(record.reservation, runs, still=still)
        )

    def _move(
        self, record: VariableRecord, direction: Direction, segments: Segments, show: Callable[[Still], object]
    ) -> Transfer:
        span = record.address, record.reservation.num_chunks * self._space.driver.chunk_nbytes

        def make(job: Job) -> int:
            tickets: list[int] = []
            show(lambda calls: tickets.append(self._table.move(span, self._store.engine, job, calls)))
            return tickets[0]

        assert record.slot is not None, record
        return self._store.move(direction, record.slot, segments, make)

    def guard_away(self, records: Iterable[VariableRecord]) -> None:
        """Guard records that are away, or on their way in, while their addresses show other bytes."""
        new = [record for record in records if record.guard == NO_GUARD and not _shows_its_file(record)]
        if new:
            new.sort(key=_address)
            self._guard(new, protects=True)

    def check_room(self, num_records: int) -> None:
        """Raise `MapCountExceeded` if so many more cannot be guarded."""
        self._space.driver.note_guards(num_records)
        self._space.driver.note_guards(-num_records)

    def lift(self, record: VariableRecord) -> bool:
        """End a record's guard: it gets chunks again, so its range is made accessible.

        Returns:
            Whether a touch was served meanwhile: the reservation shows the file (which may have been
            written to since any load under way began) until it is mapped again.
        """
        return self._end(record, unprotects=True)

    def was_served(self, record: VariableRecord) -> bool:
        """Whether a guarded record's range shows the file now."""
        return record.guard != NO_GUARD and self._table.state(record.guard) == SERVED

    def serve(self, is_on: bool) -> None:
        """Set whether touches are served from now on. Only debug mode turns that off, inside a step."""
        self._table.is_serving = is_on or not self._debug

    def served_records(self) -> list[VariableRecord]:
        """Guarded records whose ranges show the file now."""
        return [r for entry, r in self._guarded.items() if self._table.state(entry) == SERVED]

    def become_inherited(self) -> None:
        """In a forked process: the guards are the parent's. A touch of what is not inherited faults, with a message."""
        if self._opened is not None:
            self._opened.become_inherited()

    def close(self) -> None:
        """End every guard and remove the fault handler. Idempotent."""
        for record in self._guarded.values():
            record.guard = NO_GUARD
        self._guarded.clear()
        if self._opened is not None:
            self._opened.close()

    def _guard(self, records: list[VariableRecord], *, protects: bool) -> None:
        table, driver = self._table, self._space.driver
        driver.note_guards(len(records), cuts=protects)
        chunk_nbytes = driver.chunk_nbytes
        guards = []
        for record in records:
            slot, transfer = record.slot, record.transfer
            assert slot is not None, record
            record.guard = table.new_entry()
            self._guarded[record.guard] = record
            guards.append(
                Guard(
                    record.guard,
                    record.address,
                    self._shown_nbytes(record),
                    record.reservation.num_chunks * chunk_nbytes,
                    slot.offset,
                    transfer.ticket if transfer is not None else 0,
                    protects,
                )
            )
        try:
            table.guard(guards)
        except OSError:
            for record in records:
                del self._guarded[record.guard]
                record.guard = NO_GUARD
            driver.note_guards(-len(records))
            raise

    def _end(self, record: VariableRecord, *, unprotects: bool = False) -> bool:
        if record.guard == NO_GUARD:
            return False
        unprotects = unprotects and record.reservation.runs is not None  # else there is nothing to open
        was_served = self._table.lift(record.guard, unprotects=unprotects) == SERVED
        del self._guarded[record.guard]
        record.guard = NO_GUARD
        self._space.driver.note_guards(-1)
        if was_served and not record.reservation.is_file:
            assert record.slot is not None, record
            shown_nbytes = self._shown_nbytes(record)
            self._space.note_file(record.reservation, self._store.descriptor, record.slot.offset, shown_nbytes)
        return was_served

    def _shown_nbytes(self, record: VariableRecord) -> int:
        """Bytes of its slot that a record's addresses can show: a shrunk reservation is smaller than its slot."""
        assert record.slot is not None, record
        span_nbytes = record.reservation.num_chunks * self._space.driver.chunk_nbytes
        return int(min(record.slot.capacity_nbytes, span_nbytes))


def _shows_its_file(record: VariableRecord) -> bool:
    """Whether all touches of an away record are served already, those of system calls, too."""
    return record.state is State.AWAY and record.reservation.is_file


def _address(record: VariableRecord) -> int:
    return record.address
