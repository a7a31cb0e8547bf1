"""`dtr`: dynamic tensor rematerialisation (Kirisame et al., ICLR 2021), played ahead of time.

DTR decides online: when an allocation does not fit, it evicts the resident tensor with the least
h_DTR = cost / (size x staleness) (section 3 and appendix C.5), where the cost counts the tensor's own computation and
that of its *evicted neighbourhood*: the evicted tensors that would have to be made for it, and those that
would then need it. It does not know the future, and nothing is swapped. Evicted tensors are made again when
an op needs them, recursively.

Two things differ from a run of DTR's: the neighbourhood is worked out exactly, not by union-find (its h_DTR with
exact e*); and a tensor is only evicted if it can surely be made again when it is needed, which DTR can
take for granted because it keeps alive what is needed for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.plan import Machine, Residency
from scheduler.policies._rerun_policies import or_too_small
from scheduler.policies._walk import Advice, Facts, Victim, Walk
from scheduler.trace import Trace


def schedule(trace: Trace, machine: Machine, *, wrap: bool = True) -> tuple[Residency, ...]:
    """Evict by h_DTR, and recompute.

    Args:
        trace: The step.
        machine: The budget; rates do not matter, because nothing is swapped.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.

    Raises:
        BudgetTooSmall: Recomputation alone does not fit the budget.
    """

    def attempt(within: Machine) -> tuple[Residency, ...]:
        return propose(Facts(trace, within), wrap=wrap)

    return or_too_small(attempt, trace, machine)


def propose(facts: Facts, *, wrap: bool) -> tuple[Residency, ...]:
    """What the rule makes of the step. Raises `Stuck` where it does not fit."""
    return Walk(facts, _Heuristic()).schedule(wrap=wrap)


class _Heuristic(Advice):
    def victims(self, walk: Walk, op_index: int, candidates: Sequence[int]) -> Iterable[Victim]:
        """One victim, the one of least h_DTR: each eviction changes the neighbourhood of the others."""
        scores = [(self._score(walk, op_index, v), v) for v in candidates if walk.may_discard(v, op_index)]
        return [Victim(min(scores)[1], True)] if scores else []

    def _score(self, walk: Walk, op_index: int, variable: int) -> float:
        now_ns = walk.facts.start_ns[op_index]
        staleness = max(now_ns - walk.last_used_ns.get(variable, 0), 1)
        cost = walk.remake_ns(variable, op_index) + walk.dependents_ns(variable)
        return cost / (walk.facts.chunks[variable] * staleness)
