"""Chunks, and addresses that show them, for variables that are born on demand.

Chunks in a row have addresses at once, in a view of the pool (`vmm.pool_views`). Where free memory is in pieces, no
view shows a variable's chunks in a row, and mapping them takes a system call for each piece. But a step allocates most
sizes many times over, and one chunk may be shown at many addresses at once (DESIGN.md section 5). So reservations of
freed variables go on showing the chunks they had, which are free at once for whoever takes them, and are of use again
whenever all of these chunks are free.
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


class Births:
    """Serves births of one session, and keeps reservations of its freed variables. One thread at a time (its lock).

    Nothing is read or written at the kept addresses: no storage is there. Who has the chunks they show does not matter.

    Args:
        space: What the reservations belong to.
        reuses_addresses: Whether freed addresses may go on showing memory: then the use of what was freed is no fault.
    """

    def __init__(self, space: Space, *, reuses_addresses: bool) -> None:
        self._space = space
        self._reuses_addresses = reuses_addresses
        self._kept: dict[int, OrderedDict[int, tuple[Reservation, Runs]]] = {}  # by size, by address, the oldest first
        self._order: OrderedDict[int, int] = OrderedDict()  # address -> size, the oldest first
        self._num_runs = 0
        self._num_chunks = 0

    def __repr__(self) -> str:
        return f"<Births: {len(self._order)} reservations kept, of {self._num_chunks} chunks in {self._num_runs} runs>"

    def take(self, num_chunks: int, pool: ChunkPool) -> tuple[Reservation, Runs]:
        """A reservation of so many chunks, which were free in `pool` and are taken; it shows them.

        Raises `vmm.driver.MemoryFault`: nothing was taken.
        """
        kept = self._take_kept(num_chunks, pool)
        if kept is not None:
            return kept
        runs, nbytes = pool.take(num_chunks), num_chunks * self._space.driver.chunk_nbytes
        reservation: Reservation | None = None
        try:
            if self._reuses_addresses:
                reservation = self._space.reserve_shown(runs, nbytes)
            if reservation is None:
                reservation = self._space.reserve(nbytes)
                self._space.map(reservation, runs)
        except BaseException:
            pool.give(runs)
            if reservation is not None:
                self._space.release(reservation)
            raise
        return reservation, runs

    def keep(self, reservation: Reservation, runs: Runs, pool: ChunkPool) -> bool:
        """Keep a reservation that shows these chunks, the caller's to give to `pool`; False: it is of no use."""
        if not self._reuses_addresses or len(runs) < 2:
            return False
        size = reservation.num_chunks
        self._kept.setdefault(size, OrderedDict())[reservation.address] = reservation, runs
        self._order[reservation.address] = size
        self._num_runs += len(runs)
        self._num_chunks += size
        while self._num_runs > _MOST_RUNS or self._num_chunks > _MOST_POOLS * pool.num_chunks:
            oldest, _ = self._forget(next(iter(self._order)))
            self._space.release(oldest)
        return True

    def _take_kept(self, num_chunks: int, pool: ChunkPool) -> tuple[Reservation, Runs] | None:
        kept = self._kept.get(num_chunks)
        if kept is None:
            return None
        for address in islice(reversed(kept), _MOST_TRIED):
            if not pool.take_if_free(kept[address][1]):
                continue
            reservation, runs = self._forget(address)
            try:
                self._space.map(reservation, runs)  # nothing to do, unless a resize has unmapped it
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
