"""Runs the ops of a session on demand: those that no plan replays.

The native dispatcher (native/dispatch.cpp) replays ops that are as planned and calls `OpRunner` for all others; the
allocator calls it for every large allocation that the plan's table does not serve.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ooc.dispatch.extension import new_dispatcher
from ooc.dispatch.guest_ops import GuestOps, is_guest
from ooc.dispatch.mode import SessionMode
from ooc.dispatch.out_of_memory import budget_too_small
from ooc.dispatch.signals import CriticalLock
from ooc.errors import BudgetTooSmall, OocError
from ooc.memory.record import VariableRecord
from ooc.memory.residency import NoRoom, ResidencyManager
from ooc.replay.executor import Executor
from ooc.replay.op_watch import OpWatch
from ooc.tracing import op_semantics as ops
from ooc.tracing.collective_ops import is_collective
from ooc.tracing.recorder import OpRecord
from ooc.tracing.recording import StepRecording
from vmm.chunks import ChunkPool
from vmm.nvtx_ranges import marked, names_ops
from vmm.torch_cpu import SERVED_APART, AllocatorTable

_log = logging.getLogger(__name__)

MAX_PERIOD_OPS = 1 << 16
"""Longest period that is recorded, in ops: the recorder takes about 1 KiB an op, which the budget does not count."""

_SPLIT_FRACTION = 8
"""List ops and convolution_backward run in parts when their operands exceed 1/8 of the budget."""

_NOTHING = contextlib.nullcontext()

_FLIGHT_FRACTION = 4
"""Planned around: operands of collectives under way, up to 1/4 of the budget. More, and the ops in between
would not fit; whoever moves one of the rest waits for it."""


class CollectiveRuns(Protocol):
    """What becomes of ops that go on after they have returned: `ooc.interop.collectives.Collectives`."""

    def run(
        self,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run such an op, by `run`."""

    def postpones(self, index: int) -> bool:
        """Whether a planned op's acts after it are not to be done yet."""

    def take_landed(self, op_index: int) -> Sequence[int]:
        """Addresses that the program has waited for since the op before this one."""

    def is_apart(self, nbytes: int) -> bool:
        """Whether an allocation on this thread is none of the session's."""

    def open(self) -> None:
        """From now on the program's own waits are seen."""

    def close(self) -> None:
        """They are seen no more. Idempotent."""

    def settle(self, act: str, *, is_last: bool = False) -> None:
        """Wait for all that is under way, before `act`. Raises `SessionError` if that cannot be waited for."""

    def document(self) -> dict[str, int]:
        """For the report."""


_Call = tuple[Any, Sequence[Any], Mapping[str, Any]]
"""An op, its arguments and its keyword arguments."""


class OpRunner:
    """Runs ops and serves allocations of one session on demand; makes the native dispatcher and is called by it.

    Attributes:
        dispatcher: The native dispatcher.
        lock: The session's lock.
        executor: Replays plans.
        recording: The recording of the present step, while it runs on demand.
        mode: The dispatch mode by which ops arrive.
        guests: Runs the ops of other threads.
        collectives: What becomes of ops that go on after they have returned.
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
    ) -> None:
        self._manager = manager
        self._allocator = allocator
        self._threshold_nbytes = threshold_nbytes
        self.recording = StepRecording()
        self.set_budget(budget_nbytes)
        self._is_open = is_open
        self._watch = watch
        self._names_ops = names_ops()
        self._thread = threading.get_ident()
        self._pending: BaseException | None = None
        self._largest_refused_nbytes = 0
        self._has_served = False  # an allocation since somebody last looked
        self._call_sites = self.recording.call_sites
        self.dispatcher = self._dispatcher = new_dispatcher(
            allocator,
            dispatch=self.dispatch,
            before=self.before,
            after=self.after,
            finish=self.finish,
            failed=self.failed,
        )
        self.lock = self._lock = CriticalLock(self.dispatcher)
        self.mode = SessionMode(self.dispatcher)
        self.executor = self._executor = Executor(
            manager=manager,
            allocator=allocator,
            dispatcher=self.dispatcher,
            recording=self.recording,
            new_pool=new_pool,
            watch=watch,
        )
        self.collectives = make_collectives(self)
        self.guests = GuestOps(
            manager=manager,
            executor=self.executor,
            dispatcher=self.dispatcher,
            lock=self.lock,
            is_open=is_open,
            absorb=self.absorb,
            limit_nbytes=lambda: self._split_nbytes,
        )

    def __repr__(self) -> str:
        return f"<OpRunner, {self.recording!r}>"

    def set_budget(self, budget_nbytes: int) -> None:
        """Set the budget by which large ops are split into parts."""
        self._split_nbytes = budget_nbytes // _SPLIT_FRACTION
        self.recording.note_limit(budget_nbytes // _FLIGHT_FRACTION)

    @property
    def op_index(self) -> int:
        """The op that is running, or that comes next."""
        return self._allocator.state.op_index

    def start_recording(self) -> None:
        """Begin a period on demand: record its ops."""
        self.recording.begin(self._manager.records)
        self._allocator.state.set_between(0)

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

    def finish(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """Record an op that began on the plan and ended after a bailout, as if it had run on demand."""
        with self._lock:
            error = self._pending_error((func, args, kwargs or {}), self._executor.mid_op_records())
            self._executor.finish()
            self.absorb()
            occurrences = self._dispatcher.occurrences(args, kwargs or {})
            record = OpRecord(
                func=func,
                where=self._call_sites.of_this_op(),
                occurrences=occurrences,
                written=self._dispatcher.operands(*ops.written_values(func, args, kwargs or {})),
                landed=self.collectives.take_landed(index),
            )
            self._complete(record, result)
        if error is not None:  # as in `_raise_if_refused`
            raise error from error.__cause__

    def failed(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Handle a planned op that raised: if a refused allocation was the cause, raise the error that explains it."""
        with self._lock:
            error = self._pending_error((func, args, kwargs or {}), self._executor.mid_op_records())
            if self._executor.active is not None:
                self._executor.fail(index)
                self.bail_out("an op raised")
            else:
                self._executor.finish()
            self._note_failed_op(func)
            self.absorb()
        if error is not None:
            raise error from error.__cause__

    def dispatch(
        self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any op but the one that the plan expects, as `__torch_dispatch__`."""
        if any(t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types):
            return NotImplemented  # a wrapper unwraps itself; we see the ops inside
        kwargs = kwargs or {}
        if not self._is_open():
            return func(*args, **kwargs)
        if threading.get_ident() != self._thread and self._manager.is_host:
            return self.guests.run(func, args, kwargs)
        if not _is_special(func):
            return self._run(func, args, kwargs)
        if ops.is_list_op(func):
            return ops.run_list_op(func, args, kwargs, limit_nbytes=self._split_nbytes, run=self._run)
        if ops.is_convolution_backward(func):
            return ops.run_convolution_backward(func, args, kwargs, limit_nbytes=self._split_nbytes, run=self._run)
        return self.collectives.run(self._run, func, args, kwargs)

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
        if self._executor.active is not None:
            played = self._dispatcher.try_play(func, (), args, kwargs)
            if played is None and self._adapt(func, args, kwargs):
                played = self._dispatcher.try_play(func, (), args, kwargs)
            if played is not None:
                return played[0]
            if not self._dispatcher.occurrences(args, kwargs):
                return self._run_beside(func, args, kwargs)
            with self._lock:
                if self._executor.active is not None:
                    self.bail_out(f"{func} is not what the plan expects")
        return self._run_on_demand(func, args, kwargs)

    def _run_beside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op without any managed operand while a plan is replayed: the replay can go on after it."""
        self._has_served = False
        try:
            result = func(*args, **kwargs)
        except BaseException:
            with self._lock:
                error = self._pending_error((func, args, kwargs), [])
            if error is not None:
                raise error from error.__cause__
            raise
        if self._has_served:
            with self._lock:
                for record in self._records_at(self._dispatcher.operands(result)):
                    record.note_seen()
        return result

    def _adapt(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Try to realign plan and step where they differ harmlessly."""
        if threading.get_ident() != self._thread:
            return False
        with self._lock:
            executor = self._executor
            active, cursor = executor.active, self._dispatcher.cursor
            if active is None or cursor >= active.num_ops:
                return False
            if active.funcs[cursor] is func:
                return executor.rebind(self._dispatcher.occurrences(args, kwargs))
            return executor.skip_bystanders(func)

    def _run_on_demand(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            self._executor.finish()  # another thread may have left the plan for an op that never began
            if self._manager.flights:
                self._manager.flights.poll()
            self.absorb()
            recorder = self.recording.recorder
            assert recorder is not None
            occurrences = self._dispatcher.occurrences(args, kwargs)
            records = self._records_at(occurrences)
            for record in records:
                record.pin()
            try:
                self._manager.load(records)
            except NoRoom as no_room:
                self._unpin(records)
                raise self.too_small((func, args, kwargs), records, no_room, 0) from None
            except BaseException:
                self._unpin(records)
                raise
            for record in records:
                if not record.seen:  # a call costs more than a look, here and below
                    record.note_seen()
                self._manager.touch(record)
            op = OpRecord(
                func=func,
                where=self._call_sites.of_this_op(),
                occurrences=occurrences,
                written=self._dispatcher.operands(*ops.written_values(func, args, kwargs)),
                landed=self.collectives.take_landed(len(recorder.ops)),
            )
            state = self._allocator.state
            state.set_inside(len(recorder.ops))
            cold_ns = state.cold_ns
            self._pending = None
            if self._watch is not None:
                self._watch.begins(func, records, op.written)
        started = time.monotonic_ns()
        try:
            with marked(str(func)) if self._names_ops else _NOTHING:
                result = func(*args, **kwargs)
            if self._watch is not None:
                with self._lock:
                    self._watch.ended()
        except BaseException:
            with self._lock:
                error = self._pending_error((func, args, kwargs), records)  # before what it allocated is forgotten
                self._unpin(records)
                for record in self._records_at(op.written):
                    record.written()
                self._note_failed_op(func)
                self.absorb()
            if error is not None:
                raise error from error.__cause__
            raise
        self._raise_if_refused((func, args, kwargs), records)
        op.duration_ns = max(time.monotonic_ns() - started - (state.cold_ns - cold_ns), 0)
        with self._lock:
            self._unpin(records)
            self.absorb()
            self._complete(op, result)
        return result

    def _complete(self, op: OpRecord, result: Any) -> None:
        recorder = self.recording.recorder
        assert recorder is not None
        op.results = self._dispatcher.operands(result)
        for address in op.results:
            record = self._manager.records.get(address)
            if record is not None and not record.seen:
                record.note_seen()
        for address in op.written:
            record = self._manager.records.get(address)
            if record is not None and record.stored:
                record.written()
        recorder.ops.append(op)
        if len(recorder.ops) >= MAX_PERIOD_OPS:
            self._cut_period()
            return
        self._allocator.state.set_between(len(recorder.ops))

    def _cut_period(self) -> None:
        """Start a new recording: no step has ended for so many ops that the recorder would take too much memory.

        What follows up to the next boundary is an incomplete sequence, and nothing is planned for it.
        """
        if self.recording.recorder is not None and not self.recording.recorder.is_cut:
            _log.warning("no step ended in %d ops: they are not planned (is there an optimizer?)", MAX_PERIOD_OPS)
        self.recording.begin(self._manager.records, is_cut=True)
        self._allocator.state.set_between(0)

    def _note_failed_op(self, func: Any) -> None:
        if self.recording.recorder is not None:
            self.recording.recorder.ops.append(OpRecord(func=func, where="", occurrences=(), written=()))
            self._allocator.state.set_between(len(self.recording.recorder.ops))

    def _records_at(self, addresses: Any) -> list[VariableRecord]:
        found = self._manager.records
        return [found[a] for a in dict.fromkeys(addresses) if a in found]

    @staticmethod
    def _unpin(records: list[VariableRecord]) -> None:
        for record in records:
            record.unpin()

    # -- memory

    def cold_allocate(self, nbytes: int) -> int:
        """Serve an allocation that no plan covers. Called by the allocator, on any thread; never raises."""
        if self.collectives.is_apart(nbytes):
            return SERVED_APART
        if threading.get_ident() != self._thread and self.guests.takes_apart(nbytes):
            return SERVED_APART
        try:
            with self._lock:
                executor = self._executor
                if executor.active is not None:
                    executor.absorb_events()
                    between = not self._allocator.state.is_inside_op
                    if between and threading.get_ident() == self._thread:
                        address = executor.serve_between(nbytes)
                        if address:
                            return self._served(address, nbytes)
                    if self._manager.pool.num_free < self._manager.chunks_of(nbytes):
                        self.bail_out("an allocation that the plan does not have")
                self.absorb()
                record = self._manager.allocate(nbytes)
                inside = self._allocator.state.is_inside_op
                record.is_workspace = inside and threading.get_ident() == self._thread
                return self._served(record.address, nbytes)
        except BaseException as error:  # noqa: BLE001 - nothing may be raised into C++; the op's caller raises it
            if threading.get_ident() == self._thread and self._dispatcher.depth > 1:  # one for this call, one for an op
                self._pending = error if not isinstance(error, NoRoom) else _Failure(error, nbytes)
            return 0

    def _served(self, address: int, nbytes: int) -> int:
        self._has_served = True
        if self._watch is not None:
            self._watch.born(address, nbytes)
        return address

    def absorb(self) -> None:
        """Take the allocator's log: forget the records of freed variables, and record all events for the trace."""
        if self._executor.active is not None:
            self._executor.absorb_events()
            return
        if not self._allocator.state.num_events:
            return
        events = self._allocator.drain()
        for event in events:
            if event.kind != 0:
                self._manager.free(event.address)
        if self.recording.recorder is not None:
            self.recording.recorder.events.extend(events)

    def _raise_if_refused(self, call: _Call, records: list[VariableRecord]) -> None:
        """Raise if an op was refused memory and ended well all the same: by another algorithm, with other bits."""
        if self._pending is None:
            return
        with self._lock:
            error = self._pending_error(call, records)
            self._unpin(records)
            for record in records:
                record.written()
            self._note_failed_op(call[0])
            self.absorb()
        if error is not None:
            raise error from error.__cause__

    def _pending_error(self, call: _Call, records: list[VariableRecord]) -> BaseException | None:
        """The error for an op that raised because an allocation was refused; None if it raised for another reason."""
        pending, self._pending = self._pending, None
        if isinstance(pending, _Failure):
            return self.too_small(call, records, pending.no_room, pending.nbytes)
        return pending

    def too_small(self, call: _Call, records: list[VariableRecord], no_room: NoRoom, nbytes: int) -> BudgetTooSmall:
        func, args, kwargs = call
        active, cursor = self._executor.active, self._dispatcher.cursor
        is_planned = active is not None and cursor < active.num_ops and active.funcs[cursor] is func
        error = budget_too_small(
            func=func,
            args=args,
            kwargs=kwargs,
            operands=records,
            no_room=no_room,
            new_nbytes=nbytes,
            manager=self._manager,
            earlier_ops=self.recording.recorder.ops if self.recording.recorder is not None else (),
            address_of=self._dispatcher.address,
            threshold_nbytes=self._threshold_nbytes,
            place=active.trace.ops[cursor].where
            if active is not None and is_planned
            else self._call_sites.of_this_op(),
            earlier_needed_nbytes=self._largest_refused_nbytes,
        )
        self._largest_refused_nbytes = error.largest_needed_nbytes
        self._pending = None  # to find the sizes of results, it may have run the op once more
        return error


@functools.cache
def _is_special(func: Any) -> bool:
    """Whether an op is run in parts, or goes on after it has returned. One look, instead of three an op."""
    return ops.is_list_op(func) or ops.is_convolution_backward(func) or is_collective(func)


class _Failure(OocError):
    """A refused allocation; becomes a `BudgetTooSmall` where the op is known."""

    def __init__(self, no_room: NoRoom, nbytes: int) -> None:
        super().__init__(str(no_room))
        self.no_room = no_room
        self.nbytes = nbytes
