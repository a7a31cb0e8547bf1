"""Which chunks each residency holds: interval colouring, with an eye on remaps and runs.

Any free chunks will do for any variable (DESIGN.md section 5), so for residencies that do not
cross the step boundary a greedy walk in order of start needs exactly as many chunks as are held
at the worst tick.

A cyclic step is a circle. What is kept over the boundary is one arc with its heir's start, in the
same chunks. The walk begins where the fewest chunks are held across, at the *cut*; the arcs that
cross it are coloured first, and others may use their chunks only in between. This can need more
chunks than are held at once; what is held throughout costs nothing.

Two wishes come second. *Remaps*: a variable's first chunks are its home; its later residencies want
the same chunks again, position by position, because anything else costs a remap of those
positions, twice. So a home is softly reserved, and of several free chunks those are taken that
break the fewest reservations. *Runs*: neighbouring chunks in order need a single mapping, and
the number of mappings is limited (`vm.max_map_count`).

A finished colouring is improved by exchanges (`scheduler.colouring.exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scheduler.budget import IntArray
from scheduler.colouring.arcs import Arc, arcs_of, from_the_cut, written_ticks
from scheduler.colouring.border_copies import border_copies
from scheduler.colouring.boundary_evictions import not_kept
from scheduler.colouring.exchange import Holder, exchange_chunks
from scheduler.colouring.runs import NO_CHUNKS, all_runs, run_starts
from scheduler.colouring.walk import walk
from scheduler.plan import BorderCopy, Kept, Machine, Residency, occupied_ticks
from scheduler.trace import Trace

# From this many residencies on, planning stays within seconds: only the faster of the two ways to colour is tried, the
# first walk is the one that cuts at the step boundary and gives way, and no exchanges are.
# On a transformer of 10,000 ops that walk leaves fewer remaps and shorter waits than the other one does with exchanges,
# at two tenths of the peak and more; at one tenth up to 13 % more remaps. Exchanges leave it as it is.
MANY_TO_COLOUR = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Colouring:
    """Residencies with chunks.

    Attributes:
        residencies: As given, with `chunks` filled in; but see `colour` for what gave way at the boundary.
        border_copies: What brings those that gave way from the chunks in which they end a step to those in which they
            start the next. Empty where nothing gave way, or what did is evicted.
        given_up: Variables that gave way and are kept, by way of `border_copies`.
        num_remapped_chunks: Chunk mappings that change within one step, the way back to the
            step-start layout included.
        num_runs: Mappings of the step-start layout: one a run of neighbouring chunks.
        other: The same with fewer remaps, some of whose chunks are taken while their last bytes are still on the way
            out, so that their next holder waits. None: there is no such, or nobody asked for exchanges.
    """

    residencies: tuple[Residency, ...]
    num_remapped_chunks: int
    num_runs: int
    border_copies: tuple[BorderCopy, ...] = ()
    given_up: frozenset[int] = frozenset()
    other: Colouring | None = None

    def evicting(self, trace: Trace) -> Colouring:
        """The same with what gave way evicted at the boundary, instead of copied there."""
        residencies = not_kept(self.residencies, set(self.given_up), trace)
        return replace(self, residencies=residencies, border_copies=(), given_up=frozenset(), other=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """No colouring was found: `num_chunks` were missing at `tick`, where `variable` was to begin."""

    num_chunks: int
    tick: int
    variable: int


def colour(
    residencies: tuple[Residency, ...],
    trace: Trace,
    machine: Machine,
    *,
    quick: bool = False,
    exchanges: bool = True,
) -> Colouring | Shortage:
    """Assign chunks to `residencies`, which must fit the budget at each tick.

    In a step taken alone, and wherever some tick is crossed only by what is held throughout, the
    first walk succeeds. Otherwise a greedy walk can fall short. Another walk then cuts at the step
    boundary and gives way there: what blocks ends the step in other chunks than it starts with, and is
    copied there at the boundary. Where all memory is held there, and chunks would have to change places in a
    ring, it is not kept over the boundary, but written out at the step's end and loaded again at its start.
    Neither ever needs more memory at any tick.

    Each walk is tried in two ways, best fit by the next claim on a chunk and longest runs, since
    neither always has the fewer remaps; with `quick`, in the second way only, which takes half the time and has
    up to a tenth more remaps. Then it is improved by exchanges, which takes up to a few seconds and leaves about a
    third of the remaps; without `exchanges` it is not: enough to compare candidates by.

    Returns:
        A colouring; or a `Shortage`, where variables that can never be away block.
    """
    written = written_ticks(residencies, trace, machine)
    best: tuple[tuple[int, int], _Painter] | None = None
    is_long = len(residencies) > MANY_TO_COLOUR
    walks = (False, True) if not is_long else (True, False)
    for give_way in walks if trace.cyclic else (False,):
        for best_fit in (False,) if quick or is_long else (True, False):
            arcs = from_the_cut(arcs_of(residencies, written, trace, machine), trace, at_boundary=give_way)
            painter = _Painter(residencies, trace, machine, arcs, give_way=give_way, best_fit=best_fit)
            shortage = painter.paint()
            if shortage is not None:
                break
            rank = painter.num_remapped_chunks() + painter.num_late, painter.num_runs()
            if best is None or rank < best[0]:
                best = rank, painter
            if rank[0] == 0:
                break
        if best is not None:
            return best[1].result(exchanges=exchanges and not is_long)
    assert shortage is not None
    return shortage


class _Painter:
    def __init__(
        self,
        residencies: tuple[Residency, ...],
        trace: Trace,
        machine: Machine,
        arcs: list[Arc],
        *,
        give_way: bool,
        best_fit: bool,
    ) -> None:
        self.residencies = residencies
        self.trace = trace
        self.arcs = arcs
        self.give_way = give_way
        self.best_fit = best_fit
        self.num_late = 0
        self.num_chunks = machine.num_chunks
        self.parted: list[
            tuple[int, int]
        ] = []  # residencies that gave way: a variable's last, and the next step's first
        self.members: dict[int, list[int]] = {}
        for index, arc in enumerate(self.arcs):
            self.members.setdefault(arc.family, []).append(index)

    def paint(self) -> Shortage | None:
        """Give every arc its chunks, or say what is missing."""
        found = walk(
            self.arcs,
            [self._may_be_cut(arc) for arc in self.arcs],
            num_ticks=self.trace.num_ticks,
            num_chunks=self.num_chunks,
            give_way=self.give_way,
            best_fit=self.best_fit,
        )
        for index in found.cut:
            self._cut(self.arcs[index])
        if found.missing is not None:
            num_chunks, index = found.missing
            first = self.residencies[self.arcs[index].residencies[0]]
            tick = occupied_ticks(first, self.trace)[0]
            return Shortage(num_chunks=num_chunks, tick=tick, variable=first.variable)
        for arc, chunks in zip(self.arcs, found.chunks, strict=True):
            arc.chunks = chunks
        self.num_late = found.num_late
        return None

    def _may_be_cut(self, arc: Arc) -> bool:
        """Whether it may have other chunks at the step's end than at its start."""
        return (
            len(arc.residencies) == 2 and self.trace.variables[self.residencies[arc.residencies[0]].variable].evictable
        )

    def _cut(self, arc: Arc) -> None:
        """Make two arcs of one that crosses the boundary; the one that ends the step comes behind all others."""
        end, start = arc.residencies
        self.parted.append((end, start))
        self.members[arc.family].append(len(self.arcs))
        num_ticks = self.trace.num_ticks
        self.arcs.append(
            Arc(
                residencies=(end,),
                family=arc.family,
                num_chunks=arc.num_chunks,
                start=arc.start,
                stop=num_ticks,
                written=num_ticks,
            )
        )
        arc.residencies, arc.start, arc.stop = (start,), 0, arc.stop - num_ticks

    def _exchange(self, *, in_time: bool) -> None:
        """Exchange chunks for fewer remaps; if `in_time`, a chunk that is not late stays so."""
        num_ticks = self.trace.num_ticks
        holders = []
        for arc in self.arcs:
            assert arc.chunks is not None
            stop = max(arc.stop, min(arc.written, arc.start + num_ticks)) if in_time else arc.stop
            holders.append(Holder(start=arc.start, stop=stop, family=arc.family, chunks=arc.chunks))
        for arc, chunks in zip(self.arcs, exchange_chunks(holders, num_ticks, cyclic=self.trace.cyclic), strict=True):
            arc.chunks = chunks

    def result(self, *, exchanges: bool) -> Colouring:
        """The colouring, improved by exchanges or as it was painted."""
        if not exchanges or not self.num_remapped_chunks():
            return self._coloured()
        self._exchange(in_time=True)
        found = self._coloured()
        if not found.num_remapped_chunks:
            return found
        self._exchange(in_time=False)
        other = self._coloured() if self.num_remapped_chunks() < found.num_remapped_chunks else None
        return replace(found, other=other)

    def _coloured(self) -> Colouring:
        """What the arcs' chunks amount to now."""
        chunks: list[IntArray] = [np.empty(0, dtype=np.int64)] * len(self.residencies)
        for arc in self.arcs:
            assert arc.chunks is not None
            for index in arc.residencies:
                chunks[index] = arc.chunks
        coloured = tuple(
            Residency(variable=r.variable, start=r.start, stop=r.stop, chunks=runs)
            for r, runs in zip(self.residencies, all_runs(chunks), strict=True)
        )
        given_up = [self.residencies[a].variable for a, b in self.parted if not np.array_equal(chunks[a], chunks[b])]
        colouring = Colouring(
            residencies=coloured,
            num_remapped_chunks=self.num_remapped_chunks(),
            num_runs=self.num_runs(),
            given_up=frozenset(given_up),
        )
        if not given_up:
            return colouring
        copies = border_copies(self._kept(chunks), self.num_chunks)
        return colouring.evicting(self.trace) if copies is None else replace(colouring, border_copies=copies)

    def _kept(self, chunks: list[IntArray]) -> list[tuple[IntArray, IntArray]]:
        """For each variable that is kept, its chunks at the step's end and at its start."""
        heads = {r.variable: chunks[i] for i, r in enumerate(self.residencies) if isinstance(r.start, Kept)}
        ends = ((r.variable, chunks[i]) for i, r in enumerate(self.residencies) if isinstance(r.stop, Kept))
        heirs = ((self.trace.variables[variable].becomes, own) for variable, own in ends)
        return [(own, heads[heir]) for heir, own in heirs if heir is not None]

    def num_runs(self) -> int:
        """Mappings of the step-start layout."""
        homes = [self._chunks(own[0]) for own in self.members.values()]
        return int(np.count_nonzero(run_starts(homes)))

    def num_remapped_chunks(self) -> int:
        """Chunk mappings that change from each of a family's arcs to the next, around the circle."""
        before, after = [NO_CHUNKS], [NO_CHUNKS]
        for own in self.members.values():
            if len(own) == 1:
                continue
            chunks = [self._chunks(index) for index in sorted(own, key=lambda index: self.arcs[index].start)]
            before += chunks if self.trace.cyclic else chunks[:-1]
            after += [*chunks[1:], chunks[0]] if self.trace.cyclic else chunks[1:]
        return int(np.count_nonzero(np.concatenate(before) != np.concatenate(after)))

    def _chunks(self, index: int) -> IntArray:
        chunks = self.arcs[index].chunks
        assert chunks is not None
        return chunks
