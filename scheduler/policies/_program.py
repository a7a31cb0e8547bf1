"""What `checkmate` and `poet` share: a program over nodes of ops, and the walk that plays its answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from scheduler.milp.from_trace import Power, TraceGraph, graph_of
from scheduler.milp.program import Request, Schedule, Solution, Status, solve
from scheduler.milp.rounding import solve_by_rounding
from scheduler.plan import Machine, Residency
from scheduler.policies._greedy import Advice, Early, Facts, Stuck, Victim, Walk
from scheduler.policies._slack import use_slack
from scheduler.trace import Trace

# Nodes times stages up to which the program is solved exactly; beyond, the relaxation is rounded. With
# 4,000 it has about 25,000 columns, and HiGHS is mostly done within a minute on one core.
_MOST_EXACT = 4_000

# Shares of the budget that the program is given, one after another, until the walk fits.
_ALLOWANCES = (1.0, 0.9, 0.8)


def plan_by_program(
    trace: Trace,
    machine: Machine,
    *,
    request: Request,
    num_nodes: int,
    num_stages: int,
    power: Power,
    exact: bool,
    wrap: bool,
    notes: list[str] | None = None,
) -> tuple[Residency, ...]:
    """Solve, and play the answer; where it does not fit op by op, solve again for less.

    Where the program finds nothing, because merged ops need more at once than the ops themselves, the walk goes
    without it.

    Args:
        trace, machine: What is planned, and for what.
        request: What to ask of the program; its budget is set here.
        num_nodes, num_stages: Most nodes that the ops are merged into, and most stages of these.
        power: For the energy objective.
        exact: Whether to solve the program where it is small enough; if not, its relaxation is rounded.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        notes: Gets one line that says how the plan came about, unless the program was solved and fitted as it is.

    Raises:
        Stuck: Nothing that was found fits, or everything takes longer than the request's limit.
    """
    facts = Facts(trace, machine)
    if not trace.ops:
        return Walk(facts, Advice()).schedule(wrap=wrap)
    merged = graph_of(trace, machine, facts.graph, num_nodes=num_nodes, num_stages=num_stages, power=power)
    notes = [] if notes is None else notes
    for allowance in _ALLOWANCES:
        solution = _solve(merged, replace(request, budget_nbytes=machine.budget_nbytes * allowance), exact=exact)
        if solution.status is Status.TOO_LONG:
            raise Stuck(0, (), ())
        if solution.schedule is None:
            break
        try:
            found = _play(facts, _Program(merged, solution.schedule, paging=request.paging), request, wrap=wrap)
        except Stuck:
            continue
        notes.extend(_said(solution, merged, allowance))
        return found
    found = _play(facts, _Program(merged, None, paging=request.paging), request, wrap=wrap)
    how = f"{solution.status.value}" if solution.schedule is None else "no schedule of it fits op by op"
    struck = " (its limit in seconds struck)" if solution.was_cut_off else ""
    notes.append(f"planned without the program ({_size(merged)}): {how}{struck}. {_alone(request)}")
    return found


def _said(solution: Solution, merged: TraceGraph, allowance: float) -> list[str]:
    """What is to be said of a schedule that is played: nothing, if it is proven the best and has the whole budget."""
    if solution.status is Status.OPTIMAL and allowance == 1.0:
        return []
    struck = " (its limit in seconds struck)" if solution.was_cut_off else ""
    within = "" if allowance == 1.0 else f", within {allowance:.0%} of the budget so that it fits op by op"
    gap = "unknown" if solution.gap is None else f"{solution.gap:.1%}"
    return [f"the program ({_size(merged)}): {solution.status.value} (gap {gap}){within}{struck}"]


def _size(merged: TraceGraph) -> str:
    return f"{len(merged.graph.nodes)} nodes in {merged.graph.num_stages} stages"


def _alone(request: Request) -> str:
    rule = "the furthest next use is paged" if request.paging else "the largest TPS is discarded"
    return f"Where memory is short, {rule}"


def _solve(merged: TraceGraph, request: Request, *, exact: bool) -> Solution:
    graph = merged.graph
    if max(graph.reserved) > request.budget_nbytes:
        return Solution(status=Status.INFEASIBLE)
    if exact and len(graph.nodes) * graph.num_stages <= _MOST_EXACT:
        solution = solve(graph, request)
        if solution.status is not Status.NONE:
            return solution
        rounded = solve_by_rounding(graph, request)
        return replace(rounded, was_cut_off=rounded.was_cut_off or solution.was_cut_off)
    return solve_by_rounding(graph, request)


def _play(facts: Facts, advice: Advice, request: Request, *, wrap: bool) -> tuple[Residency, ...]:
    proposal = Walk(facts, advice).schedule(wrap=wrap)
    return use_slack(proposal, facts.trace, facts.machine) if request.paging else proposal


class _Program(Advice):
    """Releases what the program does not keep into the next stage; makes again together what it says."""

    early = Early.ANY

    def __init__(self, merged: TraceGraph, schedule: Schedule | None, *, paging: bool) -> None:
        self.merged = merged
        self.schedule = schedule
        self.paging = paging

    def eager(self, walk: Walk, op_index: int, candidates: Sequence[int]) -> Iterable[Victim]:
        """What is not used again in this stage and not kept into the next one."""
        if self.schedule is None:
            return []
        stage = self.merged.stage_at(op_index)
        found = []
        for v in candidates:
            node, needed = self.merged.node_of[v], walk.next_use(v, op_index)
            if node is None or needed >= len(walk.trace.ops) or self.merged.stage_at(needed) == stage:
                continue
            if self.schedule.kept[stage + 1, node]:
                continue
            if self._comes_back_by_load(node, stage):
                found.append(Victim(v, False))
            elif walk.may_discard(v, op_index):
                found.append(Victim(v, True))
        return found

    def _comes_back_by_load(self, node: int, stage: int) -> bool:
        assert self.schedule is not None
        loads, again = self.schedule.load[stage:, node], self.schedule.computed[stage + 1 :, node]
        if not loads.any():
            return False
        return not again.any() or int(loads.argmax()) < int(again.argmax()) + 1

    def victims(self, walk: Walk, op_index: int, candidates: Sequence[int]) -> Iterable[Victim]:
        """Beyond the program: paged by next use if that is allowed, else discarded by TPS, one after another."""
        if self.paging:
            return super().victims(walk, op_index, candidates)
        may = [v for v in candidates if walk.may_discard(v, op_index)]
        return [Victim(v, True) for v in sorted(may, key=lambda v: (-walk.triangle_per_s(v, op_index), v))[:1]]

    def companions(self, walk: Walk, op_index: int, remade: Sequence[int]) -> Sequence[int]:
        """What else the program makes again in this stage and needs later."""
        if self.schedule is None:
            return ()
        again = self.schedule.computed[self.merged.stage_at(op_index)]
        rest = [
            v
            for v in sorted(walk.discarded)
            if (node := self.merged.node_of[v]) is not None and again[node] and v not in remade
        ]
        return sorted(rest, key=lambda v: (walk.next_use(v, op_index), v))
