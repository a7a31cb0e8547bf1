"""The calls of `cuda.bindings.driver`, made on this machine's memory."""

# ruff: noqa: N802 (the functions have the driver's own names)

from __future__ import annotations

import ctypes
import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from vmm.testing.fake_cuda import names
from vmm.testing.fake_cuda.contexts import CONTEXT, Contexts, ThreadContexts
from vmm.testing.fake_cuda.memory import FakeMemory, HostMemory
from vmm.testing.fake_cuda.names import CallRefused, CUresult
from vmm.testing.fake_cuda.races import Clock, Interval, Race, RaceDetector, TrackedAccess
from vmm.testing.fake_cuda.work import FakeAct, FakeStream, Work

__all__ = ["FakeCuda"]

_P = ParamSpec("_P")
_Result = tuple[Any, ...]
_Range = tuple[int, int]
_Use = tuple[dict[int, tuple[int, str]], Interval, bool]
"""Where to note the use of a range, its physical bytes, whether it is written."""


def _call(
    body: Callable[Concatenate[FakeCuda, _P], object],
) -> Callable[Concatenate[FakeCuda, _P], _Result]:
    """A driver call: counted, failed on request, and preceded by some of the queued work."""

    @functools.wraps(body)
    def made(self: FakeCuda, /, *arguments: _P.args, **options: _P.kwargs) -> _Result:
        with self._lock:
            self.num_calls[body.__name__] += 1
            injected = self._injected()
            if injected is not None:
                return (injected, *([None] * _NUM_VALUES.get(body.__name__, 0)))
            self._work.progress()
            try:
                if body.__name__ not in _WITHOUT_CONTEXT and not self._contexts.current():
                    raise CallRefused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
                value = body(self, *arguments, **options)
            except CallRefused as refused:
                return (refused.result, *([None] * _NUM_VALUES.get(body.__name__, 0)))
        if value is None:
            return (CUresult.CUDA_SUCCESS,)
        return (CUresult.CUDA_SUCCESS, *(value if isinstance(value, tuple) else (value,)))

    return made


_NUM_VALUES = {
    "cuMemGetAllocationGranularity": 1,
    "cuMemAddressReserve": 1,
    "cuMemCreate": 1,
    "cuMemGetInfo": 2,
    "cuMemHostAlloc": 1,
    "cuStreamCreate": 1,
    "cuEventCreate": 1,
    "cuEventElapsedTime": 1,
    "cuDeviceGet": 1,
    "cuDeviceGetAttribute": 1,
    "cuDeviceGetCount": 1,
    "cuDeviceGetName": 1,
    "cuDriverGetVersion": 1,
    "cuCtxGetCurrent": 1,
}
"""Values beside the result. The bindings answer a failed call with None for each of them."""
_WITHOUT_CONTEXT = frozenset(
    {
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDeviceGetCount",
        "cuDeviceGetName",
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
    }
)
"""What a thread without a current context may call. The real driver lets it call more; nothing of ours needs that."""


class FakeCuda:
    """One device, in place of the module `cuda.bindings.driver`.

    Where the real driver answers an error code, so does this. Where it would answer with garbage, a
    lost context or undefined behaviour, this raises `RuleBroken` at once. Races are collected in
    `races`. Work is told what it reads and writes (`launch`), and is run late, on the thread of
    whichever call lets it. Calls may come from any thread.

    Besides the driver's calls: `launch`, `perform`, `host_touch`, `host_signal`, `host_wait`, `fail`, `races`, `left`,
    `close`.

    Args:
        total_nbytes: The device's memory.
        granularity: Of its mappings.
        seed: Of the order in which queued work runs.
        eagerness: Chance, at each call, that one more step of queued work runs; 0: none does before
            it is asked for.
        has_vmm: Whether the device says that it can map memory.
        is_integrated: Whether it says that its memory is the host's.
        compute_mode: Who may use it: 0 everybody, 2 nobody, 3 one process.
        arena: `[start, stop)` of addresses to hand out, mapped to nothing by their owner; by default fresh ones.
        occupied: Ranges of it, address to bytes, that are somebody's already.
        contexts: Which threads have the context current; by default the one that makes this, until others ask.
    """

    CUresult = CUresult
    CUmemAccessDesc = names.CUmemAccessDesc
    CUmemAccess_flags = names.CUmemAccess_flags
    CUmemAllocationGranularity_flags = names.CUmemAllocationGranularity_flags
    CUmemAllocationProp = names.CUmemAllocationProp
    CUmemAllocationType = names.CUmemAllocationType
    CUmemLocationType = names.CUmemLocationType
    CUstream_flags = names.CUstream_flags
    CUevent_flags = names.CUevent_flags
    CUdevice_attribute = names.CUdevice_attribute

    def __init__(
        self,
        *,
        total_nbytes: int = 256 << 20,
        granularity: int = 2 << 20,
        seed: int = 0,
        eagerness: float = 0.3,
        has_vmm: bool = True,
        is_integrated: bool = False,
        compute_mode: int = 0,
        arena: _Range | None = None,
        occupied: Mapping[int, int] | None = None,
        contexts: Contexts | None = None,
    ) -> None:
        self._contexts: Contexts = contexts if contexts is not None else ThreadContexts()
        self._lock = threading.RLock()
        self._memory = FakeMemory(total_nbytes=total_nbytes, granularity=granularity, arena=arena, occupied=occupied)
        self._host = HostMemory()
        self._work = Work(seed=seed, eagerness=eagerness)
        self._detector = RaceDetector(block_nbytes=granularity)
        attribute = names.CUdevice_attribute
        self._attributes = {
            attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED: int(is_integrated),
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: compute_mode,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
            attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED: int(has_vmm),
        }
        self._is_initialized = False
        self._countdown = 0
        self._num_failures = 0
        self._failure = CUresult.CUDA_ERROR_UNKNOWN
        self.has_failed = False
        """Whether a call has failed on request since the last `fail`."""
        self.num_calls: Counter[str] = Counter()
        """How often each of the driver's functions was called."""

    def __repr__(self) -> str:
        left = len(self.left())
        return f"<FakeCuda {self._memory.num_mappings} mappings, {len(self.races)} races, {left} not given back>"

    @property
    def races(self) -> tuple[Race, ...]:
        """Pairs of conflicting accesses that nothing orders, found so far."""
        return self._detector.races

    def fail(self, call: int, result: names.CUresult = CUresult.CUDA_ERROR_UNKNOWN, *, times: int = 1) -> None:
        """Let `times` driver calls from the `call`-th on (counted from 1, from now; 0: none) answer `result`."""
        self._countdown, self._failure, self.has_failed = call, result, False
        self._num_failures = times if call > 0 else 0

    def left(self) -> list[str]:
        """All that has not been given back: handles, addresses, pinned memory, streams, events."""
        work = self._work
        streams = [f"stream {handle:#x}" for handle in work.streams if handle]
        return self._memory.left() + self._host.left() + streams + [f"event {handle:#x}" for handle in work.events]

    def close(self) -> None:
        """Give this machine's memory back. Not a driver call."""
        self._memory.close()

    def launch(
        self,
        stream: Any,
        function: Callable[[], object],
        *,
        reads: Sequence[_Range] = (),
        writes: Sequence[_Range] = (),
        name: str = "launch",
    ) -> None:
        """Queue a kernel: `function`, run later, which touches the device ranges `(address, nbytes)` and no others."""
        with self._lock:
            self._work.progress()
            uses = self._device_uses(name, reads, is_write=False) + self._device_uses(name, writes, is_write=True)
            self._queue(self._work.stream(stream), name, [function], uses)

    def perform(
        self,
        stream: Any,
        *,
        reads: Sequence[_Range] = (),
        writes: Sequence[_Range] = (),
        name: str = "kernel",
    ) -> None:
        """Stand for a kernel that the caller runs by itself, right after this call.

        Queues an act as `launch` does, and runs it with all that streams and events put before it, and no more:
        what the kernel should have waited for, and does not, is still late.
        """
        with self._lock:
            self._work.progress()
            uses = self._device_uses(name, reads, is_write=False) + self._device_uses(name, writes, is_write=True)
            self._work.require(self._queue(self._work.stream(stream), name, (), uses))

    def host_touch(self, address: int, nbytes: int, *, is_write: bool, name: str = "the host") -> None:
        """Say that the calling thread touches pinned host memory now."""
        with self._lock:
            uses, interval = self._host.touched(name, address, nbytes)
            act_id, tick = self._work.host_act()
            agent = self._work.host_agent
            uses[agent] = (tick, name)
            access = TrackedAccess(
                act_id=act_id, name=name, agent=agent, tick=tick, is_write=is_write, interval=interval
            )
            self._detector.add(access, dict(self._work.host_clock))

    def host_signal(self) -> Clock:
        """What the calling thread knows, to be given to another (over a lock, a queue, a thread's start or end)."""
        with self._lock:
            self._work.host_act()
            return dict(self._work.host_clock)

    def host_wait(self, clock: Clock) -> None:
        """The calling thread has received what another knew."""
        with self._lock:
            self._work.host_learns(clock)

    @_call
    def cuInit(self, flags: int) -> None:
        """Start."""
        _require(flags == 0)
        self._is_initialized = True

    @_call
    def cuDriverGetVersion(self) -> object:
        """The version of CUDA: 12.0, the surface that is faked."""
        return 12000

    def cuGetErrorString(self, error: names.CUresult) -> _Result:
        """A code's text. Neither counted nor failed: it is asked in the midst of failures."""
        return CUresult.CUDA_SUCCESS, error.name.removeprefix("CUDA_ERROR_").lower().replace("_", " ").encode()

    @_call
    def cuDeviceGet(self, ordinal: int) -> object:
        """The only device is number 0."""
        self._check_initialized()
        if ordinal != 0:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_DEVICE)
        return names.CUhandle(0)

    @_call
    def cuDeviceGetAttribute(self, attribute: int, device: Any) -> object:
        """What the device can do."""
        self._check_device(device)
        _require(attribute in set(self._attributes))
        return self._attributes[names.CUdevice_attribute(attribute)]

    @_call
    def cuDeviceGetCount(self) -> object:
        """One."""
        self._check_initialized()
        return 1

    @_call
    def cuDeviceGetName(self, nbytes: int, device: Any) -> object:
        """As a string of C in a buffer."""
        self._check_device(device)
        return b"the fake driver".ljust(nbytes, b"\0")

    @_call
    def cuCtxGetCurrent(self) -> object:
        """The calling thread's context; 0: none."""
        return names.CUhandle(self._contexts.current())

    @_call
    def cuCtxSetCurrent(self, context: Any) -> None:
        """Make it the calling thread's; 0: none."""
        if int(context) not in (0, CONTEXT):
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._contexts.make_current(int(context))

    @_call
    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> object:
        """What sizes must be multiples of."""
        self._check_device(properties.location.id)
        _require(option in set(names.CUmemAllocationGranularity_flags))
        return self._memory.granularity

    @_call
    def cuMemGetInfo(self) -> object:
        """Free and total memory."""
        self._check_initialized()
        return self._memory.free_nbytes, self._memory.total_nbytes

    @_call
    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> object:
        """Physical memory."""
        self._check_initialized()
        _require(flags == 0)
        return names.CUhandle(self._memory.create(nbytes, properties))

    @_call
    def cuMemRelease(self, handle: Any) -> None:
        """Give a handle up; its mappings keep the memory."""
        self._memory.release(int(handle))

    @_call
    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: Any, flags: int) -> object:
        """Addresses."""
        self._check_initialized()
        int(address)
        return names.CUdeviceptr(self._memory.reserve(nbytes, alignment, flags))

    @_call
    def cuMemAddressFree(self, address: Any, nbytes: int) -> None:
        """Give addresses back."""
        self._memory.free_addresses(int(address), nbytes)

    @_call
    def cuMemMap(self, address: Any, nbytes: int, offset: int, handle: Any, flags: int) -> None:
        """Map a handle."""
        self._memory.map(int(address), nbytes, offset, int(handle), flags)

    @_call
    def cuMemUnmap(self, address: Any, nbytes: int) -> None:
        """Unmap whole mappings."""
        self._memory.unmap(int(address), nbytes, self._work.host_clock)

    @_call
    def cuMemSetAccess(self, address: Any, nbytes: int, wishes: Sequence[Any], count: int) -> None:
        """Say what the device may do at whole mappings."""
        self._memory.set_access(int(address), nbytes, wishes, count, self._work.host_clock)

    @_call
    def cuMemHostAlloc(self, nbytes: int, flags: int) -> object:
        """Pinned host memory."""
        _require(flags == 0)
        return self._host.allocate(nbytes)

    @_call
    def cuMemFreeHost(self, address: int) -> None:
        """Free pinned host memory."""
        self._host.give_back(address, self._work.host_clock, is_ours=True)

    @_call
    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> None:
        """Pin host memory."""
        _require(flags == 0)
        self._host.register(address, nbytes)

    @_call
    def cuMemHostUnregister(self, address: int) -> None:
        """Unpin host memory."""
        self._host.give_back(address, self._work.host_clock, is_ours=False)

    @_call
    def cuStreamCreate(self, flags: int) -> object:
        """A stream."""
        _require(flags in set(names.CUstream_flags))
        is_blocking = flags == names.CUstream_flags.CU_STREAM_DEFAULT
        return names.CUhandle(self._work.create_stream(is_blocking=is_blocking))

    @_call
    def cuStreamDestroy(self, stream: Any) -> None:
        """Destroy a stream; its work is still done."""
        self._work.destroy_stream(self._work.stream(stream))

    @_call
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> None:
        """Let a stream wait for an event as last recorded."""
        _require(flags == 0)
        self._work.wait(self._work.stream(stream), self._work.event(event))

    @_call
    def cuStreamQuery(self, stream: Any) -> None:
        """Whether a stream's work is done; if so, the thread has observed it."""
        it = self._work.stream(stream)
        self._work.step()
        if it.queue or not all(act.is_done for act in it.awaited):
            raise CallRefused(CUresult.CUDA_ERROR_NOT_READY)
        self._work.host_learns(it.clock)

    @_call
    def cuStreamSynchronize(self, stream: Any) -> None:
        """Let the thread wait for a stream."""
        self._observe(self._work.stream(stream))

    @_call
    def cuCtxSynchronize(self) -> None:
        """Let the thread wait for everything."""
        while self._work.step():
            pass
        for stream in list(self._work.streams.values()):
            self._observe(stream)

    @_call
    def cuEventCreate(self, flags: int) -> object:
        """An event."""
        _require(0 <= flags <= 3)
        return names.CUhandle(self._work.create_event(is_timed=not flags & names.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    @_call
    def cuEventDestroy(self, event: Any) -> None:
        """Destroy an event; waits for it stay."""
        self._work.event(event)
        del self._work.events[int(event)]

    @_call
    def cuEventRecord(self, event: Any, stream: Any) -> None:
        """Let an event stand for all that is on a stream."""
        self._work.record(self._work.event(event), self._work.stream(stream))

    @_call
    def cuEventQuery(self, event: Any) -> None:
        """Whether an event has happened; if so, the thread has observed it. Polling gets there in the end."""
        it = self._work.event(event)
        self._work.step()
        if it.act is not None and not it.act.is_done:
            raise CallRefused(CUresult.CUDA_ERROR_NOT_READY)
        self._work.host_learns(it.clock)

    @_call
    def cuEventElapsedTime(self, first: Any, last: Any) -> float:
        """Milliseconds between two events. What has happened is said, and no order is learned from it."""
        events = [self._work.event(it) for it in (first, last)]
        if not all(it.is_timed and it.act is not None for it in events):
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        if not all(it.act is not None and it.act.is_done for it in events):
            raise CallRefused(CUresult.CUDA_ERROR_NOT_READY)
        return (events[1].at_ns - events[0].at_ns) * 1e-6

    @_call
    def cuEventSynchronize(self, event: Any) -> None:
        """Let the thread wait for an event."""
        it = self._work.event(event)
        self._work.finish(it.act)
        self._work.host_learns(it.clock)

    @_call
    def cuMemcpyHtoDAsync(self, target: Any, source: int, nbytes: int, stream: Any) -> None:
        """Queue a copy to the device."""
        name = f"copy to device {int(target):#x}"
        uses = [(*self._host.touched(name, source, nbytes), False)]
        uses += self._device_uses(name, [(int(target), nbytes)], is_write=True)
        self._copy(name, int(target), source, nbytes, stream, uses)

    @_call
    def cuMemcpyDtoHAsync(self, target: int, source: Any, nbytes: int, stream: Any) -> None:
        """Queue a copy to the host."""
        name = f"copy from device {int(source):#x}"
        uses = self._device_uses(name, [(int(source), nbytes)], is_write=False)
        uses += [(*self._host.touched(name, target, nbytes), True)]
        self._copy(name, target, int(source), nbytes, stream, uses)

    @_call
    def cuMemcpyDtoDAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> None:
        """Queue a copy on the device."""
        name = f"copy on device {int(source):#x} to {int(target):#x}"
        uses = self._device_uses(name, [(int(source), nbytes)], is_write=False)
        uses += self._device_uses(name, [(int(target), nbytes)], is_write=True)
        self._copy(name, int(target), int(source), nbytes, stream, uses)

    @_call
    def cuMemsetD8Async(self, target: Any, value: int, nbytes: int, stream: Any) -> None:
        """Queue a fill."""
        name = f"fill of {int(target):#x}"
        uses = self._device_uses(name, [(int(target), nbytes)], is_write=True)
        fill = functools.partial(ctypes.memset, int(target), value, nbytes)
        self._queue(self._work.stream(stream), name, [fill], uses)

    def _copy(self, name: str, target: int, source: int, nbytes: int, stream: Any, uses: list[_Use]) -> None:
        """In two parts, cut anywhere, between which other streams may run."""
        cut = self._work.cut(nbytes)
        steps = [
            functools.partial(ctypes.memmove, target, source, cut),
            functools.partial(ctypes.memmove, target + cut, source + cut, nbytes - cut),
        ]
        self._queue(self._work.stream(stream), name, steps, uses)

    def _device_uses(self, name: str, ranges: Sequence[_Range], *, is_write: bool) -> list[_Use]:
        return [
            (mapping.uses, interval, is_write)
            for address, nbytes in ranges
            for mapping, interval in self._memory.touched(name, address, nbytes, is_write=is_write)
        ]

    def _queue(self, stream: FakeStream, name: str, steps: Sequence[Callable[[], object]], uses: list[_Use]) -> FakeAct:
        act = self._work.enqueue(stream, name, steps)
        clock = stream.clock  # a stream's clock is replaced, never changed
        for noted, interval, is_write in uses:
            noted[stream.agent] = (act.tick, name)
            access = TrackedAccess(
                act_id=act.id, name=name, agent=stream.agent, tick=act.tick, is_write=is_write, interval=interval
            )
            self._detector.add(access, clock)
        return act

    def _observe(self, stream: FakeStream) -> None:
        self._work.finish(self._work.enqueue(stream, "synchronise"))
        self._work.host_learns(stream.clock)

    def _injected(self) -> names.CUresult | None:
        if self._num_failures == 0:
            return None
        self._countdown -= 1
        if self._countdown > 0:
            return None
        self._num_failures -= 1
        self.has_failed = True
        return self._failure

    def _check_initialized(self) -> None:
        if not self._is_initialized:
            raise CallRefused(CUresult.CUDA_ERROR_NOT_INITIALIZED)

    def _check_device(self, device: Any) -> None:
        self._check_initialized()
        if int(device) != 0:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_DEVICE)


def _require(condition: bool) -> None:
    if not condition:
        raise CallRefused(CUresult.CUDA_ERROR_INVALID_VALUE)
