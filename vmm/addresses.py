"""Reservations: the addresses that variables keep for life, and what is mapped there now."""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Sequence

from vmm.driver import Access, Driver, Still
from vmm.ranges import Run

__all__ = ["AddressSpace", "Reservation", "first_chunks"]


class Reservation:
    """A contiguous range of addresses. Made, changed and released by its `AddressSpace` alone."""

    __slots__ = (
        "_given",
        "_is_file",
        "_is_protected",
        "_is_released",
        "_runs",
        "address",
        "nbytes",
        "num_chunks",
        "num_held_chunks",
    )

    def __init__(self, address: int, num_chunks: int, nbytes: int) -> None:
        self.address = address
        """First address."""
        self.num_chunks = num_chunks
        """Whole chunks that it spans."""
        self.nbytes = nbytes
        """Bytes asked for, at most `num_chunks` chunks."""
        self.num_held_chunks = num_chunks
        """Whole chunks of addresses that it holds: more than it spans once it was shrunk."""
        self._runs: tuple[Run, ...] | None = None
        self._given: Sequence[tuple[int, int]] | None = None  # the very runs last mapped, for a quick "no change"
        self._is_protected = False
        self._is_file = False
        self._is_released = False

    def __repr__(self) -> str:
        if self._is_released:
            state = "released"
        elif self._is_file:
            state = "shows a file"
        elif self._runs is None:
            state = "unmapped"
        else:
            state = f"{len(self._runs)} runs from chunk {self._runs[0].first}"
            state += ", protected" if self._is_protected else ""
        return f"<Reservation {self.address:#x}, {self.num_chunks} chunks, {state}>"

    @property
    def runs(self) -> tuple[Run, ...] | None:
        """The chunks mapped here in the order of their bytes, neighbours merged; None if none are."""
        return self._runs

    @property
    def is_protected(self) -> bool:
        """Whether a touch of the mapped range faults."""
        return self._is_protected

    @property
    def is_file(self) -> bool:
        """Whether it shows a part of a file."""
        return self._is_file

    @property
    def is_released(self) -> bool:
        """Whether its addresses were given back; then it must not be used."""
        return self._is_released


class AddressSpace:
    """Reservations over one driver: what each shows, changed by as few driver calls as possible.

    Calls are made by one thread at a time. A call that raises has changed nothing.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._starts: list[int] = []
        self._reservations: dict[int, Reservation] = {}
        self._num_maps = 0
        self._num_mapped_runs = 0
        self._num_remapped_chunks = 0

    def __repr__(self) -> str:
        return (
            f"<AddressSpace {len(self._starts)} reservations, {self._num_maps} maps, "
            f"{self._num_remapped_chunks} remapped chunks>"
        )

    @property
    def driver(self) -> Driver:
        """What it maps with."""
        return self._driver

    @property
    def num_maps(self) -> int:
        """Calls of the driver's `map` so far."""
        return self._num_maps

    @property
    def num_mapped_runs(self) -> int:
        """Runs that these calls mapped."""
        return self._num_mapped_runs

    @property
    def num_remapped_chunks(self) -> int:
        """Places, so far, that were changed from one chunk to another. Zero a step is the aim."""
        return self._num_remapped_chunks

    @property
    def reservations(self) -> tuple[Reservation, ...]:
        """All that are not released, by address."""
        return tuple(self._reservations[start] for start in self._starts)

    def reserve(self, nbytes: int) -> Reservation:
        """A fresh reservation of at least `nbytes` bytes, mapped to nothing (a touch faults)."""
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes}: must be positive")
        num_chunks = -(-nbytes // self._driver.chunk_nbytes)
        return self._enter(Reservation(self._driver.reserve(num_chunks), num_chunks, nbytes))

    def reserve_shown(self, runs: tuple[tuple[int, int], ...], nbytes: int) -> Reservation | None:
        """A fresh reservation of `nbytes` that shows `runs` at once; None if the driver has no such addresses.

        Its addresses may show chunks after its release, too: a touch there need not fault.
        """
        if len(runs) != 1:
            return None
        ((first, length),) = runs
        address = self._driver.reserve_shown(first, length)
        if address is None:
            return None
        reservation = self._enter(Reservation(address, length, nbytes))
        reservation._runs = (Run(first, length),)
        reservation._given = runs
        return reservation

    def _enter(self, reservation: Reservation) -> Reservation:
        insort(self._starts, reservation.address)
        self._reservations[reservation.address] = reservation
        return reservation

    def copy_chunks(self, source: int, target: int, num_chunks: int) -> None:
        """Copy neighbouring chunks, the first one `source`, to others that do not overlap them. What is shown stays."""
        chunk_nbytes, view = self._driver.chunk_nbytes, self._driver.view_address
        ctypes.memmove(view + target * chunk_nbytes, view + source * chunk_nbytes, num_chunks * chunk_nbytes)

    def release(self, reservation: Reservation) -> None:
        """Give the addresses back, whatever they show. Its chunks are the caller's to give back."""
        self._check(reservation)
        self._driver.release(reservation.address, reservation.num_held_chunks)
        del self._starts[bisect_right(self._starts, reservation.address) - 1]
        del self._reservations[reservation.address]
        reservation._runs = reservation._given = None
        reservation._is_protected = reservation._is_file = False
        reservation._is_released = True

    def shrink(self, reservation: Reservation, nbytes: int) -> None:
        """Let the reservation span `nbytes` bytes and no more; behind them nothing is mapped.

        It holds its addresses until it is released. The chunks that it no longer shows are the caller's to give back.
        """
        self._check(reservation)
        num_chunks = -(-nbytes // self._driver.chunk_nbytes)
        if not 0 < num_chunks <= reservation.num_chunks:
            raise ValueError(f"shrink({reservation!r}, {nbytes} bytes): at least one byte, at most what it spans")
        surplus = reservation.num_chunks - num_chunks
        if surplus and (reservation._runs is not None or reservation._is_file):
            self._driver.unmap(reservation.address + num_chunks * self._driver.chunk_nbytes, surplus)
        if surplus and reservation._runs is not None:
            reservation._runs = _merged(first_chunks(reservation._runs, num_chunks))
        reservation._given = None
        reservation.num_chunks = num_chunks
        reservation.nbytes = nbytes

    def map(self, reservation: Reservation, runs: Sequence[tuple[int, int]], *, still: Still | None = None) -> int:
        """Let all of `reservation` show `runs`, accessible. Only what differs is mapped.

        Args:
            reservation: Where.
            runs: `(first chunk, count)` in the order of the bytes; as many chunks as the reservation has.
            still: Makes the driver's call, if it is given. The reservation shows no chunk now.

        Returns:
            The number of chunk-sized places that show another chunk than before, or show one for the
            first time.
        """
        if (runs is reservation._given or runs == reservation._given) and not reservation._is_protected:
            return 0
        self._check(reservation)
        wanted = _merged(runs)
        if sum(run.length for run in wanted) != reservation.num_chunks:
            raise ValueError(f"{reservation!r}: runs of {sum(run.length for run in wanted)} chunks, {list(runs)}")
        before = reservation._runs
        if still is not None and before is not None:
            raise ValueError(f"{reservation!r}: shows chunks, and cannot come to show others still")
        stretches = _differences(before, wanted)
        done: list[_Stretch] = []
        try:
            for stretch in stretches:
                self._driver.map(self._address(reservation, stretch), stretch.after, still=still)
                done.append(stretch)
            if reservation._is_protected:  # what was mapped anew is accessible; the rest is not yet
                self._driver.protect(reservation.address, reservation.num_chunks, Access.READ_WRITE)
        except BaseException:
            self._undo(reservation, done)
            raise
        num_changed = sum(stretch.num_chunks for stretch in stretches)
        self._num_maps += len(stretches)
        self._num_mapped_runs += sum(len(stretch.after) for stretch in stretches)
        self._num_remapped_chunks += num_changed if before is not None else 0
        reservation._runs = wanted
        reservation._is_file = False
        reservation._given = runs if isinstance(runs, tuple) else None  # a list may change under us
        reservation._is_protected = False
        return num_changed

    def map_file(
        self, reservation: Reservation, descriptor: int, offset: int, nbytes: int, *, still: Still | None = None
    ) -> None:
        """Let the reservation show a part of a file (see `PosixDriver.map_file`), whatever it showed before."""
        self._check(reservation)
        self._driver.map_file(reservation.address, reservation.num_chunks, descriptor, offset, nbytes, still=still)
        self._became_file(reservation)

    def note_file(self, reservation: Reservation, descriptor: int, offset: int, nbytes: int) -> None:
        """Note that the fault handler has mapped a part of a file at the reservation."""
        self._check(reservation)
        self._driver.note_file(reservation.address, reservation.num_chunks, descriptor, offset, nbytes)
        self._became_file(reservation)

    @staticmethod
    def _became_file(reservation: Reservation) -> None:
        reservation._runs = reservation._given = None
        reservation._is_protected = False
        reservation._is_file = True

    def note_unused(self, reservation: Reservation) -> None:
        """Nothing to keep: what the host has done is done, and the kernel lets a mapping be replaced at any time."""

    def unmap(self, reservation: Reservation) -> None:
        """Let the reservation show nothing: a touch faults. Nothing happens if it shows nothing."""
        self._check(reservation)
        if reservation._runs is None and not reservation._is_file:
            return
        self._driver.unmap(reservation.address, reservation.num_chunks)
        reservation._runs = reservation._given = None
        reservation._is_protected = reservation._is_file = False

    def vacate(self, first_chunk: int) -> None:
        """Let no reservation show a chunk from `first_chunk` on: those that do show nothing at all from now on."""
        for reservation in self.reservations:
            if any(first + length > first_chunk for first, length in reservation._runs or ()):
                AddressSpace.unmap(self, reservation)

    def protect(self, reservation: Reservation) -> None:
        """Keep the mapping but let a touch fault. Nothing happens if it does already."""
        self._check(reservation)
        if reservation._is_protected or reservation._runs is None:
            return
        self._driver.protect(reservation.address, reservation.num_chunks, Access.NONE)
        reservation._is_protected = True

    def unprotect(self, reservation: Reservation) -> None:
        """Let a touch reach the mapped chunks again. Nothing happens if it does already."""
        self._check(reservation)
        if not reservation._is_protected:
            return
        self._driver.protect(reservation.address, reservation.num_chunks, Access.READ_WRITE)
        reservation._is_protected = False

    def find(self, address: int) -> Reservation | None:
        """The reservation whose chunks hold `address`, if any."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        reservation = self._reservations[self._starts[index]]
        inside = address < reservation.address + reservation.num_chunks * self._driver.chunk_nbytes
        return reservation if inside else None

    def close(self) -> None:
        """Release every reservation. Idempotent. The driver stays open: it is the caller's."""
        for reservation in self.reservations:
            self.release(reservation)

    def _address(self, reservation: Reservation, stretch: _Stretch) -> int:
        return reservation.address + stretch.start * self._driver.chunk_nbytes

    def _undo(self, reservation: Reservation, done: Sequence[_Stretch]) -> None:
        """Let the stretches show again what they showed before a call that failed."""
        before = reservation._runs
        reservation._given = None
        if not done:
            return
        reservation._runs = None  # unless all of it succeeds, nothing is known, and `map` maps all anew
        if before is None:
            self._driver.unmap(reservation.address, reservation.num_chunks)
            reservation._is_file = False
            return
        for stretch in done:
            self._driver.map(self._address(reservation, stretch), stretch.before)
            if reservation._is_protected:
                self._driver.protect(self._address(reservation, stretch), stretch.num_chunks, Access.NONE)
        reservation._runs = before

    def _check(self, reservation: Reservation) -> None:
        if self._reservations.get(reservation.address) is not reservation:
            raise ValueError(f"{reservation!r} is not a reservation of this address space")


class _Stretch:
    """Neighbouring places of a reservation that must change, and to what."""

    __slots__ = ("after", "before", "num_chunks", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.num_chunks = 0
        self.before: list[Run] = []
        self.after: list[Run] = []


def first_chunks(runs: Sequence[tuple[int, int]], num_chunks: int) -> tuple[tuple[int, int], ...]:
    """The first `num_chunks` chunks of `runs`, as runs."""
    found = []
    for first, count in runs:
        if num_chunks <= 0:
            break
        found.append((first, min(count, num_chunks)))
        num_chunks -= count
    return tuple(found)


def _merged(runs: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """The same chunks in the same order with neighbours in one run."""
    merged: list[Run] = []
    for first, length in runs:
        if length <= 0:
            raise ValueError(f"run ({first}, {length}): must hold a chunk")
        if merged and merged[-1].first + merged[-1].length == first:
            merged[-1] = Run(merged[-1].first, merged[-1].length + length)
        else:
            merged.append(Run(first, length))
    return tuple(merged)


def _differences(before: tuple[Run, ...] | None, after: tuple[Run, ...]) -> list[_Stretch]:
    """The stretches in which two mappings of one length differ, each as long as possible."""
    num_chunks = sum(run.length for run in after)
    if before is None:
        whole = _Stretch(0)
        whole.num_chunks = num_chunks
        whole.after = list(after)
        return [whole]
    stretches: list[_Stretch] = []
    old_index = new_index = place = 0
    old, new = before[0], after[0]
    while place < num_chunks:
        length = min(old.length, new.length)
        if old.first != new.first:
            if not stretches or stretches[-1].start + stretches[-1].num_chunks != place:
                stretches.append(_Stretch(place))
            stretches[-1].num_chunks += length
            stretches[-1].before.append(Run(old.first, length))
            stretches[-1].after.append(Run(new.first, length))
        place += length
        old, old_index = _rest(before, old, old_index, length)
        new, new_index = _rest(after, new, new_index, length)
    return stretches


def _rest(runs: tuple[Run, ...], run: Run, index: int, length: int) -> tuple[Run, int]:
    """What is left of `run` after `length` chunks, or the next run."""
    if run.length > length:
        return Run(run.first + length, run.length - length), index
    index += 1
    return (runs[index] if index < len(runs) else run), index
