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

import heapq
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np

from scheduler.budget import IntArray
from scheduler.colouring.arcs import Arc, arcs_of, from_the_cut, written_ticks
from scheduler.colouring.border_copies import border_copies
from scheduler.colouring.boundary_evictions import not_kept
from scheduler.colouring.exchange import Holder, exchange_chunks
from scheduler.colouring.runs import NO_CHUNKS, BoolArray, all_runs, best_runs, least, run_starts
from scheduler.plan import BorderCopy, Kept, Machine, Residency, occupied_ticks
from scheduler.trace import Trace

_NEVER = np.iinfo(np.int64).max

# From this many residencies on, only the faster of the two ways to colour is tried: planning stays within seconds.
MANY_TO_COLOUR = 2000

# From this many on, the first walk is the one that cuts at the step boundary and gives way; no exchanges are tried.
# On a transformer of 10,000 ops that walk leaves fewer remaps and shorter waits than the other one does with exchanges,
# at two tenths of the peak and more; at one tenth up to 13 % more remaps. Exchanges leave it as it is.
MANY_TO_EXCHANGE = 8_000

# Waiting for a write costs the step more than any number of remaps, which happen off the critical path.
_LATE = 1000


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
    is_long = len(residencies) > MANY_TO_EXCHANGE
    walks = (False, True) if not is_long else (True, False)
    for give_way in walks if trace.cyclic else (False,):
        for best_fit in (False,) if quick or len(residencies) > MANY_TO_COLOUR else (True, False):
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
        self.crossing = [index for index, arc in enumerate(arcs) if arc.stop > trace.num_ticks]
        self.num_chunks = machine.num_chunks
        self.parted: list[
            tuple[int, int]
        ] = []  # residencies that gave way: a variable's last, and the next step's first
        self.members: dict[int, list[int]] = {}
        for index, arc in enumerate(self.arcs):
            self.members.setdefault(arc.family, []).append(index)
        self.home: dict[int, IntArray] = {}
        num_chunks = min(machine.num_chunks, sum(arc.num_chunks for arc in self.arcs))  # more is never needed
        self.free_at = np.zeros(num_chunks, dtype=np.int64)  # nobody holds the chunk from this tick on
        self.hard_from = np.full(num_chunks, _NEVER)  # an arc over the cut takes it at this tick
        self.written_at = np.zeros(num_chunks, dtype=np.int64)  # about when its last bytes are written out
        self.first_at = np.full(num_chunks, _NEVER)  # its first arc from the cut on takes it at this tick
        self.span = (
            1 + max((arc.written for arc in self.arcs), default=0) + trace.num_ticks
        )  # more than any `written_at`
        self.starts = [arc.start for arc in self.arcs]  # in order; what `_cut` adds comes behind
        self.start_of = np.array([arc.start for arc in self.arcs], dtype=np.int64)
        self.stop_of = np.array([arc.stop for arc in self.arcs], dtype=np.int64)
        self.size_of = np.array([arc.num_chunks for arc in self.arcs], dtype=np.int64)
        self.claims_home = np.zeros(len(self.arcs), dtype=np.bool_)  # not coloured yet, but its family has a home
        self.next_claim = np.full(num_chunks, _NEVER)  # an arc whose home it belongs to claims it at this tick
        self.home_chunks = np.empty(int(self.size_of.sum()), dtype=np.int64)  # of all homes, in the order of `home_at`
        first = {family: own[0] for family, own in self.members.items()}
        places = np.cumsum(self.size_of) - self.size_of
        self.home_at = places[[first[arc.family] for arc in self.arcs]]
        self.claims_of: dict[int, list[tuple[int, int]]] = {}  # for each claimed chunk, a heap: tick, arc

    def paint(self) -> Shortage | None:
        """Give every arc its chunks, or say what is missing."""
        shortage = self._paint_crossing()
        if shortage is not None:
            return shortage
        at_home = {index for own in self.members.values() for index in own[1:]}
        waiting = [
            (arc.start, index not in at_home, index) for index, arc in enumerate(self.arcs) if arc.chunks is None
        ]
        heapq.heapify(waiting)
        while waiting:
            index = heapq.heappop(waiting)[2]
            chunks = self._choose_unclaimed(index)
            if chunks is None:
                arc = self.arcs[index]
                usable = self._usable(arc)
                missing = arc.num_chunks - int(np.count_nonzero(usable))
                if missing > 0 and self.give_way:
                    for later in self._make_way(arc, missing):
                        heapq.heappush(waiting, (self.arcs[later].start, False, later))
                    usable = self._usable(arc)
                    missing = arc.num_chunks - int(np.count_nonzero(usable))
                if missing > 0:
                    return self._shortage(missing, arc)
                chunks = self._choose(index, usable)
            self._assign(index, chunks)
        return None

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

    def _paint_crossing(self) -> Shortage | None:
        """What crosses the cut, side by side from chunk 0, ordered by when the chunks become free."""
        crossing = [(self.arcs[index].stop, self.arcs[index].start, index) for index in self.crossing]
        position = 0
        for _, _, index in sorted(crossing):
            arc = self.arcs[index]
            chunks = np.arange(position, position + arc.num_chunks, dtype=np.int64)
            position += arc.num_chunks
            if position > len(self.free_at):
                return self._shortage(position - len(self.free_at), arc)
            self._assign(index, chunks)
            self.free_at[chunks] = arc.stop - self.trace.num_ticks
            self.written_at[chunks] = arc.written - self.trace.num_ticks
            self.hard_from[chunks] = arc.start
            self.first_at[chunks] = 0
        return None

    def _shortage(self, num_chunks: int, arc: Arc) -> Shortage:
        first = self.residencies[arc.residencies[0]]
        return Shortage(num_chunks=num_chunks, tick=occupied_ticks(first, self.trace)[0], variable=first.variable)

    def _make_way(self, arc: Arc, num_chunks: int) -> list[int]:
        """Cut arcs at the boundary until `num_chunks` more are usable for `arc`; returns their later halves.

        Candidates hold chunks that are free when `arc` starts, but are wanted back before it stops. The
        smallest that suffices alone goes first, then the larger ones.
        """
        found = []
        for index in self.crossing:
            other = self.arcs[index]
            if not arc.start <= other.start < arc.stop:
                continue
            if other.stop <= self.trace.num_ticks or other.chunks is None or len(other.residencies) < 2:
                continue
            evictable = self.trace.variables[self.residencies[other.residencies[0]].variable].evictable
            free = int(np.count_nonzero(self.free_at[other.chunks] <= arc.start))
            if free and evictable:
                found.append((free < num_chunks, free if free >= num_chunks else -free, index))
        later: list[int] = []
        for _, free, index in sorted(found):
            if num_chunks <= 0:
                break
            num_chunks -= abs(free)
            later.append(self._cut(self.arcs[index]))
        return later

    def _cut(self, arc: Arc) -> int:
        """Make two arcs of one that crosses the boundary; returns the index of the later one."""
        assert arc.chunks is not None
        end, start = arc.residencies
        self.parted.append((end, start))
        self.hard_from[arc.chunks] = _NEVER
        self.arcs.append(
            Arc(
                residencies=(end,),
                family=arc.family,
                num_chunks=arc.num_chunks,
                start=arc.start,
                stop=self.trace.num_ticks,
                written=self.trace.num_ticks,
            )
        )
        arc.residencies, arc.start, arc.stop = (start,), 0, arc.stop - self.trace.num_ticks
        self.start_of = np.append(self.start_of, self.arcs[-1].start)
        self.stop_of = np.append(self.stop_of, self.arcs[-1].stop)
        self.size_of = np.append(self.size_of, arc.num_chunks)
        self.home_at = np.append(self.home_at, self.home_at[self.members[arc.family][0]])
        self.claims_home = np.append(self.claims_home, True)
        self.members[arc.family].append(len(self.arcs) - 1)
        self._claim([len(self.arcs) - 1], self.home[arc.family])
        return len(self.arcs) - 1

    def _assign(self, index: int, chunks: IntArray) -> None:
        """Give the arc its chunks; its family's later arcs claim the home that the first one makes."""
        arc = self.arcs[index]
        arc.chunks = chunks
        self.free_at[chunks] = arc.stop
        self.written_at[chunks] = arc.written
        self.first_at[chunks] = np.minimum(self.first_at[chunks], arc.start)
        if self.claims_home[index]:
            self.claims_home[index] = False
            self._forget_claims(self.home[arc.family])
        elif arc.family not in self.home:
            self.home[arc.family] = chunks
            self.home_chunks[self.home_at[index] : self.home_at[index] + len(chunks)] = chunks
            later = [other for other in self.members[arc.family] if self.arcs[other].chunks is None]
            self.claims_home[later] = True
            self._claim(later, chunks)

    def _claim(self, later: list[int], home: IntArray) -> None:
        """Arcs that are not coloured yet claim their home."""
        if not later:
            return
        claims = [(self.arcs[index].start, index) for index in later]
        for chunk in home.tolist():
            known = self.claims_of.setdefault(chunk, [])
            for claim in claims:
                heapq.heappush(known, claim)
        self.next_claim[home] = np.minimum(self.next_claim[home], min(claims)[0])

    def _forget_claims(self, home: IntArray) -> None:
        """Claims on these chunks whose arcs are coloured are no more."""
        for chunk in home.tolist():
            known = self.claims_of[chunk]
            while known and self.arcs[known[0][1]].chunks is not None:
                heapq.heappop(known)
            self.next_claim[chunk] = known[0][0] if known else _NEVER

    def _usable(self, arc: Arc) -> BoolArray:
        """Chunks that nobody holds from the arc's start to its stop."""
        return (self.free_at <= arc.start) & (self.hard_from >= arc.stop)

    def _choose_unclaimed(self, index: int) -> IntArray | None:
        """What `_choose` would find, if the arc's home is free, or if enough chunks are that cost nothing.

        It asks only when each chunk is claimed next, not by how many, and so is quick. None: look closer.
        """
        arc = self.arcs[index]
        home = self.home.get(arc.family)
        if home is None:
            if len(self.members[arc.family]) > 1:
                return None
            good = self._cost_nothing(arc)
            if int(np.count_nonzero(good)) < arc.num_chunks:
                return None
            return np.sort(self._tightest(good, arc.num_chunks))
        at_home = (self.free_at[home] <= arc.start) & (self.hard_from[home] >= arc.stop)
        num_away = len(home) - int(np.count_nonzero(at_home))
        chunks = home.copy()
        if num_away:
            good = self._cost_nothing(arc)
            good[home[at_home]] = False
            if int(np.count_nonzero(good)) < num_away:
                return None
            chunks[~at_home] = np.sort(self._tightest(good, num_away))
        return chunks

    def _cost_nothing(self, arc: Arc) -> BoolArray:
        """Usable chunks that are not late, and that no other arc claims as long as this one holds them."""
        good: BoolArray = self.written_at <= arc.start
        good &= self.hard_from >= arc.written
        good &= self.next_claim >= arc.stop
        if arc.written - self.trace.num_ticks > 0 and arc.written > arc.stop:
            good &= (self.first_at == _NEVER) | (self.first_at >= arc.written - self.trace.num_ticks)
        return good

    def _choose(self, index: int, usable: BoolArray) -> IntArray:
        arc = self.arcs[index]
        home = self.home.get(arc.family)
        if home is None:
            return np.sort(self._pick(np.flatnonzero(usable), arc.num_chunks, index))
        at_home = usable[home]
        chunks = home.copy()
        away = int(np.count_nonzero(~at_home))
        if away:
            usable[home[at_home]] = False
            chunks[~at_home] = np.sort(self._pick(np.flatnonzero(usable), away, index))
        return chunks

    def _pick(self, free: IntArray, size: int, index: int) -> IntArray:
        """`size` of the free chunks: the best ones in long runs, then the next best."""
        late = self._is_late(free, index)
        price = self._conflicts(free, index) + _LATE * late
        costs = price > 0
        best = free[~costs]
        if len(best) >= size:
            good = np.zeros(len(self.free_at), dtype=np.bool_)
            good[best] = True
            return self._tightest(good, size)
        other = np.flatnonzero(costs)
        cheapest = other[least(price[other] * self.span + self.written_at[free[other]], size - len(best))]
        self.num_late += int(np.count_nonzero(late[cheapest]))
        return np.concatenate([best, free[cheapest]])

    def _tightest(self, good: BoolArray, size: int) -> IntArray:
        """`size` of the good chunks: those that are wanted back soonest, so that the others stay free for longer."""
        until = np.minimum(self.hard_from, self.next_claim) if self.best_fit else self.hard_from
        wanted = np.flatnonzero(good & (until < _NEVER))
        if not len(wanted):
            return best_runs(good, size)
        if len(wanted) < size:
            good[wanted] = False
            return np.concatenate([wanted, best_runs(good, size - len(wanted))])
        until = until[wanted]
        last = np.partition(until, size - 1)[size - 1]
        sooner = wanted[until < last]
        good[:] = False
        good[wanted[until == last]] = True
        return np.concatenate([sooner, best_runs(good, size - len(sooner))])

    def _is_late(self, free: IntArray, index: int) -> BoolArray:
        """Chunks whose bytes would still be on their way out: their next holder would have to wait."""
        arc = self.arcs[index]
        late = self.written_at[free] > arc.start
        if arc.written > arc.stop:
            late |= self.hard_from[free] < arc.written
            first_at = self.first_at[free]
            late |= (first_at < _NEVER) & (first_at < arc.written - self.trace.num_ticks)
        return late

    def _conflicts(self, free: IntArray, index: int) -> IntArray:
        """For each of the free chunks, how many arcs claim it while this arc's family holds it.

        The family is this arc and, if it is about to make its home, its later arcs.
        """
        arc = self.arcs[index]
        own = [arc]
        if arc.family not in self.home:
            own += [self.arcs[other] for other in self.members[arc.family] if other != index]
        conflicts = np.bincount(self._homes(self._claims(own)), minlength=len(self.free_at))[free]
        for later in own[1:]:
            conflicts += self.hard_from[free] < later.stop
        return conflicts

    def _homes(self, arcs: IntArray) -> IntArray:
        """The homes of the arcs' families, one after another."""
        lengths = self.size_of[arcs]
        ends = np.cumsum(lengths)
        found: IntArray = self.home_chunks[
            np.repeat(self.home_at[arcs] - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
        ]
        return found

    def _claims(self, own: list[Arc]) -> IntArray:
        """Arcs that claim their homes while one of `own` holds its chunks.

        Arcs are coloured in order of start, so none that still claims starts before the first of `own`. The home
        of a family is claimed by its own arcs, too, but none of it is among the free chunks that this is asked for.
        """
        first, stop = own[0].start, max(arc.stop for arc in own)
        low, high, count = bisect_left(self.starts, first), bisect_left(self.starts, stop), len(self.starts)
        claims = np.flatnonzero(self.claims_home[low:high]) + low
        if len(self.arcs) > count:
            added = np.flatnonzero(self.claims_home[count:]) + count
            claims = np.concatenate([claims, added])
        start_of, stop_of = self.start_of[claims], self.stop_of[claims]
        overlap = np.zeros(len(claims), dtype=np.bool_)
        for arc in own:
            overlap |= (start_of < arc.stop) & (stop_of > arc.start)
        found: IntArray = claims[overlap]
        return found

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
