"""`checkmate`: optimal rematerialisation by mixed-integer programming (Jain et al., MLSys 2020).

POET's program without paging (`scheduler.milp.program`), over nodes of ops: the least extra compute under
the budget, nodes computed as often as it pays. Solved by HiGHS; rounded where there are too many nodes. Nothing
is swapped, so what cannot be made again stays in memory all its life.
"""

from __future__ import annotations

from functools import partial

from scheduler.milp.from_trace import Power
from scheduler.milp.program import Request
from scheduler.plan import Machine, Residency
from scheduler.policies._program import plan_by_program
from scheduler.policies._rerun_policies import or_too_small
from scheduler.trace import Trace


def schedule(
    trace: Trace,
    machine: Machine,
    *,
    num_nodes: int = 120,
    num_stages: int = 24,
    node_limit: int = 50,
    time_limit_s: float | None = 300.0,
    exact: bool = True,
    wrap: bool = True,
    notes: list[str] | None = None,
    search_smallest: bool = True,
    limit_ns: int | None = None,
) -> tuple[Residency, ...]:
    """The least recomputation.

    Args:
        trace: The step.
        machine: The budget; rates do not matter, because nothing is swapped.
        num_nodes, num_stages: Most nodes that the ops are merged into, and most stages of these.
        node_limit: Branch-and-bound nodes of one solve; the search is the same on every machine.
        time_limit_s: A safety net for one solve. A plan made under it where it strikes depends on the machine's
            speed, and its notes say so.
        exact: Whether to solve the program where it is small enough. If not, its relaxation is rounded always.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        notes: Gets how the solve ended where it is not proven the best: the gap, or that there is no schedule.
        search_smallest: Whether a refusal names a budget that works, which takes up to 20 attempts.
        limit_ns: A step that takes as long as this is of no use to the caller, and is refused where that is
            known before the plan is made.

    Raises:
        BudgetTooSmall: Recomputation alone does not fit the budget.
    """

    def attempt(within: Machine, *, exact: bool = exact) -> tuple[Residency, ...]:
        request = Request(
            budget_nbytes=within.budget_nbytes,
            paging=False,
            objective="time",
            node_limit=node_limit,
            time_limit_s=time_limit_s,
            relative_gap=1e-3,
            limit_s=None if limit_ns is None else limit_ns / 1e9,
        )
        return plan_by_program(
            trace,
            within,
            request=request,
            num_nodes=num_nodes,
            num_stages=num_stages,
            power=Power(),
            exact=exact,
            wrap=wrap,
            notes=notes,
        )

    return or_too_small(attempt, trace, machine, search_smallest=search_smallest, probe=partial(attempt, exact=False))
