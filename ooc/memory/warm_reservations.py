"""Reservations of freed variables that go on showing the chunks they had, for the next variable of that many chunks.

Where free memory is in pieces, a variable's chunks are not neighbours, so no view of the pool shows them in a row
(`vmm.pool_views`), and mapping them takes a system call for each piece. But a step allocates most sizes many times
over. One chunk may be shown at many addresses at once (DESIGN.md section 5), so the chunks themselves are free at once
for whoever takes them; a kept reservation is of use again whenever all of its chunks are free.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from ooc.memory.record import Runs
from vmm.addresses import Reservation
from vmm.chunks import ChunkPool

if TYPE_CHECKING:
    from ooc.memory.protocols import Space

_MOST_RUNS = 2048
"""Each is a mapping, and the kernel has a limit for those (65,530 by default)."""
_MOST_POOLS = 2
"""They show so many times the pool's chunks at most: page tables take 8 bytes for each page shown, 1/512 of it."""
_MOST_TRIED = 16
"""So many of one size are tried, the one that was kept last first."""


class WarmReservations:
    """The reservations of one session's freed variables. One thread at a time (the session's lock).

    Nothing is read or written at their addresses: no storage is there. Who has the chunks they show does not matter.

    Args:
        space: What the reservations belong to.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._kept: dict[int, OrderedDict[int, tuple[Reservation, Runs]]] = {}  # by size, by address, the oldest first
        self._order: OrderedDict[int, int] = OrderedDict()  # address -> size, the oldest first
        self._num_runs = 0
        self._num_chunks = 0

    def __repr__(self) -> str:
        return f"<WarmReservations: {len(self._order)} of {self._num_chunks} chunks in {self._num_runs} runs>"

    def keep(self, reservation: Reservation, runs: Runs, pool: ChunkPool) -> None:
        """Keep a reservation that shows these chunks, which are the caller's to give to `pool`."""
        size = reservation.num_chunks
        self._kept.setdefault(size, OrderedDict())[reservation.address] = reservation, runs
        self._order[reservation.address] = size
        self._num_runs += len(runs)
        self._num_chunks += size
        while self._num_runs > _MOST_RUNS or self._num_chunks > _MOST_POOLS * pool.num_chunks:
            oldest, _ = self._forget(next(iter(self._order)))
            self._space.release(oldest)

    def take(self, num_chunks: int, pool: ChunkPool) -> tuple[Reservation, Runs] | None:
        """A reservation of this size all of whose chunks are free in `pool`, which it takes there; it shows them.

        Raises `vmm.driver.MemoryFault` if it shows nothing since a resize, and cannot be mapped.
        """
        kept = self._kept.get(num_chunks)
        if kept is None:
            return None
        for address in islice(reversed(kept), _MOST_TRIED):
            if not pool.take_if_free(kept[address][1]):
                continue
            reservation, runs = self._forget(address)
            try:
                self._space.map(reservation, runs)  # nothing to do, as a rule
            except BaseException:
                pool.give(runs)
                self._space.release(reservation)
                raise
            return reservation, runs
        return None

    def _forget(self, address: int) -> tuple[Reservation, Runs]:
        size = self._order.pop(address)
        reservation, runs = self._kept[size].pop(address)
        if not self._kept[size]:
            del self._kept[size]
        self._num_runs -= len(runs)
        self._num_chunks -= size
        return reservation, runs
