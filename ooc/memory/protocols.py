"""Protocols of what the residency manager needs of a device: an address space, page guards, a backing store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ooc.memory.record import Runs, VariableRecord
from vmm.addresses import Reservation
from vmm.driver import Driver, Still
from vmm.store_speed import StoreSpeed
from vmm.transfers import Direction, TransferRecord, TransferStatistics


class Space(Protocol):
    """An address space whose reservations show chunks.

    It is `vmm.addresses.AddressSpace`, or a device's `vmm.device_space.DeviceSpace`.
    """

    @property
    def driver(self) -> Driver:
        """What it maps with."""

    @property
    def num_remapped_chunks(self) -> int:
        """Chunk-sized places that were remapped from one chunk to another so far."""

    def reserve(self, nbytes: int) -> Reservation:
        """Addresses for so many bytes, mapped to nothing."""

    def reserve_shown(self, runs: tuple[tuple[int, int], ...], nbytes: int) -> Reservation | None:
        """Addresses for so many bytes that show these chunks at once, and may after their release; None: none do."""

    def release(self, reservation: Reservation) -> None:
        """Give the addresses back."""

    def map(self, reservation: Reservation, runs: Sequence[tuple[int, int]], *, still: Still | None = None) -> int:
        """Let a reservation show these chunks. `still` makes the driver's calls, if given."""

    def shrink(self, reservation: Reservation, nbytes: int) -> None:
        """Let it span no more than so many bytes."""

    def unmap(self, reservation: Reservation) -> None:
        """Let it show nothing."""

    def vacate(self, first_chunk: int) -> None:
        """Let no reservation show a chunk from this one on."""

    def copy_chunks(self, source: int, target: int, num_chunks: int) -> None:
        """Copy neighbouring chunks to others, after all ops so far and before those from now on. Raises MemoryFault."""

    def note_unused(self, reservation: Reservation) -> None:
        """Nothing that comes from now on uses what it shows, until it is mapped again."""


class AddressGuards(Protocol):
    """What the addresses of away variables show: `ooc.memory.guards.Guards`, or a device's `DeviceGuards`."""

    @property
    def num_served(self) -> int:
        """Stray touches served so far."""

    @property
    def num_calls(self) -> int:
        """System calls made so far to protect ranges and to make them accessible again."""

    def open(self) -> None:
        """Install what serves touches. Raises OSError."""

    def hide(self, record: VariableRecord) -> None:
        """An on-demand record is away, and its addresses show it no longer."""

    def show_file(self, record: VariableRecord) -> None:
        """Let an away record's addresses show the store's file. Raises MemoryFault."""

    def leave(self, record: VariableRecord, segments: Any) -> Any:
        """Write what was given out to its slot, and show it there; nobody can write meanwhile. The transfer, over.

        Raises OSError, MemoryFault.
        """

    def arrive(self, record: VariableRecord, runs: Runs, segments: Any) -> Any:
        """Read what was given out into these chunks, and show them. As `leave`."""

    def guard_away(self, records: Iterable[VariableRecord]) -> None:
        """Guard records that are away, or on their way in, while their addresses show other bytes."""

    def check_room(self, num_records: int) -> None:
        """Raise `MapCountExceeded` if so many more cannot be guarded."""

    def lift(self, record: VariableRecord) -> bool:
        """Make its range accessible again. Whether a touch was served meanwhile."""

    def was_served(self, record: VariableRecord) -> bool:
        """Whether a guarded record's range shows the store's file now."""

    def serve(self, is_on: bool) -> None:
        """Whether touches are served from now on."""

    def served_records(self) -> list[VariableRecord]:
        """Guarded records whose ranges show the store's file now."""

    def become_inherited(self) -> None:
        """In a forked process: the guards are the parent's."""

    def close(self) -> None:
        """Take every guard away. Idempotent."""


class Store(Protocol):
    """The backing store of evicted variables: `vmm.store.FileStore`, or a device's `vmm.device_store.DeviceStore`.

    Slots and transfers are the store's own kind, each good for its own store alone, hence `Any`. All transfers have a
    `ticket`, `done`, `order` (ops come after it) and `wait` (the host does); a device's also a `fence`.
    """

    @property
    def directory(self) -> Path | None:
        """Where its file is, if it has one."""

    @property
    def is_direct(self) -> bool:
        """Whether transfers to its file go past the page cache."""

    def allocate(self, nbytes: int) -> Any:
        """A slot. Raises `StoreFull`."""

    def free(self, slot: Any) -> None:
        """Give a slot back; transfers may be under way."""

    def reserve(self, nbytes: int) -> None:
        """Make sure that so many more bytes can be allocated. Raises `StoreFull`."""

    def segments(self, segments: Sequence[tuple[int, int]]) -> Any:
        """Memory made ready for many transfers."""

    def write(self, slot: Any, segments: Any, after: Sequence[Any] = ()) -> Any:
        """Begin to copy memory to a slot."""

    def read(self, slot: Any, segments: Any, after: Sequence[Any] = ()) -> Any:
        """Begin to copy a slot to memory, after its last write and the transfers `after`."""

    def wait_all(self) -> None:
        """Let the host wait until no transfer is under way."""

    def statistics(self, direction: Direction) -> TransferStatistics:
        """Totals of one direction."""

    def take_records(self) -> tuple[TransferRecord, ...]:
        """Times of single transfers, where they are known."""

    def measure(self, buffer: tuple[int, int] | None = None) -> StoreSpeed:
        """Its rates, each way alone and both at once."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
