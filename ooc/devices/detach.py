"""Detaches tensors that outlive their session: they become ordinary memory at their old addresses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable

from ooc.errors import SessionError
from ooc.memory.record import Segments, State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.units import format_nbytes
from vmm.driver import MemoryFault
from vmm.posix import PosixDriver
from vmm.store import FileStore
from vmm.syscalls import MAP_FIXED, MAP_NORESERVE, Syscalls
from vmm.torch_cpu import GRANULE_NBYTES, CpuAllocator

_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED


def detach_tensors(manager: ResidencyManager, driver: PosixDriver, store: FileStore, allocator: CpuAllocator) -> int:
    """Turn every live variable into ordinary memory at its old address. Returns their bytes.

    The budget ends with the session, so all of them are brought in. Each is private to the process from
    now on, and is unmapped when it is freed.

    Raises:
        SessionError: Some could not be read from the store, or were discarded and could not be made again; all
            others are detached. There is no memory at the addresses of those that are lost: reading them ends the
            process, and never gives other bytes.
    """
    syscalls = Syscalls()
    total = 0
    lost: list[tuple[VariableRecord, OSError]] = []
    for record in list(manager.records.values()):
        num_chunks = record.reservation.num_held_chunks
        whole, length = num_chunks * manager.chunk_nbytes, _whole_granules(record.nbytes)
        # The rest of the last chunk, too: one page of the pool that stays mapped keeps all of the pool's memory.
        if whole > length:
            syscalls.mmap(record.address + length, whole - length, 0, _ANONYMOUS | MAP_NORESERVE, -1, 0)
        if record.state is State.RESIDENT:
            fill: Callable[[int], None] = functools.partial(_copy, manager.segments(record.runs, record.nbytes))
        elif record.slot is not None:
            fill = functools.partial(_read, store.descriptor, record.slot.offset, length, record.nbytes)
        else:
            fill = _refuse
        driver.disown(record.address, num_chunks)
        try:
            lives = become_ordinary(allocator, record.address, record.nbytes, fill)
        except OSError as error:
            lost.append((record, error))
        else:
            total += record.nbytes if lives else 0
    manager.records.clear()
    if lost:
        raise _of_the_lost(lost)
    return total


def leave_tensors(manager: ResidencyManager, driver: PosixDriver) -> None:
    """Let every live variable stay where it is: its addresses go on to show the pool's chunks, or the store's file.

    For a process that is about to exit: other threads, and what runs while the interpreter shuts down, still find all
    bytes, and nothing is copied. The pool's memory, and the file's, are there until the last of them is freed. Where
    that cannot be, for want of mappings, nothing is left at the addresses.
    """
    for record in manager.records.values():
        with contextlib.suppress(MemoryFault, OSError):
            if record.state is State.RESIDENT:
                manager.guards.lift(record)
                manager.space.map(record.reservation, record.runs)
            elif record.slot is not None:
                manager.guards.show_file(record)
            else:
                continue
            driver.disown(record.address, record.reservation.num_held_chunks)


def abandon_tensors(manager: ResidencyManager, allocator: CpuAllocator) -> None:
    """Let go of what is alive and was not detached, if anything: what the session's end could not save, or has left.

    No later session gets its addresses before it is freed.
    """
    for record in list(manager.records.values()):
        allocator.detach(record.address, record.reservation.num_held_chunks * manager.chunk_nbytes)
    manager.records.clear()
    allocator.detach_rest()


def _of_the_lost(lost: list[tuple[VariableRecord, OSError]]) -> SessionError:
    nbytes = sum(record.nbytes for record, _ in lost)
    named = ", ".join(f"{record.label or 'variable'} ({format_nbytes(record.nbytes)})" for record, _ in lost[:5])
    error = SessionError(
        f"the session has ended, and {len(lost)} of its variables ({format_nbytes(nbytes)}) could not be brought "
        f"back: {named}{', ...' if len(lost) > 5 else ''}: {lost[0][1]}. They are lost, and must not be touched; "
        "all others are in memory.\n"
        "  Options: save what is left, and go on from the last checkpoint; look at the disk of the store "
        "(`store=`, `--store`)."
    )
    error.__cause__ = lost[0][1]
    return error


def become_ordinary(allocator: CpuAllocator, address: int, nbytes: int, fill: Callable[[int], None]) -> bool:
    """Replace what is mapped at a variable's address by memory of its own, which `fill` writes.

    Returns:
        Whether the variable is alive. If it was freed a moment ago, by the cycle collector or another thread,
        nobody will free it again, and nothing is left there. Nor is there where `fill` raises.
    """
    syscalls = Syscalls()
    length = _whole_granules(nbytes)
    syscalls.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, _ANONYMOUS, -1, 0)
    try:
        fill(address)
    except OSError:
        syscalls.mmap(address, length, 0, _ANONYMOUS | MAP_NORESERVE, -1, 0)
        allocator.detach(address, length)
        raise
    if allocator.detach(address, length):
        return True
    syscalls.mmap(address, length, 0, _ANONYMOUS | MAP_NORESERVE, -1, 0)
    return False


def _copy(segments: Segments, address: int) -> None:
    for source, nbytes in segments:
        ctypes.memmove(address, source, nbytes)
        address += nbytes


def _refuse(_: int) -> None:
    raise OSError(errno.ENODATA, "it was discarded, and could not be made again when its plan was left")


def _whole_granules(nbytes: int) -> int:
    return -(-nbytes // GRANULE_NBYTES) * GRANULE_NBYTES


def _read(descriptor: int, offset: int, length: int, nbytes: int, address: int) -> None:
    """Read `length` bytes, whole granules for `O_DIRECT`; the slot may end after `nbytes` of them."""
    view = (ctypes.c_char * length).from_address(address)
    done = 0
    while done < length:
        count = os.preadv(descriptor, [memoryview(view)[done:length]], offset + done)
        if count <= 0 and done >= nbytes:
            break
        if count <= 0:
            raise OSError(errno.EIO, f"the file ends at {offset + done}, inside of {nbytes} bytes at {offset}")
        done += count
