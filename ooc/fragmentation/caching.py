"""PyTorch's CUDA caching allocator, modelled: best fit over cached segments, and expandable segments.

Each rule names the function of c10/cuda/CUDACachingAllocator.cpp that it mirrors; the constants are
those of c10/core/AllocatorConfig.h in torch 2.11 to 2.13. No code was taken over.

| rule | where |
|---|---|
| sizes are rounded up to 512 bytes, or to a division of a power of two | round_size |
| up to 1 MiB: small pool, else large pool; each CUDA stream has its own | get_pool |
| segments: 2 MiB; 20 MiB for requests under 10 MiB; above, the request rounded up to 2 MiB | get_allocation_size |
| the smallest free block that fits; of equals, the lowest address | get_free_block, BlockComparatorSize |
| not a block at or above max_split_size for a request below; above, at most the rounding larger | get_free_block |
| split: small pool and expandable, if 512 bytes remain; large, if more than 1 MiB remains | should_split |
| a freed block merges with free neighbours of its segment | free_block, try_merge_blocks |
| no block, and a threshold set: free segments older than average go back | garbage_collect_cached_blocks |
| no memory: oversize cached blocks go back and one retry | release_available_cached_blocks |
| then all wholly free segments go back and one retry; so they do in empty_cache | release_cached_blocks |
| expandable: the lowest place where free and unmapped neighbours suffice | find_expandable_block |
| and of that, map only what is missing | try_allocate_expandable_block, map_block |
| expandable, out of memory: every whole free page is unmapped | unmap_block |

Not modelled: private pools of CUDA graphs never give memory back before the graph is gone (here
they do, on a retry); free-memory callbacks; memory that libraries take outside the allocator.
The addresses that cudaMalloc returns are not known: the model takes the lowest free ones, which
matters only where two free blocks have exactly the same size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np

from ooc.fragmentation.replay import Failure, Replay, SegmentEvent
from ooc.fragmentation.settings import CachingSettings
from ooc.fragmentation.stream import ALLOC, FREE, RELEASE, Stream
from ooc.units import MIB, TIB

MIN_BLOCK_NBYTES = 512
SMALL_NBYTES = MIB
"""The largest small request; also what must remain of a large block to split it."""
SMALL_SEGMENT_NBYTES = 2 * MIB
MIN_LARGE_ALLOC_NBYTES = 10 * MIB
LARGE_ROUNDING_NBYTES = 2 * MIB


def round_request(nbytes: int, settings: CachingSettings) -> int:
    """Bytes of the block that a request of `nbytes` needs."""
    if nbytes < MIN_BLOCK_NBYTES:
        return MIN_BLOCK_NBYTES
    divisions = settings.divisions(nbytes)
    if divisions > 1 and nbytes > MIN_BLOCK_NBYTES * divisions:
        floor = 1 << (nbytes.bit_length() - 1)
        step = floor >> (divisions.bit_length() - 1)
        return floor << 1 if step == 0 else -(-nbytes // step) * step
    return -(-nbytes // MIN_BLOCK_NBYTES) * MIN_BLOCK_NBYTES


def segment_nbytes(block_nbytes: int, settings: CachingSettings) -> int:
    """Bytes of the segment that is taken from the device for a block."""
    if block_nbytes <= SMALL_NBYTES:
        return SMALL_SEGMENT_NBYTES
    if block_nbytes < MIN_LARGE_ALLOC_NBYTES:
        return settings.large_segment_nbytes
    return -(-block_nbytes // LARGE_ROUNDING_NBYTES) * LARGE_ROUNDING_NBYTES


def replay_caching(stream: Stream, capacity: int | None, settings: CachingSettings, *, name: str) -> Replay:
    """Replay `stream` through the caching allocator with `settings`, within `capacity` bytes."""
    return _Run(stream, capacity, settings).go(name)


class _Block:
    """A piece of a segment. `previous` and `next` are its neighbours there."""

    __slots__ = ("address", "nbytes", "previous", "next", "is_free", "mapped", "pool", "age_base", "space")

    def __init__(self, address: int, nbytes: int, pool: _Pool, space: _Space | None = None) -> None:
        self.address = address
        self.nbytes = nbytes
        self.previous: _Block | None = None
        self.next: _Block | None = None
        self.is_free = True
        self.mapped = True
        self.pool = pool
        self.age_base = 0
        self.space = space


class _Space:
    """The address range of one expandable segment."""

    __slots__ = ("address", "page_nbytes")

    def __init__(self, address: int, page_nbytes: int) -> None:
        self.address = address
        self.page_nbytes = page_nbytes


class _Pool:
    """The free blocks of one CUDA stream and size class, by size and address."""

    __slots__ = ("is_small", "blocks", "unmapped")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.blocks: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def insert(self, block: _Block) -> None:
        insort(self.blocks, (block.nbytes, block.address, block))

    def remove(self, block: _Block) -> None:
        # A pair sorts before the triple that begins with it, and addresses are distinct.
        key: Any = (block.nbytes, block.address)
        del self.blocks[bisect_left(self.blocks, key)]

    def insert_unmapped(self, block: _Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: _Block) -> None:
        key: Any = (block.address,)
        del self.unmapped[bisect_left(self.unmapped, key)]


class _Device:
    """Stands for cudaMalloc: the lowest free addresses, 2 MiB apart."""

    def __init__(self, lowest: int) -> None:
        self.top = -(-lowest // LARGE_ROUNDING_NBYTES) * LARGE_ROUNDING_NBYTES
        self.holes: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int:
        length = -(-nbytes // LARGE_ROUNDING_NBYTES) * LARGE_ROUNDING_NBYTES
        for i, (start, stop) in enumerate(self.holes):
            if stop - start >= length:
                self.holes[i : i + 1] = [(start + length, stop)] if stop - start > length else []
                return start
        self.top += length
        return self.top - length

    def give_back(self, address: int, nbytes: int) -> None:
        stop = address + -(-nbytes // LARGE_ROUNDING_NBYTES) * LARGE_ROUNDING_NBYTES
        i = bisect_left(self.holes, (address, stop))
        if i < len(self.holes) and self.holes[i][0] == stop:
            stop = self.holes.pop(i)[1]
        if i > 0 and self.holes[i - 1][1] == address:
            address = self.holes.pop(i - 1)[0]
            i -= 1
        self.holes.insert(i, (address, stop))


class _Run:
    """One replay. `go` may be called once."""

    def __init__(self, stream: Stream, capacity: int | None, settings: CachingSettings) -> None:
        self.stream = stream
        self.capacity = capacity
        self.settings = settings
        self.max_split = settings.max_split_nbytes if settings.max_split_nbytes is not None else 1 << 62
        self.pools: dict[tuple[int, bool], _Pool] = {}
        self.blocks: list[_Block | None] = [None] * stream.num_buffers
        self.pending: dict[int, None] = {}  # released by the program, in use by another CUDA stream
        self.reserved = 0
        self.allocated = 0
        self.event = 0
        self.ages = {True: 0, False: 0}
        self.segments: list[SegmentEvent] = []
        self.num_device_allocs = self.num_device_frees = 0
        self.num_maps = self.num_unmaps = self.num_retries = 0
        self.failure: Failure | None = None
        self.death = stream.death.copy()
        self.address = np.full(stream.num_buffers, -1, dtype=np.int64)
        self.block_nbytes = np.zeros(stream.num_buffers, dtype=np.int64)
        seeds = stream.initial if stream.initial is not None and not settings.expandable_segments else None
        self.seeds = seeds
        self.device = _Device(max((s.address + s.nbytes for s in seeds.segments), default=0) if seeds else 0)
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

    def _malloc(self, buffer: int, requested: int, pool_number: int) -> _Block:
        nbytes = round_request(requested, self.settings)
        pool = self._pool(pool_number, nbytes <= SMALL_NBYTES)
        block = self._free_block(pool, nbytes)
        if block is None:
            if self.capacity is not None and self.settings.garbage_collection_threshold > 0:
                self._collect()
            block = self._from_device(pool, nbytes)
            if block is None:
                block = self._after_release(pool, nbytes)
            if block is None:
                self._fail(buffer, requested, nbytes)
                block = self._from_device(pool, nbytes)
        assert block is not None, "without a capacity the device always gives"
        if self._is_split(block, nbytes):
            rest = _Block(block.address + nbytes, block.nbytes - nbytes, pool, block.space)
            rest.previous, rest.next = block, block.next
            if rest.next is not None:
                rest.next.previous = rest
            block.next = rest
            block.nbytes = nbytes
            rest.age_base = self.ages[pool.is_small]
            pool.insert(rest)
        block.is_free = False
        return block

    def _free_block(self, pool: _Pool, nbytes: int) -> _Block | None:
        if self.capacity is not None and self.settings.garbage_collection_threshold > 0:
            self.ages[pool.is_small] += 1
        blocks = pool.blocks
        key: Any = (nbytes,)
        i = bisect_left(blocks, key)
        if i == len(blocks):
            return None
        if self.settings.expandable_segments:
            # A block at the end of the mapped part counts with what it can still grow to.
            while i + 1 < len(blocks) and _room(blocks[i + 1][2]) < _room(blocks[i][2]):
                i += 1
        found = blocks[i][0]
        if nbytes < self.max_split <= found:
            return None
        if nbytes >= self.max_split and found >= nbytes + self.settings.max_non_split_rounding_nbytes:
            return None
        return blocks.pop(i)[2]

    def _is_split(self, block: _Block, nbytes: int) -> bool:
        rest = block.nbytes - nbytes
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_NBYTES
        return nbytes < self.max_split and rest > SMALL_NBYTES

    def _free(self, block: _Block) -> None:
        pool = block.pool
        block.is_free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free and neighbour.mapped:
                pool.remove(neighbour)
                _absorb(block, neighbour)
        block.age_base = self.ages[pool.is_small]
        pool.insert(block)

    # -- device memory -------------------------------------------------------------------------

    def _from_device(self, pool: _Pool, nbytes: int) -> _Block | None:
        if self.settings.expandable_segments:
            return self._expand(pool, nbytes)
        size = segment_nbytes(nbytes, self.settings)
        if self.capacity is not None and self.reserved + size > self.capacity:
            return None
        block = _Block(self.device.take(size), size, pool)
        self._took(block.address, size)
        self.num_device_allocs += 1
        return block

    def _after_release(self, pool: _Pool, nbytes: int) -> _Block | None:
        if self.settings.max_split_nbytes is not None and self._release_oversize(pool, nbytes):
            block = self._from_device(pool, nbytes)
            if block is not None:
                return block
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
        return self._from_device(pool, nbytes)

    def _release_all(self) -> None:
        for held in self.pools.values():
            for _, _, block in list(held.blocks):
                if block.space is not None:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    self._release(block)

    def _release_oversize(self, pool: _Pool, nbytes: int) -> bool:
        wanted = max(nbytes, self.max_split)
        key: Any = (wanted,)
        i = bisect_left(pool.blocks, key)
        if i < len(pool.blocks):
            self._release(pool.blocks[i][2])
            return True
        released = 0
        while released < wanted and pool.blocks and pool.blocks[-1][0] >= self.max_split:
            block = pool.blocks[-1][2]
            released += block.nbytes
            self._release(block)
        return released >= wanted

    def _collect(self) -> None:
        assert self.capacity is not None
        threshold = int(self.settings.garbage_collection_threshold * self.capacity)
        if self.reserved <= threshold:
            return
        target, reclaimed = self.reserved - threshold, 0
        whole = [
            block
            for pool in self.pools.values()
            if not pool.is_small
            for _, _, block in pool.blocks
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

    def _release(self, block: _Block) -> None:
        block.pool.remove(block)
        self.device.give_back(block.address, block.nbytes)
        self._gave(block.address, block.nbytes)
        self.num_device_frees += 1

    # -- expandable segments -------------------------------------------------------------------

    def _expand(self, pool: _Pool, nbytes: int) -> _Block | None:
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

    def _place_to_grow(self, pool: _Pool, nbytes: int) -> _Block:
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
        page = SMALL_SEGMENT_NBYTES if pool.is_small else self.settings.large_segment_nbytes
        # PyTorch reserves 9/8 of the device's memory; the model has address space enough for a run without a limit.
        block = _Block(self.next_space, _up(TIB, page), pool, _Space(self.next_space, page))
        block.mapped = False
        self.next_space += 1 << 44
        pool.insert_unmapped(block)
        return block

    def _map(self, block: _Block, nbytes: int) -> bool:
        assert block.space is not None
        page = block.space.page_nbytes
        mapped = min(_up(nbytes, page), block.nbytes)
        if self.capacity is not None and self.reserved + mapped > self.capacity:
            return False
        pool = block.pool
        pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.nbytes:
            rest = _Block(block.address + mapped, block.nbytes - mapped, pool, block.space)
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
                _absorb(block, neighbour)
        pool.insert(block)
        return True

    def _unmap(self, block: _Block) -> None:
        assert block.space is not None
        page = block.space.page_nbytes
        start = block.space.address + _up(block.address - block.space.address, page)
        stop = block.address + block.nbytes
        stop -= (stop - block.space.address) % page
        if start >= stop:
            return
        pool = block.pool
        pool.remove(block)
        before, after = start - block.address, block.address + block.nbytes - stop
        if before:
            head = _Block(block.address, before, pool, block.space)
            head.previous, head.next = block.previous, block
            if head.previous is not None:
                head.previous.next = head
            block.previous = head
            pool.insert(head)
        if after:
            tail = _Block(stop, after, pool, block.space)
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
                _absorb(block, neighbour)
        pool.insert_unmapped(block)

    # -- books ---------------------------------------------------------------------------------

    def _pool(self, number: int, is_small: bool) -> _Pool:
        pool = self.pools.get((number, is_small))
        if pool is None:
            pool = self.pools[number, is_small] = _Pool(is_small)
        return pool

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

    def _seed(self) -> int:
        """Begin with the segments and blocks that existed. Returns the number of ALLOC events done by it."""
        assert self.seeds is not None
        placed = list(zip(self.seeds.address, self.seeds.block_nbytes, strict=True))
        position = 0
        for segment in self.seeds.segments:
            self._took(segment.address, segment.nbytes)
            pool = self._pool(segment.pool, segment.is_small)
            previous: _Block | None = None
            at, stop = segment.address, segment.address + segment.nbytes
            while at < stop:
                taken = position < len(placed) and placed[position][0] == at
                until = placed[position][0] if position < len(placed) else stop
                size = placed[position][1] if taken else min(until, stop) - at
                block = _Block(at, size, pool)
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
        return position


def _absorb(block: _Block, neighbour: _Block) -> None:
    """Merge the free `neighbour`, which stands before or after `block`, into it."""
    if block.previous is neighbour:
        block.address = neighbour.address
        block.previous = neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block
    block.nbytes += neighbour.nbytes


def _room(block: _Block) -> int:
    following = block.next
    return block.nbytes + (following.nbytes if following is not None and not following.mapped else 0)


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
