"""The CUDA driver: chunks are allocation handles, one each, mapped into one reserved range of device addresses.

Runs over `cuda.bindings.driver`, or over `vmm.testing.fake_cuda` where there is no GPU.
See DESIGN.md, "CUDA driver behaviour we rely on".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from vmm.cuda_calls import CudaCalls, CudaFault, load_bindings
from vmm.cuda_handles import ChunkHandles
from vmm.cuda_mappings import CudaMappings
from vmm.driver import Access, MemoryFault, Still
from vmm.places import Places
from vmm.sizes import format_nbytes

__all__ = ["CudaDriver"]

_MAX_ARENA_NBYTES = 1 << 40
"""Addresses cost no device memory; 1 TiB is a few times the largest card's. Not tuned."""
_TOO_MANY_ADDRESSES = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"})
"""Results after which half as many addresses are asked for: which of them a driver gives is not documented."""


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

    remap_ns = 90_000
    """cuMemUnmap, cuMemMap, cuMemSetAccess: 31, 3 and 58 us in planned steps on an H200 that map 17,000 chunks each
    (C14). The wait for the last use is the transfers', which come before."""

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
        self._mappings = CudaMappings(  # until addresses are held
            self._calls, self._handles, base=0, num_places=num_chunks, chunk_nbytes=chunk_nbytes
        )
        try:
            self._granularity = self._handles.find_device(device_index)
            total_nbytes = self._handles.check_free(num_chunks + num_fixed_chunks)
            self._max_chunks = max(total_nbytes // chunk_nbytes, num_chunks)
            self._handles.create(0, num_chunks)
            self._num_places = self._num_view + self._hold_addresses(arena_nbytes)
            self._places = Places(
                base=self._address(0), chunk_nbytes=chunk_nbytes, start=self._num_view, stop=self._num_places
            )
            self._mappings = CudaMappings(
                self._calls,
                self._handles,
                base=self._address(0),
                num_places=self._num_places,
                chunk_nbytes=chunk_nbytes,
            )
            self._mappings.map_in_view(0, num_chunks)
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
        self._mappings.unmap(place, num_chunks, f"release({address:#x}, {num_chunks} chunks)")
        self._places.release(place)

    def map(self, address: int, runs: Sequence[tuple[int, int]], *, still: Still | None = None) -> None:
        """Map runs of chunks, one after the other, at `address`, read-write.

        One cuMemUnmap for each contiguous range that shows other chunks, one cuMemMap for each chunk
        that is not there yet, then one cuMemSetAccess. Nobody can be kept from writing meanwhile: `still` is refused.
        """
        self._check_usable()
        if still is not None:
            raise MemoryFault(f"map({address:#x}): writes to a device's memory cannot be made to wait.")
        self._mappings.map_runs(self._places.of_runs(address, runs, self._num_chunks), runs)

    def unmap(self, address: int, num_chunks: int) -> None:
        """Map nothing at the range. The host must have observed an event behind its last use."""
        self._check_usable()
        place = self._places.inside(address, num_chunks)
        self._mappings.unmap(place, num_chunks, f"unmap({address:#x}, {num_chunks} chunks)")

    def map_file(
        self,
        address: int,
        num_chunks: int,
        descriptor: int,
        offset: int,
        nbytes: int,
        *,
        still: Still | None = None,  # noqa: ARG002 - as the protocol has it
    ) -> None:
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
        self._mappings.protect(self._places.inside(address, num_chunks), num_chunks, access)

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
        self._mappings.check_unmapped(num_chunks, self._num_chunks, first_place=self._num_view)
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
        self._mappings.forget(place, num_chunks)
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
        if self._held is not None and self._mappings.is_empty and not self.keeps_addresses:
            address, nbytes = self._held
            what = f"close: {format_nbytes(nbytes)} of addresses at {address:#x}"
            try:
                self._calls.call("cuMemAddressFree", address, nbytes, what=what)
                self._held = None
            except CudaFault as fault:
                if fault.is_gone_with_context:
                    self._held = None
                else:
                    faults.append(fault)
        if faults:
            raise MemoryFault(
                f"close: {len(faults)} driver calls failed; {len(self._handles)} chunks are still held. "
                f"Call close again to try what is left.\nThe first: {faults[0]}"
            ) from faults[0]

    def _give_chunks_back(self) -> list[CudaFault]:
        """What could not be given back stays in the books."""
        return self._mappings.unmap_all() + self._handles.release_all()

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
            self._mappings.unmap(last, first - last, f"giving back {first - last} chunks")
            try:
                self._handles.release(last, first)
            except BaseException:
                self._mappings.map_in_view(base, last + self._handles.num_from(last, first))
                raise
        try:
            self._mappings.map_in_view(base, last)
        except BaseException as error:
            try:
                if last > first and self._mappings.shows_nothing(first, last - first):  # else the next call
                    self._handles.release(first, last)
            except MemoryFault as fault:
                error.add_note(f"What had been taken could not all be given back: {fault}")
            raise
        return num_chunks

    def _num_usable(self, base: int, most: int) -> int:
        """How many chunks from `base` on exist and show in the view, after a failure whose undo failed, too."""
        return min(self._mappings.num_in_view(base, most), self._handles.num_from(base, base + most))

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

    def _check_usable(self) -> None:
        if self._is_closed:
            raise MemoryFault("the driver is closed")
        if os.getpid() != self._process:
            raise MemoryFault("this process was forked from the one that owns the pool; CUDA does not survive a fork")

    def _address(self, place: int) -> int:
        if self._held is None:
            raise MemoryFault("the driver is closed")
        return self._held[0] + place * self._chunk_nbytes
