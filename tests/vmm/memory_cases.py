"""Every driver behind one face for the tests, and ways to make its calls fail."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from vmm.cuda import CudaDriver
from vmm.driver import Driver
from vmm.posix import PosixDriver, Syscalls
from vmm.testing.fake_cuda import CUresult, FakeCuda


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


class Failing(Protocol):
    """Makes the k-th call of a driver fail."""

    has_failed: bool

    def arm(self, fail_call: int) -> None: ...


class DriverCase:
    """A driver, and how to touch its memory without being killed.

    Attributes:
        name: For people.
        chunk_nbytes: The chunks of its drivers.
        failing: What makes its calls fail.
        injected: Text of every failure that `failing` makes.
        num_calls_to_make: Calls that make a driver with an arena of given size, wishes not counted.
        num_calls_to_replace: Calls that let one run show another chunk.
    """

    name: str
    chunk_nbytes: int
    failing: Failing
    injected: str
    num_calls_to_make: int
    num_calls_to_replace: int

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        for call in (self._libc.read, self._libc.write):
            call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
            call.restype = ctypes.c_ssize_t
        self._reader, self._writer = os.pipe()

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


class PosixCase(DriverCase):
    """The POSIX driver."""

    name = "posix"
    chunk_nbytes = 64 << 10
    injected = "injected"
    num_calls_to_make = 5  # ftruncate, mmap twice, madvise, fallocate; a file with huge pages is a wish
    num_calls_to_replace = 2  # mmap, madvise

    def __init__(self) -> None:
        super().__init__()
        self.failing = FailingSyscalls()

    def make(self, num_chunks: int = 16, **options: Any) -> PosixDriver:
        """A new driver whose calls `failing` can make fail."""
        return PosixDriver(num_chunks, self.chunk_nbytes, syscalls=self.failing, **options)  # type: ignore[arg-type]

    def holdings(self) -> object:
        """What the process holds: equal before and after, if nothing was left behind."""
        return num_open_files(), Path("/proc/self/maps").read_text().count("ooc-chunks")


class FailingCalls:
    """CUDA driver calls of which the k-th fails."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    def arm(self, fail_call: int) -> None:
        """Let the `fail_call`-th call from now fail (counted from 1; 0: none)."""
        self._fake.fail(fail_call, CUresult.CUDA_ERROR_UNKNOWN)

    @property
    def has_failed(self) -> bool:
        return self._fake.has_failed


class CudaCase(DriverCase):
    """The CUDA driver over the fake: its device memory is this machine's, so a test can touch it."""

    name = "cuda over the fake"
    chunk_nbytes = 2 << 20
    injected = "CUDA_ERROR_UNKNOWN"
    num_calls_to_make = 6 + 16 + 1 + 16 + 1 + 1  # find the device, create, reserve, map, its access, the context
    num_calls_to_replace = 3  # cuMemUnmap, cuMemMap, cuMemSetAccess

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeCuda(total_nbytes=64 << 20)
        self.failing = FailingCalls(self.fake)

    def make(self, num_chunks: int = 16, **options: Any) -> CudaDriver:
        """A new driver whose calls `failing` can make fail."""
        return CudaDriver(num_chunks, self.chunk_nbytes, bindings=self.fake, **options)

    def holdings(self) -> object:
        """What the process holds: equal before and after, if nothing was left behind."""
        return num_open_files(), self.fake.left()

    def close(self) -> None:
        self.fake.close()
        super().close()


CASES = [PosixCase, CudaCase]
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


def fill(memory: Memory, nbytes: int, seed: int) -> bytes:
    """Write noise at the start, and return it."""
    noise = random.Random(seed).randbytes(nbytes)
    memory[:nbytes] = noise
    return noise


def stamp(case: DriverCase, driver: Driver) -> None:
    """Write into each chunk, at its start and end, which one it is."""
    for chunk in range(driver.num_chunks):
        start = driver.view_address + chunk * driver.chunk_nbytes
        for place in (start, start + driver.chunk_nbytes - 8):
            case.poke(place, chunk.to_bytes(8, "little"))


def shown(case: DriverCase, driver: Driver, address: int, num_chunks: int) -> list[int | None]:
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


def _smaps_words(address: int, key: str) -> list[str]:
    """A line of what the kernel says of the mapping at `address`, without its key."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *words = line.split()
        if "-" in head and not head.endswith(":"):
            start, stop = (int(word, 16) for word in head.split("-"))
            inside = start <= address < stop
        elif inside and head == f"{key}:":
            return words
    raise AssertionError(f"no mapping at {address:#x}")


def smaps_nbytes(address: int, key: str = "Rss") -> int:
    """A size that the kernel tells of the mapping at `address`."""
    return int(_smaps_words(address, key)[0]) * 1024


def vm_flags(address: int) -> list[str]:
    """The kernel's flags of the mapping at `address`."""
    return _smaps_words(address, "VmFlags")


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    """Threads of this process, native ones too, but none that is ending: one that was joined may still be listed."""
    num = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            flags = int((task / "stat").read_text().rpartition(")")[2].split()[6])
            num += not flags & _PF_EXITING
    return num


_PF_EXITING = 0x4  # include/linux/sched.h; set before whoever joins the thread goes on
