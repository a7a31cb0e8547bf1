"""Which chunks each residency holds: interval colouring, with an eye on remaps and runs.

Any free chunks will do for any variable (DESIGN.md section 5), so for residencies that do not
cross the step boundary a greedy walk in order of start needs exactly as many chunks as are held
at the worst tick. What is kept over the boundary is coloured first: its end and its heir's start
form one arc that must have the same chunks, and others may use those chunks only in between.

Two wishes come second. *Remaps*: a variable's first chunks are its home; its later residencies want
the same chunks again, position by position, because anything else costs a remap of those
positions, twice. So a home is softly reserved, and of several free chunks those are taken that
break the fewest reservations. *Runs*: neighbouring chunks in order need a single mapping, and
the number of mappings is limited (`vm.max_map_count`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from scheduler.budget import IntArray
from scheduler.plan import Kept, Machine, Residency, occupied_ticks
from scheduler.stays import is_double_buffered
from scheduler.trace import Trace

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Colouring:
    """Residencies with chunks.

    Attributes:
        residencies: As given, in the same order, with `chunks` filled in.
        num_remapped_chunks: Chunk mappings that change within one step, the way back to the
            step-start layout included.
        num_runs: Mappings of the step-start layout: one a run of neighbouring chunks.
    """

    residencies: tuple[Residency, ...]
    num_remapped_chunks: int
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """No colouring was found: `num_chunks` were missing at `tick`, where `variable` was to begin."""

    num_chunks: int
    tick: int
    variable: int


def colour(residencies: tuple[Residency, ...], trace: Trace, machine: Machine) -> Colouring | Shortage:
    """Assign chunks to `residencies`.

    Without residencies kept over the boundary this succeeds whenever the chunks held at each tick
    fit the budget. With them (circular arcs) a greedy walk can fall short: the second attempt then
    prefers a tight fit to long runs, and after that the caller must plan with less.
    """
    outcome = _Painter(residencies, trace, machine, tight=False).paint()
    if isinstance(outcome, Shortage):
        outcome = _Painter(residencies, trace, machine, tight=True).paint()
    return outcome


class _Painter:
    def __init__(self, residencies: tuple[Residency, ...], trace: Trace, machine: Machine, *, tight: bool) -> None:
        self.residencies = residencies
        self.trace = trace
        self.machine = machine
        self.tight = tight
        self.ticks = [occupied_ticks(r, trace) for r in residencies]
        self.sizes = [machine.chunks_of(trace.variables[r.variable].nbytes) for r in residencies]
        self.family = _families(trace)
        self.members: dict[int, list[int]] = {}
        for index, r in enumerate(residencies):
            self.members.setdefault(self.family[r.variable], []).append(index)
        for own in self.members.values():
            own.sort(key=lambda index: self.ticks[index][0])
        self.chunks: list[IntArray | None] = [None] * len(residencies)
        self.home: dict[int, IntArray] = {}
        self.free_at = np.zeros(machine.num_chunks, dtype=np.int64)  # nobody holds the chunk from this tick on
        self.hard_from = np.full(machine.num_chunks, _NEVER)  # a wrapped residency takes it at this tick
        self.next_claim = np.full(machine.num_chunks, _NEVER)  # a home's next residency wants it at this tick
        self.claims: list[list[tuple[int, int]]] = [[] for _ in range(machine.num_chunks)]

    def paint(self) -> Colouring | Shortage:
        shortage = self._paint_wrapped()
        if shortage is not None:
            return shortage
        rest = [index for index, chunks in enumerate(self.chunks) if chunks is None]
        first = {own[0] for own in self.members.values()}
        for index in sorted(rest, key=lambda i: (self.ticks[i][0], i in first, self.residencies[i].variable)):
            chosen = self._choose(index)
            if isinstance(chosen, Shortage):
                return chosen
            self._assign(index, chosen)
        return self._result()

    def _paint_wrapped(self) -> Shortage | None:
        """What crosses the boundary, side by side from chunk 0, ordered by when the chunks become free."""
        starts = {r.variable: i for i, r in enumerate(self.residencies) if isinstance(r.start, Kept)}
        arcs = []
        for end, r in enumerate(self.residencies):
            heir = self.trace.variables[r.variable].becomes
            if isinstance(r.stop, Kept) and heir is not None:
                arcs.append((end, starts[heir]))
        arcs.sort(key=lambda arc: (self.ticks[arc[1]][1], self.ticks[arc[0]][0], arc))
        position = 0
        for end, start in arcs:
            chunks = np.arange(position, position + self.sizes[end], dtype=np.int64)
            position += self.sizes[end]
            if position > self.machine.num_chunks:
                missing = position - self.machine.num_chunks
                return Shortage(num_chunks=missing, tick=0, variable=self.residencies[start].variable)
            self._assign(start, chunks)
            self.chunks[end] = chunks
            self.hard_from[chunks] = self.ticks[end][0] if end != start else 0
        return None

    def _assign(self, index: int, chunks: IntArray) -> None:
        """Give the residency its chunks; its family's later ones claim the home that the first one makes."""
        self.chunks[index] = chunks
        self.free_at[chunks] = self.ticks[index][1]
        family = self.family[self.residencies[index].variable]
        if family in self.home:
            self._update_claims(self.home[family], self.ticks[index][0])
            return
        self.home[family] = chunks
        later = [(self.ticks[i][0], i) for i in self.members[family] if i != index and self.chunks[i] is None]
        if later:
            for chunk in chunks.tolist():
                for claim in later:
                    heapq.heappush(self.claims[chunk], claim)
            self._update_claims(chunks, self.ticks[index][0])

    def _update_claims(self, chunks: IntArray, now: int) -> None:
        """Forget claims that have been served or broken."""
        for chunk in chunks.tolist():
            heap = self.claims[chunk]
            while heap and (heap[0][0] < now or self.chunks[heap[0][1]] is not None):
                heapq.heappop(heap)
            self.next_claim[chunk] = heap[0][0] if heap else _NEVER

    def _choose(self, index: int) -> IntArray | Shortage:
        (start, stop), size = self.ticks[index], self.sizes[index]
        usable = (self.free_at <= start) & (self.hard_from >= stop)
        missing = size - int(np.count_nonzero(usable))
        if missing > 0:
            return Shortage(num_chunks=missing, tick=start, variable=self.residencies[index].variable)
        home = self.home.get(self.family[self.residencies[index].variable])
        if home is None:
            return np.sort(self._pick(usable, size, stop))
        at_home = usable[home]
        chunks = home.copy()
        away = int(np.count_nonzero(~at_home))
        if away:
            usable[home[at_home]] = False
            chunks[~at_home] = np.sort(self._pick(usable, away, stop))
        return chunks

    def _pick(self, usable: np.ndarray[tuple[int], np.dtype[np.bool_]], size: int, stop: int) -> IntArray:
        """`size` of the usable chunks: unclaimed ones in long runs first, then those claimed latest."""
        unclaimed = np.flatnonzero(usable & (self.next_claim >= stop))
        if len(unclaimed) >= size:
            if self.tight:
                return unclaimed[np.argsort(self.hard_from[unclaimed], kind="stable")[:size]]
            return _best_runs(unclaimed, size)
        claimed = np.flatnonzero(usable & (self.next_claim < stop))
        latest = np.argsort(-self.next_claim[claimed], kind="stable")[: size - len(unclaimed)]
        return np.concatenate([unclaimed, claimed[latest]])

    def _result(self) -> Colouring:
        done = [chunks for chunks in self.chunks if chunks is not None]
        assert len(done) == len(self.residencies)
        remapped = runs = 0
        for own in self.members.values():
            runs += len(_runs(done[own[0]]))
            cycle = [*own, own[0]] if self.trace.cyclic else own
            for before, after in pairwise(cycle):
                remapped += int(np.count_nonzero(done[before] != done[after]))
        coloured = tuple(replace(r, chunks=_runs(chunks)) for r, chunks in zip(self.residencies, done, strict=True))
        return Colouring(residencies=coloured, num_remapped_chunks=remapped, num_runs=runs)


def _families(trace: Trace) -> list[int]:
    """Variables that share a reservation, by the lowest index: a variable and the heir it becomes."""
    family = list(range(len(trace.variables)))
    for index, v in enumerate(trace.variables):
        if v.becomes is not None and not is_double_buffered(trace, index):
            family[index] = family[v.becomes] = min(index, v.becomes)
    return family


def _best_runs(free: IntArray, size: int) -> IntArray:
    """`size` of the free chunks: from the shortest run that is long enough, else from the longest runs."""
    breaks = np.flatnonzero(np.diff(free) != 1) + 1
    firsts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([firsts, [len(free)]]))
    enough = np.flatnonzero(lengths >= size)
    if len(enough):
        best = enough[np.argmin(lengths[enough])]
        return free[firsts[best] : firsts[best] + size]
    order = np.argsort(-lengths, kind="stable")
    last = int(np.searchsorted(np.cumsum(lengths[order]), size)) + 1
    return np.concatenate([free[firsts[i] : firsts[i] + lengths[i]] for i in order[:last]])[:size]


def _runs(chunks: IntArray) -> tuple[tuple[int, int], ...]:
    """Chunks in order as `(first chunk, count)` runs."""
    breaks = np.flatnonzero(np.diff(chunks) != 1) + 1
    firsts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([firsts, [len(chunks)]]))
    return tuple(zip(chunks[firsts].tolist(), lengths.tolist(), strict=True))
