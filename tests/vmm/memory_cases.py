"""Every driver behind one face for the tests, and ways to make its calls fail."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Any

from vmm.driver import Driver
from vmm.posix import PosixDriver, Syscalls


class Touched(Exception):
    """A touch of memory would have faulted."""


class FailingSyscalls:
    """System calls of which the k-th fails. Counts from the last `arm`."""

    def __init__(self) -> None:
        self._real = Syscalls()
        self._countdown = 0
        self._error = errno.ENOMEM
        self.has_failed = False

    def arm(self, fail_call: int, error: int = errno.ENOMEM) -> None:
        """Let the `fail_call`-th call from now fail (counted from 1; 0: none)."""
        self._countdown, self._error, self.has_failed = fail_call, error, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(self._real, name)

        def call(*arguments: Any) -> Any:
            self._countdown -= 1
            if self._countdown == 0:
                self.has_failed = True
                raise OSError(self._error, f"{name}: injected")
            return real(*arguments)

        return call


class PosixCase:
    """The POSIX driver, and how to touch its memory without being killed."""

    name = "posix"
    chunk_nbytes = 64 << 10

    def __init__(self) -> None:
        self.failing = FailingSyscalls()
        self._libc = ctypes.CDLL(None, use_errno=True)
        for call in (self._libc.read, self._libc.write):
            call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
            call.restype = ctypes.c_ssize_t
        self._reader, self._writer = os.pipe()

    def make(self, num_chunks: int = 16, **options: Any) -> PosixDriver:
        """A new driver whose calls `failing` can make fail."""
        return PosixDriver(num_chunks, self.chunk_nbytes, syscalls=self.failing, **options)  # type: ignore[arg-type]

    def peek(self, address: int, nbytes: int = 8) -> bytes:
        """Read memory; `Touched` where a plain read would fault. The kernel answers EFAULT instead of a signal."""
        if self._libc.write(self._writer, address, nbytes) != nbytes:
            assert ctypes.get_errno() == errno.EFAULT
            raise Touched(f"{address:#x}")
        return os.read(self._reader, nbytes)

    def poke(self, address: int, data: bytes) -> None:
        """Write memory; `Touched` where a plain write would fault."""
        os.write(self._writer, data)
        if self._libc.read(self._reader, address, len(data)) != len(data):
            assert ctypes.get_errno() == errno.EFAULT
            os.read(self._reader, len(data))
            raise Touched(f"{address:#x}")

    def faults(self, address: int) -> bool:
        """Whether a touch faults."""
        try:
            self.peek(address)
        except Touched:
            return True
        return False

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


CASES = [PosixCase]
"""Every driver: one that joins this list runs the whole suite."""


class Memory:
    """Page-aligned memory with an address."""

    def __init__(self, nbytes: int) -> None:
        self._mmap = mmap.mmap(-1, nbytes)
        self._handle = ctypes.c_char.from_buffer(self._mmap)
        self.address = ctypes.addressof(self._handle)

    def __getitem__(self, part: slice) -> bytes:
        return self._mmap[part]

    def __setitem__(self, part: slice, data: bytes) -> None:
        self._mmap[part] = data

    def close(self) -> None:
        del self._handle
        self._mmap.close()


def stamp(case: PosixCase, driver: Driver) -> None:
    """Write into each chunk, at its start and end, which one it is."""
    for chunk in range(driver.num_chunks):
        start = driver.view_address + chunk * driver.chunk_nbytes
        for place in (start, start + driver.chunk_nbytes - 8):
            case.poke(place, chunk.to_bytes(8, "little"))


def shown(case: PosixCase, driver: Driver, address: int, num_chunks: int) -> list[int | None]:
    """The chunk that each place shows by its stamps; None where a touch faults."""
    found: list[int | None] = []
    for place in range(num_chunks):
        start = address + place * driver.chunk_nbytes
        end = start + driver.chunk_nbytes - 8
        assert case.faults(start) == case.faults(end)
        if case.faults(start):
            found.append(None)
            continue
        first, last = case.peek(start), case.peek(end)
        assert first == last
        found.append(int.from_bytes(first, "little"))
    return found


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))
