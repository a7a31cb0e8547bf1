"""The POSIX driver: chunks are offsets in one file in memory, reservations are PROT_NONE addresses.

See DESIGN.md, "OS and driver behaviour we rely on", for the facts behind each choice.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from vmm import machine
from vmm.driver import Access, MapCountExceeded, MemoryFault
from vmm.places import Places
from vmm.pool_file import HUGE_PAGE_NBYTES, NOTHING, PROT_NONE, PoolFile
from vmm.pool_views import PoolViews
from vmm.ranges import Layout, Piece
from vmm.sizes import format_nbytes
from vmm.syscalls import MAP_FIXED, Syscalls

__all__ = ["PosixDriver", "Syscalls"]

_CHUNKS = mmap.MAP_SHARED | MAP_FIXED

_MAX_ARENA_NBYTES = 16 << 40
_ARENA_ALIGNMENT = HUGE_PAGE_NBYTES  # so that a reservation can be backed by a huge page where the kernel has them
_MAPPINGS_LEFT_TO_OTHERS = 512
"""Mappings that we leave to the rest of the process: threads and malloc need some at any time."""


class _File(NamedTuple):
    """A range of the arena that shows a range of somebody's file; `place` is where it begins."""

    descriptor: int
    offset: int
    nbytes: int
    place: int


_Mapped = tuple[int, Access] | _File | None
"""What a chunk-sized place of the arena shows: (chunk - place, access), equal for neighbours that
the kernel keeps as one mapping; a part of a file; None for nothing."""


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
        self._max_map_count = max_map_count if max_map_count is not None else machine.max_map_count()
        self._num_mappings_unchecked = 0  # up to here we may grow before the process's mappings are counted again
        self._is_inherited = False
        self._num_guards = 0
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
            self._hold_addresses(max(max_chunks or 0, num_chunks), arena_nbytes)
            self._file.show(self._view_address)
            self._places = Places(
                base=self._arena_start,
                chunk_nbytes=chunk_nbytes,
                start=0,
                stop=(self._arena_stop - self._arena_start) // chunk_nbytes,
                more_options="no limit on address space (ulimit -v)",
            )
            for address, nbytes in occupied:
                self._places.occupy(address, nbytes)
            self._layout: Layout[_Mapped] = Layout(0, self._places.num_places, None)
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
        return self._max_chunks

    remap_ns = None
    """Page tables are made anew for each chunk, so it goes by bytes."""

    @property
    def view_address(self) -> int:
        """Start of the linear view: chunk `c` is at `view_address + c * chunk_nbytes`."""
        return self._view_address

    @property
    def arena(self) -> tuple[int, int]:
        """`[start, stop)` of the addresses that `reserve` hands out."""
        return self._arena_start, self._arena_stop

    @property
    def num_mappings(self) -> int:
        """Mappings that the kernel keeps for this driver, of its limit on the whole process.

        Those of the arena, the view, the rests before and behind the view that alignment leaves, and
        at most two for each guarded range.
        """
        return self._layout.num_pieces + 3 + 2 * self._num_guards

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
        place = next((p for p in places if self._shows(p, first_chunk, num_chunks)), None)
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

    def _shows(self, place: int, first_chunk: int, num_chunks: int) -> bool:
        return self._layout.is_one(place, place + num_chunks, (first_chunk - place, Access.READ_WRITE))

    def _add_view(self) -> int | None:
        """Map the whole pool once more. The view's first place, or None: there are enough, or it cannot be mapped."""
        start = self._views.add(self.num_chunks)
        if start is None:
            return None
        piece: Piece[_Mapped] = Piece(start, start + self.num_chunks, (-start, Access.READ_WRITE))
        try:
            self._make_room(2)
            self._replace([piece], lambda: "a view of the pool", populate=False)
        except BaseException as error:
            self._views.remove(start)
            if not isinstance(error, MemoryFault):
                raise
            return None
        return start

    def _end_views(self) -> None:
        """Let no view of the pool show a chunk but where a reservation is, and others have their addresses."""
        for place, length in self._views.free_parts():
            self._replace([Piece(place, place + length, None)], lambda: "the end of a view of the pool")
        self._views.retire()

    def release(self, address: int, num_chunks: int) -> None:
        """Give a reservation back. Unmaps what is mapped there; in a view it shows its own chunks from now on."""
        self._check_usable()
        place = self._places.reservation(address, num_chunks)
        chunk = self._views.chunk_of(place)
        if chunk is not None:
            if not self._shows(place, chunk, num_chunks):
                self._put_back(place, chunk, num_chunks)
            self._views.release(place)
            return
        if self._layout.pieces(place, place + num_chunks) != [Piece(place, place + num_chunks, None)]:
            self.unmap(address, num_chunks)
        self._places.release(place)

    def map(self, address: int, runs: Sequence[tuple[int, int]]) -> None:
        """Map runs of chunks, one after the other, at `address`, read-write."""
        self._check_usable()
        pieces, place = self._pieces_of_runs(address, runs)
        self._make_room(len(pieces) + 2)  # at most: one mapping a run, and the rests of a piece at both ends
        self._replace(pieces, lambda: f"map({address:#x}, {len(runs)} runs, {place - pieces[0].start} chunks)")

    def _put_back(self, place: int, chunk: int, num_chunks: int) -> None:
        """Let a range of a view show its own chunks again: then it is one mapping with its neighbours."""
        self._make_room(2, left_to_others=0)  # the way back from too many, as in `unmap`
        piece: Piece[_Mapped] = Piece(place, place + num_chunks, (chunk - place, Access.READ_WRITE))
        address = self._places.address(place)
        self._replace([piece], lambda: f"release({address:#x}, {num_chunks} chunks)", populate=False)

    def unmap(self, address: int, num_chunks: int) -> None:
        """Map nothing at the range: a touch faults. Frees its page tables."""
        self._check_usable()
        place = self._places.inside(address, num_chunks)
        self._make_room(2, left_to_others=0)  # the way back from too many: it may use what is kept for others
        nothing: Piece[_Mapped] = Piece(place, place + num_chunks, None)
        self._replace([nothing], lambda: f"unmap({address:#x}, {num_chunks} chunks)")

    def map_file(self, address: int, num_chunks: int, descriptor: int, offset: int, nbytes: int) -> None:
        """Map a part of a file at the start of the range, read-write and shared; nothing behind it.

        The kernel then serves every touch, system calls on the range too, from the page cache, which
        it may reclaim. In place of what was mapped at once: nobody sees a state between.

        Args:
            address: Start of the range.
            num_chunks: Chunks of it.
            descriptor: The file; it may be open for direct I/O. The mapping stays when it is closed.
            offset: Where the part begins; a multiple of the page.
            nbytes: Its length, at most the range's; rounded up to whole pages.
        """
        self._check_usable()
        place = self._places.inside(address, num_chunks)
        nbytes = _round_up(nbytes, self._granularity)
        if offset < 0 or offset % self._granularity or not 0 < nbytes <= num_chunks * self._chunk_nbytes:
            raise ValueError(
                f"map_file({address:#x}, {num_chunks} chunks): {nbytes} bytes at {offset} are not whole pages "
                f"({self._granularity} bytes) that fit the range"
            )
        self._make_room(4)
        piece: Piece[_Mapped] = Piece(place, place + num_chunks, _File(descriptor, offset, nbytes, place))
        self._replace([piece], lambda: f"map_file({address:#x}, {nbytes} bytes at {offset})")

    def note_file(self, address: int, num_chunks: int, descriptor: int, offset: int, nbytes: int) -> None:
        """Note that somebody else (the fault handler) has done what `map_file` does. No system call."""
        self._check_usable()
        place = self._places.inside(address, num_chunks)
        self._layout.assign([Piece(place, place + num_chunks, _File(descriptor, offset, nbytes, place))])

    def note_guards(self, num_added: int, *, cuts: bool = True) -> None:
        """Note that somebody else protects parts of mappings, each of which may cut two of them.

        Args:
            num_added: How many parts; negative when they are lifted.
            cuts: False for ranges that are mapped to nothing already: that needs no mapping more.

        Raises:
            MapCountExceeded: The kernel's limit on mappings would be too near. Nothing was noted.
        """
        if num_added > 0 and cuts:
            self._make_room(2 * num_added)
        self._num_guards += num_added

    def protect(self, address: int, num_chunks: int, access: Access) -> None:
        """Change what a touch of a mapped range does; mapping and page tables stay."""
        self._check_usable()
        place = self._places.inside(address, num_chunks)
        before = self._layout.pieces(place, place + num_chunks)
        after: list[Piece[_Mapped]] = []
        for start, stop, value in before:
            if value is None or isinstance(value, _File):
                hole = self._places.address(start)
                raise ValueError(f"protect({address:#x}, {num_chunks} chunks): no chunk is mapped at {hole:#x}")
            after.append(Piece(start, stop, (value[0], access)))
        self._make_room(2)
        try:
            self._sys.mprotect(address, num_chunks * self._chunk_nbytes, _prot(access))
        except BaseException as error:
            self._restore(before)
            if not isinstance(error, OSError):
                raise
            raise self._fault(f"protect({address:#x}, {num_chunks} chunks, {access.value})", error) from error
        self._layout.assign(after)

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
        if not 0 <= num_chunks <= self._max_chunks:
            raise ValueError(f"resize({num_chunks}): the pool may have 0 to {self._max_chunks} chunks")
        self._end_views()
        for start, stop, value in self._layout.pieces(0, self._places.num_places):
            if isinstance(value, _File) or value is None:
                continue
            if stop + value[0] > num_chunks:
                raise ValueError(
                    f"resize({num_chunks}): chunk {stop + value[0] - 1} is mapped at {self._places.address(start):#x}"
                )
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

    def _hold_addresses(self, max_chunks: int, arena_nbytes: int | None) -> None:
        """One range for the view and, after it, the arena: as large as the machine gives."""
        smallest = self.num_chunks * self._chunk_nbytes
        view_nbytes = _round_up(max_chunks * self._chunk_nbytes, _ARENA_ALIGNMENT)
        if self._lent_arena is not None:
            arena_nbytes = self._chunk_nbytes  # ours is not used
        wanted = arena_nbytes if arena_nbytes is not None else max(_MAX_ARENA_NBYTES, smallest)
        if wanted < self._chunk_nbytes:
            raise ValueError(f"arena_nbytes={arena_nbytes}: less than one chunk, {self._chunk_nbytes} bytes")
        while True:
            nbytes = view_nbytes + wanted + _ARENA_ALIGNMENT
            try:
                address = self._sys.mmap(0, nbytes, PROT_NONE, NOTHING, -1, 0)
                break
            except OSError as error:
                if arena_nbytes is None and wanted // 2 >= smallest:
                    wanted //= 2
                    continue
                if max_chunks > self.num_chunks:  # a pool that cannot grow does as well
                    max_chunks = self.num_chunks
                    view_nbytes = _round_up(smallest, _ARENA_ALIGNMENT)
                    continue
                raise MemoryFault(
                    f"cannot hold {format_nbytes(nbytes)} of addresses ({format_nbytes(view_nbytes)} for the pool, "
                    f"{format_nbytes(wanted)} for reservations): {error}.\n"
                    "  Options: no limit on address space (ulimit -v); a smaller arena_nbytes; a smaller budget."
                ) from error
        self._max_chunks = max_chunks
        self._whole = (address, nbytes)
        self._view_address = _round_up(address, _ARENA_ALIGNMENT)
        self._arena_start = self._view_address + view_nbytes
        if self._lent_arena is not None:
            self._arena_start, wanted = self._lent_arena[0], self._lent_arena[1] - self._lent_arena[0]
        self._arena_stop = self._arena_start + wanted // self._chunk_nbytes * self._chunk_nbytes

    def _pieces_of_runs(self, address: int, runs: Sequence[tuple[int, int]]) -> tuple[list[Piece[_Mapped]], int]:
        """The pieces that `runs` make at `address`, neighbours merged, and the place where they end."""
        place = self._places.of_runs(address, runs, self.num_chunks)
        pieces: list[Piece[_Mapped]] = []
        for first, count in runs:
            value: _Mapped = (first - place, Access.READ_WRITE)
            if pieces and pieces[-1].value == value:
                pieces[-1] = Piece(pieces[-1].start, place + count, value)
            else:
                pieces.append(Piece(place, place + count, value))
            place += count
        return pieces, place

    def _replace(self, pieces: list[Piece[_Mapped]], what: Callable[[], str], *, populate: bool = True) -> None:
        """Let neighbouring addresses show `pieces`; if a call fails, they show again what they show now.

        Raises:
            MemoryFault: A call failed; `what` says for what it was made.
        """
        start, stop = pieces[0].start, pieces[-1].stop
        before = self._layout.pieces(start, stop)
        try:
            for piece in pieces:
                self._show(piece, populate=populate)
            if pieces[0].value is not None:
                self._advise(start, stop)
        except BaseException as error:
            self._restore(before)
            if not isinstance(error, OSError):
                raise
            raise self._fault(what(), error) from error
        self._layout.assign(pieces)

    def _show(self, piece: Piece[_Mapped], *, populate: bool = True) -> None:
        """Let the addresses of `piece` show what it says, in place of what they show now; chunks with page tables."""
        address = self._places.address(piece.start)
        nbytes = (piece.stop - piece.start) * self._chunk_nbytes
        if piece.value is None:
            self._sys.mmap(address, nbytes, PROT_NONE, NOTHING | MAP_FIXED, -1, 0)
            return
        if isinstance(piece.value, _File):
            descriptor, start, length, place = piece.value
            skipped = (piece.start - place) * self._chunk_nbytes  # the piece may be the rest of a larger one
            length = min(max(length - skipped, 0), nbytes)
            if length > 0:
                prot = mmap.PROT_READ | mmap.PROT_WRITE
                self._sys.mmap(address, length, prot, mmap.MAP_SHARED | MAP_FIXED, descriptor, start + skipped)
            if length < nbytes:
                self._sys.mmap(address + length, nbytes - length, PROT_NONE, NOTHING | MAP_FIXED, -1, 0)
            return
        delta, access = piece.value
        offset = (piece.start + delta) * self._chunk_nbytes
        flags = _CHUNKS | mmap.MAP_POPULATE if populate and access is Access.READ_WRITE else _CHUNKS
        self._sys.mmap(address, nbytes, _prot(access), flags, self._file.descriptor, offset)

    def _advise(self, start: int, stop: int) -> None:
        """Say of new mappings what the kernel is to know of all of ours."""
        address, nbytes = self._places.address(start), (stop - start) * self._chunk_nbytes
        if self._dontfork:
            self._sys.madvise(address, nbytes, mmap.MADV_DONTFORK)
        if self._file.is_split:
            self._sys.madvise(address, nbytes, mmap.MADV_NOHUGEPAGE)

    def _restore(self, pieces: Sequence[Piece[_Mapped]]) -> None:
        """Undo: let addresses show again what the layout says that they show."""
        try:
            for piece in pieces:
                self._show(piece)
                if piece.value is not None:
                    self._advise(piece.start, piece.stop)
        except OSError as error:
            first, last = self._places.address(pieces[0].start), self._places.address(pieces[-1].stop)
            raise self._fault(
                f"[{first:#x}, {last:#x}) could not be put back after a failed call; what it shows is unknown", error
            ) from error

    def _make_room(self, num_added: int, *, left_to_others: int = _MAPPINGS_LEFT_TO_OTHERS) -> None:
        """Check that `num_added` more mappings stay within the kernel's limit.

        Counting the process's mappings takes milliseconds, so it is done again only when we have
        taken half of what the last count left free.
        """
        if self.num_mappings + num_added <= self._num_mappings_unchecked:
            return
        present = machine.map_count()
        free = self._max_map_count - left_to_others - present - num_added
        if free < 0:
            self._num_mappings_unchecked = 0
            raise MapCountExceeded(
                f"the process has {present} memory mappings, {self.num_mappings} of them for the pool; {num_added} "
                f"more would leave less than {_MAPPINGS_LEFT_TO_OTHERS} of the kernel's limit, vm.max_map_count = "
                f"{self._max_map_count}, to the rest of the process.\n"
                f"  Options: larger chunks (now {format_nbytes(self._chunk_nbytes)}); a higher limit: "
                f"sysctl -w vm.max_map_count={max(262144, 4 * self._max_map_count)} (as root)."
            )
        if left_to_others:
            self._num_mappings_unchecked = self.num_mappings + num_added + free // 2

    def _check_usable(self) -> None:
        if self._whole is None:
            raise MemoryFault("the driver is closed")
        if self._is_inherited:
            raise MemoryFault("this process was forked from the one that owns the pool; it cannot use it")

    def _fault(self, what: str, error: OSError) -> MemoryFault:
        message = f"{what}: {error}."
        if error.errno == errno.ENOMEM:
            with contextlib.suppress(OSError):
                message += f" The process has {machine.map_count()} of {self._max_map_count} memory mappings."
            message += "\n  Options: larger chunks; a higher vm.max_map_count; no limit on address space (ulimit -v)."
        return MemoryFault(message)

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


def _prot(access: Access) -> int:
    return PROT_NONE if access is Access.NONE else mmap.PROT_READ | mmap.PROT_WRITE


def _round_up(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


_live_drivers: weakref.WeakSet[PosixDriver] = weakref.WeakSet()
"""Drivers that a fork must take from the child; a hook of the interpreter cannot be removed."""


def _after_fork_in_child() -> None:
    for driver in list(_live_drivers):
        driver._become_inherited()


if sys.platform != "linux":
    raise ImportError(f"vmm.posix needs Linux (memfd_create, MADV_DONTFORK); this is {sys.platform}")
os.register_at_fork(after_in_child=_after_fork_in_child)
