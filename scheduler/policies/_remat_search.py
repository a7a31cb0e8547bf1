"""The least recomputation that fits the budget, without transfers: several rules, then a climb from the best.

No rule is the best for all steps: where much fits, what is dear goes away rarely whenever it is needed; where little
does, what is needed late goes first. So several rules walk the step (`_remat_walk`). Then the worth of a few variables,
drawn at random, is changed, and the step walked again; what takes less time stays. A walk that has taken more
time than the best ends there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.budget import BudgetTooSmall
from scheduler.plan import Machine, Residency
from scheduler.policies._greedy import Stuck
from scheduler.policies._remat_walk import H_DTR, FreeingRule, RematFacts, RematWalk
from scheduler.trace import Trace

# Found on the recordings that the DTR paper's authors publish with their simulator, at 30 to 90 % of the peak: each was
# the best somewhere, the first ones in more places.
_RULES = (
    H_DTR,
    FreeingRule(neighbours=1, stale=0, ahead=0.5),
    FreeingRule(neighbours=2, stale=1, ahead=0),
    FreeingRule(neighbours=0.25, stale=0, ahead=0.25),
    FreeingRule(neighbours=2, stale=0.5, ahead=0.5),
    FreeingRule(neighbours=1, stale=0, ahead=1),
    FreeingRule(neighbours=0.1, stale=0, ahead=0),
    FreeingRule(neighbours=1, stale=0.5, ahead=0.5),
)

# Bounds on the search, in ops walked: about ten seconds of a core for a step of 8,000 ops, one for a few hundred.
_MOST_OPS_BY_RULES = 40_000
_MOST_OPS_CLIMBED = 12_000

# A long step is climbed by some walks, too: with the two that it had before, an unrolled GAN's plan stayed behind.
_FEWEST_WALKS_CLIMBED = 8
_MOST_OPS_CLIMBED_OF_LONG = 40_000

# So many of the best rules are climbed from, and every so many tries one of them instead of the best so far.
_MOST_BASES = 3
_TURN = 3

# Shares of the variables whose worth is changed at once, one after another.
_SHARES = (0.01, 0.03, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A walk that fitted.

    Attributes:
        rule, weights: What it went by.
        spent_ns: Time of its re-runs.
        times_rerun: By op, how often it is run again.
    """

    rule: FreeingRule
    weights: Mapping[int, float] = field(default_factory=dict)
    spent_ns: int
    times_rerun: Mapping[int, int]
    proposal: tuple[Residency, ...]


def fewest_reruns(
    trace: Trace, machine: Machine, *, wrap: bool, limit_ns: int | None = None, climbs: bool = True
) -> list[tuple[Residency, ...]]:
    """Proposals that only recompute, the one of least time first, then h_DTR's own; none if nothing was found.

    Args:
        trace, machine, wrap: As of `RematWalk`.
        limit_ns: What takes more re-runs than this is of no use to the caller.
        climbs: Whether weights are searched, too, which takes three times as long as all the rules.
    """
    try:
        search = _Search(RematFacts(trace, machine), wrap=wrap, limit_ns=limit_ns)
    except BudgetTooSmall:
        return []
    search.try_rules()
    if climbs:
        search.climb()
    found = sorted(search.found, key=lambda found: found.spent_ns)[:1]
    found.extend(own for own in search.found if own.rule is H_DTR and own not in found and not own.weights)
    return [own.proposal for own in found]


class _Search:
    """What was found so far."""

    def __init__(self, facts: RematFacts, *, wrap: bool, limit_ns: int | None = None) -> None:
        self.facts = facts
        self.wrap = wrap
        self.limit_ns = limit_ns
        self.found: list[_Found] = []
        self.num_ops_walked = 0
        graph = facts.graph
        self.movable = [v for v in range(len(facts.trace.variables)) if graph.may_ever_return(v)]

    @property
    def best(self) -> _Found | None:
        """The one that takes the least time."""
        return min(self.found, key=lambda found: found.spent_ns, default=None)

    def try_rules(self) -> None:
        """All of them, as far as there is time; where none fits, again with restarts."""
        stuck = []
        for rule in _RULES:
            if self.num_ops_walked >= _MOST_OPS_BY_RULES:
                break
            walk = self._walk(rule, {})
            if self.limit_ns is None or walk.spent_ns <= walk.limit_ns:
                stuck.append(rule)
        for rule in stuck if not self.found else ():
            walk = RematWalk(self.facts, rule, limit_ns=self.limit_ns)
            try:
                proposal = walk.schedule(wrap=self.wrap)
            except Stuck:
                continue
            self._note(walk, {}, proposal)
            break

    def climb(self) -> None:
        """Change weights, and keep what takes less time."""
        rng = random.Random(0)
        bases = sorted(self.found, key=lambda found: found.spent_ns)[:_MOST_BASES]
        num_ops = min(_FEWEST_WALKS_CLIMBED * len(self.facts.trace.ops), _MOST_OPS_CLIMBED_OF_LONG)
        until = self.num_ops_walked + max(num_ops, _MOST_OPS_CLIMBED)
        turn = 0
        while (best := self.best) is not None and best.spent_ns and self.num_ops_walked < until:
            turn += 1
            base = best if turn % _TURN else rng.choice(bases)
            weights = dict(base.weights)
            share = _SHARES[turn % len(_SHARES)]
            if turn % 2:  # what is made again
                made = [v for op in base.times_rerun for v in self.facts.graph.births[op]]
                for v in rng.sample(made, math.ceil(len(made) * 2 * share)):
                    weights[v] = weights.get(v, 1.0) * rng.choice((0.5, 2.0, 4.0))
            else:
                for v in rng.sample(self.movable, math.ceil(len(self.movable) * share)):
                    weights[v] = weights.get(v, 1.0) * math.exp(rng.gauss(0, 1))
            self._walk(base.rule, weights, limit_ns=best.spent_ns - 1)

    def _walk(self, rule: FreeingRule, weights: Mapping[int, float], limit_ns: int | None = None) -> RematWalk:
        """Walk the step, and note what comes of it."""
        walk = RematWalk(self.facts, rule, weights, limit_ns=self.limit_ns if limit_ns is None else limit_ns)
        try:
            proposal = walk.walk_once(wrap=self.wrap)
        except Stuck as stuck:
            self.num_ops_walked += stuck.op_index + 1
        else:
            self.num_ops_walked += len(self.facts.trace.ops)
            self._note(walk, weights, proposal)
        return walk

    def _note(self, walk: RematWalk, weights: Mapping[int, float], proposal: tuple[Residency, ...]) -> None:
        self.found.append(
            _Found(
                rule=walk.rule,
                weights=weights,
                spent_ns=walk.spent_ns,
                times_rerun=walk.times_rerun,
                proposal=proposal,
            )
        )
