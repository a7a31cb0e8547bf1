"""The system calls of the POSIX driver, one thin method each, so that a test can make any of them fail."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import NamedTuple

from vmm.huge_pages import open_huge_file

__all__ = [
    "MADV_COLD",
    "MADV_POPULATE_READ",
    "MADV_POPULATE_WRITE",
    "MAP_FIXED",
    "MAP_NORESERVE",
    "MmapCall",
    "Syscalls",
    "touch",
]

# Not in the mmap module of Python 3.11; the same on all of Linux's architectures that PyTorch runs on.
MADV_COLD = 20  # since Linux 5.4
MADV_POPULATE_READ = 22  # since Linux 5.14
MADV_POPULATE_WRITE = 23  # since Linux 5.14
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000

_MAP_FAILED = ctypes.c_void_p(-1).value
_FAULT_AROUND_NBYTES = 64 << 10
"""A fault on a page of a file makes page tables for so much around it: the kernel's `fault_around_bytes` by default."""
_ADDRESSES = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0))
"""All of the process's addresses: a byte of it is what is at that address, and to read one where nothing is ends us."""


class MmapCall(NamedTuple):
    """The arguments of `Syscalls.mmap`."""

    address: int
    nbytes: int
    prot: int
    flags: int
    descriptor: int
    offset: int


class Syscalls:
    """The system calls that the driver makes. Each raises OSError. Tests wrap it to make one fail."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address, nbytes, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap = getattr(libc, "mmap64", libc.mmap)
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = (address, nbytes, number, number, number, ctypes.c_int64)
        self._munmap = libc.munmap
        self._munmap.argtypes = (address, nbytes)
        self._mprotect = libc.mprotect
        self._mprotect.argtypes = (address, nbytes, number)
        self._madvise = libc.madvise
        self._madvise.argtypes = (address, nbytes, number)

    def memfd_create(self, name: str) -> int:
        """A new file in memory, closed on exec."""
        return os.memfd_create(name, os.MFD_CLOEXEC)

    def open_huge_file(self, name: str) -> int:
        """A new file in memory, closed on exec, with huge pages whatever the kernel's setting for memfds is."""
        return open_huge_file(name)

    def ftruncate(self, descriptor: int, nbytes: int) -> None:
        """Set the file's length."""
        os.ftruncate(descriptor, nbytes)

    def fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Make the file's pages now."""
        os.posix_fallocate(descriptor, offset, nbytes)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def mmap(self, address: int, nbytes: int, prot: int, flags: int, descriptor: int, offset: int) -> int:
        """Map; the address."""
        result: int = self._mmap(address, nbytes, prot, flags, descriptor, offset)
        if result == _MAP_FAILED:
            raise _os_error("mmap")
        return result

    def munmap(self, address: int, nbytes: int) -> None:
        """Unmap, addresses and all."""
        if self._munmap(address, nbytes):
            raise _os_error("munmap")

    def mprotect(self, address: int, nbytes: int, prot: int) -> None:
        """Change what a touch does."""
        if self._mprotect(address, nbytes, prot):
            raise _os_error("mprotect")

    def madvise(self, address: int, nbytes: int, advice: int) -> None:
        """Say how a range is used."""
        if self._madvise(address, nbytes, advice):
            raise _os_error("madvise")


def touch(address: int, nbytes: int) -> None:
    """Have the page tables made of a range that shows a file's pages, all in memory, by reading some of them.

    Where the kernel makes fewer at a time, later touches are faults. It never fails, and keeps the GIL.
    """
    around = -(-(address + 1) // _FAULT_AROUND_NBYTES) * _FAULT_AROUND_NBYTES
    _ADDRESSES[address : address + 1].tobytes()
    _ADDRESSES[around : address + nbytes : _FAULT_AROUND_NBYTES].tobytes()


def _os_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
