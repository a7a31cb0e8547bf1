"""Greedy paging and rematerialisation, op by op: the common engine of the recomputing policies.

Right before each op the walk brings back what the op needs: what has a copy in the store is loaded, what
was discarded is run again, with whatever is missing of *its* sources, recursively. Where memory is
short, a policy's `Advice` names victims. What the policies differ in is the advice.

Nothing is discarded that might not come back (`ReplayGraph.expiry`): it must be possible to make it
again, from variables that nobody can discard, up to its next use, or up to its free if there is none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heapify, heappop
from itertools import accumulate

from scheduler.budget import Pin, pinned_chunks, pins_of, require_budget, zone_maxima
from scheduler.plan import Discarded, Machine, Recomputed, Residency
from scheduler.policies.on_demand import deaths_by_zone, pins_by_zone
from scheduler.reruns import ReplayGraph, Rerun
from scheduler.residency_builder import ResidencyBuilder, may_wrap, ordered
from scheduler.trace import Trace

# Rounds of the search for a step that ends as it starts; see `on_demand`.
_MAX_ROUNDS = 8

# Restarts after a re-run did not fit; each forbids to discard what it should have brought back.
_MAX_RESTARTS = 40

# A re-run of more ops than this is not considered when costs are compared: it would never win.
_MOST_OPS_COMPARED = 128


@dataclass(frozen=True, slots=True)
class Victim:
    """A variable to release, and how: by discarding it, or with a copy in the store."""

    variable: int
    discard: bool


class Stuck(Exception):
    """Memory is short at an op, and the advice has nothing more to release.

    Attributes:
        op_index: The op.
        held: Variables in memory.
        remade: Variables that were to be made again there.
        num_missing_chunks: Chunks over the budget, with what must stay and what is made again.
    """

    def __init__(
        self, op_index: int, held: Iterable[int], remade: Iterable[int], *, num_missing_chunks: int = 0
    ) -> None:
        self.op_index = op_index
        self.held = tuple(held)
        self.remade = tuple(remade)
        self.num_missing_chunks = num_missing_chunks
        super().__init__(f"op {op_index}: nothing left to release beside {len(self.held)} variables")


class Early(Enum):
    """Of which variables a policy may release some although memory may not be short."""

    NONE = auto()
    TOUCHED = auto()  # each once, right before the first op after its last use for which it may go
    ANY = auto()


class Advice:
    """What a policy decides. This one releases what is used furthest in the future, and never discards."""

    early = Early.NONE

    def victims(self, walk: Walk, op_index: int, candidates: Sequence[int]) -> Iterable[Victim]:
        """Victims, the first to go first; the walk takes as many as it needs, and asks again for each op."""
        known = walk.known_next_uses
        heap = [
            (-(at if (at := known.get(v, -1)) >= op_index else walk.next_use(v, op_index)), v) for v in candidates
        ]  # thousands, most of which are known: no call for those
        heapify(heap)  # a few are taken
        return (Victim(heappop(heap)[1], False) for _ in candidates)

    def eager(self, walk: Walk, op_index: int, candidates: Sequence[int]) -> Iterable[Victim]:  # noqa: ARG002
        """What is released right before the op although memory may not be short, of candidates as `early` says."""
        return ()

    def companions(self, walk: Walk, op_index: int, remade: Sequence[int]) -> Sequence[int]:  # noqa: ARG002
        """Other discarded variables to make in the same re-run, the dearest first."""
        return ()

    def start(self) -> set[int] | None:
        """What starts the step in memory, if it may cross the boundary; None: as much as fits, the first used first."""
        return None


class Facts:
    """What every walk over the same trace on the same machine looks up."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self.trace = trace
        self.machine = machine
        self.pins = pins_of(trace)
        require_budget(trace, machine, self.pins)
        self.pin_ops = [[pin.op_index for pin in own] for own in self.pins]
        self.chunks = [machine.chunks_of(v.nbytes) for v in trace.variables]
        pinned = pinned_chunks(trace, machine, self.pins)
        self.peaks = zone_maxima(trace, pinned)
        self.at_start = [int(pinned[tick]) for tick in trace.op_starts]  # pinned when the op starts, and a re-run is on
        self.zones = pins_by_zone(trace, self.pins)
        self.deaths = deaths_by_zone(trace)
        self.graph = ReplayGraph(trace)
        self.made_from = _made_from(self.graph)
        self.start_ns = list(accumulate((op.duration_ns for op in trace.ops), initial=0))
        self.heirs = {
            i: v.becomes for i, v in enumerate(trace.variables) if v.becomes is not None and may_wrap(trace, i)
        }
        self.never_away = {i for i, v in enumerate(trace.variables) if not v.evictable}
        self.forced = self.never_away.intersection(self.heirs.values())
        starts = trace.op_starts
        self.last_op = [  # the last op that starts within the variable's life
            len(trace.ops) - 1 if v.death_tick is None else bisect_left(starts, v.death_tick) - 1
            for v in trace.variables
        ]


def _made_from(graph: ReplayGraph) -> list[list[int]]:
    """For each variable, those that are made by ops which read it."""
    found: list[set[int]] = [set() for _ in graph.trace.variables]
    for op, born in zip(graph.trace.ops, graph.births, strict=True):
        for use in op.uses:
            found[use.variable].update(v for v in born if v != use.variable)
    return [sorted(own) for own in found]


class Walk:
    """One pass over the ops after another, until the step ends as it starts.

    Attributes:
        recent: Resident variables, least recently used first.
        discarded: Variables alive whose bytes are nowhere.
        stored: Variables with a current copy in the store.
        banned: Variables that must not be discarded.
    """

    max_restarts = _MAX_RESTARTS

    def __init__(self, facts: Facts, advice: Advice) -> None:
        self.facts = facts
        self.trace = facts.trace
        self.advice = advice
        self.banned: set[int] = set()
        self._reset()

    def _reset(self) -> None:
        self.book = _Book(self.trace)
        self.recent: dict[int, None] = {}
        self._touched: dict[int, None] = {}  # of these, what entered since `advice.eager` last saw it
        self._held = 0  # chunks of what is resident and can be away
        self.last_used_ns: dict[int, int] = {}
        self.discarded: set[int] = set()
        self.stored = {i for i, v in enumerate(self.trace.variables) if v.birth_tick is None}
        self.known_next_uses: dict[int, int] = {}  # as of the op for which each was last asked; see `next_use`

    # -- what advice asks ----------------------------------------------------------------------

    def next_use(self, variable: int, op_index: int) -> int:
        """The first op from `op_index` on that needs the variable, counted on into the next step; far if none.

        A walk asks for ops in their order, so an answer holds until that op is past.
        """
        known = self.known_next_uses.get(variable)
        if known is None or known < op_index:
            known = self.known_next_uses[variable] = self._find_next_use(variable, op_index)
        return known

    def _find_next_use(self, variable: int, op_index: int) -> int:
        num_ops = len(self.trace.ops)
        own = self.facts.pin_ops[variable]
        position = bisect_left(own, op_index)
        if position < len(own):
            return own[position]
        heir = self.facts.heirs.get(variable)
        if heir is not None and self.facts.pin_ops[heir]:
            return num_ops + self.facts.pin_ops[heir][0]
        return 2 * num_ops

    def may_discard(self, variable: int, op_index: int) -> bool:
        """Whether the variable, released right before `op_index`, can be made again whenever it is needed."""
        v = self.trace.variables[variable]
        if v.birth_tick is None or v.death_tick is None or variable in self.banned:
            return False
        needed = self.next_use(variable, op_index)
        last = needed if needed < len(self.trace.ops) else self.facts.last_op[variable]
        return self.facts.graph.expiry(variable, op_index) >= last

    def is_available(self, variable: int) -> bool:
        """Whether the variable is in memory or in the store."""
        return variable in self.recent or variable in self.stored

    def remake_ns(self, variable: int, op_index: int) -> float:
        """Time to make the variable again right before `op_index` if it were discarded now; infinite if absurd."""

        def is_there(v: int) -> bool:
            return v != variable and self.is_available(v)

        ops = self.facts.graph.ops_for([variable], op_index, is_there, most_ops=_MOST_OPS_COMPARED)
        return float("inf") if ops is None else float(sum(self.trace.ops[op].own_ns for op in ops))

    def triangle_per_s(self, variable: int, op_index: int) -> float:
        """Melon's TPS of discarding the variable now: chunks x time until its next use / time to make it again."""
        last = min(self.next_use(variable, op_index), self.facts.last_op[variable] + 1)
        freed_ns = self.facts.start_ns[last] - self.facts.start_ns[op_index]
        return self.facts.chunks[variable] * max(freed_ns, 1) / max(self.remake_ns(variable, op_index), 1)

    # -- the walk ------------------------------------------------------------------------------

    def schedule(self, *, wrap: bool) -> tuple[Residency, ...]:
        """Residencies for the step. Raises `Stuck`."""
        for _ in range(self.max_restarts):
            try:
                return self.walk_once(wrap=wrap)
            except Stuck as stuck:
                worth = {v for v in stuck.remade if v not in self.banned}
                if not worth:
                    raise
                self.banned |= worth
        self.banned.update(range(len(self.trace.variables)))
        return self.walk_once(wrap=wrap)

    def walk_once(self, *, wrap: bool) -> tuple[Residency, ...]:
        """As `schedule`, without restarts."""
        forced = self.facts.forced
        start = (self._fitting_start() | forced) if wrap else set(forced)
        for _ in range(_MAX_ROUNDS):
            end = self._run(start)
            if start <= end:
                break
            start = (start & end) | forced
        else:
            start = set(forced)
            self._run(start)
        clean = self._unchanged() & start
        if not clean.isdisjoint(r.variable for r in self.book.residencies) and not start <= self._run(start, clean):
            self._run(start)
        return ordered(self._close(start), self.trace)

    def _unchanged(self) -> set[int]:
        """Variables that start the next step in memory with a current copy in the store: a release there is a drop."""
        heirs, dirty = self.facts.heirs, self.book.dirty
        return {heirs[v] for v in self.recent if v in heirs and v not in dirty}

    def _fitting_start(self) -> set[int]:
        """Variables that may start in memory, as many as fit beside op 0, the first to be used first."""
        facts, never = self.facts, len(self.trace.ops)
        asked = self.advice.start()
        if asked is not None:
            return asked.intersection(facts.heirs.values())
        room = facts.machine.num_chunks - (facts.peaks[0] if facts.peaks else 0)
        first = {v: own[0] if (own := facts.pin_ops[v]) else never for v in facts.heirs.values()}
        start = set()
        for v in sorted(first, key=lambda v: (first[v], v)):
            if v not in facts.zones[0] and self.trace.variables[v].evictable:
                room -= facts.chunks[v]
            if room < 0:
                break
            start.add(v)
        return start

    def _run(self, start: set[int], clean: Collection[int] = ()) -> set[int]:
        """Walk the step from `start` in memory, `clean` of it with a copy. Returns what could start the next step."""
        self._reset()
        for v in sorted(start):
            self.book.keep_from_last_step(v, dirty=v not in clean)
            self._enter(v)
            if v not in clean:
                self.stored.discard(v)
        for zone, pinned in enumerate(self.facts.zones):
            self._bring_back(zone, pinned)
            for v, pin in pinned.items():
                self._touch(v, pin, zone)
            for v in self.facts.deaths[zone]:
                self._die(v)
        return {self.facts.heirs[v] for v in self.recent if v in self.facts.heirs}

    def _enter(self, variable: int) -> None:
        """The variable is in memory from here on, and the last to be used."""
        if variable in self.recent:
            del self.recent[variable]
            self._touched.pop(variable, None)
        elif self.trace.variables[variable].evictable:
            self._held += self.facts.chunks[variable]
        self.recent[variable] = self._touched[variable] = None

    def _leave(self, variable: int) -> None:
        """The variable, which was in memory, is not any more."""
        del self.recent[variable]
        self._touched.pop(variable, None)
        if self.trace.variables[variable].evictable:
            self._held -= self.facts.chunks[variable]

    def _die(self, variable: int) -> None:
        """Freed by the program."""
        if variable in self.recent:
            self.book.die(variable)
            self._leave(variable)
        self.discarded.discard(variable)
        self.stored.discard(variable)

    def _close(self, start: set[int]) -> list[Residency]:
        """End the step as it began: keep what becomes `start`, evict the rest."""
        for v in list(self.recent):
            if self.facts.heirs.get(v) in start:
                self.book.keep_for_next_step(v)
            else:
                self.book.release(v, len(self.trace.ops))
        return self.book.residencies

    def _bring_back(self, zone: int, pinned: dict[int, Pin]) -> None:
        """Make room for an op, and have in memory what it needs."""
        lost = [v for v in pinned if v in self.discarded]
        loads = {v for v in pinned if v not in self.recent and v in self.stored and v not in self.discarded}
        rerun, kept = (self._plan_rerun(zone, lost, pinned)) if lost else (None, [])
        guarded = set(kept) - set(lost)
        if rerun is not None:
            guarded |= {v for v in rerun.sources if v not in pinned}
            loads |= {v for v in rerun.sources if v not in self.recent}
        self._make_room(zone, pinned, guarded, rerun, lost)
        for v in sorted(loads, key=lambda v: (v not in pinned, v)):
            self.book.load(v, zone)
            self._enter(v)
        for v in kept:
            assert rerun is not None
            self.book.recompute(v, zone, rerun.ops, dirty=v not in self.stored)
            self.discarded.discard(v)
            self._enter(v)

    def _plan_rerun(self, zone: int, lost: Sequence[int], pinned: dict[int, Pin]) -> tuple[Rerun, list[int]]:
        """The re-run that brings `lost` back, with as many companions as fit; and what it makes."""
        graph, machine = self.facts.graph, self.facts.machine
        ops = graph.ops_for(lost, zone, self.is_available)
        assert ops is not None, f"op {zone}: {lost} were discarded, but cannot be made again"
        kept = list(lost)
        best = graph.rerun(zone, ops, kept, machine)
        for v in self.advice.companions(self, zone, lost):
            more = graph.ops_for([*kept, v], zone, self.is_available)
            if v not in self.discarded or more is None:
                continue
            bigger = graph.rerun(zone, more, [*kept, v], machine)
            guarded = {u for u in (*bigger.sources, *kept, v) if u not in pinned}
            if self._excess(zone, pinned, guarded, bigger, beside_recent=False) <= 0:
                best, kept = bigger, [*kept, v]
        return best, kept

    def _excess(
        self, zone: int, pinned: dict[int, Pin], guarded: set[int], rerun: Rerun | None, *, beside_recent: bool
    ) -> int:
        """Chunks over budget around an op, with `guarded` in memory beside what it needs, and what is there now."""
        chunks, variables, recent = self.facts.chunks, self.trace.variables, self.recent
        need = self.facts.peaks[zone]
        if rerun is not None:
            need = max(need, self.facts.at_start[zone] + rerun.num_scratch_chunks)
        beside = [v for v in guarded if not (beside_recent and v in recent)]
        need += sum(chunks[v] for v in beside if variables[v].evictable)  # what never is away is pinned throughout
        if beside_recent:
            need += self._held - sum(chunks[v] for v in pinned if v in recent and variables[v].evictable)
        return need - self.facts.machine.num_chunks

    def _make_room(
        self, zone: int, pinned: dict[int, Pin], guarded: set[int], rerun: Rerun | None, lost: Sequence[int]
    ) -> None:
        early = self.advice.early
        if zone and early is not Early.NONE:
            among = self._touched if early is Early.TOUCHED else self.recent
            for victim in self.advice.eager(self, zone, self._candidates(pinned, guarded, among)):
                self._release(victim, zone)
            self._touched = {v: None for v in self._touched if v in pinned or v in guarded}
        excess = self._excess(zone, pinned, guarded, rerun, beside_recent=True)
        while excess > 0:
            candidates = self._candidates(pinned, guarded, self.recent)
            released = 0
            for victim in self.advice.victims(self, zone, candidates):
                self._release(victim, zone)
                released += self.facts.chunks[victim.variable]
                if released >= excess:
                    break
            if not released:
                raise Stuck(zone, self.recent, lost, num_missing_chunks=excess)
            excess -= released

    def _candidates(self, pinned: dict[int, Pin], guarded: set[int], among: Iterable[int]) -> list[int]:
        """What of `among` may be released right before an op, in its order: least recently used first."""
        kept = {*pinned, *guarded, *self.facts.never_away}
        return [v for v in among if v not in kept]

    def _release(self, victim: Victim, zone: int) -> None:
        v = victim.variable
        if victim.discard:
            self.book.discard(v, zone)
            self.discarded.add(v)
            self.stored.discard(v)
        else:
            self.book.release(v, zone)
            self.stored.add(v)
        self._leave(v)

    def _touch(self, v: int, pin: Pin, zone: int) -> None:
        self.book.use(v, pin)
        self._enter(v)
        self.last_used_ns[v] = self.facts.start_ns[zone + 1]
        if pin.writes:
            self.stored.discard(v)


class _Book(ResidencyBuilder):
    """Stays that may also begin with a re-run, and stop without a copy."""

    def recompute(self, variable: int, before_op: int, ops: tuple[int, ...], *, dirty: bool) -> None:
        """Begin with a re-run; `dirty` if the store has no current copy."""
        self._begin(variable, Recomputed(before_op, ops), dirty=dirty)
        self.last_write[variable] = before_op  # a write of these bytes cannot start earlier

    def discard(self, variable: int, release_op: int) -> None:
        """Away from `release_op` on, without a copy."""
        self._end(variable, Discarded(after_op=release_op - 1))
