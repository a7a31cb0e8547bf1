"""The one place where vmm meets torch: its CPU allocator as a table of reservations.

The native part (native/allocator.cpp) is installed once per process and never removed, since
frees are routed by address for as long as the process lives.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

from vmm import native_build
from vmm.table import (
    ALLOC,
    FREE,
    GRANULE_NBYTES,
    MODE_DEMAND,
    MODE_OFF,
    MODE_PLANNED,
    PLANNED_ALLOC_DTYPE,
    SERVED_APART,
    AllocatorTable,
    Event,
    EventLog,
    PlanTables,
)

__all__ = [
    "ALLOC",
    "FREE",
    "GRANULE_NBYTES",
    "MODE_DEMAND",
    "MODE_OFF",
    "MODE_PLANNED",
    "PLANNED_ALLOC_DTYPE",
    "SERVED_APART",
    "AllocatorTable",
    "CpuAllocator",
    "Event",
    "EventLog",
    "PlanTables",
    "cpu_allocator",
    "load_table",
    "torch_build_flags",
]

_NATIVE = Path(__file__).parent / "native"


def torch_build_flags() -> tuple[list[str], list[str]]:
    """`(include directories, library directories)` of the torch that is running."""
    root = Path(torch.__file__).parent
    return [str(root / "include")], [str(root / "lib")]


def load_table(name: str, source: str) -> tuple[ctypes.CDLL, Path]:
    """Build and load a library of native/ that holds a table, against the c10 of the torch that is running."""
    include_dirs, library_dirs = torch_build_flags()
    path = native_build.build(
        name,
        [_NATIVE / source, _NATIVE / "table.h", _NATIVE / "allocator.h"],
        include_dirs=include_dirs,
        library_dirs=library_dirs,
        libraries=["c10", "dl"],
        extra_flags=["-std=c++20", "-Wno-unused-parameter", "-Wno-unused-function"],
        cache_key=torch.__version__,
        meets_torch=True,
    )
    return ctypes.CDLL(str(path)), path


class CpuAllocator(AllocatorTable):
    """The process's table behind CPU tensors. One per process: use `cpu_allocator()`."""

    def __init__(self, arena: tuple[int, int]) -> None:
        library, _ = load_table("ooc_allocator", "allocator.cpp")
        library.vmm_allocator_install.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
        status = library.vmm_allocator_install(*arena)
        if status != 0:
            raise RuntimeError(
                f"cannot install the CPU allocator (status {status}): "
                + {-1: "no address space for its tables", -3: "another allocator has a higher priority"}.get(status, "")
            )
        super().__init__(library)


_allocator: CpuAllocator | None = None
_MAX_ARENA_NBYTES = 4 << 40


def cpu_allocator() -> CpuAllocator:
    """The process's allocator, installed on first use over an arena that the process keeps for ever."""
    global _allocator
    if _allocator is None:
        _allocator = CpuAllocator(_reserve_arena())
    return _allocator


def _reserve_arena() -> tuple[int, int]:
    """`[start, stop)` of addresses for all sessions to come; they cost no memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    nbytes = _MAX_ARENA_NBYTES
    while nbytes >= 1 << 30:
        address = libc.mmap(0, nbytes, 0, flags, -1, 0)
        if address not in (None, ctypes.c_void_p(-1).value):
            start = -(-address // (2 << 20)) * (2 << 20)
            return start, address + nbytes - (2 << 20)
        nbytes //= 2
    raise RuntimeError("cannot reserve 1 GiB of addresses: is there a limit on address space (ulimit -v)?")
