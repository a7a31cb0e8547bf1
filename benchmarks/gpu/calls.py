"""What single driver calls cost the host, with the device idle and while it has work queued.

    python -m benchmarks.gpu.calls [fake]

One line of JSON: microseconds, median of many calls, by call and load.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vmm.cuda_calls import CudaCalls, load_bindings

_CHUNK_NBYTES = 2 << 20
_NUM_CHUNKS = 32
_NUM_ALIASES = 0, 3, 15
_NUM_ROUNDS = 8
_LOAD_NBYTES = 256 << 20
_NUM_FILLS = 64
_CHUNK_SIZES = 2 << 20, 8 << 20, 32 << 20
"""Whether larger chunks are shown sooner, byte for byte: on an H200 access took 36 to 49 us for each of 2 MiB."""


class Stopwatch:
    """Times of calls by name, in microseconds."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def time(self, name: str, function: Callable[[], Any]) -> Any:
        """What the function returns; how long it took is noted."""
        started = time.perf_counter_ns()
        value = function()
        self.samples.setdefault(name, []).append((time.perf_counter_ns() - started) / 1000)
        return value

    def medians(self) -> dict[str, float]:
        """By name."""
        return {name: statistics.median(found) for name, found in self.samples.items()}


def measure(bindings: Any, *, load_nbytes: int = _LOAD_NBYTES) -> dict[str, dict[str, float]]:
    """Microseconds by load ("idle", "loaded") and call. A context must be current."""
    calls = CudaCalls(bindings)
    calls.call("cuInit", 0, what="starting CUDA")
    target = _load_memory(calls, load_nbytes)
    stream = calls.create_stream()
    found = {}
    for load in ("idle", "loaded"):
        watch = Stopwatch()
        for _ in range(_NUM_ROUNDS):
            if load == "loaded":
                for value in range(_NUM_FILLS):
                    calls.call("cuMemsetD8Async", target, value, load_nbytes, stream, what="load")
            _map_and_unmap(calls, watch)
            _map_in_chunks(calls, watch, load_nbytes)
            _map_aliases(calls, watch)
            _events(calls, watch, stream)
            calls.call("cuStreamSynchronize", stream, what="the end of a round")
        found[load] = watch.medians()
    calls.destroy_stream(stream)
    calls.call("cuMemUnmap", target, load_nbytes, what="memory to fill")
    calls.call("cuMemAddressFree", target, load_nbytes, what="memory to fill")
    return found


def _load_memory(calls: CudaCalls, nbytes: int) -> int:
    """Memory that the load fills. Its handle is released already: it lives as long as it is mapped."""
    properties, access = _wishes(calls.bindings)
    what = "memory to fill"
    address = int(calls.call("cuMemAddressReserve", nbytes, 0, 0, 0, what=what))
    handle = int(calls.call("cuMemCreate", nbytes, properties, 0, what=what))
    calls.call("cuMemMap", address, nbytes, 0, handle, 0, what=what)
    calls.call("cuMemSetAccess", address, nbytes, [access], 1, what=what)
    calls.call("cuMemRelease", handle, what=what)
    return address


def _wishes(bindings: Any) -> tuple[Any, Any]:
    """What memory is to be made, and who may touch it."""
    properties, access = bindings.CUmemAllocationProp(), bindings.CUmemAccessDesc()
    for holder in (properties, access):
        holder.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        holder.location.id = 0
    properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return properties, access


def _map_and_unmap(calls: CudaCalls, watch: Stopwatch) -> None:
    properties, access = _wishes(calls.bindings)
    nbytes = _NUM_CHUNKS * _CHUNK_NBYTES

    def call(name: str, *arguments: Any) -> Any:
        return watch.time(name, lambda: calls.call(name, *arguments, what="timing"))

    base = int(call("cuMemAddressReserve", nbytes, 0, 0, 0))
    handles = [int(call("cuMemCreate", _CHUNK_NBYTES, properties, 0)) for _ in range(_NUM_CHUNKS)]
    for index, handle in enumerate(handles):
        call("cuMemMap", base + index * _CHUNK_NBYTES, _CHUNK_NBYTES, 0, handle, 0)
    for index in range(_NUM_CHUNKS):
        call("cuMemSetAccess", base + index * _CHUNK_NBYTES, _CHUNK_NBYTES, [access], 1)
    watch.time(
        f"cuMemSetAccess of {_NUM_CHUNKS} chunks",
        lambda: calls.call("cuMemSetAccess", base, nbytes, [access], 1, what="timing"),
    )
    for index in range(_NUM_CHUNKS // 2):
        call("cuMemUnmap", base + index * _CHUNK_NBYTES, _CHUNK_NBYTES)
    half = nbytes // 2
    watch.time(
        f"cuMemUnmap of {_NUM_CHUNKS // 2} chunks",
        lambda: calls.call("cuMemUnmap", base + half, half, what="timing"),
    )
    for handle in handles:
        call("cuMemRelease", handle)
    call("cuMemAddressFree", base, nbytes)


def _show(calls: CudaCalls, places: Sequence[int], handles: Sequence[int], chunk_nbytes: int) -> None:
    for place, handle in zip(places, handles, strict=True):
        calls.call("cuMemMap", place, chunk_nbytes, 0, handle, 0, what="timing")


def _map_in_chunks(calls: CudaCalls, watch: Stopwatch, nbytes: int) -> None:
    """The same bytes in chunks of several sizes."""
    properties, access = _wishes(calls.bindings)

    def call(name: str, *arguments: Any) -> Any:
        return calls.call(name, *arguments, what="timing")

    for chunk_nbytes in (size for size in _CHUNK_SIZES if size <= nbytes):
        what = f"of {nbytes >> 20} MiB in chunks of {chunk_nbytes >> 20} MiB"
        base = int(call("cuMemAddressReserve", nbytes, 0, 0, 0))
        places = range(base, base + nbytes, chunk_nbytes)
        handles = [int(call("cuMemCreate", chunk_nbytes, properties, 0)) for _ in places]

        watch.time(f"cuMemMap {what}", partial(_show, calls, places, handles, chunk_nbytes))
        watch.time(f"cuMemSetAccess {what}", partial(call, "cuMemSetAccess", base, nbytes, [access], 1))
        watch.time(f"cuMemUnmap {what}", partial(call, "cuMemUnmap", base, nbytes))
        for handle in handles:
            call("cuMemRelease", handle)
        call("cuMemAddressFree", base, nbytes)


def _map_aliases(calls: CudaCalls, watch: Stopwatch) -> None:
    """Chunks that other addresses show, too, as a plan's do: in planned steps access took 58 us a chunk, here 23."""
    properties, access = _wishes(calls.bindings)
    nbytes = _NUM_CHUNKS * _CHUNK_NBYTES

    def call(name: str, *arguments: Any) -> Any:
        return calls.call(name, *arguments, what="timing")

    handles = [int(call("cuMemCreate", _CHUNK_NBYTES, properties, 0)) for _ in range(_NUM_CHUNKS)]
    bases: list[int] = []
    for num_aliases in _NUM_ALIASES:
        while len(bases) <= num_aliases:
            bases.append(int(call("cuMemAddressReserve", nbytes, 0, 0, 0)))
            places = range(bases[-1], bases[-1] + nbytes, _CHUNK_NBYTES)
            _show(calls, places, handles, _CHUNK_NBYTES)
            if len(bases) <= num_aliases:
                call("cuMemSetAccess", bases[-1], nbytes, [access], 1)
        what = f"of {_NUM_CHUNKS} chunks shown at {num_aliases} other places"
        watch.time(f"cuMemSetAccess {what}", partial(call, "cuMemSetAccess", bases[-1], nbytes, [access], 1))
        watch.time(f"cuMemUnmap {what}", partial(call, "cuMemUnmap", bases[-1], nbytes))
        call("cuMemAddressFree", bases.pop(), nbytes)
    for base in bases:
        call("cuMemUnmap", base, nbytes)
        call("cuMemAddressFree", base, nbytes)
    for handle in handles:
        call("cuMemRelease", handle)


def _events(calls: CudaCalls, watch: Stopwatch, stream: int) -> None:
    other = calls.create_stream()
    event = calls.create_event()
    for _ in range(_NUM_CHUNKS):
        watch.time("cuEventRecord", lambda: calls.record(event, stream))
        watch.time("cuStreamWaitEvent", lambda: calls.wait_event(other, event))
        watch.time("cuEventQuery", lambda: calls.is_done(event))
    calls.synchronize_event(event)
    watch.time("cuEventSynchronize of what has happened", lambda: calls.synchronize_event(event))
    calls.destroy_event(event)
    calls.destroy_stream(other)


def main() -> int:
    """Measure on the first device, or on the fake driver, where the figures mean nothing."""
    if sys.argv[1:] == ["fake"]:
        from vmm.testing.fake_cuda import FakeCuda

        fake = FakeCuda()
        print(json.dumps(measure(fake, load_nbytes=_CHUNK_NBYTES)))
        fake.close()
        return 0
    import torch

    torch.zeros(1, device="cuda")  # makes the context current
    print(json.dumps(measure(load_bindings())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
