"""The table behind torch's CUDA allocator (native/cuda_allocator.cpp), as Python sees it.

torch gets the library's path and the names of two functions; what those do is decided here and by the
session. The library needs no CUDA header and links no CUDA library: the driver calls come as pointers.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from vmm.driver import MemoryFault
from vmm.table import AllocatorTable
from vmm.torch_cpu import load_table

__all__ = ["ALLOCATE", "FREE", "CudaTable", "DriverPointers", "cuda_table", "driver_pointers"]

ALLOCATE: Final = "vmm_cuda_allocate"
FREE: Final = "vmm_cuda_free"
"""What torch's CUDAPluggableAllocator looks for in the library."""

_POOLS = ("large", "small", "unmanaged")
_COUNTS = ("current", "peak", "allocated", "freed")


class DriverPointers(ctypes.Structure):
    """Addresses of the driver calls that the library makes by itself."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("allocate", "free", "synchronize", "unmap", "get_context", "set_context")
    )


class _Count(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _COUNTS)


class _Pool(ctypes.Structure):
    _fields_ = (("num_blocks", _Count), ("nbytes", _Count))


class _Numbers(ctypes.Structure):
    _fields_ = (*((name, _Pool) for name in _POOLS), ("num_refused", ctypes.c_uint64))


def driver_pointers() -> DriverPointers:
    """The real driver's. Raises MemoryFault where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        names = (
            "cuMemAlloc_v2",
            "cuMemFree_v2",
            "cuCtxSynchronize",
            "cuMemUnmap",
            "cuCtxGetCurrent",
            "cuCtxSetCurrent",
        )
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    except (OSError, AttributeError) as error:
        raise MemoryFault(
            f"the CUDA driver's library cannot be used: {error}\n  Options: install the NVIDIA driver; device='cpu'."
        ) from error
    return DriverPointers(*found)


class CudaTable(AllocatorTable):
    """The process's table behind CUDA tensors. One per process: use `cuda_table()`.

    Attributes:
        path: The library, for torch.
        is_installed: Whether torch allocates by it.
        reserved_nbytes: The open session's pool, for torch's figures; 0: none is open.
    """

    is_of_host = False

    def __init__(self) -> None:
        library, self.path = load_table("ooc_cuda_allocator", "cuda_allocator.cpp")
        library.vmm_cuda_install.argtypes = (DriverPointers,)
        library.vmm_cuda_begin.argtypes = (*[ctypes.c_uint64] * 4, ctypes.c_int)
        library.vmm_cuda_outlives.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
        library.vmm_cuda_outlives.restype = ctypes.c_int
        library.vmm_cuda_abandon.restype = ctypes.c_uint64
        library.vmm_cuda_resize_small.argtypes = (ctypes.c_uint64,)
        library.vmm_cuda_resize_small.restype = ctypes.c_uint64
        library.vmm_cuda_small_used.restype = ctypes.c_uint64
        library.vmm_cuda_close_small.argtypes = (ctypes.c_int,)
        library.vmm_cuda_close_small.restype = None
        library.vmm_cuda_take.argtypes = (ctypes.c_uint64,)
        library.vmm_cuda_take.restype = ctypes.c_uint64
        library.vmm_cuda_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        library.vmm_cuda_free.restype = None
        library.vmm_cuda_numbers.restype = ctypes.POINTER(_Numbers)
        super().__init__(library)
        self.is_installed = False
        self.reserved_nbytes = 0
        self._pointers: DriverPointers | None = None

    def install(self, pointers: DriverPointers) -> None:
        """Let the library make these driver calls. Before torch gets its functions."""
        self._pointers = pointers  # keeps what Python may have put there
        if self._library.vmm_cuda_install(pointers) != 0:
            raise RuntimeError("cannot install the CUDA allocator: pthread_atfork failed")

    def begin(self, arena: tuple[int, int], small: tuple[int, int], device_index: int) -> None:
        """A session begins; small blocks come from `small`, which is always mapped and not of the arena.

        The calling thread's context is set from now on, for good, on every thread that has none when torch
        allocates or frees there.
        """
        if self._library.vmm_cuda_begin(*arena, *small, device_index) != 0:
            raise MemoryFault("no address space for the CUDA allocator's tables: is there a limit (ulimit -v)?")
        self.drain()

    def end(self) -> bool:
        """The session ends. Whether small blocks are alive, so that their memory must stay mapped."""
        return bool(self._library.vmm_cuda_end())

    def resize_small(self, stop: int) -> int:
        """End the part for small blocks at `stop`, or behind its last live block; where it ends now."""
        return int(self._library.vmm_cuda_resize_small(stop))

    def small_used(self) -> int:
        """Where the last live small block ends."""
        return int(self._library.vmm_cuda_small_used())

    def close_small(self, is_closed: bool) -> None:
        """Whether no small block may be allocated, since their memory is not there."""
        self._library.vmm_cuda_close_small(int(is_closed))

    def take(self, nbytes: int) -> int:
        """A block that always stays in memory, from the part for small blocks; 0 where there is no room."""
        return int(self._library.vmm_cuda_take(nbytes))

    def give(self, address: int) -> None:
        """Free a block of `take`, also after its session."""
        self._library.vmm_cuda_free(address, 0, 0, None)

    def outlives(self, address: int, nbytes: int) -> bool:
        """The live variable there outlives its session: unmap so many bytes when it is freed.

        Returns:
            False if it was freed a moment ago, on another thread or by the cycle collector: what is mapped there
            is the caller's to unmap.
        """
        return bool(self._library.vmm_cuda_outlives(address, nbytes))

    def abandon(self) -> int:
        """Let go of all that is alive in the arena, of which nothing is mapped, or `outlives` was told. How many."""
        return int(self._library.vmm_cuda_abandon())

    def reset_peaks(self) -> None:
        """From now on peaks are counted anew."""
        self._library.vmm_cuda_reset_peaks()

    def numbers(self) -> dict[str, Any]:
        """Per pool (large, small, unmanaged) counts of `num_blocks` and `nbytes`; and `num_refused`."""
        found = self._library.vmm_cuda_numbers().contents
        pools: dict[str, Any] = {
            pool: {
                kind: {count: getattr(getattr(getattr(found, pool), kind), count) for count in _COUNTS}
                for kind in ("num_blocks", "nbytes")
            }
            for pool in _POOLS
        }
        return {**pools, "num_refused": found.num_refused}


_table: CudaTable | None = None


def cuda_table() -> CudaTable:
    """The process's table, built and loaded on first use."""
    global _table
    if _table is None:
        _table = CudaTable()
    return _table
