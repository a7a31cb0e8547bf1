"""The allocation handles of a CUDA driver's chunks: one each, created and released in ranges."""

from __future__ import annotations

from typing import Any

from vmm import machine
from vmm.cuda_calls import CudaCalls, CudaFault
from vmm.driver import MemoryFault
from vmm.sizes import format_exactly, format_nbytes

__all__ = ["ChunkHandles"]

_HOST_SHARE = 16
"""One part in so many of memory that device and host share is never the device's. Not tuned: none was seen."""


class ChunkHandles:
    """Physical memory of `chunk_nbytes` bytes of one device for each chunk that exists, by the chunk's number.

    Releasing a handle gives its memory back to the driver once no mapping shows it; the caller unmaps first.

    Args:
        calls: The driver's calls.
        chunk_nbytes: Size of one chunk.
    """

    def __init__(self, calls: CudaCalls, *, chunk_nbytes: int) -> None:
        self._calls = calls
        self._chunk_nbytes = chunk_nbytes
        self._device = -1
        self._handles: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<ChunkHandles of {len(self._handles)} chunks>"

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, chunk: int) -> int:
        return self._handles[chunk]

    def find_device(self, index: int) -> int:
        """Use device `index` from now on. Its granularity, of which chunks are a multiple."""
        bindings, calls = self._calls.bindings, self._calls
        calls.call("cuInit", 0, what="starting CUDA")
        self._device = int(calls.call("cuDeviceGet", index, what=f"device {index}"))
        attribute = bindings.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
        if not calls.call("cuDeviceGetAttribute", attribute, self._device, what=f"what device {index} can do"):
            raise MemoryFault(
                f"device {index} has no virtual memory management "
                "(CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED is 0).\n"
                "  Options: another device; a newer driver; a virtual GPU profile that allows it; device='cpu'."
            )
        option = bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        what = f"the granularity of device {index}"
        granularity = int(calls.call("cuMemGetAllocationGranularity", self.properties(), option, what=what))
        if self._chunk_nbytes % granularity:
            raise ValueError(
                f"chunks of {format_exactly(self._chunk_nbytes)}: must be a multiple of the device's granularity, "
                f"{format_exactly(granularity)}"
            )
        return granularity

    def check_free(self, num_chunks: int) -> int:
        """Raise MemoryFault if the device has not so many chunks free. Its memory in all, in bytes.

        [Note: free memory that is the host's] Where the device has no memory of its own, the driver's "free" is the
        kernel's MemFree, in which the page cache counts as used: after a file was read, next to nothing. What can be
        had is MemAvailable. Nothing but us keeps such a machine from being filled until it hangs (the driver takes
        physical pages, which no control group counts), so a part of it stays the host's.
        """
        info = self._calls.memory_info()
        free_nbytes, where = info.free_nbytes, ""
        if self._calls.shares_host_memory(self._device):
            memory = machine.meminfo_nbytes()
            left_nbytes = memory["MemTotal"] // _HOST_SHARE
            free_nbytes = max(memory["MemAvailable"] - left_nbytes, 0)
            where = f" (its memory is the host's, to which {format_nbytes(left_nbytes)} are left)"
        nbytes = num_chunks * self._chunk_nbytes
        if nbytes > free_nbytes:
            raise MemoryFault(
                f"{self._pool(num_chunks)} does not fit device {self._device}{where}:\n"
                f"  needed {format_exactly(nbytes)}\n  free   {format_exactly(free_nbytes)}\n"
                f"  total  {format_exactly(info.total_nbytes)}\n"
                f"  Options: a budget of at most {free_nbytes >> 20}MiB; end other processes on the device; "
                "torch.cuda.empty_cache() before."
            )
        return info.total_nbytes

    def located(self, holder: Any) -> Any:
        """`holder` (properties, or an access) with this device as its location."""
        holder.location.type = self._calls.bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        holder.location.id = self._device
        return holder

    def properties(self) -> Any:
        """The properties of an allocation on this device (CUmemAllocationProp)."""
        bindings = self._calls.bindings
        properties = self.located(bindings.CUmemAllocationProp())
        properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        return properties

    def create(self, start: int, stop: int) -> None:
        """Take memory for chunks `[start, stop)`. Raises MemoryFault, and then nothing was taken."""
        properties, pool = self.properties(), self._pool(stop - start)
        try:
            for chunk in range(start, stop):
                if chunk in self._handles:  # could not be given back before
                    continue
                what = f"chunk {chunk - start} of {pool}"
                self._handles[chunk] = int(
                    self._calls.call("cuMemCreate", self._chunk_nbytes, properties, 0, what=what)
                )
        except BaseException as error:
            for chunk in range(start, stop):
                try:
                    if chunk in self._handles:
                        self._release(chunk)
                except CudaFault as fault:  # it stays here, for `release_all` or another `create`
                    error.add_note(f"What had been taken could not all be given back: {fault}")
            raise

    def release(self, start: int, stop: int) -> None:
        """Give the memory of chunks `[start, stop)` back, the last one first.

        Raises:
            CudaFault: One could not be given back. Memory was taken again for those behind it: all exist as before.
            MemoryFault: That failed, too. Those behind it are gone; `num_from` says how many are left.
        """
        for chunk in reversed(range(start, stop)):
            try:
                if chunk in self._handles:
                    self._release(chunk)
            except CudaFault as fault:
                try:
                    self.create(chunk + 1, stop)
                except MemoryFault as second:
                    raise MemoryFault(
                        f"chunk {chunk} could not be given back; chunks {chunk + 1} to {stop - 1} had been, and their "
                        f"memory could not be had again: they are gone.\nFirst: {fault}\nThen: {second}"
                    ) from fault
                raise

    def release_all(self) -> list[CudaFault]:
        """Give back all that can be. The failures; another call tries those again."""
        faults: list[CudaFault] = []
        for chunk in list(self._handles):
            try:
                self._release(chunk)
            except CudaFault as fault:
                if fault.is_gone_with_context:
                    del self._handles[chunk]
                else:
                    faults.append(fault)
        return faults

    def num_from(self, start: int, end: int) -> int:
        """How many neighbouring chunks of `[start, end)` exist, from `start` on."""
        stop = start
        while stop < end and stop in self._handles:
            stop += 1
        return stop - start

    def stop_in(self, start: int, end: int) -> int:
        """One past the last chunk of `[start, end)` that exists; `start` where none does."""
        return max((chunk + 1 for chunk in self._handles if start <= chunk < end), default=start)

    def _pool(self, num_chunks: int) -> str:
        nbytes = num_chunks * self._chunk_nbytes
        return f"a pool of {num_chunks} chunks of {format_nbytes(self._chunk_nbytes)} = {format_nbytes(nbytes)}"

    def _release(self, chunk: int) -> None:
        self._calls.call("cuMemRelease", self._handles[chunk], what=f"chunk {chunk}: its memory")
        del self._handles[chunk]
