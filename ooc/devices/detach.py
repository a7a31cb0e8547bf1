"""Detaches tensors that outlive their session: they become ordinary memory at their old addresses."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable

from ooc.memory.record import Segments, State
from ooc.memory.residency import ResidencyManager
from vmm.posix import PosixDriver
from vmm.store import FileStore
from vmm.syscalls import MAP_FIXED, MAP_NORESERVE, Syscalls
from vmm.torch_cpu import GRANULE_NBYTES, CpuAllocator

_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED


def detach_tensors(manager: ResidencyManager, driver: PosixDriver, store: FileStore, allocator: CpuAllocator) -> int:
    """Turn every live variable into ordinary memory at its old address. Returns their bytes.

    The budget ends with the session, so all of them are brought in. Each is private to the process from
    now on, and is unmapped when it is freed.
    """
    syscalls = Syscalls()
    total = 0
    for record in list(manager.records.values()):
        manager.settle(record)
        num_chunks = record.reservation.num_chunks
        whole, length = num_chunks * manager.chunk_nbytes, _whole_granules(record.nbytes)
        # The rest of the last chunk, too: one page of the pool that stays mapped keeps all of the pool's memory.
        if whole > length:
            syscalls.mmap(record.address + length, whole - length, 0, _ANONYMOUS | MAP_NORESERVE, -1, 0)
        if record.state is State.RESIDENT:
            fill = functools.partial(_copy, manager.segments(record.runs, record.nbytes))
        else:
            assert record.slot is not None
            fill = functools.partial(_read, store.descriptor, record.slot.offset, length)
        driver.disown(record.address, num_chunks)
        lives = become_ordinary(allocator, record.address, record.nbytes, fill)
        total += record.nbytes if lives else 0
    manager.records.clear()
    return total


def become_ordinary(allocator: CpuAllocator, address: int, nbytes: int, fill: Callable[[int], None]) -> bool:
    """Replace what is mapped at a variable's address by memory of its own, which `fill` writes.

    Returns:
        Whether the variable is alive. If it was freed a moment ago, by the cycle collector or another thread,
        nobody will free it again, and nothing is left there.
    """
    syscalls = Syscalls()
    length = _whole_granules(nbytes)
    syscalls.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, _ANONYMOUS, -1, 0)
    fill(address)
    if allocator.detach(address, length):
        return True
    syscalls.mmap(address, length, 0, _ANONYMOUS | MAP_NORESERVE, -1, 0)
    return False


def _copy(segments: Segments, address: int) -> None:
    for source, nbytes in segments:
        ctypes.memmove(address, source, nbytes)
        address += nbytes


def _whole_granules(nbytes: int) -> int:
    return -(-nbytes // GRANULE_NBYTES) * GRANULE_NBYTES


def _read(descriptor: int, offset: int, nbytes: int, address: int) -> None:
    view = (ctypes.c_char * nbytes).from_address(address)
    done = 0
    while done < nbytes:
        count = os.preadv(descriptor, [memoryview(view)[done:nbytes]], offset + done)
        if count <= 0:
            break  # the slot ends before the last granule does
        done += count
