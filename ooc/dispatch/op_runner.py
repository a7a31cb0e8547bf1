"""Runs the ops of a session on demand: those that no plan replays.

The native dispatcher (native/dispatch.cpp) calls `OpRunner` for all ops but those that are as planned, and the
allocator for every large allocation that the plan's table does not serve.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ooc.dispatch.borders import Borders
from ooc.dispatch.collective_runs import CollectiveRuns
from ooc.dispatch.extension import new_dispatcher
from ooc.dispatch.failed_ops import FailedOps
from ooc.dispatch.guest_ops import GuestOps, is_guest
from ooc.dispatch.hidden_operands import HiddenOperands, uses_unnamed
from ooc.dispatch.mode import SessionMode, is_tracing
from ooc.dispatch.native_births import bear_natively
from ooc.dispatch.native_demand import is_special, run_natively
from ooc.dispatch.ops_in_parts import OpNotes, OpsInParts
from ooc.dispatch.refusals import RefusedAllocations
from ooc.dispatch.signals import CriticalLock
from ooc.errors import SessionError
from ooc.memory.no_room import NoRoom
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.differences import difference
from ooc.replay.executor import Executor
from ooc.replay.op_watch import OpWatch
from ooc.replay.planned_trials import TrialsInPlans
from ooc.replay.rerun_device import RerunDevice
from ooc.replay.rerun_trials import RerunTrial, RerunTrials
from ooc.tracing import op_semantics as ops
from ooc.tracing.composites import comes_whole, take_apart
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recording import OpsSoFar, StepRecording
from vmm.chunks import ChunkPool
from vmm.nvtx_ranges import marked, names_ops
from vmm.torch_cpu import SERVED_APART, AllocatorTable

_log = logging.getLogger(__name__)

MAX_PERIOD_OPS = 1 << 16
"""Longest period that is recorded, in ops: the recorder takes about 1 KiB an op, which the budget does not count."""

_SPLIT_FRACTION = 8
"""List ops and convolution_backward run in parts when their operands exceed 1/8 of the budget."""

_MOST_REALIGNMENTS = 8
"""Of plan and step for one op: more would be one that undoes another, and the step leaves its plan."""

_NOTHING = contextlib.nullcontext()

_FLIGHT_FRACTION = 4
"""Planned around: collectives' operands, up to 1/4 of the budget. Whoever moves one of the rest waits for it."""


class OpRunner:
    """Runs ops and serves allocations of one session on demand; makes the native dispatcher and is called by it.

    Attributes:
        dispatcher: The native dispatcher.
        lock: The session's lock.
        executor: Replays plans.
        recording: The recording of the present step, while it runs on demand.
        mode: The dispatch mode by which ops arrive.
        guests: Runs the ops of other threads.
        hidden: Gives out what ops keep where no later op names it.
        collectives: What becomes of ops that go on after they have returned.
        refusals: Allocations that were refused, and the errors that explain it.
        parts: Runs ops in parts that do not fit as a whole.
        trials: Which ops may run again; with `recompute` off, none.
        borders: Finds out where one sequence of ops ends and another begins; None: at the end of steps alone.
    """

    def __init__(
        self,
        *,
        manager: ResidencyManager,
        allocator: AllocatorTable,
        budget_nbytes: int,
        threshold_nbytes: int,
        is_open: Callable[[], bool],
        new_pool: Callable[[], ChunkPool],
        make_collectives: Callable[[OpRunner], CollectiveRuns],
        watch: OpWatch | None = None,
        recompute: bool = False,
    ) -> None:
        self._manager = manager
        self._allocator = allocator
        self.recording = StepRecording()
        self.set_budget(budget_nbytes)
        self._is_open = is_open
        self._watch = watch
        self._names_ops = names_ops()
        self._thread = threading.get_ident()
        self._has_served = False  # an allocation since somebody last looked
        self._call_sites = self.recording.call_sites
        self._forbids: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None
        self.dispatcher = self._dispatcher = new_dispatcher(
            allocator,
            dispatch=self.dispatch,
            before=self.before,
            after=self.after,
            finish=self.finish,
            failed=self.failed,
        )
        self.lock = self._lock = CriticalLock(self.dispatcher)
        rerun_device = RerunDevice(watch, threshold_nbytes=threshold_nbytes)
        self.mode = SessionMode(self.dispatcher)
        self.hidden = HiddenOperands(self.dispatcher)
        self.trials = RerunTrials(
            manager=manager, allocator=allocator, dispatcher=self.dispatcher, device=rerun_device, is_on=recompute
        )
        self.borders: Borders | None = None
        self.executor = self._executor = Executor(
            manager=manager,
            allocator=allocator,
            dispatcher=self.dispatcher,
            recording=self.recording,
            new_pool=new_pool,
            rerun_device=rerun_device,
            new_trials=functools.partial(TrialsInPlans, self.trials, manager, allocator, self.lock),
            watch=watch,
        )
        self.refusals = RefusedAllocations(
            manager=manager,
            executor=self.executor,
            dispatcher=self.dispatcher,
            recording=self.recording,
            threshold_nbytes=threshold_nbytes,
        )
        self._failures = FailedOps(
            manager=manager,
            dispatcher=self.dispatcher,
            recording=self.recording,
            refusals=self.refusals,
            lock=self.lock,
            set_between=allocator.state.set_between,
            absorb=self.absorb,
            resolve=lambda error, call: self.parts.resolve(error, call),
        )
        notes = OpNotes(complete=self._complete, absorb=self.absorb, failed=self._failures.note)
        self.parts = OpsInParts(
            manager, allocator, self.dispatcher, self.executor, self.lock, self.recording, self.refusals, notes
        )
        if (watch is None or watch.lets_native) and not self._names_ops:
            run_natively(
                self.dispatcher,
                manager=manager,
                executor=self.executor,
                recording=self.recording,
                lock=self.lock,
                refused=self.refusals.pending,
                failed=self._failures.on_demand,
                may_run_again=self.trials.may_run_again,
                most_ops=MAX_PERIOD_OPS,
            )
            if watch is None and manager.is_host and not manager.debug:  # then what is freed shows nothing
                bear_natively(self.dispatcher, manager=manager, allocator=allocator, parts=self.parts.memory)
        manager.position = self._position
        manager.foresight.present = OpsSoFar(self.recording, manager)
        self.collectives = make_collectives(self)
        self.guests = GuestOps(
            manager=manager,
            executor=self.executor,
            dispatcher=self.dispatcher,
            lock=self.lock,
            is_open=is_open,
            absorb=self.absorb,
            limit_nbytes=lambda: self._split_nbytes,
            is_inside_op=lambda: allocator.state.is_inside_op,
        )

    def __repr__(self) -> str:
        return f"<OpRunner, {self.recording!r}>"

    def set_budget(self, budget_nbytes: int) -> None:
        """Set the budget by which large ops are split into parts."""
        self._split_nbytes = budget_nbytes // _SPLIT_FRACTION
        self.recording.note_limit(budget_nbytes // _FLIGHT_FRACTION)

    def forbid_ops(self, forbids: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None) -> None:
        """Refuse ops on variables, and those whose arguments `forbids` names, from now on; None: no more."""
        self._forbids = forbids

    @property
    def is_yielded(self) -> bool:
        """Whether the session has no memory now, so that nothing can be loaded."""
        return self._forbids is not None

    @property
    def op_index(self) -> int:
        """The op that is running, or that comes next."""
        return self._allocator.state.op_index

    def start_recording(self) -> None:
        """Begin a period on demand: record its ops."""
        self.trials.begin_step()
        self.recording.begin(self._manager.records)
        self._manager.foresight.begin(self._manager.num_serials, time.monotonic_ns())
        self._allocator.state.restart()
        self.absorb(at_start=True)

    def _position(self) -> int:
        """The op that is running or comes next; tells the foresight whether a backward pass is under way."""
        if torch._C._current_autograd_node() is not None:
            self._manager.foresight.note_backward(self.op_index)
        return self.op_index

    def bail_out(self, reason: str) -> None:
        """Bail out of the plan that is being replayed (see `Executor.bail_out`)."""
        self._executor.bail_out(reason)

    # -- ops; called by the native dispatcher

    def before(self, index: int) -> bool:
        with self._lock:
            return self._executor.before(index)

    def after(self, index: int) -> None:
        with self._lock:
            if not self.collectives.postpones(index):
                self._executor.after(index)
                self._executor.realignment.skip_marks(index)

    def finish(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """Record an op that began on the plan and ended after a bailout, as if it had run on demand."""
        with self._lock:
            error = self.refusals.error((func, args, kwargs or {}), self._executor.mid_op_records())
            self._executor.finish()
            self.absorb()
            occurrences = self._dispatcher.occurrences(args, kwargs or {})
            record = OpRecord(
                func=func,
                **self.recording.place_of_this_op(),
                occurrences=occurrences,
                written=self._dispatcher.operands(*ops.written_values(func, args, kwargs or {})),
                landed=self.collectives.take_landed(index),
                replayable=self.trials.knows(func, args, kwargs or {}),
            )
            if not self.parts.take_left(record, result):
                self._complete(record, result)
        if error is not None:  # as in `FailedOps.given_up`
            raise error from error.__cause__

    def failed(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Handle a planned op that raised: if a refused allocation was the cause, raise the error that explains it.

        Else the plan goes on: programs catch errors, and the step may be the one that it was made from. What the op has
        not made is missed by the next op that differs.
        """
        with self._lock:
            error = self.refusals.error((func, args, kwargs or {}), self._executor.mid_op_records())
            if self._executor.active is not None:
                self._executor.fail(index)
                if error is None:
                    if self._executor.acts_after(index):
                        self.after(index)
                    return
                self.bail_out("an op was refused memory")
            else:  # it was left within the op
                self._executor.finish()
                for record in self._manager.records_at(
                    self._dispatcher.operands(*ops.written_values(func, args, kwargs or {}))
                ):
                    record.written()
            self._failures.note(func, args, kwargs or {})
            self.absorb()
        if error is not None:
            raise error from error.__cause__

    def dispatch(
        self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any op but the one that the plan expects, as `__torch_dispatch__`."""
        if any(t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types):
            if is_tracing():
                return func(*args, **(kwargs or {}))
            return NotImplemented  # a wrapper unwraps itself; we see the ops inside
        kwargs = kwargs or {}
        if not self._is_open():
            return func(*args, **kwargs)
        is_ours = threading.get_ident() == self._thread
        if is_ours and comes_whole(func, args, kwargs):
            return take_apart(func, args, kwargs, mode=self.mode, outside=self._dispatcher.outside_keys())
        if not is_ours and self._manager.is_host:
            return self.hidden.run(self.guests.run, func, args, kwargs)
        if not is_special(func):
            return self._run(func, args, kwargs)
        if (run_in_parts := ops.way_in_parts(func)) is not None:
            return run_in_parts(func, args, kwargs, limit_nbytes=self._split_nbytes, run=self._run)
        way = self.hidden if uses_unnamed(func) else self.collectives
        return way.run(self._run, func, args, kwargs)

    def dispatch_guest(self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any op of a guest thread. (One that has become this session's own comes here below `dispatch`.)"""
        if threading.get_ident() == self._thread:
            return func(*args, **kwargs)
        return self.dispatch(func, types, args, kwargs)

    def run_opaque(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread and is_guest() and self._is_open():
            return self.guests.run(op, args, kwargs)
        if threading.get_ident() != self._thread or not self.mode.is_on:
            return op(*args, **kwargs)  # another thread, or within an op: as its other ops there
        return self._run(op, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._forbids is not None:
            if self._dispatcher.occurrences(args, kwargs) or self._forbids(args, kwargs):
                raise SessionError(
                    f"{func} while session.yielded() has given all memory back: it would use the session's.\n"
                    "  Options: after the block; a smaller budget (set_budget) instead of none."
                )
            return func(*args, **kwargs)
        if self.borders is not None and threading.get_ident() == self._thread:
            self.borders.op_comes(func, args, kwargs)
        while self._executor.active is not None:
            played = self._dispatcher.try_play(func, (), args, kwargs)
            if played is not None or (played := self._play_realigned(func, args, kwargs)) is not None:
                return played[0]
            if self._executor.active is not None and not self._dispatcher.occurrences(args, kwargs):
                return self._run_beside(func, args, kwargs)
            with self._lock:
                if self._executor.active is not None:
                    place = self._call_sites.of_this_op()
                    self.bail_out(difference(self._executor.active, self._dispatcher.cursor, func, place))
            if self.borders is None or not self.borders.op_differs(func, args, kwargs):
                break
        return self._run_on_demand(func, args, kwargs)

    def _run_beside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op without any managed operand while a plan is replayed, which can go on after it."""
        self._has_served, beside, cursor = False, self._executor.beside, self._dispatcher.cursor
        try:
            with beside.running(func):
                result = func(*args, **kwargs)
        except BaseException:
            with self._lock:
                error = self.refusals.error((func, args, kwargs), [])
                self._failures.note(func)  # if it has left the plan
            if error is not None:
                raise error from error.__cause__
            raise
        active = self._executor.active
        if active is None:  # left for what it has allocated
            self.finish(cursor, func, args, kwargs, result)
            return result
        if self._has_served or cursor <= active.num_idle:
            with self._lock:
                beside.note(cursor, active.num_idle, func, self._call_sites.of_this_op(), self._note_seen(result))
        return result

    def _play_realigned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Realign plan and step where they differ harmlessly; None: the op is still not the plan's next one."""
        if threading.get_ident() != self._thread:
            return None
        for _ in range(_MOST_REALIGNMENTS):  # what is skipped to may have to be bound, too
            with self._lock:
                if not self._executor.realignment.adapt(func, args, kwargs, self._call_sites.of_this_op):
                    return None
            if (played := self._dispatcher.try_play(func, (), args, kwargs)) is not None:
                return played
        return None

    def _run_on_demand(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            self._executor.finish()  # another thread may have left the plan for an op that never began
            if self._manager.flights:
                self._manager.flights.poll()
            self.absorb()
            recorder = self.recording.recorder
            assert recorder is not None
            occurrences = self._dispatcher.occurrences(args, kwargs)
            records = self._manager.records_at(occurrences)
            for record in records:
                record.pin()
            try:
                self._manager.load(records, for_ops=True)
            except NoRoom as no_room:
                self._unpin(records)
                return self.parts.run((func, args, kwargs), records, no_room, 0)
            except BaseException:
                self._unpin(records)
                raise
            used_ns = time.monotonic_ns()
            for record in records:
                if not record.seen:  # a call costs more than a look, here and below
                    record.note_seen()
                record.used_ns = used_ns
                used_ns += 1
            op = OpRecord(
                func=func,
                **self.recording.place_of_this_op(),
                occurrences=occurrences,
                written=self._dispatcher.operands(*ops.written_values(func, args, kwargs)),
                landed=self.collectives.take_landed(recorder.num_ops),
            )
            trial = self.trials.begin(func, args, kwargs) if recorder.is_compared else False
            if isinstance(trial, RerunTrial):
                trial.prepare()
            else:
                op.replayable = trial
            state = self._allocator.state
            state.set_inside(recorder.num_ops)
            cold_ns = state.cold_ns
            self.refusals.pending.clear()
            begun = self._watch.begins(func, records, op.written) if self._watch is not None else None
        started = time.monotonic_ns()
        try:
            with marked(str(func)) if self._names_ops else _NOTHING:
                result = func(*args, **kwargs)
        except BaseException:
            self._ended(begun, None)
            error = self._failures.end((func, args, kwargs), records, self._manager.records_at(op.written), trial=trial)
            if error is not None:
                return self.parts.resolve(error, (func, args, kwargs))
            raise
        if self.refusals.pending:
            self._ended(begun, None)
            return self._failures.given_up((func, args, kwargs), records, trial, result)
        op.duration_ns = max(time.monotonic_ns() - started - (state.cold_ns - cold_ns), 0)
        with self._lock:
            self._ended(begun, op.note_device_ns)
            self.absorb()
            if isinstance(trial, RerunTrial):
                self._finish_trial(trial, op, result)
            self._unpin(records)
            self._complete(op, result)
        return result

    def _ended(self, begun: int | None, tell: Callable[[int], object] | None) -> None:
        """An op on demand has been issued; without `tell`, it has failed."""
        if self._watch is not None:
            with self._lock:
                self._watch.ended(begun, tell)

    def settle_times(self) -> None:
        """Ask the device how long the ops so far took, before a recording is learned from."""
        if self._watch is not None:
            with self._lock:
                self._watch.settle()

    def _finish_trial(self, trial: RerunTrial, op: OpRecord, result: Any) -> None:
        """Run the op once more, if there is room, and note whether its bits repeat."""
        results = self._manager.records_at(self._dispatcher.operands(result))
        recorder = self.recording.recorder
        if recorder is not None:  # else the step began anew, or entered a plan, within the op
            op.replayable = trial.conclude(result, results, recorder, self._manager.records)
        trial.close()

    def _complete(self, op: OpRecord, result: Any) -> None:
        recorder = self.recording.recorder
        assert recorder is not None
        op.results = self._note_seen(result)
        for record in self._manager.records_at(op.written):
            record.written()
        recorder.append(op)
        if not recorder.is_begun:
            self.recording.note_head(op, grad_mode=torch.is_grad_enabled())
        if recorder.num_ops >= MAX_PERIOD_OPS:
            self._cut_period()
            return
        self._allocator.state.set_between(recorder.num_ops)

    def _cut_period(self) -> None:
        """Start a new recording: no step has ended for so many ops that the recorder would take too much memory.

        What follows up to the next boundary is an incomplete sequence, and nothing is planned for it.
        """
        if not self.recording.was_cut:
            most, place = self.recording.most_called(), self._call_sites.of_this_op()
            _log.warning(
                "no step ended in %d ops (%s; now at %s), as by an optimizer's step(): they are not planned",
                MAX_PERIOD_OPS,
                most,
                place or "no line of the program's",
            )
        self.recording.begin(self._manager.records, is_cut=True)
        self._manager.foresight.begin(None)
        self._allocator.state.restart()

    def _note_seen(self, result: Any) -> list[int]:
        addresses = self._dispatcher.operands(result)
        for record in self._manager.records_at(addresses):
            record.note_seen()
        return addresses

    @staticmethod
    def _unpin(records: list[VariableRecord]) -> None:
        for record in records:
            record.unpin()

    # -- memory

    def cold_allocate(self, nbytes: int) -> int:
        """Serve an allocation that no plan covers. Called by the allocator, on any thread; never raises."""
        is_ours = threading.get_ident() == self._thread
        if self.collectives.is_apart(nbytes) or (not is_ours and self.guests.takes_apart(nbytes)):
            return SERVED_APART
        try:
            with self._lock:
                executor, memory = self._executor, self.parts.memory
                if executor.active is not None:
                    executor.absorb_events()
                    address = executor.unserved.serve(nbytes, is_whole=not memory.may_refuse) if is_ours else 0
                    if address:
                        return self._served(address, nbytes)
                if executor.active is not None:
                    may_refuse, call_site = is_ours and memory.may_refuse, self._call_sites.of_this_op
                    executor.unserved.make_way(nbytes, may_refuse=may_refuse, call_site=call_site)
                self.absorb()
                record = (memory if memory.takes_away and is_ours else self._manager).allocate(nbytes)
                record.is_workspace = self._allocator.state.is_inside_op and is_ours and not memory.may_refuse
                if record.is_workspace and executor.active is not None and not executor.active.reruns.by_op:
                    self._dispatcher.meet(record.address, record)
                return self._served(record.address, nbytes)
        except BaseException as error:  # noqa: BLE001 - nothing may be raised into C++; the op's caller raises it
            if is_ours and self._dispatcher.depth > 1:  # one for this call, one for an op
                self.refusals.note(error, nbytes)
            return 0

    def _served(self, address: int, nbytes: int) -> int:
        self._has_served = True
        if self._watch is not None:
            self._watch.born(address, nbytes)
        return address

    def absorb(self, *, at_start: bool = False) -> None:
        """Take the allocator's log: forget what was freed, and note all events; `at_start`, as before the first op."""
        if self._executor.active is not None:
            self._executor.absorb_events()
        elif self._allocator.state.num_events:
            events = self._allocator.drain()
            for event in events:
                if event.kind != 0:
                    self._manager.free(event.address)
            if self.recording.recorder is not None:
                # Of a period that has ended their places mean nothing: while one is learned, garbage is collected.
                self.recording.recorder.events += [e._replace(position=0) for e in events] if at_start else events
