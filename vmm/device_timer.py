"""How long compute work takes on a device, by events with time stamps. The host waits for none of them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

from vmm.cuda_calls import CudaFault
from vmm.device_streams import DeviceStreams

__all__ = ["DeviceTimer"]


class DeviceTimer:
    """Adds up the time that stretches of the compute work take. One thread at a time (the session's lock).

    A stretch counts as soon as somebody asks after it has ended; where the driver refuses, it does not.

    Args:
        streams: Whose compute work is timed; it owns the events.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._free: list[int] = []
        self._pending: deque[tuple[int, int]] = deque()

    def __repr__(self) -> str:
        return f"<DeviceTimer, {len(self._pending)} stretches not ended>"

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Within the block compute work is issued: a stretch. It is not counted if the block raises."""
        first = self._stamp()
        yield
        last = self._stamp()
        if first is not None and last is not None:
            self._pending.append((first, last))

    def take_ns(self) -> int:
        """Time of the stretches that have ended since the last call, up to the first that has not."""
        total = 0
        while self._pending:
            try:
                found = self._streams.calls.elapsed_ns(*self._pending[0])
            except CudaFault:
                found = 0
            if found is None:
                break
            total += found
            self._free += self._pending.popleft()
        return total

    def _stamp(self) -> int | None:
        try:
            return self._streams.stamp(self._free.pop() if self._free else None)
        except CudaFault:
            return None
