"""What the arena of a POSIX driver shows: which chunks, or parts of files, are mapped at which of its places.

See DESIGN.md, "OS and driver behaviour we rely on: POSIX", for the facts behind each choice.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vmm import machine
from vmm.driver import Access, MapCountExceeded, MemoryFault, Still
from vmm.places import Places
from vmm.pool_file import NOTHING, PROT_NONE, PoolFile
from vmm.ranges import Layout, Piece
from vmm.sizes import format_nbytes
from vmm.syscalls import MAP_FIXED, MmapCall, Syscalls, touch

__all__ = ["PosixMappings"]

_CHUNKS = mmap.MAP_SHARED | MAP_FIXED
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


class PosixMappings:
    """Lets places of an arena show chunks, parts of files or nothing, and keeps what each of them shows.

    A call that fails is undone, and raises `MemoryFault`. Whether places are reserved and chunks exist is the caller's
    to check; whether the kernel has mappings left is checked here: a call for which it has too few raises
    `MapCountExceeded`, and changes nothing.

    Args:
        places: The arena's places, all mapped to nothing.
        file: The chunks' memory.
        chunk_nbytes: Size of one chunk.
        dontfork: A forked child does not see what is mapped.
        max_map_count: The kernel's limit on mappings.
        syscalls: What makes the system calls.
    """

    def __init__(
        self,
        places: Places,
        file: PoolFile,
        *,
        chunk_nbytes: int,
        dontfork: bool,
        max_map_count: int,
        syscalls: Syscalls,
    ) -> None:
        self._places = places
        self._file = file
        self._chunk_nbytes = chunk_nbytes
        self._dontfork = dontfork
        self._max_map_count = max_map_count
        self._sys = syscalls
        self._num_mappings_unchecked = 0  # up to here we may grow before the process's mappings are counted again
        self._num_guards = 0
        self._layout: Layout[_Mapped] = Layout(0, places.num_places, None)

    def __repr__(self) -> str:
        return f"<PosixMappings: {self.num_mappings} of at most {self._max_map_count}>"

    @property
    def num_mappings(self) -> int:
        """As `PosixDriver` has it."""
        return self._layout.num_pieces + 3 + 2 * self._num_guards

    def shows(self, place: int, first_chunk: int, num_chunks: int) -> bool:
        """Whether these neighbouring chunks, and no others, are mapped from `place` on, read-write."""
        return self._layout.is_one(place, place + num_chunks, (first_chunk - place, Access.READ_WRITE))

    def shows_nothing(self, place: int, num_chunks: int) -> bool:
        """Whether nothing is mapped at any of these places."""
        return self._layout.is_one(place, place + num_chunks, None)

    def check_unmapped(self, first_chunk: int) -> None:
        """Raise ValueError if this chunk, or one behind it, is mapped: `resize` may not take it away."""
        for start, stop, value in self._layout.pieces(0, self._places.num_places):
            if isinstance(value, _File) or value is None:
                continue
            if stop + value[0] > first_chunk:
                raise ValueError(
                    f"resize({first_chunk}): chunk {stop + value[0] - 1} is mapped at {self._places.address(start):#x}"
                )

    def map_runs(self, place: int, runs: Sequence[tuple[int, int]], still: Still | None = None) -> None:
        """Map runs of chunks, one after the other, from `place` on, read-write; neighbours by one call."""
        start = place
        pieces: list[Piece[_Mapped]] = []
        for first, count in runs:
            value: _Mapped = (first - place, Access.READ_WRITE)
            if pieces and pieces[-1].value == value:
                pieces[-1] = Piece(pieces[-1].start, place + count, value)
            else:
                pieces.append(Piece(place, place + count, value))
            place += count
        self._make_room(len(pieces) + 2)  # at most: one mapping a run, and the rests of a piece at both ends
        self._replace(
            pieces,
            lambda: f"map({self._places.address(start):#x}, {len(runs)} runs, {place - start} chunks)",
            still=still,
        )

    def unmap(self, place: int, num_chunks: int) -> None:
        """Map nothing at these places."""
        self._make_room(2, left_to_others=0)  # the way back from too many: it may use what is kept for others
        nothing: Piece[_Mapped] = Piece(place, place + num_chunks, None)
        self._replace([nothing], lambda: f"unmap({self._places.address(place):#x}, {num_chunks} chunks)")

    def map_view(self, place: int, num_chunks: int) -> None:
        """Map the first chunks of the pool from `place` on, read-write. Pages are faulted in as they are touched."""
        self._make_room(2)
        piece: Piece[_Mapped] = Piece(place, place + num_chunks, (-place, Access.READ_WRITE))
        self._replace([piece], lambda: "a view of the pool", populate=False)

    def unmap_view(self, place: int, num_chunks: int) -> None:
        """Map nothing at a part of a view."""
        self._replace([Piece(place, place + num_chunks, None)], lambda: "the end of a view of the pool")

    def put_back(self, place: int, chunk: int, num_chunks: int) -> None:
        """Let a range of a view show its own chunks again: then it is one mapping with its neighbours."""
        self._make_room(2, left_to_others=0)  # the way back from too many, as in `unmap`
        piece: Piece[_Mapped] = Piece(place, place + num_chunks, (chunk - place, Access.READ_WRITE))
        self._replace(
            [piece], lambda: f"release({self._places.address(place):#x}, {num_chunks} chunks)", populate=False
        )

    def map_file(
        self, place: int, num_chunks: int, descriptor: int, offset: int, nbytes: int, still: Still | None = None
    ) -> None:
        """Map whole pages of a file from `place` on, read-write and shared; nothing at the rest of these places."""
        self._make_room(4)
        piece: Piece[_Mapped] = Piece(place, place + num_chunks, _File(descriptor, offset, nbytes, place))
        self._replace(
            [piece], lambda: f"map_file({self._places.address(place):#x}, {nbytes} bytes at {offset})", still=still
        )

    def note_file(self, place: int, num_chunks: int, descriptor: int, offset: int, nbytes: int) -> None:
        """Note that somebody else has done what `map_file` does."""
        self._layout.assign([Piece(place, place + num_chunks, _File(descriptor, offset, nbytes, place))])

    def note_guards(self, num_added: int, *, cuts: bool) -> None:
        """Note that somebody else protects so many parts more of mappings: see `PosixDriver.note_guards`."""
        if num_added > 0 and cuts:
            self._make_room(2 * num_added)
        self._num_guards += num_added

    def protect(self, place: int, num_chunks: int, access: Access) -> None:
        """Change what a touch of mapped chunks does. Raises ValueError where no chunk is mapped."""
        address = self._places.address(place)
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

    def _replace(
        self,
        pieces: list[Piece[_Mapped]],
        what: Callable[[], str],
        *,
        populate: bool = True,
        still: Still | None = None,
    ) -> None:
        """Let neighbouring addresses show `pieces`; if a call fails, they show again what they show now.

        With `populate`, chunks get their page tables: with the mapping, or, where that is cheaper, by touching some
        pages then. Small pages do not come along before they are clear.

        Raises:
            MemoryFault: A call failed; `what` says for what it was made.
        """
        start, stop = pieces[0].start, pieces[-1].stop
        before = self._layout.pieces(start, stop)
        touches = populate and self._file.has_huge_pages
        at_once = populate and not touches
        try:
            (still or self._make)([call for piece in pieces for call in self._calls(piece, populate=at_once)])
            if pieces[0].value is not None:
                self._advise(start, stop)
        except BaseException as error:
            self._restore(before)
            if not isinstance(error, OSError):
                raise
            raise self._fault(what(), error) from error
        self._layout.assign(pieces)
        for piece in pieces if touches else ():
            if _is_accessible(piece.value):
                touch(self._places.address(piece.start), (piece.stop - piece.start) * self._chunk_nbytes)

    def _make(self, calls: Sequence[MmapCall]) -> None:
        for call in calls:
            self._sys.mmap(*call)

    def _calls(self, piece: Piece[_Mapped], *, populate: bool) -> list[MmapCall]:
        """Calls by which the addresses of `piece` come to show what it says; with `populate`, with page tables."""
        address = self._places.address(piece.start)
        nbytes = (piece.stop - piece.start) * self._chunk_nbytes
        if piece.value is None:
            return [MmapCall(address, nbytes, PROT_NONE, NOTHING | MAP_FIXED, -1, 0)]
        if isinstance(piece.value, _File):
            descriptor, start, length, place = piece.value
            skipped = (piece.start - place) * self._chunk_nbytes  # the piece may be the rest of a larger one
            length = min(max(length - skipped, 0), nbytes)
            calls = []
            if length > 0:
                prot = mmap.PROT_READ | mmap.PROT_WRITE
                calls.append(MmapCall(address, length, prot, mmap.MAP_SHARED | MAP_FIXED, descriptor, start + skipped))
            if length < nbytes:
                calls.append(MmapCall(address + length, nbytes - length, PROT_NONE, NOTHING | MAP_FIXED, -1, 0))
            return calls
        delta, access = piece.value
        offset = (piece.start + delta) * self._chunk_nbytes
        flags = _CHUNKS | mmap.MAP_POPULATE if populate and access is Access.READ_WRITE else _CHUNKS
        return [MmapCall(address, nbytes, _prot(access), flags, self._file.descriptor, offset)]

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
                self._make(self._calls(piece, populate=False))
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

    def _fault(self, what: str, error: OSError) -> MemoryFault:
        message = f"{what}: {error}."
        if error.errno == errno.ENOMEM:
            with contextlib.suppress(OSError):
                message += f" The process has {machine.map_count()} of {self._max_map_count} memory mappings."
            message += "\n  Options: larger chunks; a higher vm.max_map_count; no limit on address space (ulimit -v)."
        return MemoryFault(message)


def _is_accessible(value: _Mapped) -> bool:
    """Whether a place that shows this shows chunks, read-write."""
    return value is not None and not isinstance(value, _File) and value[1] is Access.READ_WRITE


def _prot(access: Access) -> int:
    return PROT_NONE if access is Access.NONE else mmap.PROT_READ | mmap.PROT_WRITE
