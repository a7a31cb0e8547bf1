"""The engine of a session: opens its parts in order, and closes them in the opposite order.

`Session` is the public face; the parts are here. Each part registers how it is undone on one `ExitStack` as soon as it
is open. Closing the engine unwinds that stack. So does an opening that fails, and then nothing stays open.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ooc import _current
from ooc.devices.resize import refill_pool, resize_pool, yield_pool
from ooc.dispatch.extension import notice_sums
from ooc.dispatch.native_acts import act_natively
from ooc.dispatch.native_demand import Intercepts
from ooc.dispatch.op_runner import OpRunner
from ooc.dispatch.signals import HeldSignals, SignalGate
from ooc.errors import SessionError, StoreFailed
from ooc.interop import opaque_ops
from ooc.interop.aoti_packages import AotiPackages
from ooc.interop.backward_passes import BackwardPasses
from ooc.interop.collectives import Collectives
from ooc.interop.compilation import Compilation
from ooc.interop.cupy_pool import CupyPool
from ooc.interop.earlier_modes import warn_of_earlier_modes
from ooc.interop.exports import Exports
from ooc.interop.forks import DeviceForks, Forks, HostForks
from ooc.interop.graph_fusion import GraphFusion
from ooc.interop.guest_threads import GuestThreads
from ooc.interop.triton_launches import TritonLaunches
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.options import SessionOptions
from ooc.replay.given_plan import GivenPlan
from ooc.replay.learning_budget import LearningBudget
from ooc.replay.plan_change import change_plans
from ooc.replay.sequences import Sequences
from ooc.step_cycle import StepCycle
from ooc.telemetry.progress import Progress, ProgressBar
from ooc.telemetry.steps import StepLog
from ooc.telemetry.timeline import Timeline
from ooc.units import format_nbytes, parse_nbytes
from scheduler.plan import Plan
from scheduler.trace import Trace
from vmm.chunks import ChunkPool
from vmm.driver import MemoryFault
from vmm.store import FileStore

_ROOMY_FRACTION = 0.75
"""Of the pool: what moved while no more than this was ever in use was moved by plans, which put away what outlives
their segments, and not for want of room."""


class Engine:
    """The parts of one open session: memory, residency manager, dispatch, replay and telemetry.

    Signal handlers are deferred until the session is open. In between they run only at the checkpoints of `held`, and
    whatever they raise there undoes what was opened so far.

    Args:
        options: The checked arguments.
        held: Deferred signals; the caller releases them.
        claim: Registers the session as the process's; called when all but the dispatch mode is open.
        closing: Functions that close a session; signals must not interrupt them at their first bytecode.

    Raises:
        vmm.store.StoreUnavailable, vmm.driver.MemoryFault, vmm.native_build.NativeBuildError: See `ooc.Session`.
            Everything is as it was before.
    """

    def __init__(
        self,
        options: SessionOptions,
        *,
        held: HeldSignals,
        claim: Callable[[Engine], None],
        closing: Sequence[CodeType] = (),
    ) -> None:
        self.options = options
        self.budget_nbytes = options.budget_nbytes
        self.is_open = False
        self._brings_back = True
        self._yielded: list[VariableRecord] | None = None
        """While all memory is given back: what was resident before."""
        self._is_in_yield = False
        with contextlib.ExitStack() as undo:
            undo.callback(held.release)  # of signals that wait while the rest is undone
            self._open_memory(options, held, undo)
            self._open_replay(options, undo)
            self._open_telemetry(undo)
            with self.runner.lock:
                self._go_live(options, held, claim, tuple(closing), undo)
            held.checkpoint()
            self._undo = undo.pop_all()

    def __repr__(self) -> str:
        return f"<Engine {'open' if self.is_open else 'closed'}, {self.manager!r}>"

    # -- opening, in this order

    def _open_memory(self, options: SessionOptions, held: HeldSignals, undo: contextlib.ExitStack) -> None:
        self.memory = options.device.open(
            num_chunks=options.num_chunks,
            chunk_nbytes=options.chunk_nbytes,
            store=options.store,
            checkpoint=held.checkpoint,
        )
        undo.callback(self.memory.close)
        self.manager = ResidencyManager(
            pool=ChunkPool(self.memory.num_chunks),
            space=self.memory.space,
            store=self.memory.store,
            debug=options.debug,
            guards=self.memory.make_guards(debug=options.debug),
            is_host=self.memory.is_host,
        )
        undo.callback(self.manager.close)

    def _open_replay(self, options: SessionOptions, undo: contextlib.ExitStack) -> None:
        self.runner = OpRunner(
            manager=self.manager,
            allocator=self.memory.allocator,
            budget_nbytes=options.budget_nbytes,
            threshold_nbytes=options.threshold_nbytes,
            is_open=lambda: self.is_open,
            new_pool=lambda: ChunkPool(self.memory.num_chunks),
            make_collectives=lambda runner: Collectives(
                manager=self.manager,
                runner=runner,
                is_open=lambda: self.is_open,
                budget_nbytes=lambda: self.budget_nbytes,
            ),
            watch=self.memory.watch(self.manager),
            recompute=options.recompute,
        )
        act_natively(
            self.runner.dispatcher,
            manager=self.manager,
            acts=self.runner.executor.acts,
            lock=self.runner.lock,
            not_quiet=(self.runner.collectives.launches, self.runner.executor.reruns.broken),
        )
        undo.callback(self.runner.parts.close)
        self.collectives = self.runner.collectives
        self.executor = self.runner.executor
        self.lock = self.runner.lock
        self.progress = Progress(options.progress)
        undo.callback(self.progress.close)
        self.sequences = Sequences(
            policy=options.policy,
            parameters=options.parameters,
            intercepts=Intercepts(),
            view_address=self.memory.driver.view_address,
            cache=options.cache,
            planning=self.progress.planning,
            in_background=options.background_planning,
            trials=self.runner.trials if options.recompute or options.recompute_if_slow else None,
            is_timed=self.memory.is_host,
        )
        if self.sequences.background is not None:
            undo.callback(self.sequences.background.close)

        self.runner.refusals.earlier_traces = self.sequences.earlier_traces

    def _open_telemetry(self, undo: contextlib.ExitStack) -> None:
        self.steps = StepLog(self.manager, self.memory.space, self.memory.allocator)
        undo.callback(self.steps.close)
        self.timeline = Timeline(self.manager, self.memory.store, self.addresses)
        undo.callback(self.timeline.close)
        self.exports = Exports(manager=self.manager, runner=self.runner, memory=self.memory)
        self.runner.hidden.give_out = self.exports.export
        self.learning = LearningBudget(
            self.manager.counters,
            is_limited=self.options.background_planning,
            is_roomy=lambda: self.steps.peak_chunks <= _ROOMY_FRACTION * self.manager.num_chunks,
        )
        self.cycle = StepCycle(
            runner=self.runner,
            manager=self.manager,
            sequences=self.sequences,
            learning=self.learning,
            exports=self.exports,
            steps=self.steps,
            timeline=self.timeline,
            progress=self.progress,
            resident_nbytes=self.resident_nbytes,
            is_open=lambda: self.is_open and self._yielded is None,
        )
        if isinstance(self.options.cache, GivenPlan):  # it is of one optimizer's step
            self.cycle.rounds.give_up()
        undo.callback(self.cycle.close)
        bar = ProgressBar(self.progress, self.cycle.position)
        undo.callback(bar.close)

    def _go_live(
        self,
        options: SessionOptions,
        held: HeldSignals,
        claim: Callable[[Engine], None],
        closing: tuple[CodeType, ...],
        undo: contextlib.ExitStack,
    ) -> None:
        """Route allocations, ops, signals, exports and forks to this engine from here on."""
        allocator, runner = self.memory.allocator, self.runner
        undo.callback(held.hold)  # when the gate is gone
        gate = SignalGate(runner.dispatcher, is_open=lambda: self.is_open, closing=closing)
        undo.callback(gate.remove)
        gate.install(held.handlers)
        self._gate = gate
        undo.callback(allocator.close)
        # Guarded natively: no signal handler may run before the first bytecode of a C callback.
        cold_allocate = functools.partial(runner.dispatcher.guarded, runner.cold_allocate)
        allocator.open(threshold_nbytes=options.threshold_nbytes, cold_allocate=cold_allocate)
        self.manager.guards.open()
        notice_sums()
        self.guest_threads = GuestThreads(runner.dispatch_guest)
        undo.callback(runner.guests.settle)
        undo.callback(self.guest_threads.close)  # their ops are seen until all bytes are where they stay
        undo.callback(self._let_go)
        self.is_open = True
        if self.memory.is_host:
            self.guest_threads.open()
        forks = self._make_forks()
        undo.callback(forks.close)
        undo.callback(opaque_ops.set_runner, None)
        opaque_ops.set_runner(runner.run_opaque)
        self.launches = TritonLaunches(imports=not self.memory.is_host)
        undo.callback(self.launches.close)
        self.launches.open()
        self._packages = AotiPackages()
        undo.callback(self._packages.close)
        self._packages.open()
        undo.callback(self.exports.close)
        self.exports.open()
        self._fusion = GraphFusion()
        undo.callback(self._fusion.close)
        self._fusion.open()
        compilation = Compilation(
            mode=runner.mode, is_host=self.memory.is_host, budget_nbytes=lambda: self.budget_nbytes
        )
        undo.callback(compilation.remove)
        compilation.install()
        self._compilation = compilation
        undo.callback(self.collectives.close)
        self.collectives.open()
        self._hook: Any = None  # torch gives its handles no public type
        is_found = options.step_boundary == "optimizer"
        passes = BackwardPasses(
            begins=self.cycle.backward_begins,
            left=self.cycle.backward_left,
            ended=(lambda: self.cycle.backward_ended(has_optimizer=passes.has_optimizer)) if is_found else None,
        )
        undo.callback(passes.close)
        passes.open()
        if is_found:
            self._hook = register_optimizer_step_post_hook(
                lambda optimizer, *_: self.cycle.optimizer_stepped(optimizer)
            )
            undo.callback(self._hook.remove)
            self.cycle.begin_first_step()
        undo.callback(_current.release)
        claim(self)
        runner.start_recording()
        warn_of_earlier_modes()
        undo.enter_context(runner.mode)  # last: from the next op on

    def _make_forks(self) -> Forks:
        store = self.memory.store
        if not isinstance(store, FileStore):
            return DeviceForks(runner=self.runner, become_inherited=self._become_inherited)
        return HostForks(
            manager=self.manager,
            runner=self.runner,
            allocator=self.memory.allocator,
            store=store,
            slices=self.runner.parts.memory.slices,
            become_inherited=self._become_inherited,
        )

    # -- closing

    def close(self, *, bring_back: bool = True) -> None:
        """Undo the opening. Idempotent. See `ooc.Session.close`."""
        if not self.is_open:
            return
        with self.lock:
            self.collectives.settle("close", is_last=not bring_back)
            self._brings_back = bring_back
            self._undo.close()

    def _let_go(self) -> None:
        """End the session: bail out of its plan, and detach the tensors that are still alive."""
        with contextlib.ExitStack() as last_first:  # each is done whatever those before it raise
            last_first.callback(self.runner.recording.see_every_op)
            last_first.callback(setattr, self, "is_open", False)
            last_first.callback(self.memory.abandon_tensors, self.manager)
            keep = self.memory.detach_tensors if self._brings_back else self.memory.leave_tensors
            last_first.callback(keep, self.manager)
            last_first.callback(self.manager.land)
            last_first.callback(self.runner.absorb)
            last_first.callback(self.executor.finish)
            if self.executor.active is not None:
                # All variables are returned, also when one of the plan's transfers failed: what was not written is
                # still in memory, and what was not read is read again below, where a failure is the caller's.
                with contextlib.suppress(StoreFailed):
                    self.runner.bail_out("the session ends")

    def _become_inherited(self) -> None:
        """Make this copy of the engine inert, in a forked child: the parent owns it."""
        self.is_open = False
        self.memory.allocator.close()
        self.runner.dispatcher.leave()
        self.cycle.close()
        self.runner.recording.see_every_op()
        if self.sequences.background is not None:
            self.sequences.background.become_inherited()
        self.exports.close()
        self._compilation.remove()
        self.collectives.close()
        self.guest_threads.close()
        opaque_ops.set_runner(None)
        self.launches.close()
        self._packages.close()
        self._fusion.close()
        _current.release()
        self.manager.guards.become_inherited()
        self._gate.remove()
        if self._hook is not None:
            self._hook.remove()
        self.runner.mode.leave_in_child()

    # -- the budget

    def set_budget(self, budget: int | str) -> None:
        """See `ooc.Session.set_budget`."""
        nbytes = parse_nbytes(budget, what="budget")
        num_chunks = nbytes // self.options.chunk_nbytes
        if num_chunks < 1:
            raise ValueError(
                f"budget of {format_nbytes(nbytes)} ({nbytes} bytes): less than one of this session's chunks. "
                f"Options: at least {format_nbytes(self.options.chunk_nbytes)}."
            )
        with self.lock:
            if self.memory.allocator.state.is_inside_op:
                raise SessionError("set_budget within an op: what it uses must stay. Options: call it between ops.")
            self._check_not_in_yield("set_budget")
            num_pool, num_small = self.memory.split_budget(num_chunks)
            is_new = num_chunks != self.budget_nbytes // self.options.chunk_nbytes
            if self._yielded is not None:  # there was no memory at the end of `yielded`
                self._refill(num_pool, num_small)
            elif (is_new or num_pool != self.memory.num_chunks) and not self._change_plans(num_pool, num_small):
                self._leave_plan("set_budget", "the budget changes")
                self._resize(num_pool, num_small)
            if not is_new:
                self.budget_nbytes = nbytes
                return
            if self.executor.active is None:
                self.sequences.forget_plans()
                self.cycle.give_up_retired()
            self.steps.note_budget(self.budget_nbytes)
            self.budget_nbytes = nbytes
            self.runner.set_budget(nbytes)
            if self.executor.active is not None:
                self.steps.note_plan(self.manager.num_chunks - self.manager.num_free)

    def _resize(self, num_pool: int, num_small: int) -> None:
        self.sequences.forget_plans()
        self.cycle.give_up_retired()
        resize_pool(self.manager, self.memory, num_pool, num_small)

    def _change_plans(self, num_pool: int, num_small: int) -> bool:
        """Go over to a plan for a smaller pool within the step, where the plan so far recomputes. False: it is left."""
        self.runner.absorb()
        if num_pool >= self.memory.num_chunks or not self.memory.is_host:
            return False
        return change_plans(
            self.executor,
            self.sequences,
            self.manager,
            at=self.runner.dispatcher.cursor,
            num_chunks=num_pool,
            resize=lambda: self._resize(num_pool, num_small),
        )

    @contextlib.contextmanager
    def yielded(self) -> Iterator[None]:
        """See `ooc.Session.yielded`."""
        with self.lock:
            if self.memory.allocator.state.is_inside_op:
                raise SessionError("yielded within an op: what it uses must stay. Options: call it between ops.")
            if self._yielded is not None:
                raise SessionError("yielded: the session's memory is given back already.")
            self._leave_plan("yielded", "all memory is given back")
            num_pool = self.memory.num_chunks
            num_small = self.budget_nbytes // self.options.chunk_nbytes - num_pool
            self._yielded = yield_pool(self.manager, self.memory)
            self._is_in_yield = True
            self.memory.allocator.pause()
            self.runner.forbid_ops(self.memory.forbids)
        try:
            yield
        finally:
            with self.lock:
                self._is_in_yield = False
                if self.is_open:
                    self.runner.absorb()
                    self._refill(num_pool, num_small)

    def _refill(self, num_chunks: int, num_small_chunks: int) -> None:
        """Take memory again after `yield_pool`. If there is none, the session stays without, and says what to do."""
        assert self._yielded is not None
        try:
            refill_pool(self.manager, self.memory, num_chunks, num_small_chunks, self._yielded)
        except MemoryFault as fault:
            if self.memory.num_chunks == 0:
                fault.add_note(
                    "The session has no memory, and all of its variables are in the store.\n"
                    "  Options: free memory, then session.set_budget(...), with this budget or a smaller one."
                )
                raise
            self._have_memory()
            raise
        except BaseException:
            self._have_memory()
            raise
        self._have_memory()

    def _have_memory(self) -> None:
        self._yielded = None
        self.runner.forbid_ops(None)
        self.memory.allocator.resume()

    def _leave_plan(self, act: str, reason: str) -> None:
        """Be on demand, with nothing under way, before `act`."""
        if self.executor.active is not None:
            self.runner.bail_out(reason)
        self.collectives.settle(act)
        self.runner.absorb()

    def check_has_memory(self, act: str) -> None:
        """Raise `SessionError` if all memory is given back."""
        if self._yielded is not None:
            self._check_not_in_yield(act)
            raise SessionError(
                f"{act}: the session could not get its memory back after yielded().\n"
                "  Options: free memory, then session.set_budget(...), with this budget or a smaller one."
            )

    def _check_not_in_yield(self, act: str) -> None:
        if self._is_in_yield:
            raise SessionError(f"{act} within yielded(): the session has no memory there. Options: after the block.")

    # -- what is where; none of these but `live_nbytes` bails out of the plan

    def live_records(self) -> list[VariableRecord]:
        """The records of all variables that are alive now."""
        with self.lock:
            if self.is_open:
                self.runner.absorb()
            return [*self.manager.records.values(), *self.executor.live_records()]

    def record_at(self, address: int) -> VariableRecord | None:
        """The variable at an address, if one is alive there."""
        return self.executor.record_at(address) or self.manager.records.get(address)

    def addresses(self) -> Callable[[torch.Tensor], int]:
        """Return a function that gives the address of a tensor's storage, or 0 if no variable alive now has it.

        Unlike `data_ptr()` it exports nothing. It is valid until something is allocated or freed.
        """
        held = {record.address for record in self.live_records()}

        def address_of(tensor: torch.Tensor) -> int:
            address = self.runner.dispatcher.address(tensor)
            return address if address in held else 0

        return address_of

    def planned_variable(self, address: int) -> tuple[Trace, Plan, int | None] | None:
        """The trace and plan that are being replayed, and the variable of theirs at `address`; None without a plan."""
        active = self.executor.active
        if active is None:
            return None
        found = np.flatnonzero((active.variable_address == address) & (active.variable_alive != 0))
        return active.trace, active.plan, int(found[0]) if len(found) else None

    def resident_nbytes(self) -> int:
        """Bytes of all chunks that hold variables now."""
        present = (r for r in self.live_records() if r.state.holds_chunks)
        return sum(self.manager.chunks_of(r.nbytes) for r in present) * self.options.chunk_nbytes

    def live_nbytes(self) -> int:
        """Bytes of all large storages alive now, resident or away. Bails out of the plan that is being replayed."""
        with self.lock:
            self.runner.absorb()
            if self.executor.active is not None:
                self.runner.bail_out("a look at all variables")
            return sum(record.nbytes for record in self.manager.records.values())

    # -- what was recorded

    def learned(self) -> dict[str, Any]:
        """What is known of op sequences and their plans, for the report."""
        sequences, cache = self.sequences, self.options.cache
        return {
            "num_plans": sequences.num_plans,
            "not_replayable": dict(self.runner.trials.refused),
            "planning_s": sequences.maker.planning_s,
            "learning_s": self.learning.spent_s,
            "unplannable": dict(sequences.unplannable),
            "not_played": dict(self.steps.refusals),
            **({"given_plan_refused": cache.refusal} if isinstance(cache, GivenPlan) else {}),
        }

    def cupy_allocator(self) -> Callable[[int], Any]:
        """See `ooc.Session.cupy_allocator`."""
        return CupyPool(memory=self.memory, lock=self.lock, is_open=lambda: self.is_open).allocate


def open_engine(options: SessionOptions, *, claim: Callable[[Engine], None], closing: Sequence[CodeType] = ()) -> None:
    """Open an engine and pass it to `claim`. After an exception, also of a signal handler, nothing stays open."""
    held = HeldSignals()
    try:
        held.hold()
        engine = Engine(options, held=held, claim=claim, closing=closing)
    except BaseException:
        held.release()
        raise
    try:
        held.release()
    except BaseException:
        engine.close()
        raise
