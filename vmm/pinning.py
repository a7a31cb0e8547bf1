"""Pins host memory for a device: pages that several threads touch first, then registered with the driver.

cuMemHostAlloc makes its pages one by one on one thread (1.8 to 4.5 GB/s by others' measurements); pages that are there
already are registered several times as fast. Where a driver does not register memory, it is asked to allocate it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from vmm.cuda_calls import CudaCalls, CudaFault
from vmm.driver import MemoryFault
from vmm.sizes import format_nbytes
from vmm.syscalls import MADV_POPULATE_WRITE, Syscalls

__all__ = ["PinnedPiece", "Pinning"]

_log = logging.getLogger(__name__)

_MAX_THREADS = 8
_CANNOT_REGISTER = frozenset({"CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED"})
"""As on boards whose memory the device does not see coherently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPiece:
    """Pinned memory at `address`: `mapped_nbytes` of ours, registered, or 0 where the driver allocated it."""

    address: int
    mapped_nbytes: int


class Pinning:
    """Takes and gives back pieces.

    Args:
        calls: The driver's calls.
        syscalls: The system's, for tests.
    """

    def __init__(self, calls: CudaCalls, *, syscalls: Syscalls | None = None) -> None:
        self._calls = calls
        self._sys = syscalls if syscalls is not None else Syscalls()
        self._num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads: ThreadPoolExecutor | None = None
        self._registers = True

    def __repr__(self) -> str:
        return f"<Pinning {'by registering' if self._registers else 'by the driver'}, {self._num_threads} threads>"

    def take(self, nbytes: int) -> PinnedPiece:
        """Pin fresh memory, all of it there.

        Raises:
            MemoryFault: The host or the driver refuses. Nothing is left behind.
        """
        what = f"pinning {format_nbytes(nbytes)} of host memory"
        if self._registers:
            try:
                return self._register(nbytes, what)
            except CudaFault as fault:
                if fault.result_name not in _CANNOT_REGISTER:
                    raise
                _log.warning("host memory is pinned by cuMemHostAlloc, which is slower: %s", fault)
                self._registers = False
        return PinnedPiece(address=int(self._calls.call("cuMemHostAlloc", nbytes, 0, what=what)), mapped_nbytes=0)

    def give(self, piece: PinnedPiece) -> None:
        """Unpin it and give it back; the host must have seen the end of every copy."""
        what = f"pinned memory at {piece.address:#x}"
        if not piece.mapped_nbytes:
            self._calls.call("cuMemFreeHost", piece.address, what=what)
            return
        self._calls.call("cuMemHostUnregister", piece.address, what=what)
        self._sys.munmap(piece.address, piece.mapped_nbytes)

    def close(self) -> None:
        """No more pieces will be taken; those that were may still be given back. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _register(self, nbytes: int, what: str) -> PinnedPiece:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            address = self._map(nbytes)
        except OSError as error:
            raise MemoryFault(f"{what}: {error}") from error
        try:
            self._touch(address, nbytes, what)
            self._calls.call("cuMemHostRegister", address, nbytes, 0, what=what)
        except BaseException:
            self._sys.munmap(address, nbytes)
            raise
        return PinnedPiece(address=address, mapped_nbytes=nbytes)

    def _map(self, nbytes: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = self._sys.mmap(0, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        try:
            # A child that writes would else take the page from under the device's copies, on older kernels.
            self._sys.madvise(address, nbytes, mmap.MADV_DONTFORK)
            with contextlib.suppress(OSError):  # not in this kernel
                self._sys.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
        except BaseException:
            self._sys.munmap(address, nbytes)
            raise
        return address

    def _touch(self, address: int, nbytes: int, what: str) -> None:
        """Let the pages be made, a part by each thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="ooc-pin")
        num_pages = nbytes // mmap.PAGESIZE
        cuts = [address + num_pages * i // self._num_threads * mmap.PAGESIZE for i in range(self._num_threads + 1)]
        parts = [self._threads.submit(self._make, a, b - a) for a, b in itertools.pairwise(cuts)]
        try:
            for part in parts:
                part.result()
        except OSError as error:
            raise MemoryFault(f"{what}: {error}") from error
        finally:
            wait(parts)  # the caller unmaps what they touch

    def _make(self, address: int, nbytes: int) -> None:
        if not nbytes:
            return
        try:
            self._sys.madvise(address, nbytes, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            ctypes.memset(address, 0, nbytes)  # Linux before 5.14
