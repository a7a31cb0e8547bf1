"""One step on a time axis, as measured, as simulated, or as traced.

All reports and timelines are drawn from this form, so that a simulated plan and a real run can be
compared. Times are nanoseconds since the step's start; transfers may begin before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler.cost.actions import StepActions, step_actions
from scheduler.cost.simulate import Simulation, simulate
from scheduler.plan import Evicted, Loaded, Plan, occupied_ticks
from scheduler.trace import Trace

Source = Literal["measured", "simulated", "traced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One load or eviction.

    Attributes:
        residency: Index in the plan of the residency that it begins or ends; None if the plan has none.
        issue_ns: When it was issued; `start_ns`, `stop_ns`: when bytes moved.
    """

    kind: Literal["load", "evict"]
    variable: int
    residency: int | None
    nbytes: int
    issue_ns: int
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait of an op for a transfer, before it ran.

    Attributes:
        move: Index in `StepView.moves` of the transfer that ended the wait.
    """

    op: int
    start_ns: int
    stop_ns: int
    move: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunRow:
    """Ops that are run again right before an op, and when."""

    op: int
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The time span of a residency."""

    residency: int
    variable: int
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured times of a step (see `ooc.telemetry.timeline`).

    Attributes:
        unix_ns: When the step started, on the wall clock.
        moves: Its transfers, whose `residency` is not known yet.
        stalls: Its waits for transfers: `(start, stop)`.
    """

    step_index: int
    unix_ns: int
    duration_ns: int
    op_start_ns: tuple[int, ...]
    op_stop_ns: tuple[int, ...]
    moves: tuple[Move, ...]
    stalls: tuple[tuple[int, int], ...] = ()
    num_moves_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A step on a time axis.

    Attributes:
        plan: None for a step that was only traced: everything in memory, nothing moves.
        op_start_ns, op_stop_ns: Start and stop of each op of the trace.
        moves, waits, reruns: In order of start. Re-runs are known of simulated steps.
        duration_ns: The step's length.
        relocation: When copies within memory at the border were made, of simulated steps; None: there are none.
        stalls: All measured waits, those too that no op or transfer of the plan explains.
        unix_ns: When it started on the wall clock; None if it never ran.
    """

    source: Source
    trace: Trace
    plan: Plan | None
    op_start_ns: tuple[int, ...]
    op_stop_ns: tuple[int, ...]
    moves: tuple[Move, ...]
    waits: tuple[Wait, ...]
    duration_ns: int
    reruns: tuple[RerunRow, ...] = ()
    relocation: tuple[int, int] | None = None
    stalls: tuple[tuple[int, int], ...] = ()
    unix_ns: int | None = None

    def tick_times(self) -> list[int]:
        """The time of each tick of the trace; ticks are spread evenly within an op, and between two ops."""
        times = [0] * (self.trace.num_ticks + 1)
        previous_tick, previous_ns = 0, 0
        for index, op in enumerate(self.trace.ops):
            start_ns, stop_ns = self.op_start_ns[index], self.op_stop_ns[index]
            _spread(times, previous_tick, op.start_tick, previous_ns, start_ns)
            _spread(times, op.start_tick, op.stop_tick, start_ns, stop_ns)
            previous_tick, previous_ns = op.stop_tick, stop_ns
        _spread(times, previous_tick, self.trace.num_ticks, previous_ns, self.duration_ns)
        times[self.trace.num_ticks] = self.duration_ns
        return times

    def live_curve(self) -> list[tuple[int, int]]:
        """`(time, bytes alive from then on)`: what the step would hold in core."""
        times = self.tick_times()
        return [(times[tick], nbytes) for tick, nbytes in self.trace.live_nbytes()]

    def resident_curve(self) -> list[tuple[int, int]]:
        """`(time, bytes of chunks held from then on)`; empty without a plan."""
        if self.plan is None:
            return []
        times = self.tick_times()
        change: dict[int, int] = {0: 0}

        def hold(start: int, stop: int, chunks: tuple[tuple[int, int], ...]) -> None:
            nbytes = sum(count for _, count in chunks) * chunk_nbytes
            change[start] = change.get(start, 0) + nbytes
            if stop < self.trace.num_ticks:
                change[stop] = change.get(stop, 0) - nbytes

        chunk_nbytes = self.plan.machine.chunk_nbytes
        for residency in self.plan.residencies:
            hold(*occupied_ticks(residency, self.trace), residency.chunks)
        for scratch in self.plan.scratch:
            tick = self.trace.ops[scratch.before_op].start_tick
            hold(tick, tick + 1, scratch.chunks)
        curve, total = [], 0
        for tick in sorted(change):
            total += change[tick]
            curve.append((times[tick], total))
        return curve

    def spans(self) -> list[Span]:
        """The time spans of the plan's residencies; without a plan, of the variables' lifetimes."""
        times = self.tick_times()
        if self.plan is None:
            lives = [self.trace.lifetime(index) for index in range(len(self.trace.variables))]
            return [
                Span(residency=index, variable=index, start_ns=times[start], stop_ns=times[stop])
                for index, (start, stop) in enumerate(lives)
            ]
        found = []
        for index, residency in enumerate(self.plan.residencies):
            start, stop = occupied_ticks(residency, self.trace)
            found.append(Span(residency=index, variable=residency.variable, start_ns=times[start], stop_ns=times[stop]))
        return found

    @property
    def stall_ns(self) -> int:
        """Time in which ops waited for transfers."""
        return sum(wait.stop_ns - wait.start_ns for wait in self.waits)

    @property
    def compute_ns(self) -> int:
        """Time in which ops ran."""
        return sum(self.op_stop_ns) - sum(self.op_start_ns)

    def wait_by_variable(self) -> dict[int, int]:
        """Nanoseconds that ops waited for transfers of each variable."""
        found: dict[int, int] = {}
        for wait in self.waits:
            variable = self.moves[wait.move].variable
            found[variable] = found.get(variable, 0) + wait.stop_ns - wait.start_ns
        return found


def traced_view(trace: Trace) -> StepView:
    """View a step as traced: ops one after another, everything in memory."""
    starts, stops, now_ns = [], [], 0
    for op in trace.ops:
        starts.append(now_ns)
        now_ns += op.duration_ns
        stops.append(now_ns)
    return StepView(
        source="traced",
        trace=trace,
        plan=None,
        op_start_ns=tuple(starts),
        op_stop_ns=tuple(stops),
        moves=(),
        waits=(),
        duration_ns=now_ns,
    )


def simulated_view(trace: Trace, plan: Plan) -> StepView:
    """View a planned step as simulated. The plan must be coloured, and of this trace."""
    result = simulate(plan, trace)
    starts = result.op_start_ns
    stops = tuple(start + op.own_ns for start, op in zip(starts, trace.ops, strict=True))
    moves = _simulated_moves(trace, plan, result, stops)
    reruns = tuple(
        RerunRow(op=entry.index, start_ns=entry.start_ns, stop_ns=entry.stop_ns)
        for entry in result.timeline
        if entry.kind == "recompute"
    )
    relocation = next(((e.start_ns, e.stop_ns) for e in result.timeline if e.kind == "relocate"), None)
    between = (*reruns, *([RerunRow(op=0, start_ns=relocation[0], stop_ns=relocation[1])] if relocation else []))
    return StepView(
        source="simulated",
        trace=trace,
        plan=plan,
        op_start_ns=starts,
        op_stop_ns=stops,
        moves=moves,
        waits=tuple(_simulated_waits(starts, stops, moves, between, result.duration_ns)),
        duration_ns=result.duration_ns,
        reruns=reruns,
        relocation=relocation,
    )


def measured_view(trace: Trace, plan: Plan, measured: Measured) -> StepView:
    """View a planned step as measured."""
    index = _ResidencyIndex(trace, plan)
    moves = [
        Move(
            kind=move.kind,
            variable=move.variable,
            residency=index.find(move, measured.op_start_ns, measured.op_stop_ns),
            nbytes=move.nbytes,
            issue_ns=move.issue_ns,
            start_ns=move.start_ns,
            stop_ns=move.stop_ns,
        )
        for move in measured.moves
    ]
    ordered = _ordered(moves)
    starts, stops = measured.op_start_ns, measured.op_stop_ns
    return StepView(
        source="measured",
        trace=trace,
        plan=plan,
        op_start_ns=starts,
        op_stop_ns=stops,
        moves=ordered,
        waits=tuple(_measured_waits(step_actions(plan, trace), measured, ordered)),
        duration_ns=measured.duration_ns,
        stalls=measured.stalls,
        unix_ns=measured.unix_ns,
    )


def _ordered(moves: Sequence[Move]) -> tuple[Move, ...]:
    return tuple(sorted(moves, key=lambda m: (m.start_ns, m.stop_ns, m.kind, m.variable)))


def _spread(times: list[int], first: int, stop: int, start_ns: int, stop_ns: int) -> None:
    count = stop - first
    for k in range(count):
        times[first + k] = start_ns + (stop_ns - start_ns) * k // count


class _ResidencyIndex:
    """Finds the residency that a transfer begins or ends, by its variable and the op beside it."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self._num_ops = len(trace.ops)
        self._loads: dict[tuple[int, int], int] = {}
        self._writes: dict[tuple[int, int], int] = {}
        for index, residency in enumerate(plan.residencies):
            if isinstance(residency.start, Loaded):
                self._loads[residency.variable, residency.start.before_op] = index
            if isinstance(residency.stop, Evicted):
                self._writes[residency.variable, residency.stop.write_op % self._num_ops] = index

    def find(self, move: Move, starts: Sequence[int], stops: Sequence[int]) -> int | None:
        if move.kind == "load":
            return self._loads.get((move.variable, bisect_left(starts, move.issue_ns)))
        after = bisect_right(stops, move.issue_ns) - 1
        # What was allocated after the last op is written when the step ends: before the first op of the next.
        return self._writes.get((move.variable, after if after >= 0 else self._num_ops - 1))


def _simulated_moves(trace: Trace, plan: Plan, result: Simulation, stops: Sequence[int]) -> tuple[Move, ...]:
    """The simulated transfers with their residencies; a residency has at most one load and one eviction."""
    pending: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for index, residency in enumerate(plan.residencies):
        if isinstance(residency.start, Loaded):
            op = residency.start.before_op  # issued when the op before it has ended
            pending.setdefault(("load", residency.variable), []).append((stops[op - 1] if op else 0, index))
        if isinstance(residency.stop, Evicted):
            op = residency.stop.write_op  # negative: one of the next step's evictions, written in this one
            pending.setdefault(("evict", residency.variable), []).append((stops[op], index))
    for waiting in pending.values():
        waiting.sort(reverse=True)
    moves = []
    for entry in result.timeline:
        if entry.kind not in ("load", "evict"):
            continue
        issue_ns, index = pending[entry.kind, entry.index].pop()
        moves.append(
            Move(
                kind="load" if entry.kind == "load" else "evict",
                variable=entry.index,
                residency=index,
                nbytes=trace.variables[entry.index].nbytes,
                issue_ns=issue_ns,
                start_ns=entry.start_ns,
                stop_ns=entry.stop_ns,
            )
        )
    return _ordered(moves)


def _simulated_waits(
    starts: Sequence[int], stops: Sequence[int], moves: Sequence[Move], reruns: Sequence[RerunRow], duration_ns: int
) -> Iterator[Wait]:
    """The waits of simulated ops, for transfers of this step or of the one before.

    `reruns`: what else keeps compute busy before an op, one at most: before op 0 the copies at the border.
    """
    again = {rerun.op: rerun for rerun in reruns}
    ends = sorted((end, i) for i, m in enumerate(moves) for end in (m.stop_ns, m.stop_ns - duration_ns))
    for op, start_ns in enumerate(starts):
        since_ns = stops[op - 1] if op else 0
        rerun = again.get(op)
        gaps = [(since_ns, start_ns)]
        if rerun is not None:
            gaps = [(since_ns, rerun.start_ns), (rerun.stop_ns, start_ns)]
        for begin_ns, end_ns in gaps:
            if begin_ns < end_ns and ends:
                at = bisect_left(ends, (end_ns, 0))
                _, move = min(ends[max(at - 1, 0) : at + 1], key=lambda e: abs(e[0] - end_ns))
                yield Wait(op=op, start_ns=begin_ns, stop_ns=end_ns, move=move)


def _measured_waits(actions: StepActions, measured: Measured, moves: Sequence[Move]) -> Iterator[Wait]:
    """The measured waits, each with its op and the transfer that ended it: the last of those that the op needs.

    A transfer that was issued after the op is the one of the step before, at the same place of the cycle.
    """
    starts, duration_ns = measured.op_start_ns, measured.duration_ns
    loads = {m.residency: i for i, m in enumerate(moves) if m.kind == "load" and m.residency is not None}
    writes = {m.residency: i for i, m in enumerate(moves) if m.kind == "evict" and m.residency is not None}
    for begin_ns, end_ns in measured.stalls:
        op = bisect_left(starts, end_ns)
        if op == len(starts):
            continue  # between the last op and the next step: no op waited
        awaited = [loads.get(r, loads.get(actions.kept_from.get(r, -1))) for r in actions.uses[op]]
        awaited += [writes.get(before) for r in actions.births[op] for before in actions.waits_for[r]]
        done = [
            (moves[index].stop_ns - (duration_ns if moves[index].issue_ns > end_ns else 0), index)
            for index in awaited
            if index is not None
        ]
        if done:
            yield Wait(op=op, start_ns=begin_ns, stop_ns=end_ns, move=max(done)[1])
