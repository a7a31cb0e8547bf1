"""The re-runs of a plan, made executable: which ops run again before which op, from what, and into which memory.

A plan says which residencies begin by recomputation and which ops that takes (`scheduler.plan.Recomputed`). All such
residencies of one op are made by one re-run. Here each re-run becomes a list of ops in order, and for each op: where
each of its operands is read from, and where each of its large allocations goes. What the plan keeps goes to the
variable's own addresses; the rest goes to scratch chunks, each through a reservation of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ooc.memory.record import Runs
from ooc.replay.plan_variables import ExecutableResidency
from scheduler.plan import Discarded, Plan, Recomputed, occupied_ticks
from scheduler.reruns import ReplayGraph
from scheduler.trace import Trace

_OFTEN = 2
"""A variable is touched often if it was this many times, and in one of so many steps."""


@dataclass(slots=True, kw_only=True, eq=False)
class RerunOp:
    """One op of a re-run.

    Attributes:
        index: The op in the step.
        births: The variables that it allocates, in order.
        made: Variables that it reads or changes as the re-run has made them; the others are read from the pool.
        over: Variables that no later op of the re-run uses: what it has of them in scratch is over.
    """

    index: int
    births: tuple[int, ...]
    made: frozenset[int]
    over: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedRerun:
    """All that is run again right before one op.

    Attributes:
        before_op: The op.
        ops: In the step's order.
        kept: The residencies that it begins, by variable.
        scratch: Chunks for each variable that it makes and does not keep.
        sources: Variables that it reads from the pool.
        arrivals: Residencies of sources that may still be on their way in.
        waits: Residencies that held the scratch chunks before, and whose transfers must be over.
    """

    before_op: int
    ops: tuple[RerunOp, ...]
    kept: dict[int, ExecutableResidency]
    scratch: dict[int, Runs]
    sources: frozenset[int]
    arrivals: list[ExecutableResidency] = field(default_factory=list)
    waits: tuple[ExecutableResidency, ...] = ()


class PlannedReruns:
    """All re-runs of a plan.

    Attributes:
        by_op: By the op that they come before.
        recipes_of: Ops that some re-run needs, in order: what they are given must be noted.
        held_until: For each variable that re-runs read from the pool, the last op before which they do. Until then
            its storage must not be freed, however early the program lets go of it.
        needed_until: For each variable that re-runs read, change or make, the last op before which they do. What code
            beside the ops writes to it before that, no re-run would write again.
        num_touched: How often steps have left the plan for code beside the ops that might have done so, by variable.
        written_out: Residencies that the plan discards and never makes again, although the program still holds the
            variable. The program may yet ask for its bytes, off plan, and nobody could make them: it is written.
    """

    def __init__(self, plan: Plan, trace: Trace, residencies: Sequence[ExecutableResidency]) -> None:
        self.graph = ReplayGraph(trace)
        self._trace = trace
        kept: dict[int, dict[int, ExecutableResidency]] = {}
        ops: dict[int, set[int]] = {}
        for residency in residencies:
            start = residency.planned.start
            if isinstance(start, Recomputed):
                kept.setdefault(start.before_op, {})[residency.variable.index] = residency
                ops.setdefault(start.before_op, set()).update(start.ops)
        rooms = {scratch.before_op: scratch.chunks for scratch in plan.scratch}
        self.by_op = {op: self._rerun(op, sorted(ops[op]), kept[op], plan, rooms.get(op, ())) for op in sorted(ops)}
        self.recipes_of = tuple(sorted(set().union(*ops.values()))) if ops else ()
        self.held_until: dict[int, int] = {}
        self.needed_until: dict[int, int] = {}
        self.num_touched: Counter[int] = Counter()
        for rerun in self.by_op.values():
            for variable in rerun.sources:
                death = trace.variables[variable].death_tick
                if death is None or death > trace.ops[rerun.before_op].start_tick:
                    self.held_until[variable] = rerun.before_op
            self.needed_until.update(
                (use.variable, rerun.before_op) for op in rerun.ops for use in trace.ops[op.index].uses
            )
            self._find_arrivals(rerun, residencies)
        self.written_out = frozenset(id(r) for r in residencies if self._must_be_written(r))

    def __repr__(self) -> str:
        return f"<PlannedReruns before {len(self.by_op)} ops, of {len(self.recipes_of)} ops>"

    def __bool__(self) -> bool:
        return bool(self.by_op)

    def _rerun(
        self, before_op: int, ops: Sequence[int], kept: dict[int, ExecutableResidency], plan: Plan, room: Runs
    ) -> PlannedRerun:
        made, sources = replayed_reads(self.graph, ops)
        last_use = {use.variable: op for op in ops for use in self._trace.ops[op].uses}
        steps = []
        for op in ops:
            births = tuple(self.graph.births[op])
            ends = {v for v, last in last_use.items() if last == op} | {v for v in births if v not in last_use}
            steps.append(RerunOp(index=op, births=births, made=made[op], over=tuple(sorted(ends))))
        scratch = self._scratch(ops, set(kept), last_use, plan.machine.chunks_of, room)
        return PlannedRerun(before_op=before_op, ops=tuple(steps), kept=kept, scratch=scratch, sources=sources)

    def _scratch(
        self, ops: Sequence[int], kept: set[int], last_use: dict[int, int], chunks_of: Callable[[int], int], room: Runs
    ) -> dict[int, Runs]:
        """Chunks of the room for each variable that is not kept; their lifetimes are those that `scheduler` counts."""
        found: dict[int, Runs] = {}
        free = [chunk for first, count in room for chunk in range(first, first + count)]
        ends: list[tuple[int, list[int]]] = []
        births = [(self._trace.lifetime(v)[0], op, v) for op in ops for v in self.graph.births[op] if v not in kept]
        for start, op, v in sorted(births):
            for end in [end for end in ends if end[0] <= start]:
                ends.remove(end)
                free += end[1]
            free.sort()
            _, stop = self._trace.lifetime(v)
            if stop >= self._trace.ops[op].stop_tick:
                stop = self._trace.ops[max(op, last_use.get(v, op))].stop_tick
            count = chunks_of(self._trace.variables[v].nbytes)
            assert len(free) >= count, "verified plans have scratch room enough"
            taken, free = free[:count], free[count:]
            ends.append((stop, taken))
            found[v] = _as_runs(taken)
        return found

    def _find_arrivals(self, rerun: PlannedRerun, residencies: Sequence[ExecutableResidency]) -> None:
        tick = self._trace.ops[rerun.before_op].start_tick
        for residency in residencies:
            if residency.variable.index in rerun.sources and residency not in rerun.kept.values():
                first, last = occupied_ticks(residency.planned, self._trace)
                if first <= tick < last:
                    rerun.arrivals.append(residency)

    def _must_be_written(self, residency: ExecutableResidency) -> bool:
        planned, variable = residency.planned, residency.variable
        if not isinstance(planned.stop, Discarded):
            return False
        death = self._trace.variables[variable.index].death_tick
        _, stop = occupied_ticks(planned, self._trace)
        if death is not None and death <= stop:
            return False  # a ghost
        at = variable.residencies.index(residency) + 1
        if at == len(variable.residencies):
            return True
        follower = variable.residencies[at].planned
        return death is not None and occupied_ticks(follower, self._trace)[0] >= death  # a ghost of it follows

    def often_touched(self, num_steps: int) -> frozenset[int]:
        """Ops that are better not run again, after so many steps that the plan has played to their end.

        They use what code beside the ops touches in many steps, which all leave the plan for it.
        """
        often = {v for v, count in self.num_touched.items() if count >= max(_OFTEN, num_steps // _OFTEN)}
        return frozenset(op for op in self.recipes_of if any(u.variable in often for u in self._trace.ops[op].uses))

    def missing_ops(
        self, variables: Sequence[int], num_ops: int, has_bytes: Callable[[int], bool]
    ) -> tuple[int, ...] | None:
        """The ops that make `variables` as they are after the step's first `num_ops` ops, from what has bytes."""
        if num_ops >= len(self._trace.ops):
            num_ops = len(self._trace.ops)
        return self.graph.ops_for(variables, num_ops, has_bytes)


class PlannedTrials:
    """The ops of a plan that are to be tried in its next step, and what came of it.

    Attributes:
        ops: Their indices.
        was_installed: Whether a step of the plan has begun with them.
        kinds: Of the ops that have run, by index.
    """

    def __init__(self, ops: frozenset[int]) -> None:
        self.ops = ops
        self.was_installed = False
        self.kinds: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<PlannedTrials of {len(self.ops)} ops, {len(self.kinds)} have run>"


def replayed_reads(graph: ReplayGraph, ops: Sequence[int]) -> tuple[dict[int, frozenset[int]], frozenset[int]]:
    """For each of `ops`, run again in order, the variables that it uses as made by the re-run; and those it does not.

    Returns:
        By op, the variables made by exactly the writes that the op saw when it ran first; and all others that are read.
    """
    made: dict[int, frozenset[int]] = {}
    sources: set[int] = set()
    num_writes: dict[int, int] = {}
    for op in ops:
        own: set[int] = set()
        for use in graph.trace.ops[op].uses:
            v = use.variable
            if graph.maker[v] == op:
                continue
            if num_writes.get(v) == bisect_left(graph.writers[v], op):
                own.add(v)
                if use.writes:
                    num_writes[v] = bisect_right(graph.writers[v], op)
            else:
                sources.add(v)
        for v in graph.births[op]:
            num_writes[v] = 1
        made[op] = frozenset(own)
    return made, frozenset(sources)


def _as_runs(chunks: Sequence[int]) -> Runs:
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and sum(runs[-1]) == chunk:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((chunk, 1))
    return tuple(runs)
