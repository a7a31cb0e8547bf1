"""Paging and re-runs in one walk: whichever is cheaper for what goes, where neither alone is enough.

What only recomputes fails where parameters and gradients alone are more than the budget; what begins with a plan that
only moves bytes, and exchanges gap by gap (`_recompute`), keeps that plan's choice of gaps, which is another one than
it would be if most of memory were had by re-runs. So this walk (`_remat_walk`) may also write out what goes. What the
transfers of a variable cost depends on how busy the links are, which a walk cannot know. So several prices are tried,
with several rules, and the simulation says which was right.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.budget import BudgetTooSmall
from scheduler.cost.evaluate import estimate
from scheduler.plan import Machine, Residency
from scheduler.policies._greedy import Stuck, Victim
from scheduler.policies._remat_walk import NO_WORTH, FreeingRule, RematFacts, RematWalk
from scheduler.policies._slack import use_slack
from scheduler.residency_builder import with_last_copies
from scheduler.trace import Trace

# Found on recorded steps of a conv stack, MobileNetV2, ResNet-50 and an encoder at a half and a third of their peaks,
# with a store of 100 MB/s: each was the best somewhere. Prices are shares of the time that transfers take.
_RULES = (
    FreeingRule(neighbours=0.25, stale=0, ahead=1),
    FreeingRule(neighbours=1, stale=0, ahead=1),
    FreeingRule(neighbours=0, stale=0, ahead=1),
    FreeingRule(neighbours=1, stale=0, ahead=0.5),
    FreeingRule(neighbours=1, stale=0.5, ahead=0.5),
)
_PRICES = (1.0, 10.0, 0.3, 0.1)

# Below this share of the step, what is lost is not worth such walks: a second or two.
MUCH_STALL = 0.02

# Bounds on the search, in ops walked, and in walks.
_MOST_OPS_WALKED = 40_000
_MOST_WALKS = 50

# Shares of the variables whose worth is changed at once when climbing.
_SHARES = (0.02, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A walk that fitted, and what its transfers were taken to cost.

    Attributes:
        duration_ns: Of the step, simulated without chunks.
    """

    rule: FreeingRule
    price: float
    weights: Mapping[int, float] = field(default_factory=dict)
    duration_ns: int
    proposal: tuple[Residency, ...]


def mixed(
    trace: Trace, machine: Machine, *, wrap: bool, most: int = 3, climbs: bool = True
) -> list[tuple[Residency, ...]]:
    """The fastest proposals found, at most so many, by simulation without chunks; none if no walk fitted.

    With `climbs` the best is improved on by trial, which takes as long again, and more.
    """
    try:
        facts = RematFacts(trace, machine)
    except BudgetTooSmall:
        return []
    search = _Search(facts, wrap=wrap)
    search.try_all()
    if climbs:
        search.climb()
    return [own.proposal for own in sorted(search.found, key=lambda own: own.duration_ns)[:most]]


class _Search:
    """What was found so far."""

    def __init__(self, facts: RematFacts, *, wrap: bool) -> None:
        self.facts = facts
        self.wrap = wrap
        self.found: list[_Found] = []
        self.most_walks = min(max(_MOST_OPS_WALKED // max(len(facts.trace.ops), 1), 2), _MOST_WALKS)
        self.evictable = [i for i, v in enumerate(facts.trace.variables) if v.evictable]

    def try_all(self) -> None:
        """Each rule at each price, as far as there is time."""
        for price in _PRICES:
            for rule in _RULES:
                if self.most_walks:
                    self._walk(rule, price, {})

    def climb(self) -> None:
        """Change the worth of a few variables, drawn at random; what takes less time stays."""
        rng = random.Random(0)
        while self.found and self.most_walks:
            best = min(self.found, key=lambda own: own.duration_ns)
            weights = dict(best.weights)
            share = _SHARES[self.most_walks % len(_SHARES)]
            for v in rng.sample(self.evictable, math.ceil(len(self.evictable) * share)):
                weights[v] = weights.get(v, 1.0) * math.exp(rng.gauss(0, 1))
            self._walk(best.rule, best.price, weights)

    def _walk(self, rule: FreeingRule, price: float, weights: Mapping[int, float]) -> None:
        self.most_walks -= 1
        trace, machine = self.facts.trace, self.facts.machine
        try:
            proposal = MixedWalk(self.facts, rule, weights, price=price).walk_once(wrap=self.wrap)
        except Stuck:
            return
        proposal = use_slack(with_last_copies(proposal, trace), trace, machine)
        duration_ns = estimate(proposal, trace, machine).duration_ns
        self.found.append(_Found(rule=rule, price=price, weights=weights, duration_ns=duration_ns, proposal=proposal))


class MixedWalk(RematWalk):
    """A walk that discards or writes out, whichever costs less.

    Args:
        price: Of transfers: the share of their time that counts.
    """

    def __init__(
        self, facts: RematFacts, rule: FreeingRule, weights: Mapping[int, float] | None = None, *, price: float
    ) -> None:
        machine = facts.machine
        nbytes = [v.nbytes for v in facts.trace.variables]
        self._load_ns = [price * (machine.latency_ns + n / machine.load_bytes_per_s * 1e9) for n in nbytes]
        self._write_ns = [price * (machine.latency_ns + n / machine.evict_bytes_per_s * 1e9) for n in nbytes]
        super().__init__(facts, rule, weights)

    def _releasable(self, zone: int, pinned: Collection[int], guarded: Collection[int]) -> list[int]:  # noqa: ARG002
        evictable = self.facts.evictable
        return [v for v in self.recent if v not in pinned and v not in guarded and evictable[v]]

    def _worths(self, variables: Iterable[int], op_index: int) -> list[tuple[float, int]]:
        rule, facts, num_ops = self.rule, self.facts, len(self.trace.ops)
        here_ns, step_ns = facts.start_ns[op_index], facts.start_ns[-1]
        found = []
        for v in variables:
            needed = self.next_use(v, op_index)
            if needed >= num_ops and v in self.ghosts:
                found.append((NO_WORTH, v))
                continue
            worth = self._cheaper(v, op_index)[0] * self.weights.get(v, 1.0) / facts.chunks[v]
            if rule.stale:
                worth /= float(max(here_ns + self.spent_ns - self.last_used_ns.get(v, 0), 1)) ** rule.stale
            if rule.ahead:
                steps, op = divmod(min(needed, 2 * num_ops), num_ops)
                worth /= float(max(facts.start_ns[op] + steps * step_ns - here_ns, 1)) ** rule.ahead
            found.append((worth, v))
        return found

    def _victim(self, variable: int, zone: int) -> Victim:
        return Victim(variable, self._cheaper(variable, zone)[1])

    def _cheaper(self, variable: int, zone: int) -> tuple[float, bool]:
        """What it costs to be without the variable until its next use, and whether that is by a re-run."""
        is_ghost = variable in self.ghosts
        if is_ghost or self.may_discard(variable, zone):
            remake_ns = self._cost_ns.get(variable, self.facts.own_ns[variable] + 1.0)
            if is_ghost:
                return remake_ns, True
        else:
            remake_ns = math.inf
        page_ns = 0.0 if variable in self.stored else self._write_ns[variable]
        if self.next_use(variable, zone) < 2 * len(self.trace.ops):
            page_ns += self._load_ns[variable]
        return (remake_ns, True) if remake_ns <= page_ns else (page_ns, False)
