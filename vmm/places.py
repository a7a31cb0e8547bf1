"""The reservation table of a driver: which places of its arena are in which reservation. Needs no system call."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence

from vmm.driver import MemoryFault
from vmm.ranges import FreeRanges

__all__ = ["Places"]


class Places:
    """Chunk-sized places `[start, stop)` of a range of addresses, handed out as reservations.

    Args:
        base: Address of place 0, in bytes.
        chunk_nbytes: Size of one place.
        start: First place that may be handed out.
        stop: End of the places that may be handed out.
        more_options: What else a user can do when no range is free, such as `no limit on address space`.
    """

    def __init__(self, *, base: int, chunk_nbytes: int, start: int, stop: int, more_options: str = "") -> None:
        self._base = base
        self._chunk_nbytes = chunk_nbytes
        self._free = FreeRanges(start, stop)
        self._num_places = stop - start
        self._more_options = more_options
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Places {len(self._starts)} reservations, {self._free.total} of {self._num_places} places free>"

    @property
    def num_reservations(self) -> int:
        """Reservations that are not released."""
        return len(self._starts)

    @property
    def num_places(self) -> int:
        """Places that may be handed out, free or not."""
        return self._num_places

    @property
    def num_reserved(self) -> int:
        """Places in reservations."""
        return sum(self._lengths.values())

    def reservations(self) -> Iterable[tuple[int, int]]:
        """Each reservation's first place, and how many places it has."""
        return self._lengths.items()

    def address(self, place: int) -> int:
        """Where `place` begins."""
        return self._base + place * self._chunk_nbytes

    def reserve(self, num_chunks: int) -> int:
        """Take free neighbouring places. The first of them."""
        place = self._free.take(num_chunks)
        if place is None:
            raise MemoryFault(
                f"reserve({num_chunks} chunks of {self._chunk_nbytes} bytes): the arena has no such range free.\n"
                f"  largest free range {self._free.largest} chunks, free in all {self._free.total} "
                f"of {self._num_places}\n"
                "  Options: a larger arena_nbytes; release reservations that are no longer used"
                f"{self._more_options and f'; {self._more_options}'}."
            )
        self.adopt(place, num_chunks)
        return place

    def take_aligned(self, num_places: int, alignment: int) -> int | None:
        """Take free neighbouring places from a multiple of `alignment` on: no reservation. None: there are none."""
        place = self._free.take(num_places + alignment - 1)
        if place is None:
            return None
        start = -(-place // alignment) * alignment
        for first, length in ((place, start - place), (start + num_places, place + alignment - 1 - start)):
            if length:
                self._free.give(first, length)
        return start

    def give(self, place: int, num_places: int) -> None:
        """Let places that are in no reservation be handed out again."""
        self._free.give(place, num_places)

    def adopt(self, place: int, num_places: int) -> None:
        """Let places that were taken be a reservation."""
        insort(self._starts, place)
        self._lengths[place] = num_places

    def occupy(self, address: int, nbytes: int) -> None:
        """Never hand out the places that these bytes touch."""
        first = (address - self._base) // self._chunk_nbytes
        last = -(-(address + nbytes - self._base) // self._chunk_nbytes)
        for place in range(first, last):  # one by one: neighbours may share a place
            self._free.take_at(place, 1)

    def reservation(self, address: int, num_chunks: int, *, verb: str = "release") -> int:
        """The first place of the reservation that is exactly this range; `verb` is what is to be done with it."""
        place = self._place(address, num_chunks)
        if self._lengths.get(place) != num_chunks:
            raise ValueError(f"{verb}({address:#x}, {num_chunks} chunks): not a reservation")
        return place

    def release(self, place: int) -> None:
        """Give the reservation that begins at `place` back."""
        self._free.give(place, self.disown(place))

    def disown(self, place: int) -> int:
        """Forget the reservation that begins at `place`; nobody hands its places out again. How many they are."""
        del self._starts[bisect_right(self._starts, place) - 1]
        return self._lengths.pop(place)

    def inside(self, address: int, num_chunks: int) -> int:
        """The first place of a range that lies in one reservation."""
        place = self._place(address, num_chunks)
        index = bisect_right(self._starts, place) - 1
        start = self._starts[index] if index >= 0 else -1
        if start < 0 or place + num_chunks > start + self._lengths[start]:
            raise ValueError(f"{num_chunks} chunks at {address:#x}: not inside one reservation")
        return place

    def of_runs(self, address: int, runs: Sequence[tuple[int, int]], num_chunks: int) -> int:
        """The first place of the range in one reservation that `runs` of a pool of `num_chunks` chunks fill."""
        if not runs:
            raise ValueError(f"map({address:#x}): no runs")
        for first, count in runs:
            if first < 0 or count <= 0 or first + count > num_chunks:
                raise ValueError(
                    f"map({address:#x}): run ({first}, {count}) is not inside the pool of {num_chunks} chunks"
                )
        return self.inside(address, sum(count for _, count in runs))

    def _place(self, address: int, num_chunks: int) -> int:
        place, rest = divmod(address - self._base, self._chunk_nbytes)
        if rest or num_chunks <= 0:
            raise ValueError(f"{num_chunks} chunks at {address:#x}: not whole chunks of the arena")
        return place
