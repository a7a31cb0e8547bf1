"""POET's mixed-integer program (Patil et al. 2022, Algorithm 1), and Checkmate's as its case without paging.

Stage `t` computes node `t` for the first time (or a run of nodes, see `Graph.stage_of`), and may compute nodes of
earlier stages again, all in the order of the graph. Per stage
and node: `again` (computed again), `kept` (in memory at the stage's start), `stored` (on flash at its
start), `load` and `evict` (paged within it). The rules, in the paper's order: what a node reads is
computed in its stage or kept; what is kept was kept, computed or loaded in the stage before; what is stored
was stored or evicted before; a load needs a stored copy, an eviction a kept one. `free` says that a node's
output is given up right after a user of it; `held` is the memory after each computation of a stage,
at most the budget.

Two things differ in form from the published code, not in what is feasible or what it costs. The code
ties `free` to a count of hazards with one big-M row each way; here each hazard forbids `free` by itself, which
is the same for whole numbers and far tighter for the relaxation. And only `again` and `kept` are
declared whole: given whole values of these, some optimum of the others is whole, too (where transfers
take time, `evict` is declared whole as well, since half an eviction in each of two stages could hide better).

In the paper paging costs energy and no time. `charge_paging` charges it: each stage then lasts as long as the
longer of its compute and its transfers on one bus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from scheduler.milp.graph import Graph
from scheduler.milp.highs import Answer, Columns, Rows, run_highs

Matrix = npt.NDArray[np.bool_]
Objective = Literal["energy", "time"]


class Status(Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    INCUMBENT = "the search was up; the best schedule found so far, with its gap"
    ROUNDED = "rounded from the relaxation; feasible, with its gap"
    NONE = "the search was up, and no schedule had been found"
    INFEASIBLE = "no schedule fits the budget and the deadline"
    TOO_LONG = "every schedule takes longer than what is known already"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of the program.

    Attributes:
        budget_nbytes: Most bytes of outputs in memory at once.
        deadline_s: Longest time; None for no limit.
        paging, recompute: Which of the two is allowed.
        objective: What is made small.
        charge_paging: Whether transfers take time.
        node_limit: Nodes of the solver's search; None for no limit. The same everywhere, unlike a limit in seconds.
        time_limit_s: The solver's; None for no limit. Where it strikes, the answer depends on the machine's speed.
        relative_gap: A schedule proven to be this close to the best is good enough.
        limit_s: With objective "time": what takes as long as this is of no use, so that rounding ends where the
            relaxation does, and the search for the best schedule where none can be below it.
    """

    budget_nbytes: float
    deadline_s: float | None = None
    paging: bool = True
    recompute: bool = True
    objective: Objective = "energy"
    charge_paging: bool = False
    node_limit: int | None = None
    time_limit_s: float | None = 60.0
    relative_gap: float = 1e-4
    limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each stage does; boolean matrices, stage by node.

    Attributes:
        computed: Computed in the stage, for the first time or again.
        kept: In memory at the stage's start.
        stored: On flash at its start.
        load, evict: Paged in (there from the next stage on) and out.
    """

    computed: Matrix
    kept: Matrix
    stored: Matrix
    load: Matrix
    evict: Matrix


@dataclass(frozen=True, kw_only=True)
class Solution:
    """An answer.

    Attributes:
        status: How the solve ended.
        schedule: None where there is none.
        objective: Its cost, in joules or seconds, worked out from the schedule.
        bound: What no schedule can beat, as proven.
        peak_nbytes: Its memory, worked out from the schedule.
        was_cut_off: Whether a limit in seconds struck: the answer then depends on the machine's speed.
    """

    status: Status
    schedule: Schedule | None = None
    objective: float | None = None
    bound: float | None = None
    peak_nbytes: float | None = None
    was_cut_off: bool = False

    @property
    def gap(self) -> float | None:
        """Relative distance between the objective and the bound; None where there is no schedule."""
        if self.objective is None or self.bound is None:
            return None
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-300)


def solve(graph: Graph, request: Request) -> Solution:
    """The best schedule, by HiGHS."""
    if not graph.nodes:
        empty = np.zeros((0, 0), dtype=np.bool_)
        nothing = Schedule(computed=empty, kept=empty, stored=empty, load=empty, evict=empty)
        return Solution(status=Status.OPTIMAL, schedule=nothing, objective=0.0, bound=0.0, peak_nbytes=0.0)
    program = Program(graph, _limited(request))
    answer = program.run_solver(relaxed=False)
    if answer.is_infeasible:
        return Solution(status=Status.INFEASIBLE if program.request is request else Status.TOO_LONG)
    bound = None if answer.bound is None else answer.bound * program.objective_unit
    if answer.values is None:
        return Solution(status=Status.NONE, bound=bound, was_cut_off=answer.was_cut_off)
    schedule = program.schedule_of(answer.values)
    objective = cost_of(schedule, graph, request)
    return Solution(
        status=Status.OPTIMAL if answer.is_optimal else Status.INCUMBENT,
        schedule=schedule,
        objective=objective,
        bound=objective if bound is None and answer.is_optimal else bound,
        peak_nbytes=peak_of(schedule, graph),
        was_cut_off=answer.was_cut_off,
    )


def _limited(request: Request) -> Request:
    """The request with what is of no use forbidden by a deadline, which ends most searches at their first node.

    Without it a search that could no longer find anything faster than what was known took all of its nodes: 50 of
    them 30 to 100 s for a ResNet-32 of 287 ops, and 1 s with it.
    """
    if request.limit_s is None or request.objective != "time" or (request.deadline_s or math.inf) <= request.limit_s:
        return request
    return replace(request, deadline_s=request.limit_s)


class Program:
    """The program's columns and rows.

    Attributes:
        objective_unit: One unit of the solver's objective, in joules or seconds: numbers near 1 solve best.
    """

    def __init__(self, graph: Graph, request: Request) -> None:
        self.graph = graph
        self.request = request
        self.size = len(graph.nodes)
        self.num_stages = graph.num_stages
        self.columns = Columns()
        self.rows = Rows()
        self.again = self._lower(whole=True)
        self.kept = self._lower(whole=True)
        self.stored = self._lower() if request.paging else None
        self.load = self._lower() if request.paging else None
        self.evict = self._lower(whole=request.charge_paging) if request.paging else None
        self.stage = self.columns.add(self.num_stages, upper=np.inf) if request.charge_paging else None
        self._forbid()
        self._write_computability()
        self._write_residency()
        self._write_memory()
        self._write_times()
        self.objective_unit = self._write_objective()

    def _lower(self, *, whole: bool = False) -> npt.NDArray[np.int64]:
        """A column for each stage and node of an earlier stage; -1 elsewhere."""
        found = np.full((self.num_stages, self.size), -1, dtype=np.int64)
        below = np.nonzero(self.graph.earlier)
        found[below] = self.columns.add(len(below[0]), whole=whole)
        return found

    def _forbid(self) -> None:
        """Fix at zero what a node, or the request, does not allow."""
        for index, node in enumerate(self.graph.nodes):
            first = self.graph.stage_of[index] + 1
            if not (node.may_recompute and self.request.recompute):
                self.columns.fix(self.again[first:, index], 0.0)
            elif node.recompute_until is not None:
                self.columns.fix(self.again[max(node.recompute_until + 1, first) :, index], 0.0)
            if not node.may_page and self.load is not None and self.evict is not None:
                self.columns.fix(self.load[first:, index], 0.0)
                self.columns.fix(self.evict[first:, index], 0.0)

    def _write_computability(self) -> None:
        """What a node reads is computed in the same stage or kept."""
        stage_of = self.graph.stage_of
        for node, of in enumerate(self.graph.nodes):
            for dep in of.deps:
                first = stage_of[node]
                if stage_of[dep] < first:
                    self.rows.add([(self.again[first, dep], -1.0), (self.kept[first, dep], -1.0)], upper=-1.0)
                for t in range(first + 1, self.num_stages):
                    own = [(self.again[t, node], 1.0), (self.again[t, dep], -1.0), (self.kept[t, dep], -1.0)]
                    self.rows.add(own, upper=0.0)

    def _write_residency(self) -> None:
        """What is kept or stored was so before, or came in the stage before."""
        for t in range(self.num_stages - 1):
            for i in np.flatnonzero(self.graph.earlier[t + 1]).tolist():
                is_old = bool(self.graph.earlier[t, i])  # else it was computed in stage t
                if is_old:
                    own = [(self.kept[t + 1, i], 1.0), (self.kept[t, i], -1.0), (self.again[t, i], -1.0)]
                    if self.load is not None:
                        own.append((self.load[t, i], -1.0))
                    self.rows.add(own, upper=0.0)
                if self.stored is None or self.evict is None:
                    continue
                own = [(self.stored[t + 1, i], 1.0)]
                if is_old:
                    own += [(self.stored[t, i], -1.0), (self.evict[t, i], -1.0)]
                self.rows.add(own, upper=0.0)
        if self.stored is None or self.load is None or self.evict is None:
            return
        for t, i in zip(*(half.tolist() for half in np.nonzero(self.graph.earlier)), strict=True):
            self.rows.add([(self.load[t, i], 1.0), (self.stored[t, i], -1.0)], upper=0.0)
            self.rows.add([(self.evict[t, i], 1.0), (self.kept[t, i], -1.0)], upper=0.0)

    def _write_memory(self) -> None:
        """`held` after each computation of each stage, in budgets."""
        unit = max(self.request.budget_nbytes, 1.0)
        nbytes = [node.nbytes / unit for node in self.graph.nodes]
        works = [node.work_nbytes / unit for node in self.graph.nodes]
        for t in range(self.num_stages):
            limit = (self.request.budget_nbytes - self.graph.reserved[t]) / unit
            present = np.flatnonzero(self.graph.earlier[t] | self.graph.own[t]).tolist()
            held = self.columns.add(len(present), upper=limit)
            for k in present:
                is_own = bool(self.graph.own[t, k])
                own = [(held[k], 1.0)]
                if k:
                    own += [(held[k - 1], -1.0)]
                    freed = self.graph.nodes[k - 1].deps
                    own += [(self._free(t, dep, k - 1), nbytes[dep]) for dep in freed if nbytes[dep]]
                else:
                    own += [(self.kept[t, i], -nbytes[i]) for i in present if self.graph.earlier[t, i] and nbytes[i]]
                if is_own:
                    self.rows.add(own, lower=nbytes[k], upper=nbytes[k])
                    if works[k]:
                        self.rows.add([(held[k], 1.0)], upper=limit - works[k])
                    continue
                own.append((self.again[t, k], -nbytes[k]))
                self.rows.add(own, lower=0.0, upper=0.0)
                if works[k]:
                    self.rows.add([(held[k], 1.0), (self.again[t, k], works[k])], upper=limit)

    def _free(self, t: int, dep: int, user: int) -> int:
        """A column: in stage t, `dep` is given up right after `user` was computed."""
        column = int(self.columns.add(1)[0])
        if self.graph.earlier[t, user]:
            self.rows.add([(column, 1.0), (self.again[t, user], -1.0)], upper=0.0)
        if t + 1 < self.num_stages:
            self.rows.add([(column, 1.0), (self.kept[t + 1, dep], 1.0)], upper=1.0)
        for later in self.graph.users[dep]:
            if later <= user:
                continue
            if self.graph.own[t, later]:
                self.columns.fix(np.array([column]), 0.0)
            elif self.graph.earlier[t, later]:
                self.rows.add([(column, 1.0), (self.again[t, later], 1.0)], upper=1.0)
        return column

    def _write_times(self) -> None:
        """The deadline; with transfers charged, the stages' lengths."""
        nodes, deadline = self.graph.nodes, self.request.deadline_s
        unit = max(self.graph.compute_s, 1e-12)
        if self.stage is not None:
            for t in range(self.num_stages):
                old = np.flatnonzero(self.graph.earlier[t]).tolist()
                first_s = sum(nodes[i].once_s for i in np.flatnonzero(self.graph.own[t]).tolist())
                own = [(self.stage[t], 1.0)]
                own += [(self.again[t, i], -nodes[i].compute_s / unit) for i in old]
                self.rows.add(own, lower=first_s / unit)
                if self.load is not None and self.evict is not None:
                    own = [(self.stage[t], 1.0)]
                    own += [(self.load[t, i], -nodes[i].load_s / unit) for i in old]
                    own += [(self.evict[t, i], -nodes[i].evict_s / unit) for i in old]
                    self.rows.add(own, lower=0.0)
            if deadline is not None:
                self.rows.add([(column, 1.0) for column in self.stage], upper=deadline / unit)
        elif deadline is not None:
            old_pairs = zip(*(half.tolist() for half in np.nonzero(self.graph.earlier)), strict=True)
            own = [(self.again[t, i], nodes[i].compute_s / unit) for t, i in old_pairs]
            self.rows.add(own, upper=(deadline - self.graph.compute_s) / unit)

    def _write_objective(self) -> float:
        nodes = self.graph.nodes
        if self.request.objective == "time":
            unit = max(self.graph.compute_s, 1e-12)
            if self.stage is not None:
                self.columns.set_cost(self.stage, 1.0)
                return unit
            self.columns.constant = self.graph.compute_s / unit
            for i, node in enumerate(nodes):
                later = slice(self.graph.stage_of[i] + 1, None)
                self.columns.set_cost(self.again[later, i], node.compute_s / unit)
            return unit
        total = sum(node.once_j for node in nodes)
        unit = max(total, 1e-12)
        self.columns.constant = total / unit
        for i, node in enumerate(nodes):
            later = slice(self.graph.stage_of[i] + 1, None)
            self.columns.set_cost(self.again[later, i], node.compute_j / unit)
            if self.load is not None and self.evict is not None:
                self.columns.set_cost(self.load[later, i], node.load_j / unit)
                self.columns.set_cost(self.evict[later, i], node.evict_j / unit)
        return unit

    def run_solver(self, *, relaxed: bool) -> Answer:
        """HiGHS's answer, in units of the objective."""
        return run_highs(
            self.columns,
            self.rows,
            relative_gap=self.request.relative_gap,
            node_limit=self.request.node_limit,
            time_limit_s=self.request.time_limit_s,
            relaxed=relaxed,
        )

    def schedule_of(self, values: npt.NDArray[np.float64]) -> Schedule:
        """The schedule in a solution's values, with paging made whole."""
        again, kept = (self._matrix(columns, values) > 0.5 for columns in (self.again, self.kept))
        computed = again | self.graph.own
        schedule = completed(computed, kept, self.graph, paging=self.request.paging)
        if self.request.charge_paging and self.evict is not None:
            schedule = replace(schedule, evict=_first_of(self._matrix(self.evict, values) > 0.5, schedule.evict))
            schedule = replace(schedule, stored=_stored_after(schedule.evict))
        return schedule

    def _matrix(self, columns: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = np.where(columns >= 0, values[columns], 0.0)
        return found

    def fractions(self, values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """`again` and `kept` of a relaxed solution."""
        return self._matrix(self.again, values), self._matrix(self.kept, values)


def completed(computed: Matrix, kept: Matrix, graph: Graph, *, paging: bool) -> Schedule:
    """The schedule that keeps and computes so, with the loads and evictions that this takes.

    What is kept without having been kept or computed in the stage before is loaded then. What is ever
    loaded is evicted once, in the first stage at whose start it is kept: every load comes after that,
    because there is no other way to be on flash.

    Raises:
        ValueError: Something would have to be loaded that was never kept, or cannot be paged.
    """
    load = np.zeros_like(kept)
    load[:-1] = kept[1:] & ~kept[:-1] & ~computed[:-1]
    evict = np.zeros_like(kept)
    for i in np.flatnonzero(load.any(axis=0)).tolist():
        stages = np.flatnonzero(kept[:, i])
        first = int(stages[0])
        if not paging or not graph.nodes[i].may_page or int(np.flatnonzero(load[:, i])[0]) <= first:
            raise ValueError(f"node {i} ({graph.nodes[i].name}) is kept in a stage, but nothing brings it there")
        evict[first, i] = True
    return Schedule(computed=computed, kept=kept, stored=_stored_after(evict), load=load, evict=evict)


def _first_of(evict: Matrix, needed: Matrix) -> Matrix:
    """The first eviction of each node that needs one."""
    found: Matrix = evict & (np.cumsum(evict, axis=0) == 1) & needed.any(axis=0)
    return found


def _stored_after(evict: Matrix) -> Matrix:
    """What is on flash at each stage's start: whatever was evicted in a stage before."""
    stored = np.zeros_like(evict)
    stored[1:] = np.logical_or.accumulate(evict, axis=0)[:-1]
    return stored


def peak_of(schedule: Schedule, graph: Graph) -> float:
    """Most bytes in memory: each stage's start, then each computation, less what no later one needs."""
    peak, nothing = 0.0, np.zeros(len(graph.nodes), dtype=np.bool_)
    for t in range(graph.num_stages):
        next_kept = schedule.kept[t + 1] if t + 1 < graph.num_stages else nothing
        held = graph.reserved[t]
        held += sum(graph.nodes[i].nbytes for i in np.flatnonzero(schedule.kept[t]).tolist())
        for k in np.flatnonzero(schedule.computed[t]).tolist():
            held += graph.nodes[k].nbytes
            peak = max(peak, held + graph.nodes[k].work_nbytes)
            for dep in graph.nodes[k].deps:
                needed = next_kept[dep] or any(schedule.computed[t, later] for later in graph.users[dep] if later > k)
                if not needed:
                    held -= graph.nodes[dep].nbytes
    return peak


def duration_of(schedule: Schedule, graph: Graph, *, charge_paging: bool) -> float:
    """Seconds: compute alone, or stage by stage the longer of compute and transfers."""
    nodes = graph.nodes
    compute = (schedule.computed & graph.earlier) @ np.array([node.compute_s for node in nodes])
    compute += graph.own @ np.array([node.once_s for node in nodes])
    if not charge_paging:
        return float(compute.sum())
    moving = schedule.load @ np.array([node.load_s for node in nodes])
    moving += schedule.evict @ np.array([node.evict_s for node in nodes])
    return float(np.maximum(compute, moving).sum())


def cost_of(schedule: Schedule, graph: Graph, request: Request) -> float:
    """The request's objective, in joules or seconds."""
    if request.objective == "time":
        return duration_of(schedule, graph, charge_paging=request.charge_paging)
    nodes = graph.nodes
    joules = (schedule.computed & graph.earlier) @ np.array([node.compute_j for node in nodes])
    joules += graph.own @ np.array([node.once_j for node in nodes])
    joules += schedule.load @ np.array([node.load_j for node in nodes])
    joules += schedule.evict @ np.array([node.evict_j for node in nodes])
    return float(joules.sum())
