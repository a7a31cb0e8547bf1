"""From a trace to a graph: the programs' view of an `ooc` step.

A program with a binary for each pair of ops does not scale (Checkmate reports 1.4 million rows for a ResNet-50). So
neighbouring ops are merged into nodes where there are too many, and nodes into stages, both of about equal
weight. A merged op's output is what it allocates and leaves behind until a later one, and that dies within the
step; what of it lives on for long and what does not are two nodes, since only together with the other would one
be kept otherwise. All other memory (parameters, optimizer state, what outlives the step, what is allocated between ops)
counts as taken throughout; what a node allocates and frees itself is its working memory.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scheduler.milp.graph import Graph, Node
from scheduler.plan import Machine
from scheduler.reruns import ReplayGraph
from scheduler.trace import Trace

# An op that changes in place what an op at most this far back allocated belongs to the same node: only together
# can they be run again.
_IN_PLACE_REACH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What work costs in energy: watts while computing, and in addition while bytes move in and out."""

    compute_w: float = 0.0
    load_w: float = 0.0
    evict_w: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TraceGraph:
    """A trace as a graph.

    Attributes:
        graph: One or two nodes for each run of ops.
        first_ops: The first op of each run; the last entry is the number of ops.
        stage_of_run: The stage of each run.
        node_of: For each variable, the node whose output it is part of; None for all other variables.
    """

    graph: Graph
    first_ops: tuple[int, ...]
    stage_of_run: tuple[int, ...]
    node_of: tuple[int | None, ...]

    def stage_at(self, op: int) -> int:
        """The stage that an op belongs to."""
        return self.stage_of_run[bisect_right(self.first_ops, op) - 1]


def graph_of(
    trace: Trace, machine: Machine, replay: ReplayGraph, *, num_nodes: int, num_stages: int, power: Power
) -> TraceGraph:
    """Merge a trace into at most `num_nodes` runs of ops in at most `num_stages` stages.

    Raises:
        ValueError: One of the two numbers is not positive.
    """
    if min(num_nodes, num_stages) < 1:
        raise ValueError(f"num_nodes is {num_nodes}, num_stages is {num_stages}; there must be at least one of each")
    weight = _weights(trace)
    allowed = _uncut(trace, replay)
    first_ops = _cuts(weight, num_nodes, allowed)
    node_weight = np.add.reduceat(weight, first_ops[:-1])
    first_nodes = _cuts(node_weight, num_stages, np.ones(len(node_weight), dtype=np.bool_))
    stage_of = tuple(stage for stage, (a, b) in enumerate(pairwise(first_nodes)) for _ in range(a, b))
    return _Merger(trace, machine, replay, first_ops, stage_of, power).merge()


def _weights(trace: Trace) -> npt.NDArray[np.float64]:
    """Each op's share of the step's time, of its bytes, and of its ops."""
    born = np.zeros(len(trace.ops))
    starts = trace.op_starts
    for v in trace.variables:
        if v.birth_tick is not None:
            born[max(bisect_right(starts, v.birth_tick) - 1, 0)] += v.nbytes
    durations = np.array([op.duration_ns for op in trace.ops], dtype=np.float64)
    shares: npt.NDArray[np.float64] = durations / max(durations.sum(), 1) + born / max(born.sum(), 1)
    return shares + 1 / len(trace.ops)


def _uncut(trace: Trace, replay: ReplayGraph) -> npt.NDArray[np.bool_]:
    """For each op, whether a node may begin with it."""
    allowed = np.ones(len(trace.ops), dtype=np.bool_)
    for writers in replay.writers:
        for before, after in pairwise(writers):
            if after - before <= _IN_PLACE_REACH:
                allowed[before + 1 : after + 1] = False
    return allowed


def _cuts(weight: npt.NDArray[np.float64], most: int, allowed: npt.NDArray[np.bool_]) -> list[int]:
    """Where parts of about equal weight begin, at most `most`, and the end."""
    places = [0, *(i for i in range(1, len(weight)) if allowed[i])]
    if len(places) > most:
        done = np.concatenate([[0.0], np.cumsum(weight)])[places] / weight.sum()
        picked = {min(int(np.searchsorted(done, k / most)), len(places) - 1) for k in range(most)}
        places = [places[i] for i in sorted(picked)]
    return [*places, len(weight)]


class _Merger:
    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        replay: ReplayGraph,
        first_ops: list[int],
        stage_of: tuple[int, ...],
        power: Power,
    ) -> None:
        self.trace = trace
        self.machine = machine
        self.replay = replay
        self.first_ops = first_ops
        self.stage_of = stage_of
        self.power = power
        # Ticks at which each node begins, and the step's end.
        self.ticks = [0, *(trace.ops[op].start_tick for op in first_ops[1:-1]), trace.num_ticks]
        self.run_of = [self._output_run(v) for v in range(len(trace.variables))]
        self.node_of: list[int | None] = [None] * len(trace.variables)
        self.nodes: list[Node] = []
        self.node_stages: list[int] = []

    def merge(self) -> TraceGraph:
        outputs: list[list[int]] = [[] for _ in self.stage_of]
        for v, run in enumerate(self.run_of):
            if run is not None:
                outputs[run].append(v)
        reserved, work = self._other_memory()
        for run, own in enumerate(outputs):
            brief = [v for v in own if self._is_brief(v, run)]
            groups = [group for group in ([v for v in own if v not in brief], brief) if group] or [[]]
            for index, group in enumerate(groups):
                for v in group:
                    self.node_of[v] = len(self.nodes) + index
            made = [self._node(run, group, reserved[run]) for group in groups]
            beside = [
                sum(self._nbytes(v) for later in groups[index + 1 :] for v in later) for index in range(len(groups))
            ]
            made = [replace(node, work_nbytes=work[run] + extra) for node, extra in zip(made, beside, strict=True)]
            self.nodes += [made[0], *(replace(node, first_s=0.0, first_j=0.0) for node in made[1:])]
            self.node_stages += [self.stage_of[run]] * len(made)
        return TraceGraph(
            graph=Graph(nodes=tuple(self.nodes), stage_of=tuple(self.node_stages)),
            first_ops=tuple(self.first_ops),
            stage_of_run=self.stage_of,
            node_of=tuple(self.node_of),
        )

    def _run_at(self, op: int) -> int:
        return bisect_right(self.first_ops, op) - 1

    def _is_brief(self, v: int, run: int) -> bool:
        """Whether an output is freed by the end of the stage after its own."""
        dead = self.trace.variables[v].death_tick
        assert dead is not None
        last = bisect_right(self.ticks, dead - 1) - 1
        return self.stage_of[min(last, len(self.stage_of) - 1)] <= self.stage_of[run] + 1

    def _output_run(self, v: int) -> int | None:
        maker, variable = self.replay.maker[v], self.trace.variables[v]
        if maker is None or variable.death_tick is None or not variable.evictable:
            return None
        run = self._run_at(maker)
        return run if variable.death_tick > self.ticks[run + 1] else None

    def _nbytes(self, v: int) -> int:
        return self.machine.chunks_of(self.trace.variables[v].nbytes) * self.machine.chunk_nbytes

    def _other_memory(self) -> tuple[list[float], list[float]]:
        """For each run, bytes taken by what is nobody's output: throughout, and by temporaries inside runs."""
        others, inner = np.zeros(self.trace.num_ticks + 1), np.zeros(self.trace.num_ticks + 1)
        for v, run in enumerate(self.run_of):
            if run is not None:
                continue
            start, stop = self.trace.lifetime(v)
            maker = self.replay.maker[v]
            is_inner = maker is not None and self.trace.variables[v].death_tick is not None
            change = inner if is_inner and self.trace.variables[v].evictable else others
            change[start] += self._nbytes(v)
            change[stop] -= self._nbytes(v)
        spans = list(pairwise(self.ticks))
        taken, own = np.cumsum(others), np.cumsum(inner)
        return [float(taken[a:b].max()) for a, b in spans], [float(own[a:b].max()) for a, b in spans]

    def _node(self, run: int, outputs: list[int], reserved: float) -> Node:
        first, stop = self.first_ops[run], self.first_ops[run + 1]
        ops = self.trace.ops[first:stop]
        used = {use.variable for op in ops for use in op.uses if self.run_of[use.variable] != run}
        moved = sum(self.trace.variables[v].nbytes for v in outputs)
        read = {self.node_of[v] for v in used} - {None}
        compute_s = sum(op.duration_ns for op in ops) / 1e9
        latency_s = self.machine.latency_ns / 1e9 * len(outputs)
        load_s = latency_s + moved / self.machine.load_bytes_per_s
        evict_s = latency_s + moved / self.machine.evict_bytes_per_s
        until = self._recompute_until(run, outputs)
        return Node(
            name=f"ops {first} to {stop - 1}",
            deps=tuple(sorted(dep for dep in read if dep is not None)),
            nbytes=float(sum(self._nbytes(v) for v in outputs)),
            compute_s=compute_s,
            compute_j=compute_s * self.power.compute_w,
            load_s=load_s,
            load_j=load_s * self.power.load_w,
            evict_s=evict_s,
            evict_j=evict_s * self.power.evict_w,
            may_recompute=until is not None,
            recompute_until=until,
            reserved_nbytes=reserved,
        )

    def _recompute_until(self, run: int, outputs: list[int]) -> int | None:
        """The last stage throughout which the node's outputs can be made again; None if there is none."""
        last = len(self.trace.ops) - 1
        for v in outputs:
            if any(self._run_at(op) != run for op in self.replay.writers[v]):
                return None
            last = min(last, self.replay.expiry(v, len(self.trace.ops)))
        if not outputs or last < self.first_ops[run + 1]:
            return None
        other = self._run_at(last + 1) if last + 1 < len(self.trace.ops) else len(self.stage_of)
        stage = (self.stage_of[other] if other < len(self.stage_of) else self.stage_of[-1] + 1) - 1
        return stage if stage > self.stage_of[run] else None
