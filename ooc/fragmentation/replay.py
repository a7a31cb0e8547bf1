"""What a model reports: where everything lay, what was held, what failed.

A replay keeps placements, not statistics: for each buffer its address, size and time, for each
segment when it came and went. Every figure in the report is computed from these afterwards, and a
test can check them (nothing overlaps, everything lies in a segment) without knowing the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ooc.fragmentation.stream import IntArray, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEvent:
    """Device memory that an allocator took (`nbytes` > 0) or gave back (`nbytes` < 0) at an event."""

    event_index: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first request that did not fit into the capacity.

    Attributes:
        event_index, buffer: Which request.
        nbytes: As requested.
        needed_nbytes: What the device would have had to give: a whole segment, or whole chunks.
        capacity_nbytes, reserved_nbytes: The limit, and what was held when it failed, after
            everything that could be given back had been.
        allocated_nbytes: Of those, handed out.
        largest_free_nbytes: The largest free block then: enough free bytes may exist, but not in one piece.
    """

    event_index: int
    buffer: int
    nbytes: int
    needed_nbytes: int
    capacity_nbytes: int
    reserved_nbytes: int
    allocated_nbytes: int
    largest_free_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """One allocator's account of one stream.

    Attributes:
        allocator: The model's name, as on the command line.
        title: For people.
        settings: For PyTorch's allocator, what `PYTORCH_ALLOC_CONF` would say; else empty.
        first_event, last_event: Which events it covers, half-open; planners are given a part of a long stream.
        reserved_nbytes, allocated_nbytes: Per covered event, held from the device after it; and of
            that, handed out to buffers, rounding included.
        address: Per buffer of the whole stream, or -1 where it was not placed. None where
            addresses mean nothing, since any free chunk serves.
        block_nbytes: Per buffer, bytes handed out for it.
        death: Per buffer, the event at which it went; where the allocator waited for other CUDA
            streams this may be earlier than in the stream.
        segments: Device memory taken and given back, in order.
        num_device_allocs, num_device_frees: cudaMalloc and cudaFree calls, or the planner's single one.
        num_maps, num_unmaps: Calls that map or unmap physical memory.
        num_retries: Times it gave back all free segments and asked the device again.
        failure: The first request that did not fit; None: all did. After it the replay goes on
            without a limit, so that the peak says what it would have taken.
    """

    allocator: str
    title: str
    settings: str
    first_event: int
    last_event: int
    reserved_nbytes: IntArray
    allocated_nbytes: IntArray
    address: IntArray | None
    block_nbytes: IntArray
    death: IntArray
    segments: tuple[SegmentEvent, ...]
    num_device_allocs: int
    num_device_frees: int
    num_maps: int
    num_unmaps: int
    num_retries: int
    failure: Failure | None

    @property
    def peak_reserved_nbytes(self) -> int:
        """Most bytes held."""
        return int(self.reserved_nbytes.max(initial=0))

    @property
    def peak_event(self) -> int:
        """The first event at which the most bytes were held; where that never changes, the one of most use."""
        held = self.reserved_nbytes
        if not len(held):
            return self.first_event
        figure = self.allocated_nbytes if held[0] == held.max() == held.min() else held
        return self.first_event + int(figure.argmax())

    @property
    def worst_event(self) -> int:
        """The event after which to look: the one before the failed request; else the peak."""
        return self.failure.event_index - 1 if self.failure is not None else self.peak_event


Model = Callable[[Stream, int | None], Replay]
"""Replays a stream, within a capacity in bytes if one is given."""


class NotApplicable(Exception):
    """A model cannot say anything about this stream; the message says why."""


def alive_in(replay: Replay, stream: Stream, event_index: int) -> IntArray:
    """Buffers that the replay holds after `event_index`."""
    alive = (stream.birth <= event_index) & (replay.death > event_index)
    if replay.address is not None:
        alive &= replay.address >= 0
    return np.flatnonzero(alive)


def mapped_in(replay: Replay, event_index: int) -> list[tuple[int, int]]:
    """`[start, stop)` ranges of device memory held after `event_index`, by address, each segment on its own."""
    held: dict[int, int] = {}
    for event in replay.segments:
        if event.event_index > event_index:
            break
        if event.nbytes > 0:
            held[event.address] = event.address + event.nbytes
        else:
            _take_out(held, event.address, event.address - event.nbytes)
    return sorted(held.items())


def _take_out(held: dict[int, int], start: int, stop: int) -> None:
    """Remove `[start, stop)`, which may cover parts of several mapped pieces."""
    if held.get(start) == stop:
        del held[start]
        return
    for low, high in [(low, high) for low, high in held.items() if low < stop and high > start]:
        del held[low]
        if low < start:
            held[low] = start
        if high > stop:
            held[stop] = high
