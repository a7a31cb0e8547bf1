"""CuPy arrays within a session's budget: `cupy.cuda.set_allocator(session.cupy_allocator())`.

CuPy's kernels bypass torch's dispatcher, so its arrays can never be evicted: they live in the part of the pool that is
always mapped, beside torch's small blocks. By DLPack they become tensors there (`torch.from_dlpack`), without a copy;
the other way (`cupy.from_dlpack(tensor)`) a tensor stays in memory for as long as CuPy holds it.

CuPy works on streams of its own: a block is ordered after torch's ops when it is given out, and torch's ops after
CuPy's stream when it comes back. In between, exchange is ordered by DLPack's own protocol.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ooc.dispatch.signals import CriticalLock
from ooc.units import format_nbytes


class CupyPool:
    """Allocates CuPy arrays from one session's memory."""

    def __init__(self, *, memory: Any, lock: CriticalLock, is_open: Callable[[], bool]) -> None:
        if not hasattr(memory, "device_index"):
            raise ValueError("cupy_allocator: the session is not on a GPU. Options: device='cuda'.")
        self._cupy: Any = importlib.import_module("cupy")
        self._memory = memory  # `ooc.devices.cuda.CudaMemory`; CuPy has no types either
        self._lock = lock
        self._is_open = is_open

    def __repr__(self) -> str:
        return f"<CupyPool of {self._memory!r}>"

    def allocate(self, nbytes: int) -> Any:
        """A `cupy.cuda.MemoryPointer` to a block that goes back when CuPy drops it.

        Raises:
            torch.OutOfMemoryError: There is no room in the part that is always mapped.
        """
        cuda = self._cupy.cuda
        stream = int(cuda.get_current_stream().ptr)
        # CuPy also asks for 0 bytes, and wants an address for them.
        address = self._memory.allocator.take(max(nbytes, 1))
        if not address:
            raise torch.OutOfMemoryError(
                f"ooc: no room for a CuPy array of {format_nbytes(nbytes)}: it must stay in memory, in the part of the "
                f"budget that does ({format_nbytes(self._memory.small_nbytes)}).\n"
                "  Options: a larger budget, of which this is a sixteenth; a torch tensor, shown to CuPy by DLPack."
            )
        block = _Block(self, address, stream)
        with self._lock:
            self._memory.streams.lend(stream)
        memory = cuda.UnownedMemory(address, nbytes, block, self._memory.device_index)
        return cuda.MemoryPointer(memory, 0)

    def give_back(self, address: int, stream: int) -> None:
        """Free a block that CuPy has dropped, which it got for work on `stream` or on a stream that it chose later."""
        with self._lock:
            if self._is_open():
                current = int(self._cupy.cuda.get_current_stream().ptr)
                for used in {stream, current}:
                    self._memory.streams.take_back(used)
            self._memory.allocator.give(address)


class _Block:
    """Owns one block; CuPy keeps it alive for as long as an array uses it."""

    __slots__ = ("_address", "_pool", "_stream")

    def __init__(self, pool: CupyPool, address: int, stream: int) -> None:
        self._pool = pool
        self._address = address
        self._stream = stream

    def __repr__(self) -> str:
        return f"<_Block at {self._address:#x}>"

    def __del__(self) -> None:
        self._pool.give_back(self._address, self._stream)
