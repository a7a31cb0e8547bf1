"""`poet`: paging and rematerialisation together by mixed-integer programming (Patil et al., ICML 2022).

The program of the paper's Algorithm 1 (`scheduler.milp.program`) over nodes of ops, with energy or time as
objective and an optional deadline; memory and deadline are hard. The paper charges paging energy but no time; here
the default charges it (`charge_paging`), because the simulator and the hardware do. Loads are issued ahead
as far as memory allows, which is what the paper's transfer planner (Algorithm 2) is for.

The paper keeps parameters outside the budget. Here everything counts; what is no node's output (parameters,
optimizer state) is paged by the walk, the furthest next use first, where memory asks for it.
"""

from __future__ import annotations

from scheduler.milp.from_trace import Power
from scheduler.milp.program import Objective, Request
from scheduler.plan import Machine, Residency
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
    time_limit_s: float = 10.0,
    exact: bool = True,
    wrap: bool = True,
    notes: list[str] | None = None,
) -> tuple[Residency, ...]:
    """The best mixture of paging and recomputation.

    Args:
        trace: The step.
        machine: Budget and rates.
        objective: `"time"` or `"energy"`.
        deadline_s: Longest time of the step, as the program counts it; None for no limit.
        charge_paging: Whether the program lets transfers take time.
        compute_w, load_w, evict_w: Power while ops run, and in addition while bytes move in or out.
        num_nodes, num_stages: Most nodes that the ops are merged into, and most stages of these.
        time_limit_s: The solver's time for one solve. A plan made under a limit that strikes depends on the
            machine's speed; all others are the same everywhere.
        exact: Whether to solve the program where it is small enough. If not, its relaxation is rounded always: in
            seconds, and the same on every machine.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        notes: Gets how the solve ended where it is not proven the best: the gap, or that there is no schedule.

    Raises:
        BudgetTooSmall: An op needs more at once than the budget.
        ValueError: An unknown objective, or energy without any power.
    """
    if objective not in ("time", "energy"):
        raise ValueError(f"objective is {objective!r}; there are 'time' and 'energy'")
    if objective == "energy" and not max(compute_w, load_w, evict_w) > 0:
        raise ValueError("objective 'energy' needs compute_w, load_w and evict_w, the device's power in watts")

    def attempt(within: Machine) -> tuple[Residency, ...]:
        request = Request(
            budget_nbytes=within.budget_nbytes,
            deadline_s=deadline_s,
            objective=objective,
            charge_paging=charge_paging,
            time_limit_s=time_limit_s,
            relative_gap=1e-3,
        )
        power = Power(compute_w=compute_w, load_w=load_w, evict_w=evict_w)
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

    return or_too_small(attempt, trace, machine)
