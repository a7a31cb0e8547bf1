"""The device's memory and addresses in the fake: a memfd, mapped for real, under the driver's rules."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import bisect_right, insort
from collections import abc
from collections.abc import Iterator
from typing import Any

from vmm.ranges import FreeRanges
from vmm.syscalls import MAP_FIXED, MAP_NORESERVE, Syscalls
from vmm.testing.fake_cuda.names import (
    CallRefused,
    CUmemAccess_flags,
    CUmemAllocationType,
    CUmemLocationType,
    CUresult,
    RuleBroken,
)
from vmm.testing.fake_cuda.races import Clock, Interval

__all__ = ["FakeMemory", "Mapping"]

_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
_PROTS = {
    CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE: 0,
    CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ: mmap.PROT_READ,
    CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE: mmap.PROT_READ | mmap.PROT_WRITE,
}


class _Allocation:
    """Physical memory: its place in the memfd, and who keeps it."""

    __slots__ = ("is_released", "nbytes", "num_mappings", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.num_mappings = 0
        self.is_released = False


class Mapping:
    """One handle at one address. `uses`: the last act of each agent that touched it, as `agent: (tick, name)`."""

    __slots__ = ("access", "address", "handle", "nbytes", "offset", "uses")

    def __init__(self, address: int, nbytes: int, handle: int, offset: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.handle = handle
        self.offset = offset
        self.access = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
        self.uses: dict[int, tuple[int, str]] = {}


class FakeMemory:
    """`total_nbytes` of device memory. Device addresses are addresses of this process.

    With `arena` (`[start, stop)`, mapped to nothing by its owner) they are taken from there, but not from the
    ranges `occupied` (address to bytes), and what is given back is mapped to nothing again.

    A forked child has none of it: its addresses show nothing there, and `close` does nothing.
    """

    def __init__(
        self,
        *,
        total_nbytes: int,
        granularity: int,
        arena: tuple[int, int] | None = None,
        occupied: abc.Mapping[int, int] | None = None,
    ) -> None:
        if granularity <= 0 or granularity % mmap.PAGESIZE or total_nbytes % granularity:
            raise ValueError(f"total_nbytes={total_nbytes}, granularity={granularity}: not whole pages and granules")
        self._sys = Syscalls()
        self.total_nbytes = total_nbytes
        self.granularity = granularity
        self._free = FreeRanges(0, total_nbytes // granularity)
        self._descriptor = self._sys.memfd_create("fake-cuda")
        self._sys.ftruncate(self._descriptor, total_nbytes)
        self._allocations: dict[int, _Allocation] = {}
        self._num_handles = 0
        self._lent = _free_parts(arena, occupied or {}, granularity) if arena is not None else None
        self._reservations: dict[int, int] = {}
        self._outer: dict[int, tuple[int, int]] = {}  # by reservation: the whole mmap, alignment included
        self._mappings: dict[int, Mapping] = {}
        self._starts: list[int] = []
        _live_memories.add(self)

    @property
    def free_nbytes(self) -> int:
        """What no allocation has."""
        return self._free.total * self.granularity

    @property
    def num_mappings(self) -> int:
        """Mappings that exist."""
        return len(self._mappings)

    def left(self) -> list[str]:
        """What has not been given back."""
        found = [
            f"handle {handle:#x}: {'unreleased' if not it.is_released else 'released'}, {it.num_mappings} mappings"
            for handle, it in self._allocations.items()
        ]
        return found + [f"{nbytes} bytes of addresses at {at:#x}" for at, nbytes in self._reservations.items()]

    def close(self) -> None:
        """Give all of it back to the system."""
        _live_memories.discard(self)
        for address in list(self._outer):
            self._give_addresses_back(address)
        if self._descriptor >= 0:
            self._sys.close(self._descriptor)
        self._descriptor = -1

    def _become_inherited(self) -> None:
        """In a forked child: let every address of ours show nothing, and let go of the memory."""
        for outer, nbytes in self._outer.values():
            self._sys.mmap(outer, nbytes, 0, _NOTHING | MAP_FIXED, -1, 0)
        self._outer.clear()  # a later fake, the child's own, may have them
        self.close()

    def create(self, nbytes: int, properties: Any) -> int:
        """cuMemCreate."""
        location = properties.location
        if (
            nbytes <= 0
            or nbytes % self.granularity
            or properties.type != CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            or location.type != CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            or int(location.id) != 0
        ):
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
        granule = self._free.take(nbytes // self.granularity)
        if granule is None:
            raise CallRefused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        self._num_handles += 1
        handle = 0xA000 + self._num_handles
        self._allocations[handle] = _Allocation(granule * self.granularity, nbytes)
        return handle

    def release(self, handle: int) -> None:
        """cuMemRelease: the memory is free once nothing is mapped, either."""
        allocation = self._allocations.get(handle)
        if allocation is None or allocation.is_released:
            raise RuleBroken(
                f"cuMemRelease({handle:#x}): not a handle, or released before; the real driver's answer is undefined"
            )
        allocation.is_released = True
        self._free_unused(handle)

    def reserve(self, nbytes: int, alignment: int, flags: int) -> int:
        """cuMemAddressReserve. The wish for an address is only a hint, and not heard."""
        alignment = max(alignment, self.granularity)
        if nbytes <= 0 or nbytes % self.granularity or alignment & (alignment - 1) or flags:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
        slack = alignment if self._lent is None else alignment - self.granularity
        outer = self._take_addresses(nbytes + slack)
        if outer is None:
            raise CallRefused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        address = -(-outer // alignment) * alignment
        self._reservations[address] = nbytes
        self._outer[address] = (outer, nbytes + slack)
        return address

    def _take_addresses(self, nbytes: int) -> int | None:
        if self._lent is not None:
            place = self._lent.take(nbytes // self.granularity)
            return place * self.granularity if place is not None else None
        try:
            return self._sys.mmap(0, nbytes, 0, _NOTHING, -1, 0)
        except OSError:
            return None

    def _give_addresses_back(self, address: int) -> None:
        outer, nbytes = self._outer.pop(address)
        if self._lent is None:
            self._sys.munmap(outer, nbytes)
            return
        self._sys.mmap(outer, nbytes, 0, _NOTHING | MAP_FIXED, -1, 0)
        self._lent.give(outer // self.granularity, nbytes // self.granularity)

    def free_addresses(self, address: int, nbytes: int) -> None:
        """cuMemAddressFree: exactly what was reserved, with nothing mapped."""
        is_mapped = next(self._within(address, address + nbytes), None) is not None
        if self._reservations.get(address) != nbytes or is_mapped:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
        del self._reservations[address]
        self._give_addresses_back(address)

    def map(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        """cuMemMap: one whole handle, offset 0, where nothing is mapped. It is not accessible yet."""
        allocation = self._allocations.get(handle)
        if (
            allocation is None
            or allocation.is_released
            or offset
            or flags
            or address % self.granularity
            or nbytes != allocation.nbytes
            or not self._is_reserved(address, nbytes)
            or next(self._within(address, address + nbytes), None) is not None
        ):
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
        self._mmap(address, nbytes, allocation.offset)
        self._mappings[address] = Mapping(address, nbytes, handle, allocation.offset)
        insort(self._starts, address)
        allocation.num_mappings += 1

    def unmap(self, address: int, nbytes: int, clock: Clock) -> None:
        """cuMemUnmap: whole mappings, without a hole, whose uses the calling thread has observed."""
        mappings = self._whole(address, nbytes)
        for mapping in mappings:
            _check_observed("cuMemUnmap", mapping, clock)
        self._sys.mmap(address, nbytes, 0, _NOTHING | MAP_FIXED, -1, 0)
        for mapping in mappings:
            del self._mappings[mapping.address]
            del self._starts[bisect_right(self._starts, mapping.address) - 1]
            self._allocations[mapping.handle].num_mappings -= 1
            self._free_unused(mapping.handle)

    def set_access(self, address: int, nbytes: int, wishes: Any, count: int, clock: Clock) -> None:
        """cuMemSetAccess: whole mappings, without a hole; less access under the same rule as unmapping."""
        mappings = self._whole(address, nbytes)
        if count != 1 or len(wishes) != 1 or wishes[0].flags not in _PROTS or int(wishes[0].location.id) != 0:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if wishes[0].location.type != CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
        access = CUmemAccess_flags(wishes[0].flags)
        for mapping in mappings:
            if access < mapping.access:
                _check_observed("cuMemSetAccess", mapping, clock)
        self._sys.mprotect(address, nbytes, _PROTS[access])
        for mapping in mappings:
            mapping.access = access

    def touched(self, name: str, address: int, nbytes: int, *, is_write: bool) -> list[tuple[Mapping, Interval]]:
        """The mappings and physical bytes behind a range that device work is to touch."""
        found: list[tuple[Mapping, Interval]] = []
        place, stop = address, address + nbytes
        for mapping in self._within(address, stop):
            needed = (
                CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                if is_write
                else CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
            )
            if mapping.address > place:
                break
            if mapping.access < needed:
                raise RuleBroken(
                    f"{name} touches {place:#x}: mapped, but its access is {mapping.access.name} "
                    "(cuMemSetAccess comes before the touch)"
                )
            end = min(stop, mapping.address + mapping.nbytes)
            start = mapping.offset + place - mapping.address
            found.append((mapping, Interval("device", start, start + end - place, place)))
            place = end
        if place < stop:
            raise RuleBroken(f"{name} touches {place:#x}: nothing is mapped there; the real context would be lost")
        return found

    def is_device_address(self, address: int) -> bool:
        """Whether the address is in a reservation."""
        return any(start <= address < start + nbytes for start, nbytes in self._reservations.items())

    def _mmap(self, address: int, nbytes: int, offset: int) -> None:
        # Without MADV_DONTFORK: it leaves holes in a child, where the child's own mappings land (code that oneDNN
        # compiles, say), to be overwritten by the next fake that is lent these addresses. See `_become_inherited`.
        self._sys.mmap(address, nbytes, 0, mmap.MAP_SHARED | MAP_FIXED, self._descriptor, offset)

    def _free_unused(self, handle: int) -> None:
        allocation = self._allocations[handle]
        if allocation.is_released and not allocation.num_mappings:
            del self._allocations[handle]
            self._free.give(allocation.offset // self.granularity, allocation.nbytes // self.granularity)

    def _is_reserved(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + n for start, n in self._reservations.items())

    def _within(self, start: int, stop: int) -> Iterator[Mapping]:
        """The mappings that overlap a range, in order."""
        index = bisect_right(self._starts, start) - 1
        if index < 0 or self._starts[index] + self._mappings[self._starts[index]].nbytes <= start:
            index += 1
        while index < len(self._starts) and self._starts[index] < stop:
            yield self._mappings[self._starts[index]]
            index += 1

    def _whole(self, address: int, nbytes: int) -> list[Mapping]:
        """The mappings that fill a range exactly."""
        mappings = list(self._within(address, address + nbytes))
        place = address
        for mapping in mappings:
            if mapping.address != place:
                raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
            place += mapping.nbytes
        if not mappings or place != address + nbytes:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return mappings


class HostMemory:
    """Pinned host memory: what copies may touch."""

    def __init__(self) -> None:
        self._ours: dict[int, Any] = {}  # by address: the buffer that we allocated
        self._pinned: dict[int, tuple[int, dict[int, tuple[int, str]]]] = {}

    def left(self) -> list[str]:
        """What has not been given back."""
        return [f"{nbytes} bytes of pinned host memory at {at:#x}" for at, (nbytes, _) in self._pinned.items()]

    def allocate(self, nbytes: int) -> int:
        """cuMemHostAlloc."""
        if nbytes <= 0:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
        buffer = ctypes.create_string_buffer(nbytes + mmap.PAGESIZE)
        address = -(-ctypes.addressof(buffer) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._ours[address] = buffer
        self._pinned[address] = (nbytes, {})
        return address

    def register(self, address: int, nbytes: int) -> None:
        """cuMemHostRegister."""
        if nbytes <= 0:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if any(at < address + nbytes and address < at + n for at, (n, _) in self._pinned.items()):
            raise CallRefused(CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        self._pinned[address] = (nbytes, {})

    def give_back(self, address: int, clock: Clock, *, is_ours: bool) -> None:
        """cuMemFreeHost or cuMemHostUnregister, when the caller has observed the last use."""
        if address not in self._pinned or (address in self._ours) != is_ours:
            code = CUresult.CUDA_ERROR_INVALID_VALUE if is_ours else CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
            raise CallRefused(code)
        for agent, (tick, name) in self._pinned[address][1].items():
            if clock.get(agent, 0) < tick:
                raise RuleBroken(f"host memory at {address:#x} is given back before {name} was seen to be done")
        del self._pinned[address]
        self._ours.pop(address, None)

    def touched(self, name: str, address: int, nbytes: int) -> tuple[dict[int, tuple[int, str]], Interval]:
        """The pinned range behind a copy."""
        for at, (pinned_nbytes, uses) in self._pinned.items():
            if at <= address and address + nbytes <= at + pinned_nbytes:
                return uses, Interval("host", address, address + nbytes, address)
        raise RuleBroken(f"{name} touches {address:#x}: not pinned host memory, so the copy would stop the host")


def _free_parts(arena: tuple[int, int], occupied: abc.Mapping[int, int], granularity: int) -> FreeRanges:
    """The granules of a lent range of addresses that nobody is in."""
    start, stop = arena
    free = FreeRanges(-(-start // granularity), stop // granularity)
    for address, nbytes in occupied.items():
        first = address // granularity
        for granule in range(first, -(-(address + nbytes) // granularity)):
            free.take_at(granule, 1)  # two of them may share one
    return free


def _check_observed(call: str, mapping: Mapping, clock: Clock) -> None:
    for agent, (tick, name) in mapping.uses.items():
        if clock.get(agent, 0) < tick:
            raise RuleBroken(
                f"{call} of {mapping.address:#x}: the host has not observed the end of {name}, "
                "and the driver does not wait for it"
            )


_live_memories: weakref.WeakSet[FakeMemory] = weakref.WeakSet()
"""Fakes that a fork must take from the child; a hook of the interpreter cannot be removed."""


def _after_fork_in_child() -> None:
    for memory in list(_live_memories):
        memory._become_inherited()


os.register_at_fork(after_in_child=_after_fork_in_child)
