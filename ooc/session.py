"""The session: one budget, held from its opening to its close.

    with ooc.Session(budget="2GiB") as session:
        model, optimizer = build()
        for batch in loader:
            with session.step():
                ...

A session routes torch's large allocations into a pool of chunks (the budget), sees every op
through a dispatch mode, and learns the step: it first runs on demand, and once it has seen the
same sequence twice it plans and plays the plan (DESIGN.md section 6). One *period* reaches from
one step's start to the next one's, so what the user does between steps is part of the cycle.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ooc import _native, opaque_ops, ops
from ooc.books import Books, NoRoom, State, VariableRecord
from ooc.diagnosis import budget_too_small
from ooc.errors import BudgetTooSmall, OocError, SessionError
from ooc.executor import Executor
from ooc.forks import Forks
from ooc.interrupts import CriticalLock, Interrupts
from ooc.outside import Outside
from ooc.plan_cache import PlanCache
from ooc.recorder import OpRecord, StepRecorder
from ooc.report import make_report
from ooc.sequences import Sequences
from ooc.steps import StepLog
from ooc.units import parse_nbytes
from scheduler.plan import Plan
from scheduler.policies import POLICIES
from scheduler.trace import Trace
from vmm.addresses import AddressSpace
from vmm.chunks import ChunkPool
from vmm.posix import PosixDriver
from vmm.store import FileStore
from vmm.torch_cpu import GRANULE_NBYTES, cpu_allocator

_log = logging.getLogger(__name__)

_SPLIT_FRACTION = 8
"""List ops and convolution_backward run in parts when their operands exceed 1/8 of the budget."""

MAX_PERIOD_OPS = 1 << 16
"""Ops from one step's start to the next beyond which nothing is learned: the recorder takes about
1 KiB an op, outside the budget."""

_Call = tuple[Any, Sequence[Any], Mapping[str, Any]]
"""An op, its arguments and its keyword arguments."""

_current: Session | None = None


class _Mode(TorchDispatchMode):
    """The dispatch mode; its `__torch_dispatch__` is the native dispatcher, set per instance."""

    def __init__(self, dispatcher: Any) -> None:
        super().__init__()
        dispatcher.__self__ = self
        self.__torch_dispatch__ = dispatcher  # type: ignore[method-assign]


class Session:
    """Trains within a byte budget. Opened when made; use as a context manager, or `close()` it.

    Args:
        budget: Bytes for all large storages together: an int, or text such as "400MiB".
        store: Directory for the file that evicted bytes go to; not in memory (tmpfs).
        policy: Who plans: a name in `scheduler.policies.POLICIES`.
        window_nbytes: Window length of the policy `window`; searched when not given.
        chunk_nbytes: Chunk size; chosen by the budget when not given.
        threshold_nbytes: Storages below this are left to torch's own allocator and not counted.
        debug: Let every touch of an evicted variable fault, so that a missed use cannot pass.
        step_boundary: "explicit": by `step()`; "optimizer": when an optimizer's `step` returns.
        plan_cache: Keep plans on disk and use those of earlier runs (see `ooc.plan_cache`).

    Raises:
        ValueError: The budget is not a size, or less than a chunk.
        SessionError: Another session is open.
        vmm.store.StoreUnavailable, vmm.driver.MemoryFault: No store, or not the memory.
        vmm.native_build.NativeBuildError: The native parts cannot be built.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        device: str = "cpu",
        store: str | Path | None = None,
        policy: str = "auto",
        window_nbytes: int | str | None = None,
        chunk_nbytes: int | str | None = None,
        threshold_nbytes: int | str | None = None,
        debug: bool = False,
        step_boundary: Literal["explicit", "optimizer"] = "explicit",
        plan_cache: bool = True,
    ) -> None:
        global _current
        if _current is not None:
            raise SessionError(
                "a session is open already: one at a time owns the process's allocations. "
                "Close it first (leave its `with` block)."
            )
        if device != "cpu":
            raise ValueError(f"device={device!r} is not supported. Options: device='cpu'.")
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: there is no such policy. Options: {', '.join(sorted(POLICIES))}.")
        self.budget_nbytes = parse_nbytes(budget)
        self.chunk_nbytes = _choose_chunk(self.budget_nbytes, chunk_nbytes)
        self.threshold_nbytes = parse_nbytes(threshold_nbytes) if threshold_nbytes is not None else GRANULE_NBYTES
        self.policy = policy
        self.debug = debug
        self._thread = threading.get_ident()
        self._store = FileStore(store)
        try:
            self._allocator = cpu_allocator()
            num_chunks = self.budget_nbytes // self.chunk_nbytes
            self._driver = PosixDriver(
                num_chunks,
                self.chunk_nbytes,
                arena=self._allocator.arena,
                occupied=tuple(self._allocator.survivors.items()),
            )
        except BaseException:
            self._store.close()
            raise
        self._space = AddressSpace(self._driver)
        self._books = Books(pool=ChunkPool(num_chunks), space=self._space, store=self._store, debug=debug)
        self._dispatcher = _native.dispatcher_type()(
            self._allocator.state_address,
            self._allocator.this_thread_function,
            torch.empty(0),
            torch._C.TensorBase,
            self._slow,
            self._before,
            self._after,
            self._finish,
            self._failed,
        )
        self._lock = CriticalLock(self._dispatcher)
        self._interrupts = Interrupts(
            self._dispatcher,
            is_open=lambda: self._is_open,
            closing=(Session.close.__code__, Session.__exit__.__code__),
        )
        self._executor = Executor(
            books=self._books,
            allocator=self._allocator,
            dispatcher=self._dispatcher,
            new_pool=lambda: ChunkPool(num_chunks),
        )
        self._executor.on_leave = self._on_leave
        self._sequences = Sequences(
            policy=policy,
            parameters={"window_nbytes": parse_nbytes(window_nbytes)} if window_nbytes is not None else {},
            intercepts=_Intercepts(),
            view_address=self._driver.view_address,
            cache=PlanCache.default() if plan_cache else None,
        )
        self._recorder: StepRecorder | None = StepRecorder({})
        self._pending: BaseException | None = None
        self._split_nbytes = self.budget_nbytes // _SPLIT_FRACTION
        self.steps = StepLog(self._books, self._space)
        self._mode = _Mode(self._dispatcher)
        self._step_boundary = step_boundary
        self._hook: Any = None
        with self._lock:
            self._is_open = True
            self._interrupts.install()
            # Guarded natively: no signal handler may run before the first bytecode of a C callback.
            cold_allocate = functools.partial(self._dispatcher.guarded, self._cold_allocate)
            self._allocator.open(threshold_nbytes=self.threshold_nbytes, cold_allocate=cold_allocate)
            _current = self
            self._books.guards.open()
            self._outside = Outside(self)
            opaque_ops.run_in_session = self._run_opaque
            self._forks = Forks(self)
            self._mode.__enter__()
        if step_boundary == "optimizer":
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._hook = register_optimizer_step_post_hook(lambda *_: self._optimizer_stepped())
            self.steps.begin(planned=False)

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<Session {state}, budget {self.budget_nbytes} bytes, {self._books!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step. Everything from here to the next `step()` is one period of the cycle."""
        self._check_open()
        self._begin_period()
        self.steps.begin(planned=self._executor.active is not None)
        try:
            yield
        finally:
            self._end_step()

    @contextmanager
    def resident(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Keep tensors in memory, whole and at their places, for the length of the block.

        The door for code that neither torch's dispatcher nor its exports know about: extensions,
        other threads inside a step, system calls. What it writes there counts as written.

        Raises:
            BudgetTooSmall: They do not fit at once.
        """
        with self._outside.resident(tensors):
            yield

    def _end_step(self) -> None:
        with self._lock:
            if self._is_open:
                self._outside.step_ends()
            self.steps.end(on_plan=self._executor.active is not None, learned=self._sequences.num_plans > 0)

    def _optimizer_stepped(self) -> None:
        if not self._is_open or threading.get_ident() != self._thread:
            return
        self.steps.end(on_plan=self._executor.active is not None, learned=self._sequences.num_plans > 0)
        self._begin_period()
        with self._lock:
            self._outside.step_ends()
        self.steps.begin(planned=self._executor.active is not None)

    def _begin_period(self) -> None:
        """The present period ends and the next begins: learn from the one, choose a plan for the other."""
        with self._lock:
            self._outside.step_begins()
            executor = self._executor
            key: str | None
            if executor.active is not None and not executor.is_complete():
                self._leave("the step ended before the plan")
            if executor.active is not None and executor.persistent_is_missing():
                self._leave("a variable that lived across steps was freed")
            if executor.active is not None:
                key = self._sequences.active_key
            else:
                assert self._recorder is not None
                self._absorb()
                if self._recorder.is_cut:
                    key = None
                else:
                    observed = self._recorder.build(self._books.records)
                    self.steps.note_trace(observed.trace)
                    key = self._sequences.learn(observed, self._machine)
            follower = self._sequences.next_after(key)
            if executor.active is not None:
                played = executor.active
                refined = self._sequences.refine(played, self._store)
                if follower is played:
                    follower = refined
                if follower is played and executor.rotate():
                    return
                if executor.active is not None:
                    self._leave("another plan is expected")
                if refined is not played:
                    executor.retire(played)
            self._recorder = StepRecorder(self._books.records)
            self._allocator.state.position = 0
            if follower is not None:
                if executor.enter(follower, self._sequences.others(follower)):
                    self._recorder = None
                    self.steps.note_plan(follower.num_chunks)
                else:
                    _log.info("cannot play the plan: %s", executor.left_because)
                    self.steps.note_refusal(executor.left_because)

    def _leave(self, reason: str) -> None:
        self._executor.leave(reason)

    def _on_leave(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    # -- ops; called by the native dispatcher

    def _before(self, index: int) -> bool:
        with self._lock:
            return self._executor.before(index)

    def _after(self, index: int) -> None:
        with self._lock:
            self._executor.after(index)

    def _finish(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """An op that began on the plan has ended off it: note it as the on-demand way would have."""
        with self._lock:
            self._executor.finish()
            self._absorb()
            occurrences = self._dispatcher.occurrences(args, kwargs or {})
            record = OpRecord(
                func=func,
                where="",
                occurrences=occurrences,
                written=self._dispatcher.operands(*ops.written_values(func, args, kwargs or {})),
            )
            self._complete(record, self._records_at(occurrences), result)

    def _failed(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """A planned op raised. If we made it fail, say why instead."""
        with self._lock:
            error = self._pending_error((func, args, kwargs or {}), self._executor.mid_op_records())
            if self._executor.active is not None:
                self._executor.fail(index)
                self._leave("an op raised")
            else:
                self._executor.finish()
            self._note_failed_op(func)
            self._absorb()
        if error is not None:
            raise error from error.__cause__

    def _slow(self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Any op but the one that the plan expects."""
        if types and any(t is not torch.Tensor and t is not torch.nn.Parameter for t in types):
            if any(t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types):
                return NotImplemented  # a wrapper unwraps itself; we see the ops inside
        kwargs = kwargs or {}
        if not self._is_open:
            return func(*args, **kwargs)
        if ops.is_list_op(func):
            return ops.run_list_op(func, args, kwargs, limit_nbytes=self._split_nbytes, run=self._run)
        if ops.is_convolution_backward(func):
            return ops.run_convolution_backward(func, args, kwargs, limit_nbytes=self._split_nbytes, run=self._run)
        return self._run(func, args, kwargs)

    def _run_opaque(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread or self._mode not in _get_current_dispatch_mode_stack():
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
                    self._leave(f"{func} is not what the plan expects")
        return self._run_on_demand(func, args, kwargs)

    def _run_beside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op that touches nothing of ours while a plan is played: the plan can go on after it."""
        try:
            return func(*args, **kwargs)
        except BaseException:
            with self._lock:
                error = self._pending_error((func, args, kwargs), [])
            if error is not None:
                raise error from error.__cause__
            raise

    def _adapt(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Try to bring plan and step together again where they differ harmlessly."""
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
            self._absorb()
            recorder = self._recorder
            assert recorder is not None
            occurrences = self._dispatcher.occurrences(args, kwargs)
            records = self._records_at(occurrences)
            for record in records:
                record.pins += 1
            try:
                self._books.load(records)
            except NoRoom as no_room:
                self._unpin(records)
                raise self._too_small((func, args, kwargs), records, no_room, 0) from None
            except BaseException:
                self._unpin(records)
                raise
            for record in records:
                record.seen = True
                self._books.touch(record)
            op = OpRecord(
                func=func,
                where="",
                occurrences=occurrences,
                written=self._dispatcher.operands(*ops.written_values(func, args, kwargs)),
            )
            state = self._allocator.state
            state.position = 2 * len(recorder.ops) + 1
            cold_ns = state.cold_ns
        started = time.monotonic_ns()
        try:
            result = func(*args, **kwargs)
        except BaseException:
            with self._lock:
                error = self._pending_error((func, args, kwargs), records)  # before what it allocated is forgotten
                self._unpin(records)
                for record in self._records_at(op.written):
                    record.stored = False
                self._note_failed_op(func)
                self._absorb()
            if error is not None:
                raise error from error.__cause__
            raise
        op.duration_ns = max(time.monotonic_ns() - started - (state.cold_ns - cold_ns), 0)
        with self._lock:
            self._unpin(records)
            self._absorb()
            self._complete(op, records, result)
        return result

    def _complete(self, op: OpRecord, records: list[VariableRecord], result: Any) -> None:
        recorder = self._recorder
        assert recorder is not None
        op.results = self._dispatcher.operands(result)
        for address in op.results:
            record = self._books.records.get(address)
            if record is not None:
                record.seen = True
        for address in op.written:
            record = self._books.records.get(address)
            if record is not None:
                record.stored = False
        recorder.ops.append(op)
        if len(recorder.ops) >= MAX_PERIOD_OPS:
            self._cut_period()
            return
        self._allocator.state.position = 2 * len(recorder.ops)

    def _cut_period(self) -> None:
        """No step has ended for so many ops that the recorder's memory would count: start a new recording.

        What follows, up to the next boundary, is the rest of something and is not learned.
        """
        if self._recorder is not None and not self._recorder.is_cut:
            _log.warning("no step ended in %d ops: they are not planned (is there an optimizer?)", MAX_PERIOD_OPS)
        self._recorder = StepRecorder(self._books.records, is_cut=True)
        self._allocator.state.position = 0

    def _note_failed_op(self, func: Any) -> None:
        if self._recorder is not None:
            self._recorder.ops.append(OpRecord(func=func, where="", occurrences=(), written=()))
            self._allocator.state.position = 2 * len(self._recorder.ops)

    def _records_at(self, addresses: Any) -> list[VariableRecord]:
        found = self._books.records
        return [found[a] for a in dict.fromkeys(addresses) if a in found]

    @staticmethod
    def _unpin(records: list[VariableRecord]) -> None:
        for record in records:
            record.pins -= 1

    # -- memory

    def _cold_allocate(self, nbytes: int) -> int:
        """An allocation that no plan serves. Called by the allocator, on any thread; never raises."""
        try:
            with self._lock:
                executor = self._executor
                if executor.active is not None:
                    executor.absorb_events()
                    between = self._allocator.state.position % 2 == 0
                    if between and threading.get_ident() == self._thread:
                        address = executor.serve_between(nbytes)
                        if address:
                            return address
                    if self._books.pool.num_free < self._books.chunks_of(nbytes):
                        self._leave("an allocation that the plan does not have")
                self._absorb()
                return self._books.allocate(nbytes).address
        except BaseException as error:
            if threading.get_ident() == self._thread and self._dispatcher.depth > 1:  # one for this call, one for an op
                self._pending = error if not isinstance(error, NoRoom) else _Failure(error, nbytes)
            return 0

    def _absorb(self) -> None:
        """Take the allocator's log: forget what was freed, and note all of it for the trace."""
        if self._executor.active is not None:
            self._executor.absorb_events()
            return
        if not self._allocator.state.num_events:
            return
        events = self._allocator.drain()
        for event in events:
            if event.kind != 0:
                self._books.free(event.address)
        if self._recorder is not None:
            self._recorder.events.extend(events)

    def _pending_error(self, call: _Call, records: list[VariableRecord]) -> BaseException | None:
        """Why an allocation of the op that just raised was refused, if that is why it raised."""
        pending, self._pending = self._pending, None
        if isinstance(pending, _Failure):
            return self._too_small(call, records, pending.no_room, pending.nbytes)
        return pending

    def _too_small(self, call: _Call, records: list[VariableRecord], no_room: NoRoom, nbytes: int) -> BudgetTooSmall:
        func, args, kwargs = call
        return budget_too_small(
            func=func,
            args=args,
            kwargs=kwargs,
            operands=records,
            no_room=no_room,
            new_nbytes=nbytes,
            books=self._books,
            earlier_ops=self._recorder.ops if self._recorder is not None else (),
            address_of=self._dispatcher.address,
            threshold_nbytes=self.threshold_nbytes,
        )

    @property
    def _machine(self) -> Any:
        return self.steps.machine(self._driver.num_chunks, self.chunk_nbytes, self._store)

    # -- what a user may ask

    def trace(self) -> Trace | None:
        """The trace of the sequence planned last, if any."""
        return self._sequences.last_trace

    def plan(self) -> Plan | None:
        """The plan made last, if any."""
        return self._sequences.last_plan

    def report(self) -> dict[str, Any]:
        """What happened so far, as plain data (see `ooc run --report`)."""
        return make_report(self)

    @property
    def store(self) -> FileStore:
        """Where evicted bytes are."""
        return self._store

    def live_nbytes(self) -> int:
        """Bytes of all large storages alive now, wherever they are."""
        with self._lock:
            self._absorb()
            if self._executor.active is not None:
                self._leave("a look at all variables")
            return sum(record.nbytes for record in self._books.records.values())

    def in_core_peak_nbytes(self) -> int:
        """What the steps seen so far would need in core: the most bytes alive at once."""
        with self._lock:
            recorder = self._recorder
            if self.steps.in_core_peak_nbytes == 0 and recorder is not None and self._is_open:
                self._absorb()
                self.steps.note_trace(recorder.build(self._books.records).trace)
        return self.steps.in_core_peak_nbytes

    def learned(self) -> dict[str, Any]:
        """What is known of sequences, for the report."""
        sequences = self._sequences
        return {
            "num_plans": sequences.num_plans,
            "planning_s": sequences.planning_s,
            "unplannable": dict(sequences.unplannable),
            "not_played": dict(self.steps.refusals),
        }

    def close(self, *, bring_back: bool = True) -> None:
        """End the session. Idempotent.

        Args:
            bring_back: Variables that are still alive become ordinary memory, however much that
                is. If False, those in the store are lost, and touching one of them ends the
                process: for a process that is about to exit.
        """
        global _current
        if not self._is_open:
            return
        with self._lock:
            self._mode.__exit__(None, None, None)
            if self._hook is not None:
                self._hook.remove()
            self._outside.close()
            opaque_ops.run_in_session = None
            self._forks.close()
            try:
                if self._executor.active is not None:
                    self._leave("the session ends")
                self._absorb()
                if bring_back:
                    self._let_survivors_go()
            finally:
                self._is_open = False
                self._interrupts.remove()
                self._allocator.close()
                _current = None
                self._books.close()
                self._store.close()
                self._driver.close()

    def _become_inherited(self) -> None:
        """In a forked child: this session is the parent's."""
        global _current
        self._is_open = False
        self._allocator.close()
        self._dispatcher.leave()
        self._outside.close()
        opaque_ops.run_in_session = None
        self._books.guards.become_inherited()
        self._interrupts.remove()
        if self._hook is not None:
            self._hook.remove()
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self._mode:  # else it stays, and passes everything on
            self._mode.__exit__(None, None, None)
        _current = None

    def _let_survivors_go(self) -> None:
        from ooc.survivors import release_survivors

        release_survivors(self._books, self._driver, self._allocator)

    def _check_open(self) -> None:
        if not self._is_open:
            raise SessionError("this session is closed; open a new one")
        if threading.get_ident() != self._thread:
            raise SessionError("a session's steps belong to the thread that opened it")


class _Failure(OocError):
    """What an allocation could not have; turned into `BudgetTooSmall` where the op is known."""

    def __init__(self, no_room: NoRoom, nbytes: int) -> None:
        super().__init__(str(no_room))
        self.no_room = no_room
        self.nbytes = nbytes


class _Intercepts:
    """The ops that Python looks at before they are played."""

    def __contains__(self, func: object) -> bool:
        return hasattr(func, "_schema") and (ops.is_list_op(func) or ops.is_convolution_backward(func))


def _choose_chunk(budget_nbytes: int, chunk: int | str | None) -> int:
    """The chunk size: as given, or the power of two from 64 KiB to 2 MiB that gives about 4,096 chunks."""
    if chunk is not None:
        nbytes = parse_nbytes(chunk)
        if nbytes % GRANULE_NBYTES:
            raise ValueError(f"chunk_nbytes={nbytes}: must be a multiple of {GRANULE_NBYTES}")
    else:
        nbytes = GRANULE_NBYTES
        while nbytes < 2 << 20 and budget_nbytes // nbytes > 4096:
            nbytes *= 2
    if budget_nbytes < nbytes:
        raise ValueError(
            f"budget={budget_nbytes} bytes: less than one chunk ({nbytes} bytes). Options: a budget of at least "
            f"{nbytes} bytes; a smaller chunk_nbytes (multiples of {GRANULE_NBYTES})."
        )
    return nbytes
