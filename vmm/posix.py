"""The POSIX driver: chunks are offsets in one file in memory, reservations are PROT_NONE addresses.

See DESIGN.md, "OS and driver behaviour we rely on", for the facts behind each choice.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Self

from vmm import machine
from vmm.driver import Access, MemoryFault, Still
from vmm.held_addresses import hold_addresses
from vmm.places import Places
from vmm.pool_file import HUGE_PAGE_NBYTES, NOTHING, PROT_NONE, PoolFile
from vmm.pool_views import PoolViews
from vmm.posix_mappings import PosixMappings
from vmm.syscalls import MAP_FIXED, Syscalls

__all__ = ["PosixDriver", "Syscalls"]


class PosixDriver:
    """`num_chunks` chunks of `chunk_nbytes` bytes in one memory file, committed when made.

    Args:
        num_chunks: Chunks of the pool; their memory is taken from the machine at once.
        chunk_nbytes: Size of one, a multiple of the page size.
        max_chunks: How many `resize` may make of them. This takes addresses, no memory; where the machine does not
            give so many addresses, it is `num_chunks`.
        arena_nbytes: Addresses to hold for reservations. By default as many as the machine
            gives, at most 16 TiB; addresses cost no memory.
        arena: Addresses `[start, stop)` that someone else holds (mapped to nothing) and lends;
            `close` leaves them mapped to nothing again.
        occupied: `(address, nbytes)` of the lent arena that must not be handed out.
        dontfork: A forked child does not see the pool: its touch faults (SIGSEGV). If False the
            child shares the chunks with this process, which may reuse them at any time.
        huge_pages: Back the pool with huge pages, on a tmpfs of our own; where we may not have one, if the
            kernel's shmem_enabled setting allows it. Transfers then take a fifth of the CPU time.
        max_map_count: The kernel's limit on mappings; read from the kernel by default.
        syscalls: What makes the system calls.
        checkpoint: Called between the pieces in which the memory is made: what it raises undoes it all.

    Raises:
        MemoryFault: The memory or the addresses are not there. Nothing is left behind.
    """

    def __init__(
        self,
        num_chunks: int,
        chunk_nbytes: int,
        *,
        max_chunks: int | None = None,
        arena_nbytes: int | None = None,
        arena: tuple[int, int] | None = None,
        occupied: Sequence[tuple[int, int]] = (),
        dontfork: bool = True,
        huge_pages: bool = True,
        max_map_count: int | None = None,
        syscalls: Syscalls | None = None,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        granularity = machine.page_nbytes()
        if num_chunks <= 0:
            raise ValueError(f"num_chunks={num_chunks}: must be positive")
        if chunk_nbytes <= 0 or chunk_nbytes % granularity:
            raise ValueError(
                f"chunk_nbytes={chunk_nbytes}: must be a positive multiple of the page, {granularity} bytes"
            )
        self._chunk_nbytes = chunk_nbytes
        self._granularity = granularity
        self._dontfork = dontfork
        self._sys = syscalls if syscalls is not None else Syscalls()
        max_map_count = max_map_count if max_map_count is not None else machine.max_map_count()
        self._is_inherited = False
        self._whole: tuple[int, int] | None = None  # address and length of all addresses we hold
        self._lent_arena = arena
        self._places = Places(base=0, chunk_nbytes=chunk_nbytes, start=0, stop=0)  # until addresses are held
        self._views = PoolViews(self._places, alignment=1)
        self._file = PoolFile(
            num_chunks,
            chunk_nbytes,
            dontfork=dontfork,
            huge_pages=huge_pages,
            syscalls=self._sys,
            checkpoint=checkpoint,
        )
        try:
            self._held = hold_addresses(
                num_chunks,
                max(max_chunks or 0, num_chunks),
                chunk_nbytes,
                arena_nbytes=arena_nbytes,
                lent_arena=arena,
                syscalls=self._sys,
            )
            self._whole = (self._held.address, self._held.nbytes)
            self._file.show(self._held.view_address)
            self._places = Places(
                base=self._held.arena_start,
                chunk_nbytes=chunk_nbytes,
                start=0,
                stop=(self._held.arena_stop - self._held.arena_start) // chunk_nbytes,
                more_options="no limit on address space (ulimit -v)",
            )
            for address, nbytes in occupied:
                self._places.occupy(address, nbytes)
            self._mappings = PosixMappings(
                self._places,
                self._file,
                chunk_nbytes=chunk_nbytes,
                dontfork=dontfork,
                max_map_count=max_map_count,
                syscalls=self._sys,
            )
            alignment = max(HUGE_PAGE_NBYTES // chunk_nbytes, 1)
            self._views = PoolViews(self._places, alignment=alignment)
            _live_drivers.add(self)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        state = "closed"
        if self._whole is not None:
            state = f"{self._places.num_reservations} reservations, {self.num_mappings} mappings"
        return f"<PosixDriver {self.num_chunks} chunks of {self._chunk_nbytes} bytes, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def chunk_nbytes(self) -> int:
        """Size of one chunk."""
        return self._chunk_nbytes

    @property
    def num_chunks(self) -> int:
        """Chunks that exist, all with their memory."""
        return self._file.num_chunks

    @property
    def max_chunks(self) -> int:
        """How many `resize` may make of them."""
        return self._held.max_chunks

    remap_ns = None
    """Page tables are made anew for each chunk, so it goes by bytes."""

    @property
    def view_address(self) -> int:
        """Start of the linear view: chunk `c` is at `view_address + c * chunk_nbytes`."""
        return self._held.view_address

    @property
    def arena(self) -> tuple[int, int]:
        """`[start, stop)` of the addresses that `reserve` hands out."""
        return self._held.arena_start, self._held.arena_stop

    @property
    def num_mappings(self) -> int:
        """Mappings that the kernel keeps for this driver, of its limit on the whole process.

        Those of the arena, the view, the rests before and behind the view that alignment leaves, and
        at most two for each guarded range.
        """
        return self._mappings.num_mappings

    @property
    def num_reserved_chunks(self) -> int:
        """Places of the arena in reservations."""
        return self._places.num_reserved

    def reserve(self, num_chunks: int) -> int:
        """A fresh range of addresses, mapped to nothing. No system call."""
        self._check_usable()
        try:
            return self._places.address(self._places.reserve(num_chunks))
        except MemoryFault:  # where addresses are limited, views are the first to go without
            self._end_views()
            return self._places.address(self._places.reserve(num_chunks))

    def reserve_shown(self, first_chunk: int, num_chunks: int) -> int | None:
        """A fresh range of addresses that shows these neighbouring chunks: one of a view of the whole pool.

        No system call, unless a view is made: a mapping whose pages are faulted in as they are touched, once for all.
        """
        self._check_usable()
        places = list(self._views.free_places(first_chunk, num_chunks))
        place = next((p for p in places if self._mappings.shows(p, first_chunk, num_chunks)), None)
        if place is None and (start := self._add_view()) is not None:
            place = start + first_chunk
        if place is not None:
            self._views.take(place, num_chunks)
            return self._places.address(place)
        if not places:
            return None
        self._views.take(places[0], num_chunks)
        address = self._places.address(places[0])
        try:
            self.map(address, [(first_chunk, num_chunks)])
        except BaseException as error:
            self._views.release(places[0])
            if not isinstance(error, MemoryFault):
                raise
            return None
        return address

    def _add_view(self) -> int | None:
        """Map the whole pool once more. The view's first place, or None: there are enough, or it cannot be mapped."""
        start = self._views.add(self.num_chunks)
        if start is None:
            return None
        try:
            self._mappings.map_view(start, self.num_chunks)
        except BaseException as error:
            self._views.remove(start)
            if not isinstance(error, MemoryFault):
                raise
            return None
        return start

    def _end_views(self) -> None:
        """Let no view of the pool show a chunk but where a reservation is, and others have their addresses."""
        for place, length in self._views.free_parts():
            self._mappings.unmap_view(place, length)
        self._views.retire()

    def release(self, address: int, num_chunks: int) -> None:
        """Give a reservation back. Unmaps what is mapped there; in a view it shows its own chunks from now on."""
        self._check_usable()
        place = self._places.reservation(address, num_chunks)
        chunk = self._views.chunk_of(place)
        if chunk is not None:
            if not self._mappings.shows(place, chunk, num_chunks):
                self._mappings.put_back(place, chunk, num_chunks)
            self._views.release(place)
            return
        if not self._mappings.shows_nothing(place, num_chunks):
            self._mappings.unmap(place, num_chunks)
        self._places.release(place)

    def map(self, address: int, runs: Sequence[tuple[int, int]], *, still: Still | None = None) -> None:
        """Map runs of chunks, one after the other, at `address`, read-write. `still` makes the calls, if given."""
        self._check_usable()
        self._mappings.map_runs(self._places.of_runs(address, runs, self._file.num_chunks), runs, still)

    def unmap(self, address: int, num_chunks: int) -> None:
        """Map nothing at the range: a touch faults. Frees its page tables."""
        self._check_usable()
        self._mappings.unmap(self._places.inside(address, num_chunks), num_chunks)

    def map_file(
        self,
        address: int,
        num_chunks: int,
        descriptor: int,
        offset: int,
        nbytes: int,
        *,
        still: Still | None = None,
    ) -> None:
        """Map a part of a file at the start of the range, read-write and shared; nothing behind it.

        The kernel then serves every touch, system calls on the range too, from the page cache, which
        it may reclaim. In place of what was mapped at once: nobody sees a state between.

        Args:
            address: Start of the range.
            num_chunks: Chunks of it.
            descriptor: The file; it may be open for direct I/O. The mapping stays when it is closed.
            offset: Where the part begins; a multiple of the page.
            nbytes: Its length, at most the range's; rounded up to whole pages.
            still: Makes the calls, if it is given.
        """
        self._check_usable()
        place = self._places.inside(address, num_chunks)
        nbytes = -(-nbytes // self._granularity) * self._granularity
        if offset < 0 or offset % self._granularity or not 0 < nbytes <= num_chunks * self._chunk_nbytes:
            raise ValueError(
                f"map_file({address:#x}, {num_chunks} chunks): {nbytes} bytes at {offset} are not whole pages "
                f"({self._granularity} bytes) that fit the range"
            )
        self._mappings.map_file(place, num_chunks, descriptor, offset, nbytes, still)

    def note_file(self, address: int, num_chunks: int, descriptor: int, offset: int, nbytes: int) -> None:
        """Note that somebody else (the fault handler) has done what `map_file` does. No system call."""
        self._check_usable()
        self._mappings.note_file(self._places.inside(address, num_chunks), num_chunks, descriptor, offset, nbytes)

    def note_guards(self, num_added: int, *, cuts: bool = True) -> None:
        """Note that somebody else protects parts of mappings, each of which may cut two of them.

        Args:
            num_added: How many parts; negative when they are lifted.
            cuts: False for ranges that are mapped to nothing already: that needs no mapping more.

        Raises:
            MapCountExceeded: The kernel's limit on mappings would be too near. Nothing was noted.
        """
        self._mappings.note_guards(num_added, cuts=cuts)

    def protect(self, address: int, num_chunks: int, access: Access) -> None:
        """Change what a touch of a mapped range does; mapping and page tables stay."""
        self._check_usable()
        self._mappings.protect(self._places.inside(address, num_chunks), num_chunks, access)

    def disown(self, address: int, num_chunks: int) -> None:
        """Forget a reservation of a lent arena, which keeps what is mapped there after `close`."""
        self._check_usable()
        if self._lent_arena is None:
            raise ValueError(f"disown({address:#x}, {num_chunks} chunks): not a reservation of a lent arena")
        self._places.disown(self._places.reservation(address, num_chunks, verb="disown"))

    def resize(self, num_chunks: int) -> None:
        """Let the pool have this many chunks: the last ones go, with what is in them, or new ones come behind them.

        Raises:
            ValueError: It may not have so many (`max_chunks`), or a chunk that would go is mapped. Nothing has changed.
            MemoryFault: The memory for more is not there. Nothing has changed.
        """
        self._check_usable()
        if not 0 <= num_chunks <= self.max_chunks:
            raise ValueError(f"resize({num_chunks}): the pool may have 0 to {self.max_chunks} chunks")
        self._end_views()
        self._mappings.check_unmapped(num_chunks)
        self._file.resize(num_chunks)

    def close(self) -> None:
        """Unmap everything and give the memory back. Idempotent; in a forked child too."""
        _live_drivers.discard(self)
        whole, self._whole = self._whole, None
        try:
            if whole is not None:
                self._sys.munmap(*whole)
                if not self._is_inherited:  # in a forked child that was done at the fork
                    self._clear_lent_arena()
        finally:
            self._file.close()

    def _clear_lent_arena(self) -> None:
        if self._lent_arena is not None:
            for place, num_chunks in [*self._places.reservations(), *self._views.free_parts()]:
                nbytes = num_chunks * self._chunk_nbytes
                self._sys.mmap(self._places.address(place), nbytes, PROT_NONE, NOTHING | MAP_FIXED, -1, 0)

    def _check_usable(self) -> None:
        if self._whole is None:
            raise MemoryFault("the driver is closed")
        if self._is_inherited:
            raise MemoryFault("this process was forked from the one that owns the pool; it cannot use it")

    def _become_inherited(self) -> None:
        """In a forked child: let every address of ours fault, and let go of the memory.

        The kernel has left holes where the pool was mapped (MADV_DONTFORK). They must not stay
        holes: the child's own allocations could land there, and a stale pointer would read them.
        """
        if self._is_inherited:
            return  # a grandchild: what its parent has mapped at these addresses since is its own
        self._is_inherited = True
        if self._whole is not None and self._dontfork:
            self._sys.mmap(*self._whole, PROT_NONE, NOTHING | MAP_FIXED, -1, 0)
            self._clear_lent_arena()
            self._file.close()


_live_drivers: weakref.WeakSet[PosixDriver] = weakref.WeakSet()
"""Drivers that a fork must take from the child; a hook of the interpreter cannot be removed."""


def _after_fork_in_child() -> None:
    for driver in list(_live_drivers):
        driver._become_inherited()


if sys.platform != "linux":
    raise ImportError(f"vmm.posix needs Linux (memfd_create, MADV_DONTFORK); this is {sys.platform}")
os.register_at_fork(after_in_child=_after_fork_in_child)
