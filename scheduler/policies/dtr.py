"""`dtr`: dynamic tensor rematerialisation (Kirisame et al., ICLR 2021), played ahead of time.

DTR decides online: when an allocation does not fit, it evicts the resident tensor with the least
h_DTR = cost / (size x staleness) (section 3 and appendix C.5), where the cost counts the tensor's own computation and
that of its *evicted neighbourhood*: the evicted tensors that would have to be made for it, and those that
would then need it. The neighbourhood is that of the paper's h_DTR^eq: classes by union-find, from which a tensor
that is made again takes its own cost. It does not know the future, and nothing is swapped. Evicted tensors are made
again when an op needs them, recursively, and what is made on the way stays as long as there is room. What the
program frees goes at once (eager eviction), and may be made again.

Two things differ from a run of DTR's: all that is made again for an op is made by one re-run, whose sources stay until
the op has run; and a tensor is only evicted if it can surely be made again when it is needed, which DTR can
take for granted because it keeps alive what is needed for it.
"""

from __future__ import annotations

from scheduler.plan import Machine, Residency
from scheduler.policies._remat_walk import H_DTR, RematFacts, RematWalk
from scheduler.policies._rerun_policies import or_too_small
from scheduler.trace import Trace


def schedule(
    trace: Trace,
    machine: Machine,
    *,
    wrap: bool = True,
    search_smallest: bool = True,
) -> tuple[Residency, ...]:
    """Evict by h_DTR, and recompute.

    Args:
        trace: The step.
        machine: The budget; rates do not matter, because nothing is swapped.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        search_smallest: Whether a refusal names a budget that works, which takes up to 20 attempts.

    Raises:
        BudgetTooSmall: Recomputation alone does not fit the budget.
    """

    def attempt(within: Machine) -> tuple[Residency, ...]:
        return propose(RematFacts(trace, within), wrap=wrap)

    return or_too_small(attempt, trace, machine, search_smallest=search_smallest)


def propose(facts: RematFacts, *, wrap: bool) -> tuple[Residency, ...]:
    """What the rule makes of the step. Raises `Stuck` where it does not fit."""
    return RematWalk(facts, H_DTR).schedule(wrap=wrap)
