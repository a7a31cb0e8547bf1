"""`melon`: progressive recomputation by triangle per second (Melon, MobiSys 2022, section 4.3 and Algorithm 1).

When memory is short, the tensor with the largest TPS = size x freed lifetime / recomputation time goes; the freed
lifetime lasts from now to its next use, the recomputation time counts the sources that are gone as well. Inputs of
the op at hand are never discarded. After each eviction the values are worked out anew (the
paper's calibration), because a discarded source makes what depends on it dearer. A tensor that is needed
and gone is made again with all of its missing sources, recursively; they are discarded again right after, unless
the op at hand needs them. Nothing is swapped.

As printed, line 9 of Algorithm 1 adds T to the allocated set where it must remove it, and line 13 tests the
op's outputs where it must test its inputs. The lifetime-aware memory pool is
`scheduler.placement.greedy.melon`; here chunks make placement exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.plan import Machine, Residency
from scheduler.policies._greedy import Advice, Facts, Victim, Walk
from scheduler.policies._rerun_policies import or_too_small
from scheduler.trace import Trace


def schedule(
    trace: Trace,
    machine: Machine,
    *,
    wrap: bool = True,
    search_smallest: bool = True,
) -> tuple[Residency, ...]:
    """Discard by TPS, and recompute.

    Args:
        trace: The step.
        machine: The budget; rates do not matter, because nothing is swapped.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        search_smallest: Whether a refusal names a budget that works, which takes up to 20 attempts.

    Raises:
        BudgetTooSmall: Recomputation alone does not fit the budget.
    """

    def attempt(within: Machine) -> tuple[Residency, ...]:
        return propose(Facts(trace, within), wrap=wrap)

    return or_too_small(attempt, trace, machine, search_smallest=search_smallest)


def propose(facts: Facts, *, wrap: bool) -> tuple[Residency, ...]:
    """What the rule makes of the step. Raises `Stuck` where it does not fit."""
    return Walk(facts, _ByTriangle()).schedule(wrap=wrap)


class _ByTriangle(Advice):
    def victims(self, walk: Walk, op_index: int, candidates: Sequence[int]) -> Iterable[Victim]:
        """One victim, the one of largest TPS."""
        scores = [(-walk.triangle_per_s(v, op_index), v) for v in candidates if walk.may_discard(v, op_index)]
        return [Victim(min(scores)[1], True)] if scores else []
