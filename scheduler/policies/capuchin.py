"""`capuchin`: swap first by free time, then recompute by memory saving per second (Peng et al., ASPLOS 2020).

From a measured step Capuchin knows when each tensor is accessed. A pair of accesses leaves a tensor *free time*: what
is left of the time between them after writing it out and loading it again (section 4.3). Where memory is over
budget, tensors are swapped in order of free time, the longest first, as long as it is not negative and
the links are not full. What is still over budget is decided one by one (section 4.4): the best tensor to
swap costs the time that its transfers would show, the best one to recompute is that of largest
MSPS = memory saving / recomputation time, and whichever costs less is taken. Each choice changes the recomputation
times of the others, which are worked out anew.

Loads are issued ahead as far as memory allows (the paper's in-trigger). What the choices leave over budget at run
time is swapped, the furthest next use first, as Capuchin's passive mode does.
"""

from __future__ import annotations

import numpy as np

from scheduler.budget import IntArray
from scheduler.chains import Gap, chains_of
from scheduler.plan import Machine, Residency
from scheduler.policies._greedy import Advice, Facts, Walk
from scheduler.policies._rerun_policies import AsChosen, or_too_small
from scheduler.policies._slack import use_slack
from scheduler.selection import Selection
from scheduler.trace import Trace

# A recomputation that takes more ops than this is never the cheapest way.
_MOST_OPS = 128


def schedule(
    trace: Trace,
    machine: Machine,
    *,
    wrap: bool = True,
    recompute: bool = True,
    search_smallest: bool = True,
) -> tuple[Residency, ...]:
    """Swap what hides, then swap or recompute what costs least.

    Args:
        trace: The step.
        machine: Budget and rates.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        recompute: Whether ops may be run again; if not, all that does not fit is swapped.
        search_smallest: Whether a refusal names a budget that works, which takes up to 20 attempts.

    Raises:
        BudgetTooSmall: An op needs more at once than the budget.
    """

    def attempt(within: Machine) -> tuple[Residency, ...]:
        return propose(Facts(trace, within), wrap=wrap, recompute=recompute)

    return or_too_small(attempt, trace, machine, search_smallest=search_smallest)


def propose(facts: Facts, *, wrap: bool, recompute: bool) -> tuple[Residency, ...]:
    """What the rule makes of the step. Raises `Stuck` where it does not fit."""
    if not facts.trace.ops:
        return Walk(facts, Advice()).schedule(wrap=wrap)
    choices = _Choices(facts, wrap=wrap, recompute=recompute)
    choices.choose()
    proposal = Walk(facts, AsChosen(choices.discarded, choices.swapped)).schedule(wrap=wrap)
    return use_slack(proposal, facts.trace, facts.machine)


class _Choices:
    """Which gaps are swapped and which are recomputed.

    Attributes:
        swapped, discarded: `(variable, op of its next use)` of each; ops of the next step count on.
    """

    def __init__(self, facts: Facts, *, wrap: bool, recompute: bool) -> None:
        self.facts = facts
        self.recompute = recompute
        self.machine = facts.machine
        self.chains = chains_of(facts.trace, facts.machine, wrap=wrap)
        self.selection = Selection(facts.trace, self.chains)
        self.swapped: set[tuple[int, int]] = set()
        self.discarded: set[tuple[int, int]] = set()
        self.link_ns = [0.0, 0.0]  # in, out
        self._recomputed: dict[int, list[tuple[int, int]]] = {}  # variable -> ticks without it
        self._free = np.array([self._free_ns(gap) for gap in self.selection.gaps])  # of each gap, nanoseconds

    def choose(self) -> None:
        """Choose until no tick holds more than the budget."""
        selection = self.selection
        num_ticks = self.facts.trace.num_ticks
        while True:
            over = selection.occupancy.held - self.machine.num_chunks
            tick = int(over.argmax())
            if over[tick] <= 0:
                return
            covers = (selection.start <= tick) & (tick < selection.stop)
            covers |= (selection.start <= tick + num_ticks) & (tick + num_ticks < selection.stop)
            candidates = np.flatnonzero(covers & ~selection.chosen)
            if not len(candidates):
                return  # what is pinned there; the walk deals with it
            self._choose_one(candidates)

    def _choose_one(self, candidates: IntArray) -> None:
        gaps = self.selection.gaps
        to_swap = int(candidates[self._free[candidates].argmax()])  # of equals the first
        free_ns, has_room = float(self._free[to_swap]), self._links_have_room(gaps[to_swap])
        if not self.recompute or (free_ns >= 0 and has_room):
            self._take(to_swap, discard=False)
            return
        remakes = [
            (gaps[i].num_chunks / max(ns, 1.0), -i, ns) for i in candidates.tolist() if (ns := self._remake_ns(gaps[i]))
        ]
        _, to_remake, remake_ns = max(remakes, default=(0.0, 0, float("inf")))
        shown_ns = max(-free_ns, 0.0) if has_room else self._transfer_ns(gaps[to_swap])
        if remake_ns < shown_ns:
            self._take(-to_remake, discard=True)
        else:
            self._take(to_swap, discard=False)

    def _take(self, index: int, *, discard: bool) -> None:
        selection, gap = self.selection, self.selection.gaps[index]
        selection.chosen[index] = True
        selection.occupancy.add(gap.start_tick, gap.stop_tick, -gap.num_chunks)
        variable = self.chains[gap.chain].variable
        key = variable, gap.latest_load if gap.latest_load is not None else 2 * len(self.facts.trace.ops)
        if discard:
            self.discarded.add(key)
            self._recomputed.setdefault(variable, []).append((gap.start_tick, gap.stop_tick))
            return
        self.swapped.add(key)
        self.link_ns[0] += self._load_ns(gap)
        self.link_ns[1] += self._evict_ns(gap)

    def _links_have_room(self, gap: Gap) -> bool:
        total = self.facts.start_ns[-1]
        return self.link_ns[0] + self._load_ns(gap) <= total and self.link_ns[1] + self._evict_ns(gap) <= total

    def _free_ns(self, gap: Gap) -> float:
        """What is left of the gap beside its transfers; a gap without a next use only needs writing."""
        if gap.latest_load is None:
            return float(self.facts.start_ns[-1])
        return self._at_ns(gap.latest_load) - self._at_ns(gap.earliest_release) - self._transfer_ns(gap)

    def _at_ns(self, position: int) -> int:
        step, op = divmod(position, len(self.facts.trace.ops))
        return self.facts.start_ns[op] + step * self.facts.start_ns[-1]

    def _load_ns(self, gap: Gap) -> float:
        if gap.latest_load is None:
            return 0.0
        return self.machine.latency_ns + gap.nbytes / self.machine.load_bytes_per_s * 1e9

    def _evict_ns(self, gap: Gap) -> float:
        return self.machine.latency_ns + gap.nbytes / self.machine.evict_bytes_per_s * 1e9

    def _transfer_ns(self, gap: Gap) -> float:
        return self._load_ns(gap) + self._evict_ns(gap)

    def _remake_ns(self, gap: Gap) -> float:
        """Time to make the gap's bytes again, with what else is recomputed at that op; 0 if it cannot be done."""
        trace, graph = self.facts.trace, self.facts.graph
        variable, need = self.chains[gap.chain].variable, gap.latest_load
        v = trace.variables[variable]
        if need is None or need >= len(trace.ops) or v.birth_tick is None or v.death_tick is None:
            return 0.0
        if graph.expiry(variable, need) < need:
            return 0.0
        tick = trace.ops[need].start_tick

        def is_there(u: int) -> bool:
            start, stop = trace.lifetime(u)
            gone = u == variable or any(first <= tick < last for first, last in self._recomputed.get(u, ()))
            return start <= tick < stop and not gone

        ops = graph.ops_for([variable], need, is_there, most_ops=_MOST_OPS)
        return 0.0 if ops is None else float(max(sum(trace.ops[op].own_ns for op in ops), 1))
