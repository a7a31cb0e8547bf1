"""Chunks, and addresses that show them, for variables that are born on demand.

Chunks in a row have addresses at once, in a view of the pool (`vmm.pool_views`); on a device there is none. Where free
memory is in pieces, no view shows a variable's chunks in a row, and mapping them takes a system call for each piece.
But a step allocates most sizes many times over, and one chunk may be shown at many addresses at once (DESIGN.md
section 5). So reservations of freed variables go on showing the chunks they had, which are free at once for whoever
takes them, and are of use again whenever all of these chunks are free.

A loop frees what it allocates again: the next birth of the size of what was freed last takes both its addresses and its
chunks, as an allocator's free lists do. Such chunks are nobody's, and the pool does not have them until somebody wants
others: then as many go back as are missing, first those that were freed first. So memory that is short stays in a
cache, and its pages in the processor's tables, instead of going round the pool.
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
_MOST_DEVICE_POOLS = 8
"""The same on a device, whose tables are no host memory, and whose driver has no limit on mappings: a ResNet-50 at half
of its memory mapped a tenth less than with 2, and with 32 no less."""
READY_FRACTION = 8
"""Chunks are kept ready where the pool has one of so many free, and beyond that if a loop will want them."""
LOOP_BIRTHS = 16
"""What lived no longer than so many births is a loop's, and is wanted within so many again. What has lain ready for
longer goes first where chunks in a row are wanted."""
Ready = dict[int, list[tuple[Reservation, Runs, int]]]
"""What was freed, with the chunks that it shows, and when: how many storages there had been. By size in chunks; last
what was freed last. Native code's, too."""
_MOST_TRIED = 16
"""So many of one size are tried, the one that was kept last first."""


class Births:
    """Serves births of one session, and keeps reservations of its freed variables. One thread at a time (its lock).

    Nothing is read or written at the kept addresses: no storage is there. Who has the chunks they show does not matter.

    Args:
        space: What the reservations belong to.
        reuses_addresses: Whether freed addresses may go on showing memory: then the use of what was freed is no fault.
        has_views: Whether chunks in a row have addresses at once. On a device they do not, and mapping any takes a
            call of the driver for each chunk, and another for all, that takes longer than most ops.
    """

    def __init__(self, space: Space, *, reuses_addresses: bool, has_views: bool = True) -> None:
        self._space = space
        self._reuses_addresses = reuses_addresses
        self._has_views = has_views
        self._most_pools = _MOST_POOLS if has_views else _MOST_DEVICE_POOLS
        self.ready: Ready = {}
        self.num_ready = 0
        """Free chunks that the pool does not have."""
        self._kept: dict[int, OrderedDict[int, tuple[Reservation, Runs]]] = {}  # by size, by address, the oldest first
        self._order: OrderedDict[int, int] = OrderedDict()  # address -> size, the oldest first
        self._num_runs = 0
        self._num_chunks = 0

    def __repr__(self) -> str:
        return (
            f"<Births: {self.num_ready} chunks ready, {len(self._order)} reservations kept, "
            f"of {self._num_chunks} chunks in {self._num_runs} runs>"
        )

    def take(self, num_chunks: int, pool: ChunkPool, now: int) -> tuple[Reservation, Runs]:
        """A reservation of so many chunks, which were free in `pool` or ready and are taken; it shows them.

        `now` says how many storages there have been.

        Raises `vmm.driver.MemoryFault`: nothing was taken.
        """
        ready = self.ready.get(num_chunks)
        if ready:
            reservation, runs, _ = ready.pop()
            self.num_ready -= num_chunks
            return self._shown(reservation, runs, pool)
        kept = self._take_kept(num_chunks, pool)
        if kept is not None:
            return kept
        runs, nbytes = self._take_chunks(num_chunks, pool, now), num_chunks * self._space.driver.chunk_nbytes
        try:
            shown = self._space.reserve_shown(runs, nbytes) if self._reuses_addresses else None
            reservation = self._space.reserve(nbytes) if shown is None else shown
        except BaseException:
            pool.give(runs)
            raise
        return self._shown(reservation, runs, pool)

    def _shown(self, reservation: Reservation, runs: Runs, pool: ChunkPool) -> tuple[Reservation, Runs]:
        """The reservation, which shows these chunks; often it does already. Both are given up where that fails."""
        try:
            self._space.map(reservation, runs)
        except BaseException:
            pool.give(runs)
            self._space.release(reservation)
            raise
        return reservation, runs

    def _take_chunks(self, num_chunks: int, pool: ChunkPool, now: int) -> Runs:
        self.end_ready(pool, num_free=num_chunks)
        runs = pool.take(num_chunks)
        if len(runs) > 1 and self.num_ready:
            pool.give(runs)
            self._end_stale(pool, now - LOOP_BIRTHS)
            runs = pool.take(num_chunks)
        return runs

    def keep_ready(self, reservation: Reservation, runs: Runs, pool: ChunkPool, *, born: int, now: int) -> bool:
        """Keep a freed variable's reservation and the chunks that it shows for the next birth of its size.

        `born` and `now` say how many storages there had been, and have been. False: they are the caller's to give back.
        """
        is_kept = now - born <= LOOP_BIRTHS or pool.num_free * READY_FRACTION >= pool.num_chunks
        if not self._reuses_addresses or not is_kept:
            return False
        self.ready.setdefault(reservation.num_chunks, []).append((reservation, runs, now))
        self.num_ready += reservation.num_chunks
        return True

    def end_ready(self, pool: ChunkPool, *, num_free: int | None = None) -> None:
        """Let chunks go back to `pool`, those first that were freed first, until it has `num_free`; None: all."""
        while self.num_ready and (num_free is None or pool.num_free < num_free):
            self._end_oldest(pool, self._oldest())

    def num_spared(self, num_chunks: int, pool: ChunkPool, now: int) -> int:
        """Chunks that were freed so lately that the next births of their sizes should have them.

        0 if there is something ready for `num_chunks`, or too much is ready.
        """
        if not self.num_ready or self.ready.get(num_chunks) or self.num_ready * READY_FRACTION > pool.num_chunks:
            return 0
        return sum(size for size, some in self.ready.items() for *_, freed in some if now - freed <= LOOP_BIRTHS)

    def _end_stale(self, pool: ChunkPool, before: int) -> None:
        while self.num_ready and self.ready[size := self._oldest()][0][2] < before:
            self._end_oldest(pool, size)

    def _oldest(self) -> int:
        """The size of what has lain ready longest."""
        return min((some[0][2], size) for size, some in self.ready.items() if some)[1]

    def _end_oldest(self, pool: ChunkPool, size: int, *, in_use: bool = True) -> None:
        """Let what has lain ready longest of this size be so no more."""
        some = self.ready[size]
        reservation, runs, _ = some.pop(0)
        self.num_ready -= size
        if not some:
            del self.ready[size]
        if in_use:
            pool.give(runs)
        if not self.keep(reservation, runs, pool):
            self._space.release(reservation)

    def move_to(self, pool: ChunkPool) -> None:
        """Let nothing be ready any more. `pool` is new, and does not know the chunks."""
        while self.num_ready:
            self._end_oldest(pool, self._oldest(), in_use=False)

    def keep(self, reservation: Reservation, runs: Runs, pool: ChunkPool) -> bool:
        """Keep a reservation that shows these chunks, which are free in `pool`. False: it is of no use."""
        if not self._reuses_addresses or (self._has_views and len(runs) < 2):
            return False
        size = reservation.num_chunks
        self._kept.setdefault(size, OrderedDict())[reservation.address] = reservation, runs
        self._order[reservation.address] = size
        self._num_runs += len(runs)
        self._num_chunks += size
        while self._num_chunks > self._most_pools * pool.num_chunks or (
            self._has_views and self._num_runs > _MOST_RUNS
        ):
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
            return self._shown(*self._forget(address), pool)  # nothing to do, unless a resize has unmapped it
        return None

    def _forget(self, address: int) -> tuple[Reservation, Runs]:
        size = self._order.pop(address)
        reservation, runs = self._kept[size].pop(address)
        if not self._kept[size]:
            del self._kept[size]
        self._num_runs -= len(runs)
        self._num_chunks -= size
        return reservation, runs
