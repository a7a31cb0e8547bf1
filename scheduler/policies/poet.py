"""`poet`: paging and rematerialisation together by mixed-integer programming (Patil et al., ICML 2022).

The program of the paper's Algorithm 1, with energy or time as objective and an optional deadline; memory and
deadline are hard. Loads are issued ahead as far as memory allows, which is what the paper's transfer planner (Algorithm
2) is for. The paper keeps parameters outside the budget; here everything counts.

For energy the program is written over gaps between uses (`scheduler.milp.gaps`): on the trace's own ops, with all of
its variables, and the plan costs what the program says. The deadline is charged with paging: loads, writes and compute
each have to fit into it, and where the simulated step is still late, the program is solved again for less.

Time depends on when bytes move within a gap. For it the program is the paper's (`scheduler.milp.program`) over nodes of
merged ops, with transfers charged unless `charge_paging` says otherwise; what is no node's output (parameters,
optimizer state) is paged by the walk, the furthest next use first, where memory asks for it.
"""

from __future__ import annotations

from scheduler.milp.from_trace import Power
from scheduler.milp.gaps import GapRequest
from scheduler.milp.program import Objective, Request
from scheduler.plan import Machine, Residency
from scheduler.policies._gaps import plan_by_gaps
from scheduler.policies._program import plan_by_program
from scheduler.policies._rerun_policies import or_too_small
from scheduler.trace import Trace


def schedule(
    trace: Trace,
    machine: Machine,
    *,
    objective: Objective = "time",
    deadline_s: float | None = None,
    charge_paging: bool = True,
    compute_w: float = 0.0,
    load_w: float = 0.0,
    evict_w: float = 0.0,
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
    """The best mixture of paging and recomputation.

    Args:
        trace: The step.
        machine: Budget and rates.
        objective: `"time"` or `"energy"`.
        deadline_s: Longest time of the step, as the program counts it; None for no limit.
        charge_paging: With objective `"time"`: whether the program lets transfers take time.
        compute_w, load_w, evict_w: Power while ops run, and in addition while bytes move in or out.
        num_nodes, num_stages: With objective `"time"`: most nodes that the ops are merged into, and stages of these.
        node_limit: Branch-and-bound nodes of one solve; the search is the same on every machine.
        time_limit_s: A safety net for one solve. A plan made under it where it strikes depends on the machine's
            speed, and its notes say so.
        exact: With objective `"time"`: whether to solve the program where it is small enough. If not, its relaxation
            is rounded always.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        notes: Gets how the solve ended where it is not proven the best: the gap, or that there is no schedule.
        search_smallest: Whether a refusal names a budget that works, which takes up to 20 attempts.
        limit_ns: With objective `"time"`: a step that takes as long as this is of no use to the caller, and is refused
            where that is known before the plan is made.

    Raises:
        BudgetTooSmall: An op needs more at once than the budget.
        ValueError: An unknown objective, or energy without any power.
    """
    if objective not in ("time", "energy"):
        raise ValueError(f"objective is {objective!r}; there are 'time' and 'energy'")
    if objective == "energy" and not max(compute_w, load_w, evict_w) > 0:
        raise ValueError("objective 'energy' needs compute_w, load_w and evict_w, the device's power in watts")

    def attempt(within: Machine) -> tuple[Residency, ...]:
        power = Power(compute_w=compute_w, load_w=load_w, evict_w=evict_w)
        if objective == "energy":
            deadline_ns = None if deadline_s is None else round(deadline_s * 1e9)
            asked = GapRequest(power=power, deadline_ns=deadline_ns, node_limit=node_limit, time_limit_s=time_limit_s)
            return plan_by_gaps(trace, within, asked, wrap=wrap, notes=notes)
        request = Request(
            budget_nbytes=within.budget_nbytes,
            deadline_s=deadline_s,
            objective=objective,
            charge_paging=charge_paging,
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
            power=power,
            exact=exact,
            wrap=wrap,
            notes=notes,
        )

    return or_too_small(attempt, trace, machine, search_smallest=search_smallest)
