"""Who waits for whom on a device: one chain of compute work, one stream each way, and events between them.

Every wait and every record goes through `DeviceStreams.wait`, `observe` and `record`, with the rule that it
serves. So a test can take each rule away in turn and see that something breaks (tests/cuda/test_mutations.py).

Compute work is one chain. Where a program runs ops on several streams, an op on another stream than the
op before it waits for that one: streams of the program lose their concurrency with each other, and in
return every "last use" is behind one event, whether or not the program calls `record_stream`.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Iterable

from vmm.cuda_calls import CudaCalls, CudaFault
from vmm.nvtx_ranges import marked, name_stream

__all__ = ["DeviceEvent", "DeviceStreams", "WaitRule"]


class WaitRule(enum.Enum):
    """Why something waits. Each member is a wait whose removal a test notices."""

    OP_AFTER_LOAD = "an op waits for the load of what it uses"
    OP_AFTER_WRITE = "an op that writes chunks anew waits for the write of who held them"
    OP_AFTER_OTHER_STREAM = "an op waits for the op before it where that ran on another stream"
    LOAD_AFTER_USE = "a load waits for the ops that used its chunks before"
    LOAD_AFTER_OWN_WRITE = "a load waits for the write of its own bytes"
    LOAD_AFTER_HOLDER = "a load waits for the transfers of who held its chunks before"
    WRITE_AFTER_USE = "a write waits for the ops that made its bytes"
    WRITE_AFTER_READ_OF_BLOCKS = "a write waits for the load out of the host memory that it takes over"
    FILE_AFTER_COPY = "what goes on to the file has arrived in host memory"
    STAGING_AFTER_COPY = "staging memory is filled anew after what it held has gone to the device"
    OTHER_AFTER_OPS = "another library's work on memory that ops have left comes after those ops"
    OP_AFTER_OTHER = "ops come after another library's work on memory that it has left"
    HOST_AFTER_USE = "the host has seen the end of all use before it takes a mapping away"
    HOST_AFTER_TRANSFER = "the host has seen the end of a transfer before it relies on it"


class DeviceEvent:
    """One record of an event. When nobody refers to it any more, its driver event is used again."""

    __slots__ = ("_free", "handle", "is_observed")

    def __init__(self, handle: int, free: list[int]) -> None:
        self.handle = handle
        self.is_observed = False
        """Whether the host has seen it happen: what is submitted from now on comes after it anyway."""
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.handle)

    def __repr__(self) -> str:
        return f"<DeviceEvent {self.handle:#x}{', observed' if self.is_observed else ''}>"


class DeviceStreams:
    """Streams and events of one session. One thread at a time (the session's lock).

    Args:
        calls: The driver's calls.
        current: The handle of the stream on which the next op of the program runs.
    """

    def __init__(self, calls: CudaCalls, *, current: Callable[[], int]) -> None:
        self._calls = calls
        self._current = current
        self._free: list[int] = []
        self._events: list[int] = []
        self._streams: list[int] = []
        self._tail = current()
        self._num_moves = ctypes.c_uint64()
        self.num_host_waits = 0
        """How often the host was made to wait. Not once in a planned step, but for remaps and files."""
        try:
            self.inward = self._new_stream("ooc load")
            self.outward = self._new_stream("ooc evict")
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<DeviceStreams {len(self._events)} events, {self.num_host_waits} host waits>"

    @property
    def calls(self) -> CudaCalls:
        """The driver's calls."""
        return self._calls

    @property
    def tail(self) -> int:
        """The stream of the newest compute work."""
        return self._tail

    @property
    def num_moves_address(self) -> int:
        """Address of a 64-bit count of the chain's moves from one stream to another, for as long as this lives."""
        return ctypes.addressof(self._num_moves)

    def follow(self) -> int:
        """The program's next op comes on its current stream: behind all compute work so far. That stream."""
        stream = self._current()
        if stream != self._tail:
            self.wait(WaitRule.OP_AFTER_OTHER_STREAM, stream, self.record(self._tail))
            self._tail = stream
            self._num_moves.value += 1
        return stream

    def lend(self, stream: int) -> None:
        """Memory is about to be given to another library's work on `stream`: that comes after all ops so far."""
        self.wait(WaitRule.OTHER_AFTER_OPS, stream, self.fence())

    def take_back(self, stream: int) -> None:
        """Memory that another library's work on `stream` has used is free again: ops from now on come after it."""
        self.wait(WaitRule.OP_AFTER_OTHER, self._tail, self.record(stream))

    def fence(self) -> DeviceEvent:
        """An event behind all compute work so far."""
        return self.record(self._tail)

    def record(self, stream: int) -> DeviceEvent:
        """An event behind all that is on `stream` so far."""
        if not self._free:
            handle = self._calls.create_event()
            self._events.append(handle)
            self._free.append(handle)
        event = DeviceEvent(self._free.pop(), self._free)
        self._calls.record(event.handle, stream)
        return event

    def stamp(self, event: int | None) -> int:
        """Let a timed event stand for all compute work so far: the one given, or a new one. Its handle."""
        if event is None:
            event = self._calls.create_event(timed=True)
            self._events.append(event)
        self._calls.record(event, self._tail)
        return event

    def wait(self, rule: WaitRule, stream: int, event: DeviceEvent) -> None:
        """Let what comes on `stream` from now on wait for `event`. The host goes on.

        If the driver refuses, the host waits in the stream's place: the order holds all the same.
        """
        if event.is_observed:
            return
        try:
            self._calls.wait_event(stream, event.handle)
        except CudaFault:
            self.observe(rule, event)

    def observe(self, rule: WaitRule, event: DeviceEvent) -> None:  # noqa: ARG002 - tests tell rules apart
        """Let the host wait until `event` has happened."""
        if not event.is_observed:
            self.num_host_waits += 1
            with marked("wait"):
                try:
                    self._calls.synchronize_event(event.handle)
                except CudaFault:
                    self.drain()
            event.is_observed = True

    def has_happened(self, event: DeviceEvent) -> bool:
        """Whether an event has happened; if so, the host has seen it. Nobody waits."""
        event.is_observed = event.is_observed or self._calls.is_done(event.handle)
        return event.is_observed

    def drain(self) -> None:
        """Let the host wait until the device has nothing left to do, when a call has failed half way."""
        self._calls.call("cuCtxSynchronize", what="the end of all device work")

    def observe_use(self) -> None:
        """Let the host see the end of all compute work so far: from now on mappings may be taken away."""
        self.observe(WaitRule.HOST_AFTER_USE, self.fence())

    def observe_all(self) -> None:
        """Let the host see the end of everything, transfers too."""
        for stream in (self._tail, self.inward, self.outward):
            self.observe(WaitRule.HOST_AFTER_TRANSFER, self.record(stream))

    def close(self) -> None:
        """Give streams and events back; what is queued is still done. Idempotent.

        Events that somebody still refers to are given back, too: they must not be used any more.
        """
        _give_back(self._streams, self._calls.destroy_stream)
        _give_back(self._events, self._calls.destroy_event)
        self._free.clear()

    def _new_stream(self, name: str) -> int:
        stream = self._calls.create_stream()
        self._streams.append(stream)
        name_stream(stream, name)
        return stream


def _give_back(handles: list[int], destroy: Callable[[int], None]) -> None:
    """Destroy each; one that cannot be does not keep the rest, and is tried again by the next call."""
    failure: Exception | None = None
    left = []
    for handle in handles:
        try:
            destroy(handle)
        except RuntimeError as error:
            failure = error
            left.append(handle)
    handles[:] = left
    if failure is not None:
        raise failure


def events_of(found: Iterable[DeviceEvent | None]) -> tuple[DeviceEvent, ...]:
    """Those that there are and that the host has not seen, each once."""
    return tuple({event.handle: event for event in found if event is not None and not event.is_observed}.values())
