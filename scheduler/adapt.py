"""A budget that changes in the middle of a step: from one plan to another (Melon, MobiSys 2022, section 4.4).

A growing budget can wait: the new plan begins with the next step (the paper's lazy switch). A shrinking one
cannot. Then, right before an op, the step goes over from the old plan's state to the new one's: what both have in
memory stays, or moves to its new chunks; what only the new plan has comes from the store if that has a current copy,
and is made again otherwise, with whatever is missing for it; what only the old plan has is given up, and written
first where the new plan counts on the store. The alternative is to start the step anew, which costs
all that was computed so far.

Melon keeps what lies in the first part of the pool, as large as the new budget, and loses the rest
(`keeps_prefix_only`); where memory is chunks, what is needed from the rest can move before the pool shrinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from scheduler.budget import BudgetTooSmall
from scheduler.cost.simulate import simulate
from scheduler.plan import Discarded, Dropped, Evicted, Kept, Loaded, Machine, Plan, Residency, occupied_ticks
from scheduler.planning import make_plan
from scheduler.reruns import ReplayGraph
from scheduler.trace import Trace

# Copying within memory: half the rate of writing that was measured for the design (DESIGN.md section 7).
_MOVE_BYTES_PER_S = 16e9


class SwitchKind(Enum):
    """How a budget change is met."""

    LAZY = "the new plan begins with the next step"
    ON_THE_FLY = "the step goes on under the new plan"
    RESTART = "the step starts anew under the new plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What a change of plans takes, right before op `op_index`. Variables are in growing order.

    Attributes:
        stays: In memory under both plans, in the same chunks.
        moves: In memory under both, in other chunks.
        loads: In memory under the new plan only; the store has a current copy.
        recomputes: In memory under the new plan only, and made again by `ops`.
        writes: Written to the store, because the new plan counts on a copy there.
        drops: In memory under the old plan only.
        ops: Run again, in order.
        duration_ns: Time of all that; `restart_ns`: the time to come to this op under the new plan from
            the step's start, which is what `RESTART` costs.
        reason: Why it is not `ON_THE_FLY`.
    """

    kind: SwitchKind
    op_index: int
    stays: tuple[int, ...] = ()
    moves: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    recomputes: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()
    duration_ns: int = 0
    restart_ns: int = 0
    reason: str = ""


def plans_for(
    trace: Trace, machine: Machine, num_chunks: Iterable[int], policy: str = "melon", **parameters: Any
) -> dict[int, Plan]:
    """Plans for a set of budgets in chunks, made ahead; those for which the policy has none are left out."""
    found = {}
    for count in sorted(set(num_chunks)):
        try:
            found[count] = make_plan(trace, replace(machine, num_chunks=count), policy, **parameters)
        except BudgetTooSmall:
            continue
    return found


def plan_within(plans: Mapping[int, Plan], num_chunks: int) -> Plan | None:
    """The plan of the largest budget that is not above `num_chunks`."""
    fitting = [count for count in plans if count <= num_chunks]
    return plans[max(fitting)] if fitting else None


def switch(
    old: Plan,
    new: Plan,
    trace: Trace,
    op_index: int,
    *,
    keeps_prefix_only: bool = False,
    num_way_chunks: int | None = None,
) -> Switch:
    """What it takes to go from `old` to `new` right before an op.

    Args:
        old, new: Plans of `trace`; their machines differ in the number of chunks at most.
        trace: The step.
        op_index: Ops before it have run under `old`.
        keeps_prefix_only: Whether what lies beyond the new budget's chunks is lost at once, as in the paper.
        num_way_chunks: Chunks that there are until the way over is done; by default no more than the new plan has.

    Raises:
        ValueError: Another trace or chunk size, or no such op.
    """
    if {old.trace_fingerprint, new.trace_fingerprint} != {trace.fingerprint()}:
        raise ValueError("the plans must be plans of this trace")
    if old.machine.chunk_nbytes != new.machine.chunk_nbytes:
        raise ValueError(f"chunks of {old.machine.chunk_nbytes} and {new.machine.chunk_nbytes} bytes; they must agree")
    if not 0 <= op_index < len(trace.ops):
        raise ValueError(f"op {op_index}: the step has ops 0 to {len(trace.ops) - 1}")
    if new.machine.num_chunks >= old.machine.num_chunks:
        return Switch(kind=SwitchKind.LAZY, op_index=op_index, reason="the budget did not shrink")
    room = new.machine.num_chunks if num_way_chunks is None else num_way_chunks
    return _Switcher(old, new, trace, op_index, keeps_prefix_only).switch(room)


class _State:
    """What a plan has where, right before an op.

    Attributes:
        resident: Chunks of each variable in memory.
        stored: Variables with a current copy in the store, or on its way there.
    """

    def __init__(self, plan: Plan, trace: Trace, op_index: int) -> None:
        self.plan = plan
        tick = trace.ops[op_index].start_tick
        self.resident: dict[int, tuple[int, ...]] = {}
        self.stored: set[int] = set()
        last: dict[int, Residency] = {}
        for stay in plan.residencies:
            start, stop = occupied_ticks(stay, trace)
            made_here = start == tick and not isinstance(stay.start, Kept)  # by a load, a re-run or a birth to come
            if start > tick or made_here:
                continue
            last[stay.variable] = stay
            if tick < stop:
                self.resident[stay.variable] = tuple(stay.chunk_indices())
        writers = [[op for op, use in uses if use.writes and op < op_index] for uses in trace.uses_by_variable()]
        for v, variable in enumerate(trace.variables):
            stay_so_far = last.get(v)
            if stay_so_far is None:
                if variable.birth_tick is None:
                    self.stored.add(v)  # where it was at the step's start
            elif tick < trace.lifetime(v)[1] and self._is_current(stay_so_far, writers[v], op_index):
                self.stored.add(v)

    def _is_current(self, stay: Residency, writers: Sequence[int], op_index: int) -> bool:
        """Whether the store's copy is current in, or after, a stay that began before the op."""
        match stay.stop:
            case Evicted(write_op=write_op) if write_op < op_index:
                return True
            case Dropped():
                return True
            case Discarded():
                return False
            case _:
                begins = stay.start.before_op if isinstance(stay.start, Loaded) else None
                return begins is not None and not any(op >= begins for op in writers)


class _Switcher:
    def __init__(self, old: Plan, new: Plan, trace: Trace, op_index: int, keeps_prefix_only: bool) -> None:
        self.new = new
        self.trace = trace
        self.op_index = op_index
        self.before, self.after = _State(old, trace, op_index), _State(new, trace, op_index)
        self.graph = ReplayGraph(trace)
        self.there = {
            v: chunks
            for v, chunks in self.before.resident.items()
            if not (keeps_prefix_only and max(chunks, default=0) >= new.machine.num_chunks and self._can_be_lost(v))
        }

    def _can_be_lost(self, variable: int) -> bool:
        return variable in self.before.stored or self.graph.may_ever_return(variable)

    def switch(self, num_way_chunks: int) -> Switch:
        """The way over within so many chunks, or the reason why there is none."""
        wanted, there, machine = self.after.resident, self.there, self.new.machine
        restart_ns = simulate(self.new, self.trace, with_timeline=False).op_start_ns[self.op_index]
        stored = self.before.stored
        writes = sorted(self.after.stored - stored)
        missing = [v for v in sorted({*wanted, *writes}) if v not in there]
        loads = [v for v in missing if v in stored]
        lost = [v for v in missing if v not in stored]

        def give_up(reason: str) -> Switch:
            return Switch(
                kind=SwitchKind.RESTART,
                op_index=self.op_index,
                duration_ns=restart_ns,
                restart_ns=restart_ns,
                reason=reason,
            )

        ops = self.graph.ops_for(lost, self.op_index, lambda v: v in there or v in stored)
        if ops is None:
            return give_up("some of what is lost cannot be made again")
        rerun = self.graph.rerun(self.op_index, ops, lost, machine)
        guests = [v for v in rerun.sources if v not in wanted]  # read by the re-run, and given up after it
        held = {*wanted, *guests, *writes}
        num_chunks = sum(machine.chunks_of(self.trace.variables[v].nbytes) for v in held) + rerun.num_scratch_chunks
        if num_chunks > num_way_chunks:
            return give_up(f"the way over needs {num_chunks} chunks at once, and there are {num_way_chunks}")
        moves = [v for v in sorted(wanted) if v in there and there[v] != wanted[v]]
        loads = sorted({*loads, *(v for v in guests if v not in there)})
        return Switch(
            kind=SwitchKind.ON_THE_FLY,
            op_index=self.op_index,
            stays=tuple(v for v in sorted(wanted) if there.get(v) == wanted[v]),
            moves=tuple(moves),
            loads=tuple(loads),
            recomputes=tuple(lost),
            writes=tuple(writes),
            drops=tuple(v for v in sorted(self.before.resident) if v not in wanted),
            ops=ops,
            duration_ns=self._duration_ns(moves, loads, writes, rerun.duration_ns),
            restart_ns=restart_ns,
        )

    def _duration_ns(self, moves: Sequence[int], loads: Sequence[int], writes: Sequence[int], recompute_ns: int) -> int:
        """One thing after another: nothing else runs meanwhile."""
        machine = self.new.machine
        moved, loaded, written = (sum(self.trace.variables[v].nbytes for v in own) for own in (moves, loads, writes))
        transfers = len(loads) + len(writes)
        seconds = moved / _MOVE_BYTES_PER_S + loaded / machine.load_bytes_per_s + written / machine.evict_bytes_per_s
        return recompute_ns + int(seconds * 1e9) + transfers * machine.latency_ns
