"""How long compute work takes on a device, by events with time stamps."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from vmm.cuda_calls import CudaFault
from vmm.device_streams import DeviceStreams

__all__ = ["DeviceTimer", "OpTimer"]

_MOST_PENDING = 4096
"""Ops of which nobody has asked how long they took, before they are asked unbidden: they hold two events each."""


class _Stamps:
    """Events with time stamps that are used again and again. Where the driver refuses, there is none."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._free: list[int] = []

    def stamp(self, event: int | None = None) -> int | None:
        """An event behind all compute work so far: the one given, or one that is free."""
        try:
            return self._streams.stamp(event if event is not None or not self._free else self._free.pop())
        except CudaFault:
            return None

    def give_back(self, *events: int | None) -> None:
        self._free += [event for event in events if event is not None]

    def elapsed_ns(self, first: int, last: int) -> int | None:
        """From one to the other; None: the last has not happened yet. 0 where the driver refuses."""
        try:
            return self._streams.calls.elapsed_ns(first, last)
        except CudaFault:
            return 0

    def wait(self, event: int) -> None:
        """Let the host wait until `event` has happened, as far as the driver lets it."""
        with contextlib.suppress(CudaFault):
            self._streams.calls.synchronize_event(event)


class DeviceTimer:
    """Adds up the time that stretches of the compute work take. One thread at a time (the session's lock).

    A stretch counts as soon as somebody asks after it has ended, and the host waits for none; where the driver refuses,
    it does not.

    Args:
        streams: Whose compute work is timed; it owns the events.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._stamps = _Stamps(streams)
        self._pending: deque[tuple[int, int]] = deque()

    def __repr__(self) -> str:
        return f"<DeviceTimer, {len(self._pending)} stretches not ended>"

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Within the block compute work is issued: a stretch. It is not counted if the block raises."""
        first = self._stamps.stamp()
        yield
        last = self._stamps.stamp()
        if first is not None and last is not None:
            self._pending.append((first, last))

    def take_ns(self) -> int:
        """Time of the stretches that have ended since the last call, up to the first that has not."""
        total = 0
        while self._pending:
            found = self._stamps.elapsed_ns(*self._pending[0])
            if found is None:
                break
            total += found
            self._stamps.give_back(*self._pending.popleft())
        return total


class OpTimer:
    """Tells how long ops have taken, later than they ran. One thread at a time (the session's lock).

    Args:
        streams: Whose compute work the ops are; it owns the events.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._stamps = _Stamps(streams)
        self._begun: int | None = None
        self._pending: list[tuple[int, int, Callable[[int], object]]] = []

    def __repr__(self) -> str:
        return f"<OpTimer, {len(self._pending)} ops not told of>"

    def begin(self) -> int | None:
        """An op is about to be issued. What `end` takes."""
        self._begun = self._stamps.stamp()
        return self._begun

    def begin_again(self) -> None:
        """What was issued of the op under way, if any, was waiting for memory: its time begins now."""
        if self._begun is not None:
            self._stamps.stamp(self._begun)

    def end(self, first: int | None, tell: Callable[[int], object] | None) -> None:
        """The op has been issued. `tell` gets its nanoseconds when they are asked for; None: it has failed."""
        self._begun = None
        last = self._stamps.stamp() if first is not None and tell is not None else None
        if first is None or last is None or tell is None:
            self._stamps.give_back(first, last)
            return
        self._pending.append((first, last, tell))
        if len(self._pending) >= _MOST_PENDING:
            self.settle()

    def settle(self) -> None:
        """Tell the times of all ops so far. The host waits for the last of them."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        self._stamps.wait(pending[-1][1])
        for first, last, tell in pending:
            tell(self._stamps.elapsed_ns(first, last) or 0)
            self._stamps.give_back(first, last)
