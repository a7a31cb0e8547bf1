"""What becomes of variables that outlive their session."""

from __future__ import annotations

import ctypes
import mmap
import os

from ooc.books import Books, State
from vmm.posix import PosixDriver
from vmm.syscalls import MAP_FIXED, MAP_NORESERVE, Syscalls
from vmm.torch_cpu import GRANULE_NBYTES, CpuAllocator


def release_survivors(books: Books, driver: PosixDriver, allocator: CpuAllocator) -> int:
    """Turn every live variable into ordinary memory at its old address. Returns their bytes.

    The budget ends with the session, so they all come back; each is private to the process from
    now on and is unmapped when it is freed.
    """
    syscalls = Syscalls()
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    total = 0
    for record in list(books.records.values()):
        books.settle(record)
        length = -(-record.nbytes // GRANULE_NBYTES) * GRANULE_NBYTES
        content = None
        if record.state is State.RESIDENT:
            content = books.segments(record.runs, record.nbytes)
        num_chunks = record.reservation.num_chunks
        whole = num_chunks * books.chunk_nbytes
        # The rest of the last chunk, too: one page of the pool that stays mapped keeps all of the pool's memory.
        if whole > length:
            syscalls.mmap(record.address + length, whole - length, 0, anonymous | MAP_NORESERVE, -1, 0)
        syscalls.mmap(record.address, length, mmap.PROT_READ | mmap.PROT_WRITE, anonymous, -1, 0)
        if content is not None:
            offset = 0
            for address, nbytes in content:
                ctypes.memmove(record.address + offset, address, nbytes)
                offset += nbytes
        else:
            assert record.slot is not None
            _read(books.store.descriptor, record.slot.offset, record.address, length)
        driver.disown(record.address, num_chunks)
        if allocator.survive(record.address, length):
            total += record.nbytes
        else:  # freed a moment ago, by the cycle collector or another thread: nobody will free it again
            syscalls.mmap(record.address, length, 0, anonymous | MAP_NORESERVE, -1, 0)
    books.records.clear()
    return total


def _read(descriptor: int, offset: int, address: int, nbytes: int) -> None:
    view = (ctypes.c_char * nbytes).from_address(address)
    done = 0
    while done < nbytes:
        count = os.preadv(descriptor, [memoryview(view)[done:nbytes]], offset + done)
        if count <= 0:
            break  # the slot ends before the last granule does
        done += count
