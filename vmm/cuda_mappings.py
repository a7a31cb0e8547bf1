"""What the addresses of a CUDA driver show: which chunk is mapped at which place, and what a touch of it does.

See DESIGN.md, "CUDA driver behaviour we rely on".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vmm.cuda_calls import CudaCalls, CudaFault
from vmm.cuda_handles import ChunkHandles
from vmm.driver import Access, MemoryFault
from vmm.ranges import Layout, Piece
from vmm.sizes import format_nbytes

__all__ = ["CudaMappings"]


class _Shown(NamedTuple):
    """What a place shows: chunk `place + delta`."""

    delta: int
    access: Access


_Mapped = _Shown | None


class CudaMappings:
    """Lets places show chunks, or nothing, and keeps what each of them shows.

    A call that fails is undone; where that fails too, it is known all the same what each place shows. Whether places
    are reserved, chunks exist and their last use was observed is the caller's to see to.

    Args:
        calls: The driver's calls.
        handles: The chunks' memory.
        base: Address of place 0.
        num_places: Places of the view and of the arena behind it, all mapped to nothing.
        chunk_nbytes: Size of one place.
    """

    def __init__(
        self, calls: CudaCalls, handles: ChunkHandles, *, base: int, num_places: int, chunk_nbytes: int
    ) -> None:
        self._calls = calls
        self._handles = handles
        self._base = base
        self._num_places = num_places
        self._chunk_nbytes = chunk_nbytes
        self._layout: Layout[_Mapped] = Layout(0, num_places, None)

    def __repr__(self) -> str:
        num_shown = sum(stop - start for start, stop in self._mapped_stretches())
        return f"<CudaMappings {num_shown} of {self._num_places} places show a chunk>"

    @property
    def is_empty(self) -> bool:
        """Whether nothing is mapped anywhere."""
        return self.shows_nothing(0, self._num_places)

    def shows_nothing(self, place: int, num_chunks: int) -> bool:
        """Whether nothing is mapped at any of these places."""
        return self._layout.is_one(place, place + num_chunks, None)

    def num_in_view(self, place: int, most: int) -> int:
        """How many neighbouring places of the view, from `place` on and at most `most`, show their own chunks."""
        if not most:
            return 0
        piece = self._layout.pieces(place, place + most)[0]
        return piece.stop - place if piece.value == _Shown(0, Access.READ_WRITE) else 0

    def check_unmapped(self, first_chunk: int, num_chunks: int, *, first_place: int) -> None:
        """Raise ValueError if one of the chunks `[first_chunk, num_chunks)` is mapped from `first_place` on.

        That is where the arena begins; `resize` may not take such a chunk away.
        """
        for start, stop, value in self._layout.pieces(first_place, self._num_places):
            if value is not None and first_chunk < stop + value.delta <= num_chunks:
                raise ValueError(
                    f"resize({first_chunk}): chunk {stop + value.delta - 1} is mapped at {self._address(start):#x}"
                )

    def map_runs(self, place: int, runs: Sequence[tuple[int, int]]) -> None:
        """Map runs of chunks, one after the other, from `place` on, read-write."""
        start = place
        wanted: list[Piece[_Mapped]] = []
        for first, count in runs:
            wanted.append(Piece(place, place + count, _Shown(first - place, Access.READ_WRITE)))
            place += count
        self._change(wanted, f"map({self._address(start):#x}, {len(runs)} runs, {place - start} chunks)")

    def map_in_view(self, start: int, stop: int) -> None:
        """Map its own chunk at each of the places `[start, stop)` of the view; there may be none."""
        if stop > start:
            self._change([Piece(start, stop, _Shown(0, Access.READ_WRITE))], "the linear view")

    def unmap(self, place: int, num_chunks: int, what: str) -> None:
        """Map nothing at these places. Errors begin with `what`."""
        self._change([Piece(place, place + num_chunks, None)], what)

    def unmap_all(self) -> list[CudaFault]:
        """Unmap all that can be. The failures; another call tries those again."""
        faults: list[CudaFault] = []
        for start, stop in self._mapped_stretches():
            try:
                self._unmap_stretch(start, stop, "close")
            except CudaFault as fault:
                if not fault.is_gone_with_context:
                    faults.append(fault)
                    continue
            self._layout.assign([Piece(start, stop, None)])
        return faults

    def forget(self, place: int, num_chunks: int) -> None:
        """What is mapped at these places is somebody else's from now on."""
        self._layout.assign([Piece(place, place + num_chunks, None)])

    def protect(self, place: int, num_chunks: int, access: Access) -> None:
        """Change what a touch of mapped chunks does. Raises ValueError where no chunk is mapped."""
        address = self._address(place)
        wanted: list[Piece[_Mapped]] = []
        for start, stop, value in self._layout.pieces(place, place + num_chunks):
            if value is None:
                hole = self._address(start)
                raise ValueError(f"protect({address:#x}, {num_chunks} chunks): no chunk is mapped at {hole:#x}")
            wanted.append(Piece(start, stop, value._replace(access=access)))
        self._change(wanted, f"protect({address:#x}, {num_chunks} chunks, {access.value})")

    def _change(self, wanted: Sequence[Piece[_Mapped]], what: str) -> None:
        """Let neighbouring pieces show what they say, or leave all as it was.

        The books follow every driver call, so the way back is a change like any other.
        """
        before = self._layout.pieces(wanted[0].start, wanted[-1].stop)
        try:
            self._show(wanted, what)
        except BaseException as error:
            try:
                self._show(before, f"undo of {what}")
            except CudaFault as second:
                raise MemoryFault(
                    f"{what}: failed, and could not be undone; the range shows a part of what it did.\n"
                    f"First: {error}\nThen: {second}"
                ) from error
            raise

    def _show(self, wanted: Sequence[Piece[_Mapped]], what: str) -> None:
        self._unmap_others(wanted, what)
        self._map_missing(wanted, what)
        self._set_access(wanted, what)

    def _unmap_others(self, wanted: Sequence[Piece[_Mapped]], what: str) -> None:
        """Unmap what shows another chunk than is wanted: one call for each contiguous range."""
        stretches: list[tuple[int, int]] = []
        for piece in wanted:
            for start, stop, value in self._layout.pieces(piece.start, piece.stop):
                if value is not None and (piece.value is None or piece.value.delta != value.delta):
                    _extend(stretches, start, stop)
        for start, stop in stretches:
            self._unmap_stretch(start, stop, what)
            self._layout.assign([Piece(start, stop, None)])

    def _map_missing(self, wanted: Sequence[Piece[_Mapped]], what: str) -> None:
        """Map the wanted chunks where nothing is mapped: one call each, since a handle is one chunk."""
        for piece in wanted:
            if piece.value is None:
                continue
            shown = _Shown(piece.value.delta, Access.NONE)  # until access is set
            for start, stop, value in self._layout.pieces(piece.start, piece.stop):
                if value is not None:
                    continue
                for place in range(start, stop):
                    chunk = place + shown.delta
                    address = self._address(place)
                    self._calls.call(
                        "cuMemMap",
                        address,
                        self._chunk_nbytes,
                        0,
                        self._handles[chunk],
                        0,
                        what=f"{what}: chunk {chunk} at {address:#x}",
                    )
                    self._layout.assign([Piece(place, place + 1, shown)])

    def _set_access(self, wanted: Sequence[Piece[_Mapped]], what: str) -> None:
        """Set what a touch does: one call for each contiguous range of equal access, where any of it differs."""
        groups: list[tuple[int, int, Access]] = []
        for start, stop, value in wanted:
            if value is None:
                continue
            if groups and groups[-1][1:] == (start, value.access):
                groups[-1] = (groups[-1][0], stop, value.access)
            else:
                groups.append((start, stop, value.access))
        for start, stop, access in groups:
            others = [
                piece
                for piece in self._layout.pieces(start, stop)
                if piece.value is not None and piece.value.access is not access
            ]
            if others:
                self._set_stretch(others[0].start, others[-1].stop, access, what)

    def _set_stretch(self, start: int, stop: int, access: Access, what: str) -> None:
        bindings, address = self._calls.bindings, self._address(start)
        flags = bindings.CUmemAccess_flags
        wish = self._handles.located(bindings.CUmemAccessDesc())
        is_open = access is Access.READ_WRITE
        wish.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if is_open else flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
        nbytes = (stop - start) * self._chunk_nbytes
        what = f"{what}: access {access.value} for {format_nbytes(nbytes)} at {address:#x}"
        self._calls.call("cuMemSetAccess", address, nbytes, [wish], 1, what=what)
        after: list[Piece[_Mapped]] = []
        for first, last, value in self._layout.pieces(start, stop):
            assert value is not None
            after.append(Piece(first, last, value._replace(access=access)))
        self._layout.assign(after)

    def _unmap_stretch(self, start: int, stop: int, what: str) -> None:
        address, nbytes = self._address(start), (stop - start) * self._chunk_nbytes
        self._calls.call("cuMemUnmap", address, nbytes, what=f"{what}: {format_nbytes(nbytes)} at {address:#x}")

    def _mapped_stretches(self) -> list[tuple[int, int]]:
        stretches: list[tuple[int, int]] = []
        for start, stop, value in self._layout.pieces(0, self._num_places):
            if value is not None:
                _extend(stretches, start, stop)
        return stretches

    def _address(self, place: int) -> int:
        return self._base + place * self._chunk_nbytes


def _extend(stretches: list[tuple[int, int]], start: int, stop: int) -> None:
    """Add `[start, stop)` behind the last stretch, as a part of it where they touch."""
    if stretches and stretches[-1][1] == start:
        stretches[-1] = (stretches[-1][0], stop)
    else:
        stretches.append((start, stop))
