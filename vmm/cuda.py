"""The CUDA driver: chunks are allocation handles, one each, mapped into one reserved range of device addresses.

Runs over `cuda.bindings.driver`, or over `vmm.testing.fake_cuda` where there is no GPU; so far over the fake alone.
See DESIGN.md, "CUDA driver behaviour we rely on".
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from vmm.cuda_calls import CudaCalls, CudaFault, load_bindings
from vmm.cuda_handles import ChunkHandles
from vmm.driver import Access, MemoryFault
from vmm.places import Places
from vmm.ranges import Layout, Piece
from vmm.sizes import format_nbytes

__all__ = ["CudaDriver"]

_MAX_ARENA_NBYTES = 1 << 40
"""Addresses cost no device memory; 1 TiB is a few times the largest card's. Not tuned: no GPU has been seen."""
_TOO_MANY_ADDRESSES = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"})
"""Results after which half as many addresses are asked for: which of them a driver gives is not documented."""
_GONE_WITH_THE_CONTEXT = frozenset({"CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_CONTEXT_IS_DESTROYED"})
"""Results after which there is nothing left to give back."""


class _Shown(NamedTuple):
    """What a place shows: chunk `place + delta`."""

    delta: int
    access: Access


_Mapped = _Shown | None


class CudaDriver:
    """`num_chunks` chunks of `chunk_nbytes` bytes of one device's memory: the pool, which `resize` changes.

    It differs from `PosixDriver` in this:

    - The host cannot touch the addresses, and a device touch of what is not mapped or protected is
      no fault that could be served: it destroys the context.
    - `unmap`, `release`, a `map` over other chunks, `protect` with NONE and `close` take a mapping
      away at once, whatever the device is doing. The host must first have *observed* (queried or
      synchronised) an event behind the last use; that a stream waits for it is not enough.
    - Replacing is not one step: between the calls the range shows nothing.
    - A place that shows the wanted chunk already is left alone, so it may be in use.
    - After a failed call whose undo fails too, the books still say what each place shows, and the
      next call starts from there.
    - There is no limit on mappings.
    - Files cannot be mapped (`map_file`, `note_file`, `note_guards` raise MemoryFault).
    - In a forked child every call raises, and `close` does nothing: CUDA does not survive a fork.

    The thread that makes it must have the device's context current; other threads get it when they have none.

    Args:
        num_chunks: Chunks of the pool, created at once.
        num_fixed_chunks: Chunks beside the pool that are never mapped by `map` and show in one piece at
            `fixed_address`; `resize_fixed` changes their number.
        chunk_nbytes: Size of one, a multiple of the device's granularity (2 MiB, as far as documented).
        bindings: `cuda.bindings.driver` or its like; imported by default.
        device_index: Which device, as CUDA counts those that are visible.
        arena_nbytes: Addresses to hold for reservations. By default 1 TiB, or as much of it as there is.
        num_attempts: How often a call that answers NOT_READY is made before it counts as failed.
        wait: What passes the time between attempts, given seconds.

    Raises:
        MemoryFault: There is no device, it cannot map, or its memory or addresses are not there.
            Nothing is left behind.
    """

    remap_ns = 100_000
    """cuMemUnmap, cuMemMap, cuMemSetAccess: 64 us as published (C14); and a wait for the last use. Not measured yet."""

    def __init__(
        self,
        num_chunks: int,
        chunk_nbytes: int,
        *,
        bindings: Any = None,
        device_index: int = 0,
        num_fixed_chunks: int = 0,
        arena_nbytes: int | None = None,
        num_attempts: int = 100,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        if num_chunks <= 0:
            raise ValueError(f"num_chunks={num_chunks}: must be positive")
        if chunk_nbytes <= 0:
            raise ValueError(f"chunk_nbytes={chunk_nbytes}: must be positive")
        if arena_nbytes is not None and arena_nbytes < chunk_nbytes:
            raise ValueError(f"arena_nbytes={arena_nbytes}: less than one chunk, {chunk_nbytes} bytes")
        self._num_chunks = num_chunks
        self._num_fixed = 0
        self._has_fixed = num_fixed_chunks > 0
        self._max_chunks = num_chunks
        self._chunk_nbytes = chunk_nbytes
        self._calls = CudaCalls(
            bindings if bindings is not None else load_bindings(), num_attempts=num_attempts, wait=wait
        )
        self._process = os.getpid()
        self._is_closed = False
        self.keeps_addresses = False
        """Whether `close` does not free the addresses: somebody may still name some of them."""
        self._handles = ChunkHandles(self._calls, chunk_nbytes=chunk_nbytes)
        self._held: tuple[int, int] | None = None  # address and length of all addresses we hold
        self._num_places = num_chunks  # of the view, and of the arena behind it once its addresses are held
        self._layout: Layout[_Mapped] = Layout(0, num_chunks, None)
        try:
            self._granularity = self._handles.find_device(device_index)
            total_nbytes = self._handles.check_free(num_chunks + num_fixed_chunks)
            self._max_chunks = max(total_nbytes // chunk_nbytes, num_chunks)
            self._handles.create(0, num_chunks)
            self._num_places = self._num_view + self._hold_addresses(arena_nbytes)
            self._places = Places(
                base=self._address(0), chunk_nbytes=chunk_nbytes, start=self._num_view, stop=self._num_places
            )
            self._layout = Layout(0, self._num_places, None)
            self._show_in_view(0, num_chunks)
            self._num_fixed = self._resized(self._max_chunks, num_fixed_chunks) if num_fixed_chunks else 0
            self._calls.note_context()
        except BaseException as error:
            try:
                self.close()
            except MemoryFault as second:
                error.add_note(f"What had been taken could not all be given back: {second}")
            raise

    def __repr__(self) -> str:
        if self._is_closed:
            left = f", {len(self._handles)} chunks not given back" if len(self._handles) else ""
            return f"<CudaDriver closed{left}>"
        return f"<CudaDriver {self._num_chunks} chunks of {self._chunk_nbytes} bytes, {self._places!r}>"

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
        """Chunks of the pool, all with their memory."""
        return self._num_chunks

    @property
    def num_fixed_chunks(self) -> int:
        """Chunks beside the pool."""
        return self._num_fixed

    @property
    def max_chunks(self) -> int:
        """As many chunks the pool may ever have, and as many may be beside it."""
        return self._max_chunks

    @property
    def fixed_address(self) -> int:
        """Where the chunks beside the pool begin, in one piece."""
        return self._address(self._max_chunks)

    def holds(self, address: int) -> bool:
        """Whether an address is one of the view, of the chunks beside the pool, or of the arena."""
        return self._held is not None and 0 <= address - self._held[0] < self._held[1]

    @property
    def granularity(self) -> int:
        """What sizes and addresses of mappings are multiples of, in bytes, by the device."""
        return self._granularity

    @property
    def calls(self) -> CudaCalls:
        """The driver's calls, for streams, events and copies on the same bindings."""
        return self._calls

    @property
    def view_address(self) -> int:
        """Start of the linear view: chunk `c` is at `view_address + c * chunk_nbytes`."""
        return self._address(0)

    @property
    def arena(self) -> tuple[int, int]:
        """`[start, stop)` of the addresses that `reserve` hands out."""
        return self._address(self._num_view), self._address(self._num_places)

    def reserve(self, num_chunks: int) -> int:
        """A fresh range of addresses, mapped to nothing. No driver call."""
        self._check_usable()
        return self._address(self._places.reserve(num_chunks))

    def reserve_shown(self, first_chunk: int, num_chunks: int) -> int | None:  # noqa: ARG002 - as `Driver` has it
        """None: a mapping is a handle's, and takes a call for each chunk of each view."""
        return None

    def release(self, address: int, num_chunks: int) -> None:
        """Give a reservation back. Unmaps what is mapped there (see `unmap`)."""
        self._check_usable()
        place = self._places.reservation(address, num_chunks)
        self._change([Piece(place, place + num_chunks, None)], f"release({address:#x}, {num_chunks} chunks)")
        self._places.release(place)

    def map(self, address: int, runs: Sequence[tuple[int, int]]) -> None:
        """Map runs of chunks, one after the other, at `address`, read-write.

        One cuMemUnmap for each contiguous range that shows other chunks, one cuMemMap for each chunk
        that is not there yet, then one cuMemSetAccess.
        """
        self._check_usable()
        place = self._places.of_runs(address, runs, self._num_chunks)
        wanted: list[Piece[_Mapped]] = []
        for first, count in runs:
            wanted.append(Piece(place, place + count, _Shown(first - place, Access.READ_WRITE)))
            place += count
        self._change(wanted, f"map({address:#x}, {len(runs)} runs, {place - wanted[0].start} chunks)")

    def unmap(self, address: int, num_chunks: int) -> None:
        """Map nothing at the range. The host must have observed an event behind its last use."""
        self._check_usable()
        place = self._places.inside(address, num_chunks)
        self._change([Piece(place, place + num_chunks, None)], f"unmap({address:#x}, {num_chunks} chunks)")

    def map_file(self, address: int, num_chunks: int, descriptor: int, offset: int, nbytes: int) -> None:
        """Not possible on a device."""
        raise MemoryFault(
            f"map_file({address:#x}, {num_chunks} chunks, descriptor {descriptor}, {nbytes} bytes at {offset}): "
            "a file cannot be mapped at device addresses.\n  Options: load its bytes through the store."
        )

    def note_file(self, address: int, num_chunks: int, descriptor: int, offset: int, nbytes: int) -> None:
        """Not possible on a device."""
        self.map_file(address, num_chunks, descriptor, offset, nbytes)

    def note_guards(self, num_added: int, *, cuts: bool = True) -> None:
        """Not possible on a device."""
        raise MemoryFault(f"note_guards({num_added}, cuts={cuts}): nobody serves faults of a device.")

    def protect(self, address: int, num_chunks: int, access: Access) -> None:
        """Change what a device touch does; with NONE under the same rule as `unmap`. One driver call."""
        self._check_usable()
        place = self._places.inside(address, num_chunks)
        wanted: list[Piece[_Mapped]] = []
        for start, stop, value in self._layout.pieces(place, place + num_chunks):
            if value is None:
                raise ValueError(
                    f"protect({address:#x}, {num_chunks} chunks): no chunk is mapped at {self._address(start):#x}"
                )
            wanted.append(Piece(start, stop, value._replace(access=access)))
        self._change(wanted, f"protect({address:#x}, {num_chunks} chunks, {access.value})")

    def resize(self, num_chunks: int) -> None:
        """Let the pool have so many chunks: the last ones go to the driver, with what is in them, or more are taken.

        The host must have observed the end of all device work on the chunks that go.

        Raises:
            ValueError: It may not have so many (`max_chunks`), or a chunk that would go is mapped. Nothing has changed.
            MemoryFault: The memory for more is not there, or a call failed. Nothing has changed, unless the error
                says that chunks are gone; `num_chunks` is true then, too.
        """
        self._check_usable()
        if not 0 <= num_chunks <= self._max_chunks:
            raise ValueError(f"resize({num_chunks}): the pool may have 0 to {self._max_chunks} chunks")
        for start, stop, value in self._layout.pieces(self._num_view, self._num_places):
            if value is not None and num_chunks < stop + value.delta <= self._num_chunks:
                raise ValueError(
                    f"resize({num_chunks}): chunk {stop + value.delta - 1} is mapped at {self._address(start):#x}"
                )
        try:
            self._num_chunks = self._resized(0, num_chunks)
        except MemoryFault:
            self._num_chunks = self._num_usable(0, self._num_chunks)
            raise

    def resize_fixed(self, num_chunks: int) -> None:
        """Let there be so many chunks beside the pool, as `resize` does; those that stay keep their addresses."""
        self._check_usable()
        if not 0 <= num_chunks <= self._max_chunks:
            raise ValueError(f"resize_fixed({num_chunks}): there may be 0 to {self._max_chunks} chunks beside the pool")
        try:
            self._num_fixed = self._resized(self._max_chunks, num_chunks)
        except MemoryFault:
            self._num_fixed = self._num_usable(self._max_chunks, self._num_fixed)
            raise

    def disown(self, address: int, num_chunks: int) -> None:
        """The range is somebody else's from now on, as it is: mapped, with its memory, even when this is closed.

        Whoever owns it unmaps it, which gives its memory back; its addresses are never used again.
        """
        place, rest = divmod(address - self._address(0), self._chunk_nbytes)
        if rest or place < 0 or place + num_chunks > self._num_places:
            raise ValueError(f"disown({address:#x}, {num_chunks} chunks): not whole chunks of the pool's addresses")
        self._layout.assign([Piece(place, place + num_chunks, None)])
        self.keeps_addresses = True

    def give_chunks_back(self) -> None:
        """Unmap all that is not disowned and release every chunk. `attach_new`, `disown` and `close` may follow."""
        faults = self._give_chunks_back()
        if faults:
            raise MemoryFault(f"give_chunks_back: {len(faults)} driver calls failed. The first: {faults[0]}")

    def attach_new(self, address: int, num_chunks: int) -> None:
        """Map memory beside the pool at a range where nothing is mapped, and disown it."""
        nbytes = num_chunks * self._chunk_nbytes
        what = f"{format_nbytes(nbytes)} beside the pool at {address:#x}"
        handle = int(self._calls.call("cuMemCreate", nbytes, self._handles.properties(), 0, what=what))
        try:
            self._calls.call("cuMemMap", address, nbytes, 0, handle, 0, what=what)
            try:
                wish = self._handles.located(self._calls.bindings.CUmemAccessDesc())
                wish.flags = self._calls.bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                self._calls.call("cuMemSetAccess", address, nbytes, [wish], 1, what=what)
            except CudaFault:
                self._calls.call("cuMemUnmap", address, nbytes, what=what)
                raise
        finally:
            self._calls.call("cuMemRelease", handle, what=what)
        self.disown(address, num_chunks)

    def close(self) -> None:
        """Unmap everything, release every chunk, free the addresses, in this order. Idempotent.

        The host must have observed the end of all device work on the pool. What cannot be given
        back does not keep the rest; another call tries it again.

        Raises:
            MemoryFault: Something could not be given back.
        """
        self._is_closed = True
        if os.getpid() != self._process:
            return
        faults = self._give_chunks_back()
        if self._held is not None and not self._mapped_stretches() and not self.keeps_addresses:
            address, nbytes = self._held
            what = f"close: {format_nbytes(nbytes)} of addresses at {address:#x}"
            free = functools.partial(self._calls.call, "cuMemAddressFree", address, nbytes, what=what)
            if self._gives_back(faults, free):
                self._held = None
        if faults:
            raise MemoryFault(
                f"close: {len(faults)} driver calls failed; {len(self._handles)} chunks are still held. "
                f"Call close again to try what is left.\nThe first: {faults[0]}"
            ) from faults[0]

    def _give_chunks_back(self) -> list[CudaFault]:
        """What could not be given back stays in the books."""
        faults: list[CudaFault] = []
        for start, stop in self._mapped_stretches():
            if self._gives_back(faults, functools.partial(self._unmap_stretch, start, stop, "close")):
                self._layout.assign([Piece(start, stop, None)])
        return faults + self._handles.release_all()

    def _gives_back(self, faults: list[CudaFault], operation: Callable[[], object]) -> bool:
        try:
            operation()
        except CudaFault as fault:
            if fault.result_name not in _GONE_WITH_THE_CONTEXT:
                faults.append(fault)
                return False
        return True

    @property
    def _num_view(self) -> int:
        """Places of the view: the pool's at its largest, and as many for chunks beside it, if there are any."""
        return self._max_chunks * (2 if self._has_fixed else 1)

    def _resized(self, base: int, num_chunks: int) -> int:
        """Let so many chunks exist from `base` on, and show in the view. Their number. What fails is undone."""
        first, last = self._handles.stop_in(base, base + self._max_chunks), base + num_chunks
        if last > first:
            self._handles.check_free(last - first)
            self._handles.create(first, last)
        elif last < first:
            self._change([Piece(last, first, None)], f"giving back {first - last} chunks")
            try:
                self._handles.release(last, first)
            except BaseException:
                self._show_in_view(base, last + self._handles.num_from(last, first))
                raise
        try:
            self._show_in_view(base, last)
        except BaseException as error:
            try:
                if last > first and not any(it.value for it in self._layout.pieces(first, last)):  # else the next call
                    self._handles.release(first, last)
            except MemoryFault as fault:
                error.add_note(f"What had been taken could not all be given back: {fault}")
            raise
        return num_chunks

    def _num_usable(self, base: int, most: int) -> int:
        """How many chunks from `base` on exist and show in the view, after a failure whose undo failed, too."""
        usable = 0
        for start, stop, value in self._layout.pieces(base, base + most) if most else ():
            if value != _Shown(0, Access.READ_WRITE) or start != base + usable:
                break
            usable = stop - base
        return min(usable, self._handles.num_from(base, base + most))

    def _show_in_view(self, start: int, stop: int) -> None:
        if stop > start:
            self._change([Piece(start, stop, _Shown(0, Access.READ_WRITE))], "the linear view")

    def _hold_addresses(self, arena_nbytes: int | None) -> int:
        """One range for the view and, after it, the arena. The number of places of the arena."""
        num_places = (
            arena_nbytes or max(_MAX_ARENA_NBYTES, self._max_chunks * self._chunk_nbytes)
        ) // self._chunk_nbytes
        while True:
            nbytes = (self._num_view + num_places) * self._chunk_nbytes
            what = f"{format_nbytes(nbytes)} of addresses ({num_places} chunks beside the pool's {self._num_view})"
            try:
                # Address 0 and alignment 0: the driver chooses; it aligns to its granularity.
                address = int(self._calls.call("cuMemAddressReserve", nbytes, 0, 0, 0, what=what))
            except CudaFault as fault:
                is_too_much = fault.result_name in _TOO_MANY_ADDRESSES
                if arena_nbytes is None and is_too_much and num_places // 2 >= self._num_chunks:
                    num_places //= 2
                    continue
                raise
            self._held = (address, nbytes)
            return num_places

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

    def _check_usable(self) -> None:
        if self._is_closed:
            raise MemoryFault("the driver is closed")
        if os.getpid() != self._process:
            raise MemoryFault("this process was forked from the one that owns the pool; CUDA does not survive a fork")

    def _address(self, place: int) -> int:
        if self._held is None:
            raise MemoryFault("the driver is closed")
        return self._held[0] + place * self._chunk_nbytes


def _extend(stretches: list[tuple[int, int]], start: int, stop: int) -> None:
    """Add `[start, stop)` behind the last stretch, as a part of it where they touch."""
    if stretches and stretches[-1][1] == start:
        stretches[-1] = (stretches[-1][0], stop)
    else:
        stretches.append((start, stop))
