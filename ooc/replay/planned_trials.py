"""Trials of ops while a step is replayed from a plan: whether a plan that runs them again would be right.

A session that recomputes only where that pays tries no op while it learns: on a fast store nobody wants to know. Once a
plan waits for the store for a good part of its step, the ops that make what it moves are tried within its next step:
each kind is run a second time right after its first run, in chunks that the plan leaves free just then. So a trial
moves nothing, takes no step off its plan, and no memory beyond the budget. Where there is no room, the op is not called
replayable.

On a device the host waits in such a step: for each comparison, and for writes out of the chunks that a trial takes.
What comes after is ordered as ever, since a trial is compute work: loads into its chunks come behind all ops so far,
and its mappings stay until the host has seen the end of all use (`vmm.device_space`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ooc.memory.no_room import NoRoom
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.bailout import has_landed, pinned_by
from ooc.replay.op_watch import Range
from ooc.replay.plan_variables import ExecutableResidency
from ooc.replay.planned_reruns import PlannedTrials
from ooc.replay.present_sizes import births_of, forget_births, present_nbytes
from ooc.replay.rerun_trials import RerunTrials
from scheduler.plan import Loaded, Plan, occupied_ticks
from scheduler.trace import Trace
from vmm.addresses import Reservation
from vmm.table import AllocatorTable

if TYPE_CHECKING:
    from ooc.replay.executable_plan import ExecutablePlan

WORTH_TRIALS = 0.1
"""A plan that is predicted to wait for at least this share of its step has its ops tried: re-runs save no more."""
WORTH_ELASTIC_TRIALS = 0.25
"""The same of a plan for steps of any size: it keeps room to try ops of new sizes, and its ops are mostly small. Of the
59 ms of a loop of accelerate's that waited for 3, re-runs made 69, with a quarter less moved."""


def trials_for(executable: ExecutablePlan, may_be_tried: Callable[[Any], bool]) -> PlannedTrials | None:
    """The ops that a plan with re-runs may want, of a plan without; None: there is no such op.

    They are those that allocate or write a variable of the step, up to the last load of one.
    """
    trace = executable.trace
    last = _last_load(executable.plan, trace)
    within = {v.index for v in executable.variables if v.is_born}
    born = executable.reruns.graph.births
    found = [
        index
        for index in range(last)
        if executable.parts.may_run_again(index)
        and may_be_tried(executable.funcs[index])
        and all(executable.variables[v].evictable for v in born[index])
        and (born[index] or any(u.writes and u.variable in within for u in trace.ops[index].uses))
    ]
    return PlannedTrials(frozenset(found)) if found else None


def waits_much(duration_ns: int, trace: Trace, *, is_elastic: bool = False) -> bool:
    """Whether a step that is predicted to take so long waits for the store long enough to look for re-runs."""
    share = WORTH_ELASTIC_TRIALS if is_elastic else WORTH_TRIALS
    return duration_ns - trace.duration_ns >= share * duration_ns > 0


def with_replayable(trace: Trace, ops: frozenset[int]) -> Trace:
    """The trace with these ops called replayable, and no others."""
    return replace(trace, ops=tuple(replace(op, replayable=i in ops) for i, op in enumerate(trace.ops)))


def _last_load(plan: Plan, trace: Trace) -> int:
    """The last op before which a variable that is born in the step is loaded again; 0 if none is."""
    return max(
        (
            r.start.before_op
            for r in plan.residencies
            if isinstance(r.start, Loaded) and trace.variables[r.variable].birth_tick is not None
        ),
        default=0,
    )


class TrialsInPlans:
    """Makes the trials of the plan that is being replayed, around its ops.

    Attributes:
        installed: Those of the plan that was installed last.
    """

    def __init__(
        self,
        trials: RerunTrials,
        manager: ResidencyManager,
        allocator: AllocatorTable,
        lock: AbstractContextManager[None],
        bail_out: Callable[[str], None],
    ) -> None:
        self.installed: PlannedTrials | None = None
        self._trials = trials
        self._manager = manager
        self._allocator = allocator
        self._lock = lock
        self._bail_out = bail_out

    def __repr__(self) -> str:
        return f"<TrialsInPlans by {self._trials!r}>"

    def calls_of(self, executable: ExecutablePlan) -> list[Any]:
        """The functions to call for a plan's ops: those that are to be tried run twice."""
        trials, calls = executable.trials, list(executable.calls)
        self.installed = trials
        if trials is not None:
            self._trials.begin_step()
            trials.was_installed = True
            for index in trials.ops:
                calls[index] = functools.partial(self._call, executable, trials, index, calls[index])
        return calls

    def _call(
        self,
        executable: ExecutablePlan,
        trials: PlannedTrials,
        index: int,
        call: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        trials.kinds[index], result = self.call_tried(executable, index, call, args, kwargs)
        return result

    def repeats(self, kind: int) -> bool:
        """Whether a kind of op was tried, and its bits were the same."""
        return self._trials.repeats(kind)

    def call_tried(
        self,
        executable: ExecutablePlan,
        index: int,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[int, Any]:
        """Run an op of the plan, and once more if nothing is known of its kind. The kind, and the op's result."""

        def new_room() -> PlannedRoom:
            return PlannedRoom(executable, index, self._manager, self._bail_out)

        with self._lock:
            kind, trial = self._trials.begin_in_plan(executable.funcs[index], args, kwargs, new_room)
            if trial is not None:
                trial.prepare()
        self._allocator.state.num_counted = 0  # what the trial has copied is no allocation of the op's
        if trial is None:
            return kind, call(*args, **kwargs)
        try:
            forget_births(executable, index)
            result = call(*args, **kwargs)
            with self._lock:
                if self._is_active(executable):  # else its chunks may be others' by now
                    born = {v: nbytes for v, nbytes in births_of(executable, index).items() if nbytes}
                    trial.finish(result, [*born.values()], [bool(executable.variable_alive[v]) for v in born])
                    executable.num_without_room += not trial.has_room
        finally:
            with self._lock:
                trial.close()
        return kind, result

    def _is_active(self, executable: ExecutablePlan) -> bool:
        return self._allocator.state.plan == executable.tables_address


class PlannedRoom:
    """Memory for the trial of one op of a plan: chunks that nobody has while the op runs.

    Made and used with the session's lock held, right before and right after the op.
    """

    moves_others = False

    def __init__(
        self,
        executable: ExecutablePlan,
        index: int,
        manager: ResidencyManager,
        bail_out: Callable[[str], None],
    ) -> None:
        self._executable = executable
        self._manager = manager
        self._bail_out = bail_out
        self._space = manager.space
        self._chunk_nbytes = manager.chunk_nbytes
        self._index = index
        self._records = {record.address: record for record in executable.live_records()}
        self._reservations: list[Reservation] = []
        self._free, self._under_way = _free_chunks(
            executable, index, self._records.values(), may_wait=not manager.is_host
        )

    def nbytes_at(self, address: int) -> int | None:
        """Of the live variable there; None if the plan has none."""
        record = self._records.get(address) or next(
            (r for r in self._executable.live_records() if r.address == address), None
        )
        return present_nbytes(self._executable, record) if record is not None else None

    def in_use(self) -> list[Range]:
        """On a device, what the op uses and has made, and what was taken."""
        if self._manager.is_host:
            return []
        indices = pinned_by(self._executable, self._index)
        alive = (self._executable.variables[i].record for i in indices if self._executable.variable_alive[i])
        found = [(r.address, r.nbytes) for r in alive if r is not None and r.state is State.RESIDENT]
        return found + [(r.address, r.nbytes) for r in self._reservations]

    def take(self, nbytes: int) -> int:
        """The address of so many bytes. Raises `NoRoom`."""
        count = -(-nbytes // self._chunk_nbytes)
        if count > len(self._free):
            raise NoRoom(num_needed=count, num_free=len(self._free), num_pinned=0)
        taken, self._free = self._free[:count], self._free[count:]
        for residency in {r for chunk in taken for r in self._under_way.get(chunk, ())}:
            if not _lands(residency):
                raise NoRoom(num_needed=count, num_free=len(self._free), num_pinned=count)
        reservation = self._space.reserve(nbytes)
        self._reservations.append(reservation)
        self._space.map(reservation, [(chunk, 1) for chunk in taken])
        return reservation.address

    def keep(self, address: int) -> None:
        """What was taken there is the program's from now on. The plan wants its chunks: it is left."""
        reservation = next(r for r in self._reservations if r.address == address)
        self._reservations.remove(reservation)
        assert reservation.runs is not None
        adopt_kept(self._manager, reservation)
        self._bail_out("an op keeps memory that it allocates")

    def close(self) -> None:
        """Give back what was taken and is not kept."""
        while self._reservations:
            self._space.release(self._reservations.pop())


def adopt_kept(manager: ResidencyManager, reservation: Reservation) -> None:
    """Manage what an op allocated when it was run again, and keeps. A plan that has these chunks is to be left."""
    record = VariableRecord(nbytes=reservation.nbytes, reservation=reservation, serial=manager.next_serial())
    record.born(reservation.runs or ())
    record.is_workspace = True
    manager.records[record.address] = record


def _free_chunks(
    executable: ExecutablePlan, index: int, alive: Any, *, may_wait: bool
) -> tuple[list[int], dict[int, list[ExecutableResidency]]]:
    """The plan's chunks that no variable has while an op runs, and whose last transfer has ended well.

    A write that is under way reads them, and what a failed one was to write is nowhere else. With `may_wait`, chunks
    of transfers under way come last; what must have ended before they are touched is in the second result.
    """
    op, trace = executable.trace.ops[index], executable.trace
    is_free = np.ones(executable.num_chunks, dtype=np.bool_)
    under_way: dict[int, list[ExecutableResidency]] = {}
    for variable in executable.variables:
        for residency in variable.residencies:
            first, last = occupied_ticks(residency.planned, trace)
            if first <= op.stop_tick and last >= op.start_tick:
                _take(is_free, residency.runs)
            elif not has_landed(residency):
                if not may_wait:
                    _take(is_free, residency.runs)
                for start, count in residency.runs:
                    for chunk in range(start, start + count):
                        under_way.setdefault(chunk, []).append(residency)
    record: VariableRecord
    for record in alive:  # what was freed later than planned, too
        if record.state.holds_chunks or (record.transfer is not None):
            _take(is_free, record.runs)
    free = np.flatnonzero(is_free).tolist()
    return sorted(free, key=under_way.__contains__), under_way


def _lands(residency: ExecutableResidency) -> bool:
    """Wait for a residency's transfer. Whether it has ended well."""
    if residency.transfer is not None:
        with contextlib.suppress(OSError):
            residency.transfer.wait()
    return has_landed(residency)


def _take(is_free: Any, runs: Any) -> None:
    for first, count in runs:
        is_free[first : first + count] = False
