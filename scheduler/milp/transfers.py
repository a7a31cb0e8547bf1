"""The transfer planner (POET, section 5.5 and Algorithm 2): when to page, and the execution plan.

The program says in which stage a node is paged in; it does not see that several transfers of one stage share a
bus. `without_contention` moves loads to earlier stages where a stage's transfers take longer than its compute,
as far as the budget allows, and updates what is in memory. `execution_plan` lists the acts in order, with
times: transfers run one after another on the bus beside compute, a computation waits for the loads of what it reads,
and memory that is to be given up after an eviction is given up when the eviction is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scheduler.milp.graph import Graph
from scheduler.milp.program import Schedule, peak_of

Kind = Literal["compute", "load", "evict", "free"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One line of an execution plan; a `free` takes no time."""

    kind: Kind
    node: int
    stage: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """Acts in order of issue.

    Attributes:
        duration_s: When the last act is done.
        stall_s: Time in which nothing was computed before the last computation ended.
    """

    acts: tuple[Act, ...]
    duration_s: float
    stall_s: float


def without_contention(schedule: Schedule, graph: Graph, *, budget_nbytes: float) -> Schedule:
    """The same schedule with loads issued earlier where the bus is fuller than the processor.

    Stages are looked at from the last to the first, so that a load can move on through several. Of a stage's loads
    the one that is needed first is moved, and only to a stage at whose start its node is on flash already.
    """
    for t in range(graph.num_stages - 1, 0, -1):
        loads = sorted(np.flatnonzero(schedule.load[t]).tolist(), key=lambda i: (_first_need(schedule, graph, t, i), i))
        for node in loads:
            if _bus_s(schedule, graph, t) <= _compute_s(schedule, graph, t):
                break
            if not schedule.stored[t - 1, node]:
                continue
            moved = _moved_earlier(schedule, t, node)
            if peak_of(moved, graph) <= budget_nbytes * (1 + 1e-9):
                schedule = moved
    return schedule


def _moved_earlier(schedule: Schedule, stage: int, node: int) -> Schedule:
    load, kept = schedule.load.copy(), schedule.kept.copy()
    load[stage, node], load[stage - 1, node] = False, True
    kept[stage, node] = True
    return replace(schedule, load=load, kept=kept)


def _first_need(schedule: Schedule, graph: Graph, stage: int, node: int) -> int:
    """The first stage after `stage` that computes from the node; the number of stages if none does."""
    users = list(graph.users[node])
    later = np.flatnonzero(schedule.computed[stage + 1 :, users].any(axis=1)) if users else np.zeros(0, dtype=np.int64)
    return stage + 1 + int(later[0]) if len(later) else graph.num_stages


def _bus_s(schedule: Schedule, graph: Graph, stage: int) -> float:
    loads = sum(graph.nodes[i].load_s for i in np.flatnonzero(schedule.load[stage]).tolist())
    return loads + sum(graph.nodes[i].evict_s for i in np.flatnonzero(schedule.evict[stage]).tolist())


def _compute_s(schedule: Schedule, graph: Graph, stage: int) -> float:
    return sum(_cost_s(graph, stage, i) for i in np.flatnonzero(schedule.computed[stage]).tolist())


def _cost_s(graph: Graph, stage: int, node: int) -> float:
    return graph.nodes[node].once_s if graph.own[stage, node] else graph.nodes[node].compute_s


def execution_plan(schedule: Schedule, graph: Graph) -> ExecutionPlan:
    """The acts of a schedule, in order, with the times at which they run."""
    return _Timeline(schedule, graph).run()


class _Timeline:
    """Two clocks, of the processor and of the bus, while the acts are issued one after another."""

    def __init__(self, schedule: Schedule, graph: Graph) -> None:
        self.schedule = schedule
        self.graph = graph
        self.acts: list[Act] = []
        self.now_s = 0.0
        self.bus_s = 0.0
        self.busy_s = 0.0
        self.loaded_s: dict[int, float] = {}  # node -> when its latest load is done
        self.evicted_s: dict[int, float] = {}

    def run(self) -> ExecutionPlan:
        for t in range(self.graph.num_stages):
            for node in np.flatnonzero(self.schedule.evict[t]).tolist():
                ready_s = max(self.now_s, self.loaded_s.get(node, 0.0))
                self.evicted_s[node] = self._transfer("evict", node, t, ready_s, self.graph.nodes[node].evict_s)
            loads = np.flatnonzero(self.schedule.load[t]).tolist()
            for node in sorted(loads, key=lambda i: (_first_need(self.schedule, self.graph, t, i), i)):
                ready_s = max(self.now_s, self.evicted_s.get(node, 0.0))
                self.loaded_s[node] = self._transfer("load", node, t, ready_s, self.graph.nodes[node].load_s)
            self._compute(t)
        duration_s = max(self.now_s, self.bus_s)
        return ExecutionPlan(acts=tuple(self.acts), duration_s=duration_s, stall_s=self.now_s - self.busy_s)

    def _transfer(self, kind: Kind, node: int, stage: int, ready_s: float, cost_s: float) -> float:
        start_s = max(self.bus_s, ready_s)
        self.bus_s = start_s + cost_s
        self.acts.append(Act(kind=kind, node=node, stage=stage, start_s=start_s, stop_s=self.bus_s))
        return self.bus_s

    def _compute(self, t: int) -> None:
        schedule, graph = self.schedule, self.graph
        made: set[int] = set()
        for node in np.flatnonzero(schedule.computed[t]).tolist():
            read_s = [self.loaded_s.get(dep, 0.0) for dep in graph.nodes[node].deps if dep not in made]
            start_s = max([self.now_s, *read_s])
            cost_s = _cost_s(graph, t, node)
            self.now_s, self.busy_s = start_s + cost_s, self.busy_s + cost_s
            self.acts.append(Act(kind="compute", node=node, stage=t, start_s=start_s, stop_s=self.now_s))
            made.add(node)
            for dep in graph.nodes[node].deps:
                if self._is_last_use(t, node, dep):
                    self._free(t, dep)
        for node in np.flatnonzero(schedule.kept[t] | schedule.computed[t]).tolist():
            kept_on = t + 1 < graph.num_stages and schedule.kept[t + 1, node]
            read = any(schedule.computed[t, user] for user in graph.users[node])
            if not kept_on and not read:
                self._free(t, node)

    def _is_last_use(self, t: int, node: int, dep: int) -> bool:
        if t + 1 < self.graph.num_stages and self.schedule.kept[t + 1, dep]:
            return False
        return not any(self.schedule.computed[t, later] for later in self.graph.users[dep] if later > node)

    def _free(self, t: int, node: int) -> None:
        at_s = max(self.now_s, self.evicted_s.get(node, 0.0))
        self.acts.append(Act(kind="free", node=node, stage=t, start_s=at_s, stop_s=at_s))
