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
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ooc import _current
from ooc.devices.cpu import CpuDevice, find_device
from ooc.devices.protocols import Device
from ooc.devices.resize import resize_pool
from ooc.dispatch import extension as _native
from ooc.dispatch.op_runner import OpRunner
from ooc.dispatch.signals import CriticalLock, SignalGate
from ooc.errors import SessionError
from ooc.interop import collectives, opaque_ops
from ooc.interop.exports import Exports
from ooc.interop.forks import DeviceForks, Forks
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.executor import Executor
from ooc.replay.given_plan import GivenPlan
from ooc.replay.plan_cache import PlanCache
from ooc.replay.sequences import Sequences
from ooc.reporting.explain import Explanation, explain
from ooc.reporting.report import make_report
from ooc.reporting.statistics import session_stats, step_metrics
from ooc.telemetry.progress import Position, Progress, parse_when
from ooc.telemetry.steps import StepLog
from ooc.telemetry.timeline import Timeline
from ooc.tracing import op_semantics as ops
from ooc.units import format_exactly, format_nbytes, parse_nbytes
from scheduler.plan import Plan
from scheduler.policies import POLICIES
from scheduler.trace import Trace
from vmm.chunks import ChunkPool
from vmm.nvtx_ranges import NamedRange
from vmm.store import FileStore

_log = logging.getLogger(__name__)

_LAST_WAIT_S = 5.0
"""For collectives under way when the process exits: another rank may have died."""

_STEP_BOUNDARIES = "explicit", "optimizer"


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
        device: "cpu", "cuda", "cuda:1", or a device of `ooc.devices.protocols`.
        host_budget: On a GPU, bytes of host memory to pin for what is evicted; by default half of what is free.
        store: Directory for the file that evicted bytes go to; not in memory (tmpfs).
        policy: Who plans: a name in `scheduler.policies.POLICIES`.
        window_nbytes: Window length of the policy `window`; searched when not given.
        chunk_nbytes: Chunk size; chosen by the budget when not given.
        threshold_nbytes: Storages below this are left to torch's own allocator and not counted.
        debug: Let every touch of an evicted variable fault, so that a missed use cannot pass.
        step_boundary: "explicit": by `step()`; "optimizer": when an optimizer's `step` returns.
        plan_cache: Keep plans on disk and use those of earlier runs (see `ooc.replay.plan_cache`).
        plan: A plan to play for the step that it was made for, at this budget and chunk size (`ooc plan`); other
            steps are planned by `policy`.
        progress: One line a step to stderr: "never", "auto" (on a terminal), "always".

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
        device: str | Device = "cpu",
        host_budget: int | str | None = None,
        store: str | Path | None = None,
        policy: str = "auto",
        window_nbytes: int | str | None = None,
        chunk_nbytes: int | str | None = None,
        threshold_nbytes: int | str | None = None,
        debug: bool = False,
        step_boundary: Literal["explicit", "optimizer"] = "explicit",
        plan_cache: bool = True,
        plan: Plan | None = None,
        progress: str = "never",
    ) -> None:
        if _current.session is not None:
            raise SessionError(
                "a session is open already: one at a time owns the process's allocations. "
                "Options: close it first (leave its `with` block); under `ooc run`, which opens one for the whole "
                "script, take the script's own out, or start it with python."
            )
        if step_boundary not in _STEP_BOUNDARIES:
            raise ValueError(f"step_boundary={step_boundary!r}: Options: {', '.join(_STEP_BOUNDARIES)}.")
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: there is no such policy. Options: {', '.join(sorted(POLICIES))}.")
        chosen = find_device(device, host_budget=host_budget)
        self.budget_nbytes = parse_nbytes(budget, what="budget")
        self.chunk_nbytes = _choose_chunk(self.budget_nbytes, chunk_nbytes, chosen.granule_nbytes)
        if not isinstance(chosen, CpuDevice) and (rest := self.budget_nbytes % self.chunk_nbytes):
            self.budget_nbytes -= rest
            _log.warning("budget: rounded down to %s, whole chunks", format_exactly(self.budget_nbytes))
        self.threshold_nbytes = (
            parse_nbytes(threshold_nbytes, what="threshold")
            if threshold_nbytes is not None
            else chosen.threshold_nbytes
        )
        self.policy = policy
        self.debug = debug
        when = parse_when(progress)
        self._thread = threading.get_ident()
        self._memory = chosen.open(
            num_chunks=self.budget_nbytes // self.chunk_nbytes, chunk_nbytes=self.chunk_nbytes, store=store
        )
        self._allocator, self._driver = self._memory.allocator, self._memory.driver
        self._store, self._space = self._memory.store, self._memory.space
        self._manager = ResidencyManager(
            pool=ChunkPool(self._memory.num_chunks),
            space=self._space,
            store=self._store,
            debug=debug,
            guards=self._memory.make_guards(debug=debug),
            is_host=self._memory.is_host,
        )
        watch = self._memory.watch(self._manager)
        self._runner = OpRunner(
            manager=self._manager,
            allocator=self._allocator,
            budget_nbytes=self.budget_nbytes,
            threshold_nbytes=self.threshold_nbytes,
            is_open=lambda: self._is_open,
            is_mode_on=lambda: self._mode in _get_current_dispatch_mode_stack(),
            watch=watch,
            collectives=collectives,
        )
        self._wait_hooks = collectives.WaitHooks(note_end=self._runner.note_waited, is_ours=self._runner.is_in_flight)
        self._dispatcher = _native.dispatcher_type()(
            self._allocator.state_address,
            self._allocator.this_thread_function,
            torch.empty(0),
            torch._C.TensorBase,
            self._runner.dispatch,
            self._runner.before,
            self._runner.after,
            self._runner.finish,
            self._runner.failed,
        )
        self._lock = CriticalLock(self._dispatcher)
        self._signal_gate = SignalGate(
            self._dispatcher,
            is_open=lambda: self._is_open,
            closing=(Session.close.__code__, Session.__exit__.__code__),
        )
        self._executor = Executor(
            manager=self._manager,
            allocator=self._allocator,
            dispatcher=self._dispatcher,
            new_pool=lambda: ChunkPool(self._memory.num_chunks),
            watch=watch,
        )
        self._runner.attach(dispatcher=self._dispatcher, lock=self._lock, executor=self._executor)
        self._cache = PlanCache.default() if plan_cache else None
        if plan is not None:
            self._cache = GivenPlan(plan, self._cache)
        self._sequences = Sequences(
            policy=policy,
            parameters={"window_nbytes": parse_nbytes(window_nbytes, what="window")}
            if window_nbytes is not None
            else {},
            intercepts=_Intercepts(),
            view_address=self._driver.view_address,
            cache=self._cache,
            planning=lambda num_ops: self._progress.planning(num_ops),
        )
        self.steps = StepLog(self._manager, self._space)
        self._progress = Progress(when, self._position)
        self.timeline = Timeline(self._manager, self._store, self.addresses)
        self._step_range = NamedRange("step")
        self._mode = _Mode(self._dispatcher)
        self._step_boundary = step_boundary
        self._hook: Any = None
        with self._lock:
            self._is_open = True
            self._signal_gate.install()
            # Guarded natively: no signal handler may run before the first bytecode of a C callback.
            cold_allocate = functools.partial(self._dispatcher.guarded, self._runner.cold_allocate)
            self._allocator.open(threshold_nbytes=self.threshold_nbytes, cold_allocate=cold_allocate)
            _current.session = self
            self._manager.guards.open()
            self._exports = Exports(self)
            opaque_ops.run_in_session = self._runner.run_opaque
            self._wait_hooks.open()
            self._forks = (Forks if self._memory.is_host else DeviceForks)(self)
            self._mode.__enter__()
        if step_boundary == "optimizer":
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._hook = register_optimizer_step_post_hook(lambda *_: self._optimizer_stepped())
            self.steps.begin(planned=False)
            self._step_range.begin()

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<Session {state}, budget {self.budget_nbytes} bytes, {self._manager!r}>"

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
        self._begin_step()
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
        with self._exports.resident(tensors):
            yield

    def set_budget(self, budget: int | str) -> None:
        """Change the budget, between any two ops: memory that others need is theirs when this returns.

        What does not fit any more moves to the store; a step under way goes on on demand, and the next one is
        planned for the new budget. On the CPU; up to the machine's memory. Peaks in reports and `memory_stats`
        begin anew (`past_budgets` of the report has those before).

        Args:
            budget: As of the session; rounded down to whole chunks. The chunks keep their size.

        Raises:
            ValueError: Not a size, or less than a chunk.
            SessionError: Within an op, or on another thread; the memory is a device's; what must stay (in
                `resident()`) does not fit. The budget is as it was.
            StoreFailed, vmm.store.StoreFull, vmm.driver.MemoryFault: What leaves cannot be written out, or the
                memory for more is not there. The budget is as it was.
        """
        self._check_open()
        nbytes = parse_nbytes(budget, what="budget")
        num_chunks = nbytes // self.chunk_nbytes
        if num_chunks < 1:
            raise ValueError(
                f"budget of {format_exactly(nbytes)}: less than one of this session's chunks. "
                f"Options: at least {format_nbytes(self.chunk_nbytes)}."
            )
        with self._lock:
            if self._allocator.state.position % 2:
                raise SessionError("set_budget within an op: what it uses must stay. Options: call it between ops.")
            if num_chunks == self._memory.num_chunks:
                self.budget_nbytes = nbytes
                return
            self._memory.check_resize(num_chunks)
            if self._executor.active is not None:
                self._runner.bail_out("the budget changes")
            if not self._manager.flights.settle():
                raise SessionError(
                    f"set_budget: {', '.join(self._manager.flights.names())} not over: its operands must stay. "
                    "Options: call it after the program has waited for them."
                )
            self._runner.absorb()
            self._sequences.forget_plans()
            self._give_up_retired()
            resize_pool(self._manager, self._memory, num_chunks)
            self.steps.note_budget(self.budget_nbytes)
            self.budget_nbytes = nbytes
            self._runner.set_budget(nbytes)

    def _end_step(self) -> None:
        with self._lock:
            if self._is_open:
                self._exports.step_ends()
            self._note_step()

    def _optimizer_stepped(self) -> None:
        if not self._is_open or threading.get_ident() != self._thread:
            return
        self._note_step()
        self._begin_period()
        with self._lock:
            self._exports.step_ends()
        self._begin_step()

    def _note_step(self) -> None:
        self._step_range.end()
        before = self.steps.num_steps
        self.steps.end(on_plan=self._executor.active is not None, learned=self._sequences.num_plans > 0)
        if self._progress.is_on and self.steps.num_steps > before:
            resident = self.memory_stats()["resident_bytes.all.current"]
            self._progress.note_step(self.steps.num_steps, self.steps.rows[-1], resident)

    def _position(self) -> Position:
        """For the bar, on its thread: reads what is there and takes no lock."""
        active, recorder = self._executor.active, self._runner.recorder
        if active is not None:
            return Position(mode="planned", num_done=self._dispatcher.cursor, num_ops=active.num_ops)
        num_done = len(recorder.ops) if recorder is not None else 0
        mode = "off plan" if self._sequences.num_plans else "learning"
        return Position(mode=mode, num_done=num_done, num_ops=self._sequences.last_num_ops)

    def _begin_step(self) -> None:
        self._step_range.begin()
        self.timeline.begin_step(self._executor.active)
        self.steps.begin(planned=self._executor.active is not None)

    def _begin_period(self) -> None:
        """The present period ends and the next begins: learn from the one, choose a plan for the other."""
        with self._lock:
            self._exports.step_begins()
            executor = self._executor
            key: str | None
            if executor.active is not None and not executor.is_complete():
                self._runner.bail_out("the step ended before the plan")
            if executor.active is not None and executor.persistent_is_missing():
                self._runner.bail_out("a variable that lived across steps was freed")
            self.timeline.end_period(executor.active, self.steps.num_steps - 1)
            if executor.active is not None:
                key = self._sequences.active_key
            else:
                assert self._runner.recorder is not None
                self._runner.absorb()
                if self._runner.recorder.is_cut:
                    key = None
                else:
                    observed = self._runner.recorder.build(self._manager.records)
                    self.steps.note_trace(observed.trace)
                    key = self._sequences.learn(observed, self._machine)
            self._give_up_retired()
            follower = self._sequences.next_after(key)
            if executor.active is not None:
                played = executor.active
                refined = self._sequences.refine(played, self._store)
                if follower is played:
                    follower = refined
                if follower is played and executor.rotate():
                    return
                if executor.active is not None:
                    self._runner.bail_out("another plan is expected")
                self._give_up_retired()
            self._runner.start_recording()
            if follower is not None:
                if executor.enter(follower, self._sequences.others(follower)):
                    self._runner.recorder = None
                    self.steps.note_plan(follower.num_chunks)
                else:
                    _log.info("cannot play the plan: %s", executor.bailout_reason)
                    self.steps.note_refusal(executor.bailout_reason)

    def _give_up_retired(self) -> None:
        while self._sequences.retired:
            self._executor.retire(self._sequences.retired.pop())

    @property
    def _machine(self) -> Any:
        num_kept = sum(self._manager.chunks_of(record.nbytes) for record in self._manager.workspaces())
        return self.steps.machine(max(self._memory.num_chunks - num_kept, 1), self.chunk_nbytes, self._store)

    # -- what a user may ask

    def trace(self) -> Trace | None:
        """The trace of the sequence planned last, if any."""
        return self._sequences.last_trace

    def plan(self) -> Plan | None:
        """The plan made last, if any."""
        return self._sequences.last_plan

    def report(self, *, with_timeline: bool = False) -> dict[str, Any]:
        """What happened so far, as plain data (see `ooc run --report`).

        Args:
            with_timeline: Also the last step that was played whole: its trace, its plan, and when
                each op and each transfer started and stopped (for `ooc report`).
        """
        report = make_report(self)
        if with_timeline:
            with self._lock:
                report["timeline"] = self.timeline.document()
        return report

    def explain(self, what: torch.Tensor | str) -> Explanation:
        """Where a tensor is, when it moves in the plan that is being played, and why.

        Args:
            what: A tensor, or a name as a module or optimizer gives it: "blocks.0.weight",
                "gradient of blocks.0.weight", "exp_avg of blocks.0.weight". Names are looked up among
                all modules and optimizers of the process; with several models they begin with the
                model's class.

        Raises:
            ValueError: There is no tensor of this name.
        """
        self._check_open()
        with self._lock:
            self._runner.absorb()
            return explain(self, what)

    def memory_stats(self) -> dict[str, int]:
        """See `ooc.memory_stats`."""
        return session_stats(self)

    def metrics(self) -> dict[str, float]:
        """The last step as scalars, for TensorBoard and the like: `for key, value in session.metrics().items()`."""
        return step_metrics(self)

    def live_records(self) -> list[VariableRecord]:
        """Records of all variables alive now. Leaves a step on its plan."""
        with self._lock:
            if self._is_open:
                self._runner.absorb()
            return [*self._manager.records.values(), *self._executor.live_records()]

    def record_at(self, address: int) -> VariableRecord | None:
        """The variable at an address, if one is alive there."""
        return self._executor.record_at(address) or self._manager.records.get(address)

    def addresses(self) -> Callable[[torch.Tensor], int]:
        """A function for the address of a tensor's storage: 0 if no variable alive now has it.

        Gives nothing out, unlike `data_ptr()`. Good until something is allocated or freed.
        """
        held = {record.address for record in self.live_records()}

        def address_of(tensor: torch.Tensor) -> int:
            address: int = self._dispatcher.address(tensor)
            return address if address in held else 0

        return address_of

    def planned_variable(self, address: int) -> tuple[Trace, Plan, int | None] | None:
        """What is being played now, and which of its variables is alive at `address`; None: nothing is played."""
        active = self._executor.active
        if active is None:
            return None
        found = np.flatnonzero((active.variable_address == address) & (active.variable_alive != 0))
        return active.trace, active.plan, int(found[0]) if len(found) else None

    def counters(self) -> dict[str, int]:
        """What was moved since the session was opened."""
        return self.steps.counters()

    def cupy_allocator(self) -> Any:
        """An allocator for `cupy.cuda.set_allocator`, within this session's budget (see `ooc.interop.cupy_pool`)."""
        from ooc.interop.cupy_pool import CupyPool

        self._check_open()
        return CupyPool(self).allocate

    @property
    def store(self) -> FileStore:
        """Where evicted bytes are."""
        return self._store

    def live_nbytes(self) -> int:
        """Bytes of all large storages alive now, wherever they are."""
        with self._lock:
            self._runner.absorb()
            if self._executor.active is not None:
                self._runner.bail_out("a look at all variables")
            return sum(record.nbytes for record in self._manager.records.values())

    def in_core_peak_nbytes(self) -> int:
        """What the steps seen so far would need in core: the most bytes alive at once."""
        with self._lock:
            recorder = self._runner.recorder
            if self.steps.in_core_peak_nbytes == 0 and recorder is not None and self._is_open:
                self._runner.absorb()
                self.steps.note_trace(recorder.build(self._manager.records).trace)
        return self.steps.in_core_peak_nbytes

    def largest_need_nbytes(self) -> int:
        """What the worst op so far needed at once, in chunks of 64 KiB: no budget below that would have done."""
        return self._sequences.largest_need_nbytes()

    def collectives(self) -> dict[str, int]:
        """Collectives so far, waits of ours for them, and what their backend's threads took beside the budget."""
        runner = self._runner
        apart = {"num_apart": runner.num_apart, "apart_nbytes": runner.apart_nbytes}
        return {**self._manager.flights.statistics(), **apart}

    def learned(self) -> dict[str, Any]:
        """What is known of sequences, for the report."""
        sequences = self._sequences
        return {
            "num_plans": sequences.num_plans,
            "planning_s": sequences.planning_s,
            "unplannable": dict(sequences.unplannable),
            "not_played": dict(self.steps.refusals),
            **({"given_plan_refused": self._cache.refusal} if isinstance(self._cache, GivenPlan) else {}),
        }

    def close(self, *, bring_back: bool = True) -> None:
        """End the session. Idempotent.

        Args:
            bring_back: Variables that are still alive become ordinary memory, however much that
                is. If False, those in the store are lost, and touching one of them ends the
                process: for a process that is about to exit.
        """
        if not self._is_open:
            return
        with self._lock:
            self._settle_flights(bring_back)
            self._mode.__exit__(None, None, None)
            if self._hook is not None:
                self._hook.remove()
            self._exports.close()
            opaque_ops.run_in_session = None
            self._wait_hooks.close()
            self._forks.close()
            try:
                if self._executor.active is not None:
                    self._runner.bail_out("the session ends")
                self._runner.absorb()
                if bring_back:
                    self._detach_tensors()
            finally:
                self._is_open = False
                self._signal_gate.remove()
                self._allocator.close()
                _current.session = None
                self._progress.close()
                self._step_range.end()
                self._manager.close()
                self.timeline.close()
                self._memory.close()

    def _settle_flights(self, bring_back: bool) -> None:
        """Collectives under way end before their operands' memory goes."""
        flights = self._manager.flights
        if flights.settle(timeout_s=None if bring_back else _LAST_WAIT_S) or not bring_back:
            return
        what = f"{', '.join(flights.names())} not over: what it does later would be lost with the session's memory"
        if sys.exception() is None:
            raise SessionError(f"close: {what}. Options: wait() for it before the session is closed.")
        _log.warning("close: %s", what)

    def _become_inherited(self) -> None:
        """In a forked child: this session is the parent's."""
        self._is_open = False
        self._allocator.close()
        self._dispatcher.leave()
        self._exports.close()
        opaque_ops.run_in_session = None
        self._wait_hooks.close()
        self._manager.guards.become_inherited()
        self._signal_gate.remove()
        if self._hook is not None:
            self._hook.remove()
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self._mode:  # else it stays, and passes everything on
            self._mode.__exit__(None, None, None)
        _current.session = None

    def _detach_tensors(self) -> None:
        self._memory.detach_tensors(self._manager)

    def _check_open(self) -> None:
        if not self._is_open:
            raise SessionError("this session is closed; open a new one")
        if threading.get_ident() != self._thread:
            raise SessionError("a session's steps belong to the thread that opened it")


class _Intercepts:
    """The ops that Python looks at before they are played."""

    def __contains__(self, func: object) -> bool:
        return hasattr(func, "_schema") and (
            ops.is_list_op(func) or ops.is_convolution_backward(func) or collectives.is_collective(func)
        )


def _choose_chunk(budget_nbytes: int, chunk: int | str | None, granule_nbytes: int) -> int:
    """The chunk size: as given, or the power of two from the granule to 2 MiB that gives about 4,096 chunks."""
    if chunk is not None:
        nbytes = parse_nbytes(chunk, what="chunk size")
        if nbytes % granule_nbytes:
            raise ValueError(
                f"chunk size {chunk!r} is {format_exactly(nbytes)}; it must be a multiple of "
                f"{format_exactly(granule_nbytes)}"
            )
    else:
        nbytes = granule_nbytes
        while nbytes < 2 << 20 and budget_nbytes // nbytes > 4096:
            nbytes *= 2
    if budget_nbytes < nbytes:
        raise ValueError(
            f"budget of {format_exactly(budget_nbytes)}: less than one chunk of {format_nbytes(nbytes)}. Options: a "
            f"budget of at least {format_nbytes(nbytes)}"
            + ("." if nbytes == granule_nbytes else f"; smaller chunks (multiples of {format_nbytes(granule_nbytes)}).")
        )
    return nbytes
