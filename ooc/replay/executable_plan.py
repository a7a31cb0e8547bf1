"""An executable plan: per op the actions before and after it, and the tables that native code reads.

Making one decides nothing. It turns the plan's residencies into `ExecutableResidency` objects, works out for each
whose chunks it takes over (so what it must wait for, or must see freed, first), and lays the rest
out in arrays that native/dispatch.cpp and vmm/native/allocator.cpp read.
"""

from __future__ import annotations

import ctypes
import functools
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.memory.record import VariableRecord
from ooc.replay.doubts import Doubts
from ooc.replay.op_acts import After, Before
from ooc.replay.op_timings import Between, OpTimings
from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.replay.planned_border import planned_border
from ooc.replay.planned_parts import PlannedParts
from ooc.replay.planned_reruns import PlannedReruns, PlannedTrials
from ooc.replay.takeovers import Takeovers
from ooc.tracing.observed import Observed
from ooc.tracing.op_semantics import order_tells_changes
from ooc.tracing.recording import MOST_HEAD_OPS
from ooc.units import format_nbytes
from scheduler.plan import (
    Born,
    Dies,
    Discarded,
    Dropped,
    Evicted,
    Kept,
    Loaded,
    Plan,
    PlanError,
    Recomputed,
    occupied_ticks,
)
from scheduler.trace import Trace, Use
from vmm.addresses import Reservation
from vmm.torch_cpu import PLANNED_ALLOC_DTYPE, PlanTables

PLAN_OP_DTYPE = np.dtype(
    [
        ("uses_start", "u4"),
        ("uses_stop", "u4"),
        ("allocs_start", "u4"),
        ("allocs_stop", "u4"),
        ("flags", "u4"),
        ("reserved", "u4"),
    ]
)
"""numpy layout of `PlanOp` in native/dispatch.cpp."""

_BEFORE, _AFTER, _INTERCEPT, _HEAD, _GRADIENTS, _TOUCHES, _CHANGES, _HIDDEN = 1, 2, 4, 8, 16, 32, 64, 128
_OMITTABLE = 512


class ExecutablePlan:
    """A plan, its variables and its tables. Owns the arrays that native code reads while it is installed.

    Args:
        elastic: Variables whose sizes differ from step to step (`ooc.replay.elastic`).
        standing: Variables that exist throughout, other storages each time.
        may_omit: Steps may leave out ops of it (`ooc.replay.omissions`).
        num_chunks: So many at least are its own while it is replayed. More than it uses: there is room to try ops.

    Attributes:
        leaves_room: Whether it was made for less memory than there is, for such room, and is to go when that was used.
        num_without_room: Trials that found no room.
        is_placed: Whether it was entered before: its chunks keep their names (`ooc.replay.start_places`).
        omitted, doubts: Ops that the present step has left out so far, in order; those that it is going to leave out.
        readdressed: Of variables whose addresses have changed in this step: since which op, and what it was before.
        grad_mode: Whether gradients were enabled when its first op ran.
        num_idle: Ops at its head that touch no variable. Python sees these and the next one in another grad mode than
            the plan's, and whatever comes instead of them: that tells what begins.
    """

    def __init__(
        self,
        *,
        trace: Trace,
        plan: Plan,
        observed: Observed,
        view_address: int,
        intercepts: Container[Any],
        elastic: frozenset[int] = frozenset(),
        standing: frozenset[int] = frozenset(),
        may_omit: bool = False,
        num_chunks: int = 0,
    ) -> None:
        self.trace = trace
        self.plan = plan
        self.num_ops = len(trace.ops)
        self.num_alive = self.num_entered = observed.num_alive
        self.funcs = list(observed.funcs)
        self.calls = [getattr(func, "_op", func) for func in observed.funcs]
        self.occurrences = observed.occurrences
        self.parts = PlannedParts(trace, observed)
        self.flights = observed.flights or (None,) * self.num_ops
        self.variables = [PlanVariable(index=i, trace=trace) for i in range(len(trace.variables))]
        self.before: list[Before | None] = [None] * self.num_ops
        self.after: list[After | None] = [None] * self.num_ops
        self.last_releases: list[ExecutableResidency] = []
        self.between_births: dict[int, list[ExecutableResidency]] = {}
        self.num_chunks = num_chunks
        self.leaves_room = num_chunks > 0
        self.num_without_room = 0
        self.timings, self.between = OpTimings(), Between()
        self.observed = observed
        self.grad_mode = observed.grad_mode
        self.elastic = elastic
        self.is_elastic = bool(elastic)
        self.standing = standing
        self.may_omit = may_omit
        self.omitted: list[int] = []
        self.readdressed: list[tuple[int, int, int]] = []
        self._places: dict[Any, list[int]] = {}
        self._link_variables(observed, elastic)
        # What a step boundary looks at, so that it need not look at every variable.
        self.movers = [r for r in self.variables if r.lives_on and not (r.is_persistent or r.is_standing)]
        self.successors = [r for r in self.variables if r.predecessor is not None or r.is_standing]
        self.persistent = np.array([r.index for r in self.variables if r.is_persistent], dtype=np.int64)
        self.dies = np.array([r.index for r in self.variables if not r.lives_on], dtype=np.int64)
        deaths = ((self.trace.variables[i].death_tick, i) for i in self.dies.tolist())
        self.deaths = sorted((tick, i) for tick, i in deaths if tick is not None)
        residencies = self._make_residencies(view_address)
        self.reruns = PlannedReruns(plan, trace, residencies)
        self.trials: PlannedTrials | None = None
        """What is to be tried in the next step."""
        self.draws: set[tuple[Any, str]] = set()
        """Of its ops, those that have turned out to join what is drawn anew in each step (`Draws`)."""
        self.is_quick = self.is_due = self.waits_in_vain = self.is_outgrown = self.is_placed = False
        self.stands_for: Trace | None = None
        """Of a plan made in mid-step: the trace with all ops that may run again, for which the next one is made."""
        self.scratch: dict[tuple[int, int], Reservation] = {}
        """For each re-run's op and each variable that it makes and does not keep: where that is. See `Bindings`."""
        self.parts.leave_out(residencies, {id(r) for rerun in self.reruns.by_op.values() for r in rerun.arrivals})
        takeovers = Takeovers(trace, self.variables, self.deaths, self.reruns.written_out)
        self.border = planned_border(plan, trace, self.variables, residencies, takeovers.has_transfer)
        """What is copied within memory before the next step of the same plan."""
        if self.border is not None:
            self.num_chunks = max(self.num_chunks, self.border.num_chunks)
        takeovers.find(residencies, self.num_chunks, self.border.written_early() if self.border is not None else ())
        takeovers.wait_for_scratch(self.reruns.by_op.values(), residencies)
        self.outlasting = [variable for variable in self.variables if not variable.dies_within and variable.residencies]
        births = self._place_acts(residencies, takeovers)
        idle = range(min(self.num_ops, MOST_HEAD_OPS))
        self.num_idle = next((i for i in idle if not self.is_bystander(i)), len(idle))
        self._lay_out(births, intercepts)

    def __repr__(self) -> str:
        return f"<ExecutablePlan by {self.plan.policy}: {self.num_ops} ops, {len(self.variables)} variables>"

    # -- making it

    def _link_variables(self, observed: Observed, elastic: frozenset[int]) -> None:
        for variable, traced in zip(self.variables, self.trace.variables, strict=True):
            if traced.becomes is not None and traced.becomes != variable.index:
                variable.successor = self.variables[traced.becomes]
                variable.successor.predecessor = variable
                _, successor_stop = self.trace.lifetime(traced.becomes)
                birth, _ = self.trace.lifetime(variable.index)
                variable.double_buffered = successor_stop > birth
            serial = observed.start_serials[variable.index]
            if variable.index in self.standing:
                variable.is_persistent, variable.is_standing = False, True
            if variable.is_persistent:
                variable.serial = serial
            variable.rank = observed.start_ranks[variable.index]
            variable.is_elastic = variable.index in elastic
            if variable.is_born:
                variable.origin = observed.origins[variable.index]

    def _make_residencies(self, view_address: int) -> list[ExecutableResidency]:
        chunk = self.plan.machine.chunk_nbytes
        residencies = []
        for room in self.plan.scratch:  # may lie above all residencies, where others' memory would stay beside the plan
            self.num_chunks = max(self.num_chunks, *(first + count for first, count in room.chunks))
        for planned in self.plan.residencies:
            variable = self.variables[planned.variable]
            segments = []
            left = variable.nbytes
            for first, count in planned.chunks:
                segments.append((view_address + first * chunk, min(left, count * chunk)))
                left -= count * chunk
                self.num_chunks = max(self.num_chunks, first + count)
            residency = ExecutableResidency(variable=variable, planned=planned, segments=segments)
            residencies.append(residency)
            variable.residencies.append(residency)
        residencies.sort(key=lambda s: occupied_ticks(s.planned, self.trace))
        for variable in self.variables:
            variable.residencies.sort(key=lambda s: occupied_ticks(s.planned, self.trace))
        return residencies

    def _place_acts(
        self, residencies: Iterable[ExecutableResidency], takeovers: Takeovers
    ) -> list[list[ExecutableResidency]]:
        """Sort the residencies' actions by op. Returns the births inside each op, in order."""
        uses = self.trace.uses_by_variable()
        births: list[list[ExecutableResidency]] = [[] for _ in range(self.num_ops)]
        late = self._loaded_for_next_step()
        starts = self.trace.op_starts
        for in_parts in self.parts.ops():
            self._after(in_parts)  # there the marks of its operands are skipped
        for residency in residencies:
            planned, index = residency.planned, residency.variable.index
            if residency.is_left_out:
                continue
            first_tick, last_tick = occupied_ticks(planned, self.trace)
            mine = [
                (i, u) for i, u in uses[index] if self.trace.ops[i].stop_tick > first_tick and starts[i] < last_tick
            ]
            match planned.start:
                case Born():
                    op = takeovers.birth_op(residency)
                    if op is not None:
                        births[op].append(residency)
                        self._before(op).births.append(residency)
                    else:
                        self.between_births.setdefault(bisect_right(starts, first_tick), []).append(residency)
                case Loaded(before_op=op):
                    self._before(op).loads.append(residency)
                    self._note_arrival(residency, mine)
                case Kept():
                    if index in late:
                        self._note_arrival(residency, mine)
                case Recomputed(before_op=op):
                    acts = self._before(op)
                    acts.rerun = self.reruns.by_op[op]
                    acts.arrivals += [r for r in acts.rerun.arrivals if r not in acts.arrivals]
            if not isinstance(planned.start, Born):
                writer = next((i for i, u in mine if u.writes), None)
                if writer is not None:
                    self._after(writer).dirties.append(residency.variable)
            match planned.stop:
                case Evicted(write_op=write, release_op=release):
                    self._after(write % self.num_ops).writes.append(residency)
                    if release < self.num_ops:
                        self._before(release).releases.append(residency)
                    else:
                        self.last_releases.append(residency)
                case Dropped(after_op=op):
                    self._after(op).drops.append(residency)
                case Discarded(after_op=op):
                    is_written = id(residency) in self.reruns.written_out
                    (self._after(op).drops if is_written else self._after(op).discards).append(residency)
                case Dies() | Kept():
                    pass
        return births

    def _note_arrival(self, residency: ExecutableResidency, uses: Sequence[tuple[int, Use]]) -> None:
        """Let the first op that uses a residency wait for its load; a mark does not."""
        op = next((op for op, _ in uses if not self.parts.is_mark(op)), None)
        if op is not None:
            self._before(op).arrivals.append(residency)

    def _loaded_for_next_step(self) -> set[int]:
        """Variables that start in memory, where the load may still be under way when the step starts."""
        found = set()
        for variable in self.variables:
            last = variable.residencies[-1].planned if variable.residencies else None
            if last is not None and isinstance(last.start, Loaded) and isinstance(last.stop, Kept):
                found.add(variable.successor.index if variable.successor is not None else variable.index)
        return found

    def _before(self, op: int) -> Before:
        acts = self.before[op]
        if acts is None:
            acts = self.before[op] = Before()
        return acts

    def _after(self, op: int) -> After:
        acts = self.after[op]
        if acts is None:
            acts = self.after[op] = After()
        return acts

    def _lay_out(self, births: Sequence[Sequence[ExecutableResidency]], intercepts: Container[Any]) -> None:
        num_variables = max(len(self.variables), 1)
        self.variable_address: npt.NDArray[np.uint64] = np.zeros(num_variables, dtype=np.uint64)
        self.variable_alive: npt.NDArray[np.uint8] = np.zeros(num_variables, dtype=np.uint8)
        self.variable_nbytes: npt.NDArray[np.uint64] = np.zeros(num_variables, dtype=np.uint64)
        self.op_start_ns: npt.NDArray[np.int64] = np.zeros(max(self.num_ops, 1), dtype=np.int64)
        self.op_stop_ns: npt.NDArray[np.int64] = np.zeros(max(self.num_ops, 1), dtype=np.int64)
        self.op_nodes: npt.NDArray[np.int64] = np.zeros(max(self.num_ops, 1), dtype=np.int64)
        self._ops = np.zeros(max(self.num_ops, 1), dtype=PLAN_OP_DTYPE)
        uses: list[int] = []
        allocs: list[tuple[int, int, int, int, int]] = []
        must_be_dead: list[int] = []
        for index in range(self.num_ops):
            first_use, first_alloc = len(uses), len(allocs)
            uses.extend(self.occurrences[index])
            for residency in self.parts.divide(index, births[index])[0]:
                first_dead = len(must_be_dead)
                must_be_dead.extend(residency.dead)
                variable = residency.variable
                ordinal = variable.origin[2] if variable.origin is not None else 0
                allocs.append((variable.nbytes, variable.index, first_dead, len(must_be_dead), ordinal))
            flags = (
                (_BEFORE if self.before[index] else 0)
                | (_AFTER if self.after[index] else 0)
                | (_INTERCEPT if self.funcs[index] in intercepts else 0)
                | (_HEAD if index <= self.num_idle else 0)
                | (_GRADIENTS if self.grad_mode else 0)
                | self._change_flags(index)
                | (_OMITTABLE if self.may_omit else 0)
                | (_TOUCHES if index == self.num_idle and self.occurrences[index] and not self.is_elastic else 0)
            )
            self._ops[index] = (first_use, len(uses), first_alloc, len(allocs), flags, 0)
        # Marks are skipped by Python.
        self._native_after = [None if self.parts.marks_after(op) else acts for op, acts in enumerate(self.after)]
        self.doubts = Doubts(self.observed, self._ops["flags"], may_omit=self.may_omit)
        self._uses = np.array(uses or [0], dtype=np.uint32)
        self._allocs = np.array(allocs or [(0, 0, 0, 0, 0)], dtype=PLANNED_ALLOC_DTYPE)
        self._must_be_dead = np.array(must_be_dead or [0], dtype=np.uint32)
        self._deaths = np.array([index for _, index in self.deaths] or [0], dtype=np.uint32)
        starts = [op.start_tick for op in self.trace.ops]
        self._num_deaths = np.searchsorted([tick for tick, _ in self.deaths], starts, side="right").astype(np.uint32)
        self.tables = PlanTables(
            allocs=self._allocs.ctypes.data,
            must_be_dead=self._must_be_dead.ctypes.data,
            variable_address=self.variable_address.ctypes.data,
            variable_alive=self.variable_alive.ctypes.data,
            variable_nbytes=self.variable_nbytes.ctypes.data,
            is_elastic=self.is_elastic,
            num_variables=len(self.variables),
        )

    def _change_flags(self, index: int) -> int:
        operands = frozenset(self.occurrences[index])
        written = [use.variable for use in self.trace.ops[index].uses if use.reads and use.writes]
        is_told = not operands or order_tells_changes(self.funcs[index], len(operands.intersection(written)))
        return (_CHANGES if written else 0) | (0 if is_told else _HIDDEN)

    # -- replaying it

    def changed_by(self, op: int) -> set[int]:
        """Addresses of operands that op `op` is planned to change."""
        written = [use.variable for use in self.trace.ops[op].uses if use.reads and use.writes]
        return {int(self.variable_address[variable]) for variable in written if self.variable_alive[variable]}

    def note_passed_over(self, start: int, stop: int, now_ns: int) -> None:
        """These ops do not come in the present step: where one may leave out ops, it has left them out."""
        self.op_start_ns[start:stop] = self.op_stop_ns[start:stop] = now_ns
        if self.may_omit:  # the recording of a step that leaves the plan is to have what came, and no more
            self.omitted.extend(range(start, stop))
            self.op_nodes[start:stop] = self.op_nodes[start - 1] if start else 0  # they made none: numbers ascend
            self.doubts.note_omitted(start, stop)

    def persistent_is_missing(self) -> bool:
        """Whether a variable that lives across steps was freed in this one."""
        return not self.variable_alive[self.persistent].all()

    def live_records(self) -> list[VariableRecord]:
        """Records that are bound to a live variable now."""
        return [r.record for r in self.variables if r.record is not None and self.variable_alive[r.index]]

    def record_at(self, address: int) -> VariableRecord | None:
        """The record at this address, if it is bound to a live variable now."""
        variable = self.variable_at(address)
        return variable.record if variable is not None else None

    def variable_at(self, address: int) -> PlanVariable | None:
        """The live variable that is bound to the record at this address, if any."""
        for index in np.flatnonzero(self.variable_address == address).tolist():
            record = self.variables[index].record
            if record is not None and self.variable_alive[index] and record.address == address:
                return self.variables[index]
        return None

    def is_at(self, variable: int, address: int) -> bool:
        """Whether a variable is alive, at this address."""
        return bool(self.variable_alive[variable]) and int(self.variable_address[variable]) == address

    def give_up_records(self) -> list[VariableRecord]:
        """Let go of the records kept for variables born in the step; the caller disposes of them.

        Only while the plan is inactive. They are made anew when it is entered again.
        """
        found = {id(r.record): r.record for r in self.variables if r.is_born and r.record is not None}
        for variable in self.variables:
            variable.record = None
        return list(found.values())

    @property
    def tables_address(self) -> int:
        """Address of the allocator's `PlanTables`."""
        return ctypes.addressof(self.tables)

    def install_arguments(self, calls: list[Any]) -> tuple[Any, ...]:
        """Arguments of `Dispatcher.install`, with what is called for each op."""
        return (
            self.funcs,
            calls,
            self,
            self._ops.ctypes.data,
            self._uses.ctypes.data,
            self.variable_address.ctypes.data,
            self.op_start_ns.ctypes.data,
            self.op_stop_ns.ctypes.data,
            self.op_nodes.ctypes.data,
            self.num_ops,
            (
                self.before,
                self._native_after,
                self.variable_alive.ctypes.data,
                self.variable_nbytes.ctypes.data,
                self._deaths.ctypes.data,
                self._num_deaths.ctypes.data,
            ),
        )

    def allocs_of(self, op: int) -> list[tuple[int, int, PlanVariable]]:
        """The allocations of an op that native code serves, in order: index of all, bytes, and what is born."""
        start, stop = self._ops[["allocs_start", "allocs_stop"]][op].tolist()
        rows = self._allocs[["capacity", "variable"]][start:stop].tolist()
        return [(start + place, nbytes, self.variables[index]) for place, (nbytes, index) in enumerate(rows)]

    def births_between(self, op: int, nbytes: int, ordinal: int) -> list[ExecutableResidency]:
        """Births right before op `op` that an allocation of `nbytes` may be, the likeliest first.

        `ordinal` says which allocation at this place it is.
        """
        fitting = [r for r in self.between_births.get(op, ()) if r.variable.has_room(nbytes)]
        if self.is_elastic:
            fitting.sort(key=lambda r: (r.variable.origin or ("", 0, 0))[2] != ordinal)
        return fitting

    @property
    def head(self) -> Any:
        """The first op that touches a variable."""
        return self.funcs[self._head_index]

    @functools.cached_property
    def _head_index(self) -> int:
        return next((i for i in range(self.num_idle, self.num_ops) if not self.parts.is_mark(i)), self.num_ops - 1)

    def can_be_bound(self, observed: Observed, alignment: Mapping[int, int]) -> bool:
        """Whether the variables that live across steps are still those that the plan was made for."""
        serials = {ours: observed.start_serials[theirs] for theirs, ours in alignment.items()}
        return all(v.serial == serials.get(v.index) for v in self.variables if v.is_persistent)

    def places_of(self, func: Any) -> Sequence[int]:
        """The ops that call this and are no bystanders, in order."""
        if not self._places:
            for index in (i for i in range(self.num_ops) if not self.is_bystander(i)):
                self._places.setdefault(self.funcs[index], []).append(index)
        return self._places.get(func, ())

    def is_born_before(self, variable: PlanVariable, op: int) -> bool:
        """Whether a variable is born in the step, before op `op`."""
        birth_tick = self.trace.variables[variable.index].birth_tick
        return birth_tick is not None and birth_tick < self.trace.op_starts[op]

    def note_address(self, variable: PlanVariable, op: int) -> None:
        """Note that a variable's address is about to change, before op `op`."""
        self.readdressed.append((op, variable.index, int(self.variable_address[variable.index])))

    def is_freed_at_head(self, variable: PlanVariable) -> bool:
        """Whether a variable is freed before the first op that touches one."""
        death_tick = self.trace.variables[variable.index].death_tick
        return (
            death_tick is not None
            and self.num_idle < self.num_ops
            and death_tick <= self.trace.op_starts[self.num_idle]
        )

    def may_start_with(
        self, func: Any, addresses: Sequence[int], grad_mode: bool, record_at: Callable[[int], VariableRecord | None]
    ) -> bool:
        """Whether an op may be the first of a replay that touches a variable, whatever others came before it.

        Of its operands, those that live across steps must be the plan's.
        """
        if grad_mode != self.grad_mode or func is not self.head:
            return False
        expected = self.occurrences[self._head_index]
        if len(expected) < len(addresses):
            return False
        if len(expected) > len(addresses):  # some fell below the threshold this time
            serials = {record.serial for address in addresses if (record := record_at(address)) is not None}
            fixed = [self.variables[i] for i in expected if i not in self.elastic and self.variables[i].is_persistent]
            return self.is_elastic and all(variable.serial in serials for variable in fixed)
        for index, address in zip(expected, addresses, strict=True):
            record = record_at(address)
            if self.variables[index].is_persistent and (
                record is None or record.serial != self.variables[index].serial
            ):
                return False
        return True

    def is_bystander(self, op: int) -> bool:
        """Whether an op touches no variable, so that a step may go without it and stay on its plan.

        What the plan does before and after it is to be done all the same.
        """
        before = self.before[op]
        births = any(not use.reads for use in self.trace.ops[op].uses)  # the others may be of collectives under way
        return not (self.occurrences[op] or births or (before is not None and before.births))

    def dirtied_by(self, op: int) -> list[VariableRecord]:
        """Records of which the store's copy is stale after op `op`, as far as the plan counts on copies."""
        acts = self.after[op]
        return [v.record for v in acts.dirties if v.record is not None] if acts is not None else []

    def is_written_from(self, variable: PlanVariable, op: int) -> bool:
        """Whether op `op` or a later one writes the variable."""
        return any(u.writes and u.variable == variable.index for o in self.trace.ops[op:] for u in o.uses)

    def is_used_from(self, variable: PlanVariable, op: int) -> bool:
        """Whether op `op` or a later one has the variable among its operands."""
        return any(variable.index in occurrences for occurrences in self.occurrences[op:])

    def start_residencies(self) -> dict[int, ExecutableResidency]:
        """Per variable that is resident when the step starts, its first residency."""
        return {
            v.index: v.residencies[0] for v in self.variables if v.residencies and v.residencies[0].is_kept_at_start
        }

    def residency_at(self, variable: PlanVariable, op: int) -> ExecutableResidency | None:
        """The residency of a variable that covers op `op`, if any that is not left out."""
        start, stop = self.trace.ops[op].start_tick, self.trace.ops[op].stop_tick
        for residency in variable.residencies:
            first, last = occupied_ticks(residency.planned, self.trace)
            if first < stop and last > start and not residency.is_left_out:
                return residency
        return None


def check_unseen(trace: Trace) -> None:
    """Raise `PlanError` if what can never be away crosses the cycle's boundary: nobody could take it over."""
    successors = {v.becomes for v in trace.variables}
    for index, v in enumerate(trace.variables):
        comes = trace.cyclic and v.birth_tick is None and index not in successors
        if not v.evictable and (comes or (v.death_tick is None and v.becomes is None)):
            raise PlanError(
                f"variable {index} ({format_nbytes(v.nbytes)}) can never be away, but it "
                f"{'enters' if comes else 'outlives'} the cycle: no op has named it yet, so it may be in use unseen "
                "(memory from another thread, say)."
            )
