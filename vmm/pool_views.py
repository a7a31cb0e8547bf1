"""Views of the whole pool among a driver's addresses: a range of one shows its chunks before anybody asks for it.

One chunk may be mapped at any number of addresses at once (DESIGN.md section 5). A variable that is born into
neighbouring chunks, and need not have particular addresses, can take those at which a view shows these chunks already:
no system call, no page table to fill, however often they change hands. There are several views, since a variable keeps
its addresses for life while its chunks may serve others. Needs no system call.
"""

from __future__ import annotations

from collections.abc import Iterator

from vmm.places import Places
from vmm.ranges import FreeRanges

__all__ = ["PoolViews"]

_MOST_VIEWS = 4
"""Page tables take 8 bytes for each page of each view that was touched: at most 1/128 of the pool in all. Twelve layers
of 192 at half of their memory, each skipped in one step of five: 15 of 430 births a step find no addresses in four."""


class PoolViews:
    """Which addresses of which view are taken.

    Args:
        places: Where the views' own addresses come from, and where ranges of them count as reservations.
        alignment: Each view begins at a multiple of so many places, as the pool's chunks do in their file.
    """

    def __init__(self, places: Places, *, alignment: int) -> None:
        self._places = places
        self._alignment = alignment
        self._free: dict[int, FreeRanges] = {}  # by a view's first place: its free places

    def __repr__(self) -> str:
        num_free = sum(free.total for free in self._free.values())
        return f"<PoolViews: {len(self._free)}, {num_free} places free>"

    def free_places(self, first_chunk: int, num_chunks: int) -> Iterator[int]:
        """Where these chunks belong in each view in which all of these addresses are free."""
        for start, free in self._free.items():
            if free.is_free(start + first_chunk, num_chunks):
                yield start + first_chunk

    def add(self, num_chunks: int) -> int | None:
        """A further view's first place, of a pool of so many chunks; it shows nothing yet. None: there are enough."""
        if len(self._free) == _MOST_VIEWS:
            return None
        start = self._places.take_aligned(num_chunks, self._alignment)
        if start is not None:
            self._free[start] = FreeRanges(start, start + num_chunks)
        return start

    def remove(self, start: int) -> None:
        """Forget a view all of whose addresses are free."""
        self._places.give(start, self._free.pop(start).total)

    def chunk_of(self, place: int) -> int | None:
        """The chunk that belongs at this place; None: it is in no view."""
        for start, free in self._free.items():
            if start <= place < free.stop:
                return place - start
        return None

    def take(self, place: int, num_chunks: int) -> None:
        """Let a free range of a view be a reservation."""
        if not self._view(place).take_at(place, num_chunks):
            raise ValueError(f"{num_chunks} places from {place} on are not all free in a view of the pool")
        self._places.adopt(place, num_chunks)

    def release(self, place: int) -> None:
        """Give back a reservation that is a range of a view."""
        self._view(place).give(place, self._places.disown(place))

    def free_parts(self) -> list[tuple[int, int]]:
        """`(first place, number)` of all that is free in views."""
        return [(start, stop - start) for free in self._free.values() for start, stop in free.ranges()]

    def retire(self) -> None:
        """Let there be no views any more.

        What is free in them counts as addresses like any others, and must show nothing. Reservations stay.
        """
        for start, length in self.free_parts():
            self._places.give(start, length)
        self._free.clear()

    def _view(self, place: int) -> FreeRanges:
        chunk = self.chunk_of(place)
        if chunk is None:
            raise ValueError(f"place {place} is in no view of the pool")
        return self._free[place - chunk]
