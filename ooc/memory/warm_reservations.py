"""Reservations of freed variables that still show their chunks, for the next variable of the same number of chunks.

On demand, mapping chunks at fresh addresses costs two system calls a variable, and a page fault for each of its pages;
a step allocates most sizes many times over. The chunks kept here count as free: whoever needs them takes them back.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from ooc.memory.record import Runs
from vmm.addresses import Reservation

if TYPE_CHECKING:
    from ooc.memory.protocols import Space

_MOST_RESERVATIONS = 1024
"""Each is a mapping at least, and the kernel has a limit for those (65,530 by default)."""


class WarmReservations:
    """The reservations of one session's freed variables. One thread at a time (the session's lock).

    Args:
        space: What the reservations belong to.
        debug: They show nothing meanwhile, so that the use of a freed variable faults.

    Attributes:
        num_chunks: Chunks that are kept.
    """

    def __init__(self, space: Space, *, debug: bool) -> None:
        self._space = space
        self._debug = debug
        self._kept: OrderedDict[int, tuple[Reservation, Runs]] = OrderedDict()  # by address, the oldest first
        self._by_size: dict[int, list[int]] = {}  # number of chunks -> addresses, the oldest first
        self.num_chunks = 0

    def __repr__(self) -> str:
        return f"<WarmReservations: {len(self._kept)} of {self.num_chunks} chunks>"

    def keep(self, reservation: Reservation, runs: Runs) -> Runs:
        """Keep a reservation that shows these chunks. Returns the chunks of one that had to go for it, if any."""
        if self._debug:
            self._space.unmap(reservation)
        self._kept[reservation.address] = reservation, runs
        self._by_size.setdefault(reservation.num_chunks, []).append(reservation.address)
        self.num_chunks += reservation.num_chunks
        return self.release_oldest() if len(self._kept) > _MOST_RESERVATIONS else ()

    def take(self, num_chunks: int) -> tuple[Reservation, Runs] | None:
        """The one of this size that was used last, and the chunks that it shows; it is kept no more."""
        addresses = self._by_size.get(num_chunks)
        if not addresses:
            return None
        reservation, runs = self._kept[addresses[-1]]
        if self._debug:
            self._space.map(reservation, runs)
        self._forget(reservation, -1)
        return reservation, runs

    def release_oldest(self) -> Runs:
        """Give back the addresses that were kept the longest; the chunks are the caller's."""
        reservation, runs = next(iter(self._kept.values()))
        self._forget(reservation, 0)
        self._space.release(reservation)
        return runs

    def release_all(self) -> list[Runs]:
        """Give back all addresses; the chunks are the caller's."""
        return [self.release_oldest() for _ in range(len(self._kept))]

    def _forget(self, reservation: Reservation, place: int) -> None:
        addresses = self._by_size[reservation.num_chunks]
        del addresses[place]
        if not addresses:
            del self._by_size[reservation.num_chunks]
        del self._kept[reservation.address]
        self.num_chunks -= reservation.num_chunks
