"""The greedy walk of a colouring: arcs in order of start, each with the chunks that suit it and the others best.

`scheduler/native/walk.cpp` says the same in C++, for pools of thousands of chunks and plans that compare dozens of
colourings (`scheduler.colouring.native`): it finds the same chunks, as the tests hold, in a third to an eighth of the
time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from scheduler.budget import IntArray
from scheduler.colouring import native
from scheduler.colouring.arcs import Arc, Walked
from scheduler.colouring.runs import BoolArray, best_runs, least

NEVER = int(np.iinfo(np.int64).max)

# Waiting for a write costs the step more than any number of remaps, which happen off the critical path.
LATE = 1000


def walk(
    arcs: Sequence[Arc],
    may_be_cut: Sequence[bool],
    *,
    num_ticks: int,
    num_chunks: int,
    give_way: bool,
    best_fit: bool,
) -> Walked:
    """Give every arc its chunks, or say what is missing.

    Args:
        arcs: In order of start, in ticks from the cut.
        may_be_cut: Of those that cross the boundary, which may have other chunks before it than from it on.
        num_ticks: Length of the step.
        num_chunks: Size of the pool.
        give_way: Whether arcs are cut where others lack chunks.
        best_fit: Whether the next claim on a chunk counts as a wish to have it back, or only what crosses the cut.
    """
    num_chunks = min(num_chunks, sum(arc.num_chunks for arc in arcs))  # more is never needed
    found = native.walk(
        arcs,
        may_be_cut,
        num_ticks=num_ticks,
        num_chunks=num_chunks,
        late_price=LATE,
        give_way=give_way,
        best_fit=best_fit,
    )
    if found is not None:
        return found
    walker = _Walk(arcs, may_be_cut, num_ticks, num_chunks, best_fit=best_fit)
    missing = walker.run(give_way=give_way)
    chunks = [] if missing is not None else [own for own in walker.chunks if own is not None]
    return Walked(chunks=chunks, cut=walker.cut, num_late=walker.num_late, missing=missing)


class _Walk:
    """Arcs by index; what `_cut` adds comes behind."""

    def __init__(
        self,
        arcs: Sequence[Arc],
        may_be_cut: Sequence[bool],
        num_ticks: int,
        num_chunks: int,
        *,
        best_fit: bool,
    ) -> None:
        self.starts, self.stops = [arc.start for arc in arcs], [arc.stop for arc in arcs]
        self.written = [arc.written for arc in arcs]
        self.sizes, self.families = [arc.num_chunks for arc in arcs], [arc.family for arc in arcs]
        self.may_be_cut = may_be_cut
        self.num_ticks = num_ticks
        self.best_fit = best_fit
        self.num_late = 0
        self.cut: list[int] = []
        self.chunks: list[IntArray | None] = [None] * len(arcs)
        self.crossing = [index for index, stop in enumerate(self.stops) if stop > num_ticks]
        self.members: dict[int, list[int]] = {}
        for index, family in enumerate(self.families):
            self.members.setdefault(family, []).append(index)
        self.home: dict[int, IntArray] = {}
        self.free_at = np.zeros(num_chunks, dtype=np.int64)  # nobody holds the chunk from this tick on
        self.hard_from = np.full(num_chunks, NEVER)  # an arc over the cut takes it at this tick
        self.written_at = np.zeros(num_chunks, dtype=np.int64)  # about when its last bytes are written out
        self.first_at = np.full(num_chunks, NEVER)  # its first arc from the cut on takes it at this tick
        self.span = 1 + max(self.written, default=0) + num_ticks  # more than any `written_at`
        self.ordered = list(self.starts)  # in order; what `_cut` adds is not among them
        self.start_of = np.array(self.starts, dtype=np.int64)
        self.stop_of = np.array(self.stops, dtype=np.int64)
        self.size_of = np.array(self.sizes, dtype=np.int64)
        self.claims_home = np.zeros(len(arcs), dtype=np.bool_)  # not coloured yet, but its family has a home
        self.next_claim = np.full(num_chunks, NEVER)  # an arc whose home it belongs to claims it at this tick
        self.home_chunks = np.empty(int(self.size_of.sum()), dtype=np.int64)  # of all homes, in the order of `home_at`
        first = {family: own[0] for family, own in self.members.items()}
        places = np.cumsum(self.size_of) - self.size_of
        self.home_at = places[[first[family] for family in self.families]]
        self.claims_of: dict[int, list[tuple[int, int]]] = {}  # for each claimed chunk, a heap: tick, arc

    def run(self, *, give_way: bool) -> tuple[int, int] | None:
        """Give every arc its chunks; or how many are missing, and for which."""
        missing = self._take_crossing()
        if missing is not None:
            return missing
        at_home = {index for own in self.members.values() for index in own[1:]}
        waiting = [
            (self.starts[index], index not in at_home, index)
            for index, chunks in enumerate(self.chunks)
            if chunks is None
        ]
        heapq.heapify(waiting)
        while waiting:
            index = heapq.heappop(waiting)[2]
            chunks = self._choose_unclaimed(index)
            if chunks is None:
                usable = self._usable(index)
                num_missing = self.sizes[index] - int(np.count_nonzero(usable))
                if num_missing > 0 and give_way:
                    for later in self._make_way(index, num_missing):
                        heapq.heappush(waiting, (self.starts[later], False, later))
                    usable = self._usable(index)
                    num_missing = self.sizes[index] - int(np.count_nonzero(usable))
                if num_missing > 0:
                    return num_missing, index
                chunks = self._choose(index, usable)
            self._assign(index, chunks)
        return None

    def _take_crossing(self) -> tuple[int, int] | None:
        """What crosses the cut, side by side from chunk 0, ordered by when the chunks become free."""
        position = 0
        for _, _, index in sorted((self.stops[index], self.starts[index], index) for index in self.crossing):
            chunks = np.arange(position, position + self.sizes[index], dtype=np.int64)
            position += self.sizes[index]
            if position > len(self.free_at):
                return position - len(self.free_at), index
            self._assign(index, chunks)
            self.free_at[chunks] = self.stops[index] - self.num_ticks
            self.written_at[chunks] = self.written[index] - self.num_ticks
            self.hard_from[chunks] = self.starts[index]
            self.first_at[chunks] = 0
        return None

    def _make_way(self, index: int, num_chunks: int) -> list[int]:
        """Cut arcs at the boundary until `num_chunks` more are usable for this one; returns the halves that are new.

        Candidates hold chunks that are free when it starts, but are wanted back before it stops. The
        smallest that suffices alone goes first, then the larger ones.
        """
        found = []
        for other in self.crossing:
            chunks = self.chunks[other]
            if not self.may_be_cut[other] or not self.starts[index] <= self.starts[other] < self.stops[index]:
                continue
            if self.stops[other] <= self.num_ticks or chunks is None:  # it was cut before
                continue
            free = int(np.count_nonzero(self.free_at[chunks] <= self.starts[index]))
            if free:
                found.append((free < num_chunks, free if free >= num_chunks else -free, other))
        later: list[int] = []
        for _, free, other in sorted(found):
            if num_chunks <= 0:
                break
            num_chunks -= abs(free)
            later.append(self._cut(other))
        return later

    def _cut(self, index: int) -> int:
        """Make two arcs of one that crosses the boundary; returns the index of that which ends the step."""
        chunks, family = self.chunks[index], self.families[index]
        assert chunks is not None
        self.cut.append(index)
        self.hard_from[chunks] = NEVER
        self.starts.append(self.starts[index])
        self.stops.append(self.num_ticks)
        self.written.append(self.num_ticks)
        self.sizes.append(self.sizes[index])
        self.families.append(family)
        self.chunks.append(None)
        self.starts[index], self.stops[index] = 0, self.stops[index] - self.num_ticks
        self.start_of = np.append(self.start_of, self.starts[-1])
        self.stop_of = np.append(self.stop_of, self.stops[-1])
        self.size_of = np.append(self.size_of, self.sizes[-1])
        self.home_at = np.append(self.home_at, self.home_at[self.members[family][0]])
        self.claims_home = np.append(self.claims_home, True)
        new = len(self.starts) - 1
        self.members[family].append(new)
        self._claim([new], self.home[family])
        return new

    def _assign(self, index: int, chunks: IntArray) -> None:
        """Give the arc its chunks; its family's later arcs claim the home that the first one makes."""
        family = self.families[index]
        self.chunks[index] = chunks
        self.free_at[chunks] = self.stops[index]
        self.written_at[chunks] = self.written[index]
        self.first_at[chunks] = np.minimum(self.first_at[chunks], self.starts[index])
        if self.claims_home[index]:
            self.claims_home[index] = False
            self._forget_claims(self.home[family])
        elif family not in self.home:
            self.home[family] = chunks
            self.home_chunks[self.home_at[index] : self.home_at[index] + len(chunks)] = chunks
            later = [other for other in self.members[family] if self.chunks[other] is None]
            self.claims_home[later] = True
            self._claim(later, chunks)

    def _claim(self, later: list[int], home: IntArray) -> None:
        """Arcs that are not coloured yet claim their home."""
        if not later:
            return
        claims = [(self.starts[index], index) for index in later]
        for chunk in home.tolist():
            known = self.claims_of.setdefault(chunk, [])
            for claim in claims:
                heapq.heappush(known, claim)
        self.next_claim[home] = np.minimum(self.next_claim[home], min(claims)[0])

    def _forget_claims(self, home: IntArray) -> None:
        """Claims on these chunks whose arcs are coloured are no more."""
        for chunk in home.tolist():
            known = self.claims_of[chunk]
            while known and self.chunks[known[0][1]] is not None:
                heapq.heappop(known)
            self.next_claim[chunk] = known[0][0] if known else NEVER

    def _usable(self, index: int) -> BoolArray:
        """Chunks that nobody holds from the arc's start to its stop."""
        return (self.free_at <= self.starts[index]) & (self.hard_from >= self.stops[index])

    def _choose_unclaimed(self, index: int) -> IntArray | None:
        """What `_choose` would find, if the arc's home is free, or if enough chunks are that cost nothing.

        It asks only when each chunk is claimed next, not by how many, and so is quick. None: look closer.
        """
        family = self.families[index]
        home = self.home.get(family)
        if home is None:
            if len(self.members[family]) > 1:
                return None
            good = self._cost_nothing(index)
            if int(np.count_nonzero(good)) < self.sizes[index]:
                return None
            return np.sort(self._tightest(good, self.sizes[index]))
        at_home = (self.free_at[home] <= self.starts[index]) & (self.hard_from[home] >= self.stops[index])
        num_away = len(home) - int(np.count_nonzero(at_home))
        chunks = home.copy()
        if num_away:
            good = self._cost_nothing(index)
            good[home[at_home]] = False
            if int(np.count_nonzero(good)) < num_away:
                return None
            chunks[~at_home] = np.sort(self._tightest(good, num_away))
        return chunks

    def _cost_nothing(self, index: int) -> BoolArray:
        """Usable chunks that are not late, and that no other arc claims as long as this one holds them."""
        start, stop, written = self.starts[index], self.stops[index], self.written[index]
        good: BoolArray = self.written_at <= start
        good &= self.hard_from >= written
        good &= self.next_claim >= stop
        if written - self.num_ticks > 0 and written > stop:
            good &= (self.first_at == NEVER) | (self.first_at >= written - self.num_ticks)
        return good

    def _choose(self, index: int, usable: BoolArray) -> IntArray:
        home = self.home.get(self.families[index])
        if home is None:
            return np.sort(self._pick(np.flatnonzero(usable), self.sizes[index], index))
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
        price = self._conflicts(free, index) + LATE * late
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
        wanted = np.flatnonzero(good & (until < NEVER))
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
        written = self.written[index]
        late = self.written_at[free] > self.starts[index]
        if written > self.stops[index]:
            late |= self.hard_from[free] < written
            first_at = self.first_at[free]
            late |= (first_at < NEVER) & (first_at < written - self.num_ticks)
        return late

    def _conflicts(self, free: IntArray, index: int) -> IntArray:
        """For each of the free chunks, how many arcs claim it while this arc's family holds it.

        The family is this arc and, if it is about to make its home, its later arcs.
        """
        own = [index]
        family = self.families[index]
        if family not in self.home:
            own += [other for other in self.members[family] if other != index]
        conflicts = np.bincount(self._homes(self._claims(own)), minlength=len(self.free_at))[free]
        for later in own[1:]:
            conflicts += self.hard_from[free] < self.stops[later]
        return conflicts

    def _homes(self, arcs: IntArray) -> IntArray:
        """The homes of the arcs' families, one after another."""
        lengths = self.size_of[arcs]
        ends = np.cumsum(lengths)
        found: IntArray = self.home_chunks[
            np.repeat(self.home_at[arcs] - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
        ]
        return found

    def _claims(self, own: list[int]) -> IntArray:
        """Arcs that claim their homes while one of `own` holds its chunks.

        Arcs are coloured in order of start, so none that still claims starts before the first of `own`. The home
        of a family is claimed by its own arcs, too, but none of it is among the free chunks that this is asked for.
        """
        first, stop = self.starts[own[0]], max(self.stops[index] for index in own)
        low, high, count = bisect_left(self.ordered, first), bisect_left(self.ordered, stop), len(self.ordered)
        claims = np.flatnonzero(self.claims_home[low:high]) + low
        if len(self.starts) > count:
            added = np.flatnonzero(self.claims_home[count:]) + count
            claims = np.concatenate([claims, added])
        start_of, stop_of = self.start_of[claims], self.stop_of[claims]
        overlap = np.zeros(len(claims), dtype=np.bool_)
        for index in own:
            overlap |= (start_of < self.stops[index]) & (stop_of > self.starts[index])
        found: IntArray = claims[overlap]
        return found
