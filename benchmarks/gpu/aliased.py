"""Memory for timing computation at sizes that do not fit: all large tensors lie in the same few chunks.

Results are garbage and times are right: the limit that out-of-core training is compared with. It is no mode of
a session, and nothing in the package leads here: a process that opens it trains nothing that anybody keeps.

A tensor takes the chunks after those of the tensor before, around and around. So with room for a few ops, no
op finds its own result or workspace in what it is writing, and only what earlier ops left is garbage. What
must hold its bytes (batches, whose labels are indices; libraries' workspaces) is made under `own_memory`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ooc.devices.cuda import CudaDevice
from vmm.cuda import CudaDriver
from vmm.driver import MemoryFault
from vmm.table import FREE, GRANULE_NBYTES, MODE_DEMAND, MODE_OFF, AllocatorTable
from vmm.testing.fake_cuda import FakeCuda
from vmm.torch_cpu import cpu_allocator

_SMALL_SHARE = 16


class AliasedMemory:
    """Serves large allocations from one ring of chunks, mapped at as many addresses as there are tensors.

    Args:
        driver: Of the chunks.
        table: torch's allocator.
        num_chunks: Of the ring, the first ones of the pool.
        threshold_nbytes: Smaller tensors have memory of their own.
    """

    def __init__(self, *, driver: CudaDriver, table: AllocatorTable, num_chunks: int, threshold_nbytes: int) -> None:
        self._driver = driver
        self._table = table
        self._num_chunks = num_chunks
        self._next = 0
        self._sizes: dict[int, int] = {}  # by address, in chunks; once mapped, an address is kept
        self._free: dict[int, list[int]] = {}
        self.failure: MemoryFault | None = None
        """Why an allocation was refused."""
        table.open(threshold_nbytes=threshold_nbytes, cold_allocate=self._allocate)

    def __repr__(self) -> str:
        nbytes = sum(self._sizes.values()) * self._driver.chunk_nbytes
        return f"<AliasedMemory: {nbytes} bytes of addresses in {self._num_chunks} chunks>"

    @property
    def aliased_nbytes(self) -> int:
        """Of all addresses that show the ring."""
        return sum(self._sizes.values()) * self._driver.chunk_nbytes

    @contextlib.contextmanager
    def own_memory(self) -> Iterator[None]:
        """What is allocated meanwhile has memory that nobody else has, beside the pool."""
        self._table.state.mode = MODE_OFF
        try:
            yield
        finally:
            self._table.state.mode = MODE_DEMAND

    def close(self) -> None:
        """Serve nothing any more. Tensors that are alive must not be touched. The driver is the caller's."""
        self._table.close()
        self._table.drain()

    def _allocate(self, nbytes: int) -> int:
        for event in self._table.drain():
            if event.kind == FREE and event.address in self._sizes:
                self._free.setdefault(self._sizes[event.address], []).append(event.address)
        count = -(-nbytes // self._driver.chunk_nbytes)
        if self._free.get(count):
            return self._free[count].pop()
        try:
            address = self._driver.reserve(count)
            self._driver.map(address, self._ring(count))
        except MemoryFault as fault:
            self.failure = fault
            return 0
        self._sizes[address] = count
        return address

    def _ring(self, count: int) -> list[tuple[int, int]]:
        runs = []
        while count:
            length = min(count, self._num_chunks - self._next)
            runs.append((self._next, length))
            self._next = (self._next + length) % self._num_chunks
            count -= length
        return runs


@contextlib.contextmanager
def open_aliased(nbytes: int, *, fake: bool) -> Iterator[AliasedMemory]:
    """For the rest of the process, on the first device or on the fake: a ring of `nbytes` bytes.

    On a device a sixteenth of it is for small tensors, which have memory of their own.
    """
    with contextlib.ExitStack() as stack:
        # As in a session, so that it is a session's computation that is timed; else backward has a thread of its own.
        threading = torch.autograd.set_multithreading_enabled(False)
        stack.callback(threading.__exit__, None, None, None)
        if fake:
            allocator: Any = cpu_allocator()
            chunk_nbytes = threshold_nbytes = GRANULE_NBYTES
            num_chunks = num_ring = nbytes // chunk_nbytes
            bindings: Any = FakeCuda(
                total_nbytes=nbytes, granularity=chunk_nbytes, arena=allocator.arena, occupied=allocator.detached
            )
            stack.callback(bindings.close)
            arena_nbytes = 1 << 36
        else:
            device = CudaDevice()
            chunk_nbytes, threshold_nbytes = device.granule_nbytes, device.threshold_nbytes
            bindings, allocator = device.start()
            num_chunks = nbytes // chunk_nbytes
            num_ring = num_chunks - max(num_chunks // _SMALL_SHARE, 1)
            arena_nbytes = None
        driver = CudaDriver(num_chunks, chunk_nbytes, bindings=bindings, arena_nbytes=arena_nbytes)
        stack.callback(driver.close)
        if not fake:
            small = driver.view_address + num_ring * chunk_nbytes
            allocator.begin(driver.arena, (small, small + (num_chunks - num_ring) * chunk_nbytes), 0)
        memory = AliasedMemory(driver=driver, table=allocator, num_chunks=num_ring, threshold_nbytes=threshold_nbytes)
        stack.callback(memory.close)
        yield memory
        if not fake:
            stack.pop_all()  # torch frees what is left when the process ends: until then all stays mapped
