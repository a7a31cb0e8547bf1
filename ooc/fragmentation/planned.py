"""Allocators that know the whole stream, and chunked virtual addressing.

*Static planners* give every buffer its place before the run, from sizes and lifetimes; they live in
`scheduler.placement`. They are for one training step, not for a day: of a long stream they are given
the part around the peak that has at most `MAX_PLANNED_BUFFERS` buffers. All bytes of the peak
are in it.

*Chunked virtual addressing* (DESIGN of this project; the paper on window scheduling and virtual
addressing, section on virtual addressing): a tensor is a contiguous range of addresses over any
free chunks, so free memory is never in the wrong place, and what is lost is the last chunk's rest.
Tensors below the session's threshold of 64 KiB stay with PyTorch's own allocator, as in a session.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ooc.fragmentation.caching import replay_caching
from ooc.fragmentation.replay import Failure, NotApplicable, Replay, SegmentEvent
from ooc.fragmentation.settings import CachingSettings
from ooc.fragmentation.stream import ALLOC, EMPTY, FREE, IntArray, Stream
from ooc.units import KIB, MIB, format_nbytes
from scheduler.placement.greedy import first_fit_by_size, melon, nntrainer
from scheduler.placement.problem import Buffer, Placement, Problem

MAX_PLANNED_BUFFERS = 4000
"""A step of ResNet-50 or GPT-2 has 1,000 to 3,000 allocations; the planners are quadratic in it."""
ALIGNMENT_NBYTES = 512
"""What PyTorch's allocator gives, and what kernels are chosen for."""
THRESHOLD_NBYTES = 64 * KIB
"""A session's default: smaller tensors stay with PyTorch's allocator."""


def replay_chunked(stream: Stream, capacity: int | None, chunk_nbytes: int, *, name: str) -> Replay:
    """Replay `stream` on a pool of chunks of `chunk_nbytes`, made when first needed and kept.

    The calls counted are those of a run that knows nothing in advance: one map per chunk and
    allocation. A planned session leaves the mappings in place and makes none.
    """
    small = _small_requests(stream)
    is_large = stream.nbytes >= THRESHOLD_NBYTES
    num_chunks = np.where(is_large, -(-stream.nbytes // chunk_nbytes), 0)
    sign = np.where(stream.kind == ALLOC, 1, np.where(stream.kind == FREE, -1, 0))
    in_use = np.cumsum(sign * num_chunks[stream.buffer])
    created = np.maximum.accumulate(in_use) if len(in_use) else in_use
    reserved = created * chunk_nbytes + small.reserved_nbytes
    allocated = in_use * chunk_nbytes + small.allocated_nbytes
    is_alloc = stream.kind == ALLOC
    failure = None
    if capacity is not None and int(reserved.max(initial=0)) > capacity:
        event = int(np.argmax(reserved > capacity))
        buffer = int(stream.buffer[event])
        held = int(reserved[event - 1]) if event else 0
        handed_out = int(allocated[event - 1]) if event else 0
        failure = Failure(
            event_index=event,
            buffer=buffer,
            nbytes=int(stream.nbytes[buffer]),
            needed_nbytes=int(num_chunks[buffer]) * chunk_nbytes or int(small.block_nbytes[buffer]),
            capacity_nbytes=capacity,
            reserved_nbytes=held,
            allocated_nbytes=handed_out,
            # Any free chunks do: all that is free counts as one block.
            largest_free_nbytes=held - handed_out,
        )
    return Replay(
        allocator=name,
        title=f"chunks of {format_nbytes(chunk_nbytes)}, virtual addressing",
        settings="",
        first_event=0,
        last_event=stream.num_events,
        reserved_nbytes=reserved,
        allocated_nbytes=allocated,
        address=None,
        block_nbytes=np.where(is_large, num_chunks * chunk_nbytes, small.block_nbytes),
        death=stream.death,
        segments=(),
        num_device_allocs=int(created.max(initial=0)) + small.num_device_allocs,
        num_device_frees=0,
        num_maps=int(num_chunks[stream.buffer[is_alloc]].sum()),
        num_unmaps=int(num_chunks[stream.buffer[stream.kind == FREE]].sum()),
        num_retries=0,
        failure=failure,
    )


def pool_nbytes(stream: Stream, chunk_nbytes: int) -> int:
    """The pool in which all tensors from the threshold on stay: the budget of a session that moves nothing."""
    num_chunks = np.where(stream.nbytes >= THRESHOLD_NBYTES, -(-stream.nbytes // chunk_nbytes), 0)
    sign = np.where(stream.kind == ALLOC, 1, np.where(stream.kind == FREE, -1, 0))
    return max(int(np.cumsum(sign * num_chunks[stream.buffer]).max(initial=0)), 1) * chunk_nbytes


def roomy_budget_nbytes(stream: Stream) -> int:
    """A budget in which nothing moves, whole MiB: with some room for a session's own chunks, which round up more."""
    pool = pool_nbytes(stream, THRESHOLD_NBYTES)
    return -(-(pool + pool // 16 + 4 * MIB) // MIB) * MIB


PLANNERS: dict[str, tuple[Callable[[Problem], Placement], str]] = {
    "first-fit-by-size": (first_fit_by_size, "static, largest first, lowest fit"),
    "melon": (melon, "static, Melon: longest-lived first, lowest fit"),
    "nntrainer": (nntrainer, "static, NNTrainer: by first use, reusing whole slots"),
}
"""By name: who plans, and what it is called."""


def replay_planner(stream: Stream, capacity: int | None, *, name: str) -> Replay:
    """Replay the peak of `stream` with every buffer where a static planner puts it.

    Raises:
        NotApplicable: More than `MAX_PLANNED_BUFFERS` buffers are live at the peak itself.
    """
    first, last = planned_events(stream)
    chosen = np.flatnonzero((stream.birth < last) & (stream.death > first))
    block = -(-np.maximum(stream.nbytes, 1) // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    problem = Problem(
        buffers=tuple(
            Buffer(
                nbytes=max(int(stream.nbytes[buffer]), 1),
                start=max(int(stream.birth[buffer]), first),
                stop=min(int(stream.death[buffer]), last),
            )
            for buffer in chosen
        ),
        alignment=ALIGNMENT_NBYTES,
    )
    plan, title = PLANNERS[name]
    placement = plan(problem)
    address = np.full(stream.num_buffers, -1, dtype=np.int64)
    address[chosen] = placement.offsets
    sizes = np.where(address >= 0, block, 0)
    change = np.zeros(last - first + 1, dtype=np.int64)
    np.add.at(change, np.maximum(stream.birth[chosen] - first, 0), sizes[chosen])
    np.add.at(change, np.minimum(stream.death[chosen] - first, last - first), -sizes[chosen])
    return Replay(
        allocator=name,
        title=title,
        settings="",
        first_event=first,
        last_event=last,
        reserved_nbytes=np.full(last - first, placement.height, dtype=np.int64),
        allocated_nbytes=np.cumsum(change)[:-1],
        address=address,
        block_nbytes=sizes,
        death=stream.death,
        segments=(SegmentEvent(event_index=first, address=0, nbytes=placement.height),) if placement.height else (),
        num_device_allocs=1 if placement.height else 0,
        num_device_frees=0,
        num_maps=0,
        num_unmaps=0,
        num_retries=0,
        failure=_beyond(stream, capacity, address, sizes, first),
    )


def planned_events(stream: Stream) -> tuple[int, int]:
    """`[first, last)`: all events, or as many around the peak as have `MAX_PLANNED_BUFFERS` buffers."""
    if stream.num_buffers <= MAX_PLANNED_BUFFERS:
        return 0, stream.num_events
    peak = int(stream.live_nbytes.argmax())
    births, deaths = np.sort(stream.birth), np.sort(stream.death)

    def around(reach: int) -> tuple[int, int]:
        return max(peak - reach, 0), min(peak + 1 + reach, stream.num_events)

    def num_buffers(reach: int) -> int:
        first, last = around(reach)
        return int(np.searchsorted(births, last) - np.searchsorted(deaths, first, side="right"))

    if num_buffers(0) > MAX_PLANNED_BUFFERS:
        raise NotApplicable(
            f"{num_buffers(0)} buffers are live at the peak; static planning is tried up to {MAX_PLANNED_BUFFERS}"
        )
    reach = bisect_right(range(stream.num_events), MAX_PLANNED_BUFFERS, key=num_buffers) - 1
    return around(reach)


def _beyond(stream: Stream, capacity: int | None, address: IntArray, sizes: IntArray, first: int) -> Failure | None:
    """The first buffer that the plan puts beyond the capacity."""
    if capacity is None:
        return None
    beyond = np.flatnonzero((address >= 0) & (address + sizes > capacity))
    if not len(beyond):
        return None
    buffer = int(beyond[stream.birth[beyond].argmin()])
    event = max(int(stream.birth[buffer]), first)
    others = np.flatnonzero((stream.birth <= event) & (stream.death > event) & (address >= 0))
    others = others[others != buffer]
    reached = largest = 0
    for other in others[np.argsort(address[others])]:
        largest = max(largest, min(int(address[other]), capacity) - reached)
        reached = max(reached, int(address[other] + sizes[other]))
    return Failure(
        event_index=event,
        buffer=buffer,
        nbytes=int(stream.nbytes[buffer]),
        needed_nbytes=int(sizes[buffer]),
        capacity_nbytes=capacity,
        reserved_nbytes=int((address + sizes).max()),
        allocated_nbytes=int(sizes[others].sum()),
        largest_free_nbytes=max(largest, capacity - reached),
    )


def small_pools_nbytes(stream: Stream) -> int:
    """The most that tensors below the threshold hold beside a pool of chunks; on a CPU, without what malloc adds."""
    if stream.device.startswith("cuda"):
        return int(_small_requests(stream).reserved_nbytes.max(initial=0))
    sign = np.where(stream.kind == ALLOC, 1, np.where(stream.kind == FREE, -1, 0))
    small = np.where(stream.nbytes < THRESHOLD_NBYTES, stream.nbytes, 0)
    return int(np.cumsum(sign * small[stream.buffer]).max(initial=0))


@lru_cache(maxsize=2)
def _small_requests(stream: Stream) -> Replay:
    """The requests below the threshold, served by PyTorch's small pools; figures per event of the whole stream."""
    is_small = stream.nbytes < THRESHOLD_NBYTES
    events = is_small[stream.buffer] | (stream.kind == EMPTY)
    index = np.maximum(np.cumsum(is_small) - 1, 0)
    part = Stream(
        source=stream.source,
        device=stream.device,
        kind=stream.kind[events],
        buffer=index[stream.buffer[events]],
        nbytes=stream.nbytes[is_small],
        pool=stream.pool[is_small],
    )
    found = replay_caching(part, None, CachingSettings(), name="small")
    position = np.cumsum(events)  # how many of the part's events have happened

    def spread(values: IntArray) -> IntArray:
        spread_out: IntArray = np.concatenate([np.zeros(1, dtype=np.int64), values])[position]
        return spread_out

    block = np.zeros(stream.num_buffers, dtype=np.int64)
    block[is_small] = found.block_nbytes
    return Replay(
        allocator=found.allocator,
        title=found.title,
        settings="",
        first_event=0,
        last_event=stream.num_events,
        reserved_nbytes=spread(found.reserved_nbytes),
        allocated_nbytes=spread(found.allocated_nbytes),
        address=None,
        block_nbytes=block,
        death=stream.death,
        segments=(),
        num_device_allocs=found.num_device_allocs,
        num_device_frees=0,
        num_maps=0,
        num_unmaps=0,
        num_retries=0,
        failure=None,
    )
