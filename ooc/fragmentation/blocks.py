"""The books of the model of PyTorch's caching allocator: blocks, pools, and a device that gives addresses."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from ooc.fragmentation.segments import LARGE_ROUNDING_NBYTES


class Block:
    """A piece of a segment. `previous` and `next` are its neighbours there."""

    __slots__ = ("address", "nbytes", "segment", "previous", "next", "is_free", "mapped", "pool", "age_base", "space")

    def __init__(
        self, address: int, nbytes: int, segment: int, pool: Pool, space: ExpandableRange | None = None
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.segment = segment  # in order of creation
        self.previous: Block | None = None
        self.next: Block | None = None
        self.is_free = True
        self.mapped = True
        self.pool = pool
        self.age_base = 0
        self.space = space


class ExpandableRange:
    """The address range of one expandable segment."""

    __slots__ = ("address", "page_nbytes")

    def __init__(self, address: int, page_nbytes: int) -> None:
        self.address = address
        self.page_nbytes = page_nbytes


class Pool:
    """The free blocks of one CUDA stream and size class, by size and age; `number` is the stream's for it."""

    __slots__ = ("number", "is_small", "blocks", "unmapped")

    def __init__(self, number: int, is_small: bool) -> None:
        self.number = number
        self.is_small = is_small
        self.blocks: list[tuple[int, int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def insert(self, block: Block) -> None:
        insort(self.blocks, (block.nbytes, block.segment, block.address, block))

    def remove(self, block: Block) -> None:
        # It sorts before the longer tuple that begins with it, and addresses are distinct.
        key: Any = (block.nbytes, block.segment, block.address)
        del self.blocks[bisect_left(self.blocks, key)]

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        key: Any = (block.address,)
        del self.unmapped[bisect_left(self.unmapped, key)]


class AllocatorDevice:
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


def absorb(block: Block, neighbour: Block) -> None:
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


def room(block: Block) -> int:
    """Bytes that a mapped block of an expandable segment has, or can grow to without another segment."""
    following = block.next
    return block.nbytes + (following.nbytes if following is not None and not following.mapped else 0)


def round_up(nbytes: int, step: int) -> int:
    """The least multiple of `step` that is not below `nbytes`."""
    return -(-nbytes // step) * step
