"""Schedules from the relaxation, for programs too large to solve: two-phase rounding after Checkmate.

Checkmate (Jain et al. 2020, section 5) solves the program with fractions allowed, rounds what is *kept*, and then
works out what must be computed for it. Rounding may need more memory than the fractions did, so the relaxation
is also solved for somewhat smaller budgets, several thresholds are tried, and the cheapest schedule that fits
is returned, beside the relaxation's bound.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler.milp.graph import Graph
from scheduler.milp.highs import Answer
from scheduler.milp.program import (
    Matrix,
    Program,
    Request,
    Schedule,
    Solution,
    Status,
    completed,
    cost_of,
    duration_of,
    peak_of,
)

# Shares of the budget that the relaxation is given, and fractions from which on "kept" is rounded up.
_ALLOWANCES = (1.0, 0.9, 0.75, 0.6)
_THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9)


def solve_by_rounding(graph: Graph, request: Request) -> Solution:
    """The cheapest rounded schedule, with the gap to the relaxation's bound."""
    best: Solution | None = None
    bound: float | None = None
    cheapest = float("inf")
    was_cut_off = False
    for allowance in _ALLOWANCES:
        program = Program(graph, replace(request, budget_nbytes=request.budget_nbytes * allowance))
        answer = program.run_solver(relaxed=True)
        was_cut_off = was_cut_off or answer.was_cut_off
        if answer.values is None:
            if allowance == 1.0:
                status = Status.INFEASIBLE if answer.is_infeasible else Status.NONE
                return Solution(status=status, was_cut_off=was_cut_off)
            break
        if allowance == 1.0 and answer.bound is not None:
            bound = answer.bound * program.objective_unit
        if _is_too_long(answer, program, request):
            return Solution(status=Status.TOO_LONG, bound=bound, was_cut_off=was_cut_off)
        _, kept = program.fractions(answer.values)
        for threshold in _THRESHOLDS:
            schedule = schedule_keeping(kept >= threshold, graph, request)
            objective = _judge(schedule, graph, request)
            if objective is not None and objective < cheapest:
                cheapest = objective
                best = Solution(
                    status=Status.ROUNDED,
                    schedule=schedule,
                    objective=objective,
                    bound=bound,
                    peak_nbytes=peak_of(schedule, graph),
                )
        if best is not None:
            break
    return replace(best or Solution(status=Status.NONE, bound=bound), was_cut_off=was_cut_off)


def _is_too_long(answer: Answer, program: Program, request: Request) -> bool:
    """Whether no schedule within this share of the budget, or a smaller one, takes less than the caller's limit."""
    if request.limit_s is None or request.objective != "time" or answer.bound is None:
        return False
    return answer.bound * program.objective_unit >= request.limit_s


def _judge(schedule: Schedule, graph: Graph, request: Request) -> float | None:
    """The schedule's cost; None if it breaks the budget or the deadline."""
    if peak_of(schedule, graph) > request.budget_nbytes * (1 + 1e-9):
        return None
    duration_s = duration_of(schedule, graph, charge_paging=request.charge_paging)
    if request.deadline_s is not None and duration_s > request.deadline_s * (1 + 1e-9):
        return None
    return cost_of(schedule, graph, request)


def schedule_keeping(kept: Matrix, graph: Graph, request: Request) -> Schedule:
    """The schedule that keeps `kept` where it is of use, and computes or pages no more than that takes."""
    kept = kept & graph.earlier
    computed = graph.own.copy()
    was_kept = np.zeros(len(graph.nodes), dtype=np.bool_)
    nothing = np.zeros(len(graph.nodes), dtype=np.bool_)
    for t in range(graph.num_stages):
        wanted = np.flatnonzero(graph.own[t]).tolist()
        missing = kept[t + 1] & ~kept[t] & graph.earlier[t] if t + 1 < graph.num_stages else nothing
        for i in np.flatnonzero(missing).tolist():
            node = graph.nodes[i]
            pages = request.paging and node.may_page and was_kept[i]
            recomputes = _may_compute(t, i, graph, request)
            if not pages or (recomputes and _is_cheaper_again(node.compute_s, node.load_s, request)):
                wanted.append(i)
        _compute(t, wanted, computed, kept, graph, request)
        was_kept |= kept[t]
    _forget_useless(kept, computed, graph)
    _keep_for_writing(kept, computed, graph)
    return completed(computed, kept, graph, paging=request.paging)


def _may_compute(t: int, node: int, graph: Graph, request: Request) -> bool:
    """Whether the node may be computed again in stage t."""
    until = graph.nodes[node].recompute_until
    return request.recompute and graph.nodes[node].may_recompute and (until is None or t <= until)


def _is_cheaper_again(compute_s: float, load_s: float, request: Request) -> bool:
    return request.charge_paging and compute_s < load_s


def _compute(t: int, wanted: list[int], computed: Matrix, kept: Matrix, graph: Graph, request: Request) -> None:
    """Compute `wanted` in stage t, and whatever of their sources is not kept. What may not be is kept throughout."""
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if not graph.own[t, node] and not _may_compute(t, node, graph, request):
            kept[graph.stage_of[node] + 1 : t + 1, node] = True
            continue
        computed[t, node] = True
        waiting.extend(dep for dep in graph.nodes[node].deps if not kept[t, dep] and not computed[t, dep])


def _forget_useless(kept: Matrix, computed: Matrix, graph: Graph) -> None:
    """Keep nothing over a stage's start that no computation reads before it is made anew."""
    useful = np.zeros(len(graph.nodes), dtype=np.bool_)
    for t in range(graph.num_stages - 1, -1, -1):
        read = np.zeros(len(graph.nodes), dtype=np.bool_)
        for node in np.flatnonzero(computed[t]).tolist():
            read[list(graph.nodes[node].deps)] = True
        useful = (useful & ~computed[t]) | (read & ~computed[t])
        kept[t] &= useful
        useful = kept[t].copy()


def _keep_for_writing(kept: Matrix, computed: Matrix, graph: Graph) -> None:
    """What is loaded without ever having been kept is kept into the stage after its own, to be written out there."""
    load = kept[1:] & ~kept[:-1] & ~computed[:-1]
    for node in np.flatnonzero(load.any(axis=0)).tolist():
        if not kept[: int(load[:, node].argmax()), node].any():
            kept[graph.stage_of[node] + 1, node] = True
