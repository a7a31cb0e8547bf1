"""The neutral stream: what a program asked of its allocator, whoever recorded it.

Every reader produces a `Stream`; every allocator model replays one. A stream says which buffers
were asked for and given back in which order, not where they lay. Time is the event's index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.fragmentation.errors import BadFile
from ooc.fragmentation.settings import CachingSettings

IntArray = npt.NDArray[np.int64]

ALLOC = 0
"""The buffer is asked for."""
RELEASE = 1
"""The program gave the buffer back, but another CUDA stream still uses it: not free yet."""
FREE = 2
"""The buffer's memory may be used again."""
EMPTY = 3
"""All that was cached went back to the device (`torch.cuda.empty_cache()`). Of no buffer: its index says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of device memory that existed before the first event; of an expandable segment, what was mapped."""

    address: int
    nbytes: int
    is_small: bool
    pool: int
    is_expandable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialLayout:
    """Where things lay before the first event, for an allocator that goes on from there.

    Attributes:
        segments: In order of address.
        address, block_nbytes: Of the first `num_initial` buffers: where each lay and how much of
            its segment it took, rounding included.
    """

    segments: tuple[Segment, ...]
    address: tuple[int, ...]
    block_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A request that failed when the file was recorded.

    Attributes:
        event_index: Where in the stream; its ALLOC event.
        nbytes: As recorded, rounded by the allocator.
        device_free_nbytes: What the device had left outside the allocator; None if not recorded.
        reserved_nbytes: What the allocator held then.
    """

    event_index: int
    nbytes: int
    device_free_nbytes: int | None
    reserved_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivatePool:
    """A pool that serves only what is asked for it.

    Attributes:
        gone_event: From this event on nothing uses the pool any more; only then does its free memory go back to the
            device. Beyond the last event: never seen.
        is_graph: It serves the capture of a CUDA graph, during which nothing goes back to the device at all.
    """

    gone_event: int
    is_graph: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the file itself says of the run: the truth that a replay has to meet. None: not in the file.

    Attributes:
        peak_live_nbytes: Most bytes live at once; a replay must meet it exactly.
        peak_reserved_nbytes: Most bytes the real allocator held.
        end_live_nbytes: Bytes live at the end, counted from something other than the events.
        end_reserved_nbytes: Bytes held at the end, counted from something other than the events.
        num_device_allocs, num_device_frees: cudaMalloc or map calls, cudaFree or unmap calls.
    """

    peak_live_nbytes: int | None = None
    peak_reserved_nbytes: int | None = None
    end_live_nbytes: int | None = None
    end_reserved_nbytes: int | None = None
    num_device_allocs: int | None = None
    num_device_frees: int | None = None


def _no_stack(_buffer: int) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Allocations and frees in order.

    Attributes:
        source: What kind of file it came from, for people.
        device: "cuda:0", "cpu".
        kind: Per event ALLOC, RELEASE, FREE or EMPTY (int8).
        buffer: Per event, the buffer's index (int64), 0 for EMPTY. A buffer has one ALLOC and at most one FREE.
        nbytes: Per buffer, bytes as requested (int64). Where a file only has rounded ones, see `notes`.
        pool: Per buffer, which pool may serve it: one number for each CUDA stream and private pool.
        num_initial: The first so many buffers existed before the recording began. Their ALLOC
            events are the first so many events.
        initial: Where those lay; None if unknown.
        attempts: Buffers whose allocation failed when recorded; each is an ALLOC and a FREE in
            succession, so that a replay tries it.
        failures: Those failures, in order.
        retried: Buffers that, when recorded, got their memory (or did not) only after no cached block had served, the
            device had been full, other CUDA streams had been waited for and all that was cached had gone back. The
            events of that come before their ALLOC, so the allocator as recorded must not look at its cache again.
        returned: Buffers before whose memory was taken some segments went back that the allocator had picked by its
            settings: their numbers, from 1, in the order in which segments came, initial ones first.
        private: Those of `pool` that belong to CUDA graphs or to `torch.cuda.MemPool`.
        recorded: What the file says the result was.
        settings: The allocator's settings when recorded; None if not in the file.
        stack: The stack of a buffer's allocation, innermost first; empty where none was recorded.
            A function, because a million stacks as text do not fit.
        notes: What a reader of the report has to know about this file.
    """

    source: str
    device: str
    kind: npt.NDArray[np.int8]
    buffer: IntArray
    nbytes: IntArray
    pool: IntArray
    num_initial: int = 0
    initial: InitialLayout | None = None
    attempts: frozenset[int] = frozenset()
    failures: tuple[OutOfMemory, ...] = ()
    retried: frozenset[int] = frozenset()
    returned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    private: Mapping[int, PrivatePool] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=Recorded)
    settings: CachingSettings | None = None
    stack: Callable[[int], tuple[str, ...]] = _no_stack
    notes: tuple[str, ...] = ()

    @property
    def num_events(self) -> int:
        return len(self.kind)

    @property
    def num_buffers(self) -> int:
        return len(self.nbytes)

    @cached_property
    def birth(self) -> IntArray:
        """Per buffer, the index of its ALLOC event."""
        return self._event_of(ALLOC)

    @cached_property
    def death(self) -> IntArray:
        """Per buffer, the index of its FREE event; `num_events` if it outlives the recording."""
        return self._event_of(FREE)

    @cached_property
    def live_nbytes(self) -> IntArray:
        """Per event, requested bytes that are live after it; failed attempts count while they are tried."""
        sign = np.where(self.kind == ALLOC, 1, np.where(self.kind == FREE, -1, 0))
        return np.cumsum(sign * self.nbytes[self.buffer])

    @cached_property
    def peak_live_nbytes(self) -> int:
        """Most requested bytes that were really live at once, failed attempts left out."""
        return int(self._granted().max(initial=0))

    @cached_property
    def wanted_nbytes(self) -> int:
        """Most requested bytes that would have been live at once, had every attempt succeeded."""
        return int(self.live_nbytes.max(initial=0))

    def alive_at(self, event_index: int) -> IntArray:
        """Indices of the buffers live after event `event_index`."""
        return np.flatnonzero((self.birth <= event_index) & (self.death > event_index))

    def validate(self) -> Stream:
        """This stream. Raises `BadFile` if its events contradict each other."""
        births = np.bincount(self.buffer[self.kind == ALLOC], minlength=self.num_buffers)
        deaths = np.bincount(self.buffer[self.kind == FREE], minlength=self.num_buffers)
        if (births != 1).any() or (deaths > 1).any() or (self.death <= self.birth).any():
            raise BadFile(f"the events of {self.device} contradict each other: a buffer is freed before it exists")
        if self.num_buffers and int(self.nbytes.min()) < 0:
            raise BadFile(f"an allocation on {self.device} has {int(self.nbytes.min())} bytes")
        return self

    def _event_of(self, kind: int) -> IntArray:
        found = np.full(self.num_buffers, self.num_events, dtype=np.int64)
        events = np.flatnonzero(self.kind == kind)
        found[self.buffer[events]] = events
        return found

    def _granted(self) -> IntArray:
        if not self.attempts:
            return self.live_nbytes
        tried = np.zeros(self.num_events, dtype=np.int64)
        for buffer in self.attempts:
            tried[self.birth[buffer]] = self.nbytes[buffer]
        return self.live_nbytes - tried


class StreamBuilder:
    """Collects events in order; `finish` makes the `Stream`.

    Readers call `alloc` and `free` by address; a free of an address that nobody allocated means
    that the buffer is older than the recording.
    """

    def __init__(self) -> None:
        self._kind = bytearray()
        self._buffer: list[int] = []
        self.nbytes: list[int] = []
        self.pool: list[int] = []
        self.site: list[object] = []
        self.live: dict[int, int] = {}
        self.attempts: list[int] = []
        self.retried: list[int] = []
        self.num_lost_frees = 0
        self._older: list[int] = []  # buffers that existed before the first event
        self.older_address: list[int] = []
        self._pools: dict[object, int] = {}

    @property
    def older_nbytes(self) -> int:
        """Bytes of the buffers found so far to be older than the recording."""
        return sum(self.nbytes[buffer] for buffer in self._older)

    def alloc(self, address: int, nbytes: int, pool: object = 0, site: object = None) -> int:
        """Note an allocation. Returns the buffer's index, preliminary until `finish`."""
        buffer = self._new(nbytes, pool, site)
        if address in self.live:  # its free is missing from the recording
            self.num_lost_frees += 1
            self._note(FREE, self.live[address])
        self.live[address] = buffer
        self._note(ALLOC, buffer)
        return buffer

    def free(self, address: int, nbytes: int, pool: object = 0, site: object = None) -> None:
        """Note a free; where the buffer is older than the recording, `nbytes` is its size."""
        buffer = self.live.pop(address, None)
        if buffer is None:
            buffer = self.older(address, nbytes, pool, site)
            del self.live[address]
        self._note(FREE, buffer)

    def release(self, address: int) -> None:
        """Note that the program gave the buffer back while another stream uses it."""
        buffer = self.live.get(address)
        if buffer is not None:
            self._note(RELEASE, buffer)

    def empty(self) -> None:
        """Note that all that was cached went back to the device."""
        self._note(EMPTY, -1)

    @property
    def num_events(self) -> int:
        """Events noted so far."""
        return len(self._kind)

    def attempt(self, nbytes: int, pool: object = 0, site: object = None) -> int:
        """Note an allocation that failed. Returns its ALLOC event's index."""
        buffer = self._new(nbytes, pool, site)
        self.attempts.append(buffer)
        self._note(ALLOC, buffer)
        self._note(FREE, buffer)
        return len(self._kind) - 2

    def older(self, address: int, nbytes: int, pool: object = 0, site: object = None) -> int:
        """Note a buffer that existed before the first event and is live now."""
        buffer = self._new(nbytes, pool, site)
        self.live[address] = buffer
        self._older.append(buffer)
        self.older_address.append(address)
        return buffer

    def pool_number(self, pool: object) -> int:
        """The number that stands for `pool` in the stream."""
        return self._pools.setdefault(pool, len(self._pools))

    def pool_numbers(self) -> list[tuple[Any, int]]:
        """What `pool_number` was asked for, with its answers."""
        return list(self._pools.items())

    def finish(self) -> tuple[IntArray, IntArray, npt.NDArray[np.int8], IntArray, IntArray, list[int]]:
        """`(nbytes, pool, kind, buffer, order, older addresses)`; initial buffers moved to the front, by address.

        `order[i]` is the preliminary index of the buffer that is now the i-th. Attempts and events
        noted before must be translated with it; events move back by the number of initial buffers.
        """
        by_address = sorted(range(len(self._older)), key=self.older_address.__getitem__)
        older = [self._older[i] for i in by_address]
        is_older = np.zeros(len(self.nbytes), dtype=bool)
        is_older[older] = True
        order = np.concatenate([np.array(older, dtype=np.int64), np.flatnonzero(~is_older)])
        new_index = np.empty(len(order), dtype=np.int64)
        new_index[order] = np.arange(len(order))
        kind = np.concatenate([np.full(len(older), ALLOC, dtype=np.int8), np.frombuffer(self._kind, dtype=np.int8)])
        if not self.nbytes:  # nothing was ever asked for, so nothing can have been cached
            self._kind.clear()
            self._buffer.clear()
        noted = np.array(self._buffer, dtype=np.int64)
        renamed = np.zeros(len(noted), dtype=np.int64)
        renamed[noted >= 0] = new_index[noted[noted >= 0]]
        buffer = np.concatenate([np.arange(len(older), dtype=np.int64), renamed])
        nbytes = _as_sizes(self.nbytes)[order]
        pool = np.array(self.pool, dtype=np.int64)[order]
        return nbytes, pool, kind, buffer, order, [self.older_address[i] for i in by_address]

    def _new(self, nbytes: int, pool: object, site: object) -> int:
        self.nbytes.append(nbytes)
        self.pool.append(self.pool_number(pool))
        self.site.append(site)
        return len(self.nbytes) - 1

    def _note(self, kind: int, buffer: int) -> None:
        self._kind.append(kind)
        self._buffer.append(buffer)


def _as_sizes(values: list[int]) -> IntArray:
    kinds = set(map(type, values))
    if not kinds <= {int}:
        raise BadFile(f"an allocation's size is a {sorted(k.__name__ for k in kinds - {int})[0]}, not an int")
    try:
        sizes = np.array(values, dtype=np.int64)
    except OverflowError:
        raise BadFile(f"an allocation of {max(values)} bytes is larger than any memory") from None
    return sizes
