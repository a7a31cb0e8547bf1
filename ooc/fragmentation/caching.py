"""PyTorch's CUDA caching allocator, modelled: best fit over cached segments, and expandable segments.

Each rule names the function of c10/cuda/CUDACachingAllocator.cpp that it mirrors; the constants are
those of c10/core/AllocatorConfig.h in torch 2.11 to 2.13. No code was taken over.

| rule | where |
|---|---|
| sizes are rounded up to 512 bytes, or to a division of a power of two | round_size |
| up to 1 MiB: small pool, else large pool; each CUDA stream has its own | get_pool |
| segments: 2 MiB; 20 MiB for requests under 10 MiB; above, the request rounded up to 2 MiB | get_allocation_size |
| the smallest free block that fits; of equals, that in the oldest segment, there the lowest address | get_free_block |
| not a block at or above max_split_size for a request below; above, at most the rounding larger | get_free_block |
| split: small pool and expandable, if 512 bytes remain; large, if more than 1 MiB remains | should_split |
| a freed block merges with free neighbours of its segment | free_block, try_merge_blocks |
| no block, a memory fraction, a threshold: free segments older than average go back | garbage_collect_cached_blocks |
| no memory: oversize cached blocks go back and one retry | release_available_cached_blocks |
| then all wholly free segments go back and one retry; so they do in empty_cache | release_cached_blocks |
| expandable: the lowest place where free and unmapped neighbours suffice | find_expandable_block |
| and of that, map only what is missing | try_allocate_expandable_block, map_block |
| expandable, out of memory: every whole free page is unmapped | unmap_block |

Private pools (of CUDA graphs, of MemPool) give their memory back only once nothing uses them any more, and while a
graph is captured nothing goes back at all. Which addresses cudaMalloc returns makes no difference.

With the settings and the capacity of a recording, the model does not guess when device memory went back, but
does as the file says (`Stream.retried`, `Stream.returned`), and what failed, fails.

Not modelled: free-memory callbacks; MemPools with `use_on_oom` or `no_split`; memory that libraries take outside the
allocator. Expandable segments have 1 TiB of addresses each, PyTorch's 9/8 of the device's memory.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

from ooc.fragmentation.blocks import AllocatorDevice, Block, ExpandableRange, Pool, absorb, room, round_up
from ooc.fragmentation.replay import Failure, Replay, SegmentEvent
from ooc.fragmentation.segments import (
    MIN_BLOCK_NBYTES,
    SMALL_NBYTES,
    SMALL_SEGMENT_NBYTES,
    is_below_device,
    recorded_capacity,
    round_request,
    segment_nbytes,
)
from ooc.fragmentation.settings import CachingSettings
from ooc.fragmentation.stream import ALLOC, FREE, RELEASE, Stream
from ooc.units import TIB


def replay_caching(stream: Stream, capacity: int | None, settings: CachingSettings, *, name: str) -> Replay:
    """Replay `stream` through the caching allocator with `settings`, within `capacity` bytes."""
    return _CachingRun(stream, capacity, settings).go(name)


class _CachingRun:
    """One replay. `go` may be called once."""

    def __init__(self, stream: Stream, capacity: int | None, settings: CachingSettings) -> None:
        self.stream = stream
        self.capacity = capacity
        self.settings = settings
        self.max_split = settings.max_split_nbytes if settings.max_split_nbytes is not None else 1 << 62
        self.is_own = settings == (stream.settings or CachingSettings())
        self.is_as_recorded = self.is_own and capacity in (None, recorded_capacity(stream))
        # Of a recording it is known what went back, and not whether PyTorch collects at all: it takes a fraction.
        knows = self.is_as_recorded and stream.recorded.num_device_frees is not None
        self.collects = capacity is not None and settings.garbage_collection_threshold > 0 and not knows
        self.by_fraction = settings.has_fraction
        if self.is_as_recorded and stream.failures:
            self.by_fraction = is_below_device(stream)
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.blocks: list[Block | None] = [None] * stream.num_buffers
        self.pending: dict[int, None] = {}  # released by the program, in use by another CUDA stream
        self.reserved = 0
        self.allocated = 0
        self.event = 0
        self.ages = {True: 0, False: 0}
        self.segments: list[SegmentEvent] = []
        self.num_segments = self.num_device_allocs = self.num_device_frees = 0
        self.num_maps = self.num_unmaps = self.num_retries = 0
        self.failure: Failure | None = None
        self.death = stream.death.copy()
        self.address = np.full(stream.num_buffers, -1, dtype=np.int64)
        self.block_nbytes = np.zeros(stream.num_buffers, dtype=np.int64)
        self.seeds = stream.initial
        if stream.initial is not None and any(
            segment.is_expandable != settings.expandable_segments for segment in stream.initial.segments
        ):
            self.seeds = None
        tops = [segment.address + segment.nbytes for segment in self.seeds.segments] if self.seeds is not None else []
        self.device = AllocatorDevice(max(tops, default=0))
        self.next_space = 1 << 50  # expandable segments lie far above cudaMalloc's

    def go(self, name: str) -> Replay:
        stream = self.stream
        addresses: list[int] = [-1] * stream.num_buffers
        sizes: list[int] = [0] * stream.num_buffers
        reserved: list[int] = []
        allocated: list[int] = []
        nbytes, pools = stream.nbytes.tolist(), stream.pool.tolist()
        blocks, pending = self.blocks, self.pending
        num_seeded = self._seed() if self.seeds is not None else 0
        for index, (kind, buffer) in enumerate(zip(stream.kind.tolist(), stream.buffer.tolist(), strict=True)):
            if kind == ALLOC:
                if index >= num_seeded:
                    self.event = index
                    blocks[buffer] = self._malloc(buffer, nbytes[buffer], pools[buffer])
                block = blocks[buffer]
                assert block is not None
                addresses[buffer], sizes[buffer] = block.address, block.nbytes
                self.allocated += block.nbytes
            elif kind == FREE:
                block = blocks[buffer]
                if block is not None:  # else it went early, on a retry
                    self.allocated -= block.nbytes
                    blocks[buffer] = None
                    pending.pop(buffer, None)
                    self._free(block)
            elif kind == RELEASE:
                pending[buffer] = None
            else:
                self.event = index
                self._release_all()
            reserved.append(self.reserved)
            allocated.append(self.allocated)
        self.address[:] = addresses
        self.block_nbytes[:] = sizes
        return Replay(
            allocator=name,
            title="PyTorch, expandable segments" if self.settings.expandable_segments else "PyTorch, caching best fit",
            settings=self.settings.text(),
            first_event=0,
            last_event=stream.num_events,
            reserved_nbytes=np.array(reserved, dtype=np.int64),
            allocated_nbytes=np.array(allocated, dtype=np.int64),
            address=self.address,
            block_nbytes=self.block_nbytes,
            death=self.death,
            segments=tuple(self.segments),
            num_device_allocs=self.num_device_allocs,
            num_device_frees=self.num_device_frees,
            num_maps=self.num_maps,
            num_unmaps=self.num_unmaps,
            num_retries=self.num_retries,
            failure=self.failure,
        )

    # -- one request ---------------------------------------------------------------------------

    def _malloc(self, buffer: int, requested: int, pool_number: int) -> Block:
        nbytes = round_request(requested, self.settings)
        pool = self._pool(pool_number, nbytes <= SMALL_NBYTES)
        must_retry = self.is_own and buffer in self.stream.retried
        returned = self.stream.returned.get(buffer, ()) if self.is_as_recorded else ()
        fails = self.is_as_recorded and self.capacity is not None and buffer in self.stream.attempts
        block = None if must_retry or returned or fails else self._free_block(pool, nbytes)
        if block is None:
            self._release_numbered(returned)
            if self.collects:
                self._collect()
            if must_retry:
                self._release_oversize(pool, nbytes)
            elif not fails:
                block = self._from_device(pool, nbytes)
                if block is None and self._release_oversize(pool, nbytes):
                    block = self._from_device(pool, nbytes)
            if block is None:
                block = self._after_release(pool, nbytes, fails)
            if block is None:
                self._fail(buffer, requested, nbytes)
                block = self._from_device(pool, nbytes)
        assert block is not None, "without a capacity the device always gives"
        if self._is_split(block, nbytes):
            rest = Block(block.address + nbytes, block.nbytes - nbytes, block.segment, pool, block.space)
            rest.previous, rest.next = block, block.next
            if rest.next is not None:
                rest.next.previous = rest
            block.next = rest
            block.nbytes = nbytes
            rest.age_base = self.ages[pool.is_small]
            pool.insert(rest)
        block.is_free = False
        return block

    def _free_block(self, pool: Pool, nbytes: int) -> Block | None:
        if self.collects and pool.number not in self.stream.private:
            self.ages[pool.is_small] += 1
        blocks = pool.blocks
        key: Any = (nbytes,)
        i = bisect_left(blocks, key)
        if i == len(blocks):
            return None
        if self.settings.expandable_segments:
            # A block at the end of the mapped part counts with what it can still grow to.
            while i + 1 < len(blocks) and room(blocks[i + 1][3]) < room(blocks[i][3]):
                i += 1
        found = blocks[i][0]
        if nbytes < self.max_split <= found:
            return None
        if nbytes >= self.max_split and found >= nbytes + self.settings.max_non_split_rounding_nbytes:
            return None
        return blocks.pop(i)[3]

    def _is_split(self, block: Block, nbytes: int) -> bool:
        rest = block.nbytes - nbytes
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_NBYTES
        return nbytes < self.max_split and rest > SMALL_NBYTES

    def _free(self, block: Block) -> None:
        pool = block.pool
        block.is_free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free and neighbour.mapped:
                pool.remove(neighbour)
                absorb(block, neighbour)
        block.age_base = self.ages[pool.is_small]
        pool.insert(block)

    # -- device memory -------------------------------------------------------------------------

    def _from_device(self, pool: Pool, nbytes: int) -> Block | None:
        size = segment_nbytes(nbytes, self.settings)
        if self.settings.expandable_segments:
            if self.by_fraction and not self._is_room(size):
                return None  # a fraction is judged by the request, not by the pages that are then mapped
            return self._expand(pool, nbytes)
        if not self._is_room(size):
            return None
        block = Block(self.device.take(size), size, self._next_segment(), pool)
        self._took(block.address, size)
        self.num_device_allocs += 1
        return block

    def _after_release(self, pool: Pool, nbytes: int, fails: bool) -> Block | None:
        owner = self.stream.private.get(pool.number)
        if owner is not None and owner.is_graph:
            # Nothing is given back while a graph is captured, which is when its pool is asked.
            return None if self.capacity is not None else self._from_device(pool, nbytes)
        self.num_retries += 1
        for buffer in list(self.pending):  # it waits for the other streams, then frees
            block = self.blocks[buffer]
            del self.pending[buffer]
            if block is not None:
                self.blocks[buffer] = None
                self.allocated -= block.nbytes
                self.death[buffer] = self.event
                self._free(block)
        self._release_all()
        return None if fails else self._from_device(pool, nbytes)

    def _release_all(self) -> None:
        for held in self.pools.values():
            owner = self.stream.private.get(held.number)
            if owner is not None and self.event < owner.gone_event:
                continue
            for *_, block in list(held.blocks):
                if block.space is not None:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    self._release(block)

    def _release_oversize(self, pool: Pool, nbytes: int) -> bool:
        if self.settings.max_split_nbytes is None or self.settings.expandable_segments:
            return False
        wanted = max(nbytes, self.max_split)
        key: Any = (wanted,)
        i = bisect_left(pool.blocks, key)
        if i < len(pool.blocks):
            self._release(pool.blocks[i][3])
            return True
        released = 0
        while released < wanted and pool.blocks and pool.blocks[-1][0] >= self.max_split:
            block = pool.blocks[-1][3]
            released += block.nbytes
            self._release(block)
        return released >= wanted

    def _release_numbered(self, numbers: tuple[int, ...]) -> None:
        if numbers:
            wanted = frozenset(numbers)
            for held in self.pools.values():
                for *_, block in list(held.blocks):
                    if block.segment in wanted and block.previous is None and block.next is None:
                        self._release(block)

    def _collect(self) -> None:
        assert self.capacity is not None
        threshold = int(self.settings.garbage_collection_threshold * self.capacity)
        if self.reserved <= threshold:
            return
        target, reclaimed = self.reserved - threshold, 0
        whole = [
            block
            for pool in self.pools.values()
            if not pool.is_small and pool.number not in self.stream.private
            for *_, block in pool.blocks
            if block.previous is None and block.next is None and block.space is None
        ]
        now = self.ages[False]
        while reclaimed < target and whole:
            average = sum(now - block.age_base for block in whole) / len(whole)
            old = [block for block in whole if now - block.age_base >= average]
            for block in old:
                reclaimed += block.nbytes
                self._release(block)
            whole = [block for block in whole if now - block.age_base < average]

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.device.give_back(block.address, block.nbytes)
        self._gave(block.address, block.nbytes)
        self.num_device_frees += 1

    # -- expandable segments -------------------------------------------------------------------

    def _expand(self, pool: Pool, nbytes: int) -> Block | None:
        block = self._place_to_grow(pool, nbytes)
        if not block.mapped and not self._map(block, min(block.nbytes, nbytes)):
            return None
        while block.nbytes < nbytes:
            grown = block.next
            assert grown is not None
            if not self._map(grown, min(nbytes - block.nbytes, grown.nbytes)):
                return None
            block = grown
        pool.remove(block)
        return block

    def _place_to_grow(self, pool: Pool, nbytes: int) -> Block:
        for _, block in pool.unmapped:
            start = block
            if block.previous is not None and block.previous.is_free:
                start = block.previous
            room, reached = 0, start
            while room < nbytes and reached is not None and reached.is_free:
                room += reached.nbytes
                reached = reached.next  # type: ignore[assignment]
            if room >= nbytes:
                return start
        page = self._page(pool)
        # PyTorch reserves 9/8 of the device's memory; the model has address space enough for a run without a limit.
        space = ExpandableRange(self.next_space, page)
        block = Block(self.next_space, round_up(TIB, page), self._next_segment(), pool, space)
        block.mapped = False
        self.next_space += 1 << 44
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        assert block.space is not None
        page = block.space.page_nbytes
        mapped = min(round_up(nbytes, page), block.nbytes)
        if not self.by_fraction and not self._is_room(mapped):
            return False
        pool = block.pool
        pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.nbytes:
            rest = Block(block.address + mapped, block.nbytes - mapped, block.segment, pool, block.space)
            rest.mapped = False
            rest.previous, rest.next = block, block.next
            if rest.next is not None:
                rest.next.previous = rest
            block.next = rest
            block.nbytes = mapped
            pool.insert_unmapped(rest)
        self._took(block.address, mapped)
        self.num_device_allocs += 1
        self.num_maps += mapped // page
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free and neighbour.mapped:
                pool.remove(neighbour)
                absorb(block, neighbour)
        pool.insert(block)
        return True

    def _unmap(self, block: Block) -> None:
        assert block.space is not None
        page = block.space.page_nbytes
        start = block.space.address + round_up(block.address - block.space.address, page)
        stop = block.address + block.nbytes
        stop -= (stop - block.space.address) % page
        if start >= stop:
            return
        pool = block.pool
        pool.remove(block)
        before, after = start - block.address, block.address + block.nbytes - stop
        if before:
            head = Block(block.address, before, block.segment, pool, block.space)
            head.previous, head.next = block.previous, block
            if head.previous is not None:
                head.previous.next = head
            block.previous = head
            pool.insert(head)
        if after:
            tail = Block(stop, after, block.segment, pool, block.space)
            tail.previous, tail.next = block, block.next
            if tail.next is not None:
                tail.next.previous = tail
            block.next = tail
            pool.insert(tail)
        block.address, block.nbytes, block.mapped = start, stop - start, False
        self._gave(start, stop - start)
        self.num_device_frees += 1
        self.num_unmaps += (stop - start) // page
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.mapped:
                pool.remove_unmapped(neighbour)
                absorb(block, neighbour)
        pool.insert_unmapped(block)

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT_NBYTES if pool.is_small else self.settings.large_segment_nbytes

    # -- books ---------------------------------------------------------------------------------

    def _is_room(self, nbytes: int) -> bool:
        return self.capacity is None or self.reserved + nbytes <= self.capacity

    def _pool(self, number: int, is_small: bool) -> Pool:
        pool = self.pools.get((number, is_small))
        if pool is None:
            pool = self.pools[number, is_small] = Pool(number, is_small)
        return pool

    def _next_segment(self) -> int:
        self.num_segments += 1
        return self.num_segments

    def _took(self, address: int, nbytes: int) -> None:
        self.reserved += nbytes
        self.segments.append(SegmentEvent(event_index=self.event, address=address, nbytes=nbytes))

    def _gave(self, address: int, nbytes: int) -> None:
        self.reserved -= nbytes
        self.segments.append(SegmentEvent(event_index=self.event, address=address, nbytes=-nbytes))

    def _fail(self, buffer: int, requested: int, nbytes: int) -> None:
        assert self.capacity is not None
        largest = max((pool.blocks[-1][0] for pool in self.pools.values() if pool.blocks), default=0)
        needed = nbytes if self.settings.expandable_segments else segment_nbytes(nbytes, self.settings)
        self.failure = Failure(
            event_index=self.event,
            buffer=buffer,
            nbytes=requested,
            needed_nbytes=needed,
            capacity_nbytes=self.capacity,
            reserved_nbytes=self.reserved,
            allocated_nbytes=self.allocated,
            largest_free_nbytes=largest,
        )
        self.capacity = None
        self.collects = False

    def _seed(self) -> int:
        """Begin with the segments and blocks that existed. Returns the number of ALLOC events done by it."""
        assert self.seeds is not None
        placed = list(zip(self.seeds.address, self.seeds.block_nbytes, strict=True))
        position = 0
        grown: dict[Pool, Block] = {}  # the last block of its expandable segment
        for segment in self.seeds.segments:
            self._took(segment.address, segment.nbytes)
            pool = self._pool(segment.pool, segment.is_small)
            number = self._next_segment()
            previous: Block | None = None
            space: ExpandableRange | None = None
            if segment.is_expandable:
                previous = grown.get(pool)
                if previous is None:
                    space = ExpandableRange(segment.address, self._page(pool))
                else:
                    number, space = previous.segment, previous.space
                    previous = self._unmapped_after(previous, segment.address - previous.address - previous.nbytes)
            at, stop = segment.address, segment.address + segment.nbytes
            while at < stop:
                taken = position < len(placed) and placed[position][0] == at
                until = placed[position][0] if position < len(placed) else stop
                size = placed[position][1] if taken else min(until, stop) - at
                block = Block(at, size, number, pool, space)
                block.previous = previous
                if previous is not None:
                    previous.next = block
                if taken:
                    block.is_free = False
                    self.blocks[position] = block
                    position += 1
                else:
                    pool.insert(block)
                previous, at = block, at + size
            if segment.is_expandable and previous is not None:
                grown[pool] = previous
        for last in grown.values():
            self._unmapped_after(last, TIB)
        return position

    def _unmapped_after(self, block: Block, nbytes: int) -> Block:
        rest = Block(block.address + block.nbytes, nbytes, block.segment, block.pool, block.space)
        rest.mapped = False
        rest.previous, block.next = block, rest
        block.pool.insert_unmapped(rest)
        return rest
