"""The walk of a policy that only recomputes: what a re-run makes on its way stays, as long as there is room.

`_walk.Walk` brings back what an op needs and throws away what it made for that. In a backward pass, which needs a
chain's results one after another, each is then made from the chain's start: n results take n * n / 2 ops. Here
all results of a re-run compete for memory with what is there, by one score, and the least of all go.

That holds for what the program has freed, too: several variables may have to be made from it. Such a variable is
kept as a **ghost** (`scheduler.plan.Recomputed`) while something that is away is made from it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.budget import Pin
from scheduler.plan import Machine
from scheduler.policies._greedy import Advice, Facts, Stuck, Victim, Walk
from scheduler.reruns import Rerun
from scheduler.trace import Trace

# Re-runs of more than so many times the step's own time are no plan; the published simulator's limit.
_MOST_OVERHEAD = 2

# A ghost that nothing needs any more goes before all else.
NO_WORTH = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeingRule:
    """How a variable's worth is counted: time to make it again / (chunks x idle time x time until it is needed).

    Attributes:
        neighbours: How much of the time of its discarded neighbours is added to its own, from 0 on.
        stale: Exponent of the time since its last use.
        ahead: Exponent of the time until its next use, which a run that happens cannot know.
    """

    neighbours: float
    stale: float
    ahead: float


# Dynamic tensor rematerialisation's own rule, h_DTR.
H_DTR = FreeingRule(neighbours=1.0, stale=1.0, ahead=0.0)


class Neighbourhoods:
    """What is away, joined with what it is made from and what is made from it: classes by union-find, and their time.

    The approximation e~* of DTR's appendix C.2: a variable that comes back takes its own time from its class,
    which is not split.
    """

    def __init__(self, near: Sequence[Sequence[int]], own_ns: Sequence[int]) -> None:
        self.near = near
        self.own_ns = own_ns
        self.node: dict[int, int] = {}  # a variable that is away -> its place in what follows
        self._parent: list[int] = []
        self._sum_ns: list[int] = []

    def __contains__(self, variable: int) -> bool:
        return variable in self.node

    def join(self, variable: int) -> None:
        """The variable goes away."""
        node = len(self._parent)
        self._parent.append(node)
        self._sum_ns.append(self.own_ns[variable])
        self.node[variable] = node
        for other in self.near[variable]:
            if other in self.node:
                first, second = self._root(self.node[other]), self._root(node)
                if first != second:
                    self._parent[second] = first
                    self._sum_ns[first] += self._sum_ns[second]

    def leave(self, variable: int) -> None:
        """The variable is back."""
        node = self.node.pop(variable, None)
        if node is not None:
            self._sum_ns[self._root(node)] -= self.own_ns[variable]

    def around_ns(self, variable: int) -> int:
        """Time of all classes next to the variable."""
        node, parent = self.node, self._parent
        first, more = -1, None
        for other in self.near[variable]:
            own = node.get(other)
            if own is None:
                continue
            while parent[own] != own:
                parent[own] = own = parent[parent[own]]
            if first < 0:
                first = own
            elif own != first:
                more = {own} if more is None else more
                more.add(own)
        if first < 0:
            return 0
        found = self._sum_ns[first]
        return found if more is None else found + sum(self._sum_ns[root] for root in more)

    def _root(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node


@dataclass(slots=True, kw_only=True)
class _Return:
    """What is brought back before an op, while it is decided.

    Attributes:
        lost: What the op needs and nobody has.
        rerun: The re-run that makes it, and keeps it and `extras`; None: none is needed.
        extras: What else it makes and would keep.
        guarded: What it reads from the pool and the op does not need.
        refused: What is not to be kept, or to be had as a source.
    """

    lost: list[int]
    rerun: Rerun | None = None
    extras: set[int] = field(default_factory=set)
    guarded: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)

    @property
    def sources(self) -> tuple[int, ...]:
        return self.rerun.sources if self.rerun is not None else ()


class RematFacts(Facts):
    """What every walk of this kind looks up.

    Attributes:
        own_ns: For each variable, the time of the ops that write it.
        near: For each variable, those that it is made from or that are made from it, where an op makes them.
    """

    def __init__(self, trace: Trace, machine: Machine) -> None:
        super().__init__(trace, machine)
        graph, ops = self.graph, trace.ops
        for v, made in enumerate(self.made_from):  # results of one op are not made from each other
            self.made_from[v] = [u for u in made if graph.maker[u] != graph.maker[v]]
        self.own_ns = [sum(ops[op].own_ns + machine.rerun_op_ns for op in own) for own in graph.writers]
        parents = [
            {use.variable for op in own for use in ops[op].uses if graph.maker[use.variable] not in (None, op)} - {v}
            for v, own in enumerate(graph.writers)
        ]
        self.near = [sorted(own.union(self.made_from[v])) for v, own in enumerate(parents)]
        self.evictable = [v.evictable for v in trace.variables]


class RematWalk(Walk):
    """A walk by one rule.

    Args:
        rule: The worth of a variable.
        weights: Factors of it, by variable; 1 for all others.
        limit_ns: The walk is `Stuck` when its re-runs take more; None: twice the step's own time.

    Attributes:
        times_rerun: By op, how often it is run again.
        spent_ns: Time of all re-runs so far.
        ghosts: Freed by the program; those in `recent` are kept for re-runs to read.
    """

    facts: RematFacts
    max_restarts = 12

    def __init__(
        self,
        facts: RematFacts,
        rule: FreeingRule,
        weights: Mapping[int, float] | None = None,
        *,
        limit_ns: int | None = None,
    ) -> None:
        self.rule = rule
        self.weights = weights or {}
        most_ns = _MOST_OVERHEAD * facts.start_ns[-1]
        self.limit_ns = most_ns if limit_ns is None else min(limit_ns, most_ns)
        super().__init__(facts, Advice())

    def _reset(self) -> None:
        super()._reset()
        self.away = Neighbourhoods(self.facts.near, self.facts.own_ns)
        self.ghosts: set[int] = set()
        self.times_rerun: dict[int, int] = {}
        self.spent_ns = 0
        self._needs: dict[int, int] = {}  # ghosts' next needs, as of the present op
        self._may_go: dict[int, bool] = {}  # whether each may be discarded, as of its last use
        self._next: dict[int, int] = {}  # its next use, likewise
        self._cost_ns: dict[int, float] = {}  # what it takes to make each again, with its neighbours, or less

    # -- what is worth how much ----------------------------------------------------------------

    def next_use(self, variable: int, op_index: int) -> int:
        """As of every walk; of a ghost, the next use of what is made from it."""
        if variable not in self.ghosts:
            known = self._next.get(variable)
            if known is None or known < op_index:
                known = self._next[variable] = super().next_use(variable, op_index)
            return known
        return self._next_need(variable, op_index, (), self._needs)

    def _next_need(self, ghost: int, op_index: int, back: Collection[int], known: dict[int, int]) -> int:
        """The next use of anything away (and not about to be `back`) that is made from the ghost; far if none.

        `known` gets the answers for all that is looked at on the way.
        """
        waiting = [ghost]
        while waiting:
            v = waiting[-1]
            made = [u for u in self.facts.made_from[v] if u in self.away and u not in back] if v not in known else []
            missing = [u for u in made if u not in known]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if v not in known:
                needs = [known[u] for u in made]
                needs += [super(RematWalk, self).next_use(u, op_index) for u in made if u in self.discarded]
                known[v] = min(needs, default=2 * len(self.trace.ops))
        return known[ghost]

    def may_discard(self, variable: int, op_index: int) -> bool:
        """As of every walk; nothing depends on a ghost.

        The answer holds from one use of the variable to the next, and is asked for at each op between them.
        """
        if variable in self.ghosts:
            return True
        known = self._may_go.get(variable)
        if known is None:
            known = self._may_go[variable] = super().may_discard(variable, op_index)
        return known

    def _releasable(self, zone: int, pinned: Collection[int], guarded: Collection[int]) -> list[int]:
        """What may be discarded right before an op, least recently used first."""
        may_go, evictable = self._may_go, self.facts.evictable
        found = []
        for v in self.recent:
            if v in pinned or v in guarded or not evictable[v]:
                continue
            known = may_go.get(v)
            if known or (known is None and self.may_discard(v, zone)) or v in self.ghosts:
                found.append(v)
        return found

    def _worths(self, variables: Iterable[int], op_index: int) -> list[tuple[float, int]]:
        """At least how much it is worth to keep each of these, and which it is.

        The time of the neighbours is what it was when `_worth` last looked at it, or nothing: it takes more than all
        else to find out, and most variables are worth too much already.
        """
        rule, facts, num_ops = self.rule, self.facts, len(self.trace.ops)
        stale, ahead = rule.stale, rule.ahead
        start_ns, own_ns, chunks, ghosts = facts.start_ns, facts.own_ns, facts.chunks, self.ghosts
        weights, last_used_ns, cost_ns = self.weights, self.last_used_ns, self._cost_ns
        here_ns, now_ns = start_ns[op_index], start_ns[op_index] + self.spent_ns
        found = []
        for v in variables:
            needed = self.next_use(v, op_index) if ahead or v in ghosts else 0
            if needed >= num_ops and v in ghosts:
                found.append((NO_WORTH, v))
                continue
            cost = cost_ns.get(v)
            worth = (own_ns[v] + 1.0 if cost is None else cost) * weights.get(v, 1.0) / chunks[v]
            if stale:
                idle_ns = now_ns - last_used_ns.get(v, 0)
                worth /= float(idle_ns if idle_ns > 1 else 1) ** stale
            if ahead:
                ahead_ns = start_ns[needed if needed < num_ops else num_ops] - here_ns
                worth /= float(ahead_ns if ahead_ns > 1 else 1) ** ahead
            found.append((worth, v))
        return found

    def _worth(self, variable: int, op_index: int) -> float:
        """How much it is worth to keep a variable, by the rule."""
        if self.rule.neighbours:
            around_ns = self.rule.neighbours * self.away.around_ns(variable)
            self._cost_ns[variable] = self.facts.own_ns[variable] + 1.0 + around_ns
        return self._worths((variable,), op_index)[0][0]

    # -- the walk ------------------------------------------------------------------------------

    def _run(self, start: set[int], clean: Collection[int] = ()) -> set[int]:
        end = super()._run(start, clean)
        for v in [v for v in self.recent if v in self.ghosts]:
            self._release(Victim(v, True), len(self.trace.ops))
        return end

    def _die(self, variable: int) -> None:
        if variable not in self.away and self.facts.graph.may_ever_return(variable):
            self.away.join(variable)
        super()._die(variable)
        self.ghosts.add(variable)

    def _release(self, victim: Victim, zone: int) -> None:
        super()._release(victim, zone)
        if victim.discard:
            self.away.join(victim.variable)
        if victim.variable in self.ghosts:
            self.discarded.discard(victim.variable)

    def _touch(self, v: int, pin: Pin, zone: int) -> None:
        super()._touch(v, pin, zone)
        self.last_used_ns[v] = self.facts.start_ns[zone + 1] + self.spent_ns
        self._may_go.pop(v, None)
        self._next.pop(v, None)

    def _bring_back(self, zone: int, pinned: dict[int, Pin]) -> None:
        self._needs.clear()
        back = _Return(lost=[v for v in pinned if v in self.discarded])
        if back.lost:
            self._plan_return(zone, pinned, back)
        while (excess := self._excess_of(zone, pinned, back)) > 0:
            if not self._free(zone, pinned, back, excess):
                self._give_up_source(zone, pinned, back)
        loads = {v for v in pinned if v not in self.recent and v in self.stored and v not in self.discarded}
        loads.update(v for v in back.sources if v not in self.recent)
        for v in sorted(loads, key=lambda v: (v not in pinned, v)):
            self.book.load(v, zone)
            self._enter(v)
        if back.rerun is not None:
            self._bring(zone, back.rerun)
            if self.spent_ns > self.limit_ns:
                raise Stuck(zone, self.recent, back.lost)

    def _bring(self, zone: int, rerun: Rerun) -> None:
        """Note a re-run and what it makes; the first of that lists all ops, the others their own."""
        self.spent_ns += rerun.duration_ns
        for op in rerun.ops:
            self.times_rerun[op] = self.times_rerun.get(op, 0) + 1
        own_ops = rerun.ops
        for position, v in enumerate(rerun.made):
            if position:
                own_ops = tuple(op for op in self.facts.graph.writers[v] if op < zone)
            self.book.recompute(v, zone, own_ops, dirty=v not in self.stored)
            self.discarded.discard(v)
            self.away.leave(v)
            self._enter(v)
        self._cost_ns.clear()  # some have fewer neighbours away now
        now_ns = self.facts.start_ns[zone] + self.spent_ns
        for v in (*rerun.made, *rerun.sources):
            self.last_used_ns[v] = now_ns

    def _plan_return(self, zone: int, pinned: dict[int, Pin], back: _Return) -> None:
        """The re-run that makes what is lost, and whatever it could keep."""
        graph, num_ops = self.facts.graph, len(self.trace.ops)
        ops = graph.ops_for(back.lost, zone, self.is_available)
        assert ops is not None, f"op {zone}: {back.lost} were discarded, but cannot be made again"
        run = set(ops)
        made = [v for op in ops for v in graph.births[op] if v not in back.refused and v not in back.lost]
        made = [v for v in made if all(op in run or op >= zone for op in graph.writers[v])]
        back.extras = {v for v in made if v in self.discarded and self.next_use(v, zone) < num_ops}
        will_be_back, known = back.extras.union(back.lost), dict[int, int]()
        for v in made:
            if v in self.ghosts and v not in self.recent and self._next_need(v, zone, will_be_back, known) < num_ops:
                back.extras.add(v)
        for v in back.extras:
            self.last_used_ns[v] = self.facts.start_ns[zone] + self.spent_ns
        self._set_rerun(zone, pinned, back, ops)

    def _set_rerun(self, zone: int, pinned: dict[int, Pin], back: _Return, ops: Sequence[int]) -> None:
        back.rerun = self.facts.graph.rerun(zone, ops, [*back.lost, *back.extras], self.facts.machine)
        back.guarded = {v for v in back.rerun.sources if v not in pinned}

    def _excess_of(self, zone: int, pinned: dict[int, Pin], back: _Return) -> int:
        """Chunks over budget around an op, with all that is resident, and all that is brought back."""
        chunks, variables = self.facts.chunks, self.trace.variables
        need = self.facts.peaks[zone]
        if back.rerun is not None:
            need = max(need, self.facts.at_start[zone] + back.rerun.num_scratch_chunks)
        beside = self._held - sum(chunks[v] for v in pinned if v in self.recent and variables[v].evictable)
        beside += sum(chunks[v] for v in back.extras)
        beside += sum(chunks[v] for v in back.guarded if v not in self.recent and variables[v].evictable)
        return need + beside - self.facts.machine.num_chunks

    def _free(self, zone: int, pinned: dict[int, Pin], back: _Return, excess: int) -> bool:
        """Release, or do not keep, what is worth least, until that should do; False if there is nothing."""
        heap = self._worths((*self._releasable(zone, pinned, back.guarded), *sorted(back.extras)), zone)
        heapq.heapify(heap)
        freed, num_extras = 0, len(back.extras)
        while heap and freed < excess:
            worth, v = heap[0]
            now = self._worth(v, zone)
            if now > worth:  # its neighbours count, too, or something next to it went
                heapq.heapreplace(heap, (now, v))
                continue
            heapq.heappop(heap)
            freed += self.facts.chunks[v]
            if v in back.extras:
                back.extras.discard(v)
                back.refused.add(v)
            else:
                self._release(self._victim(v, zone), zone)
        if len(back.extras) != num_extras and back.rerun is not None:
            self._set_rerun(zone, pinned, back, back.rerun.ops)
        return freed > 0

    def _victim(self, variable: int, zone: int) -> Victim:  # noqa: ARG002
        """How a variable goes that is worth least."""
        return Victim(variable, True)

    def _give_up_source(self, zone: int, pinned: dict[int, Pin], back: _Return) -> None:
        """Nothing is left beside what the re-run reads: make some of that again, too. Raises `Stuck`."""
        sources = [v for v in back.guarded if v in self.recent and self.trace.variables[v].evictable]
        sources = [v for v in sources if self.may_discard(v, zone)]
        if not sources:
            excess = self._excess_of(zone, pinned, back)
            raise Stuck(zone, self.recent, back.lost, num_missing_chunks=excess)
        least = min(sources, key=lambda v: (self._worth(v, zone), v))
        self._release(Victim(least, True), zone)
        back.refused.add(least)
        self._plan_return(zone, pinned, back)
