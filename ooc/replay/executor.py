"""Executor: replays a plan, op by op and step by step, and bails out when a step differs from it.

The executor decides nothing. It checks what the plan took for granted (what should be dead was freed; what is dropped
is clean), and where something is not as planned it returns all records to the residency manager: the step goes on on
demand. During replay the records bound to plan variables are the executor's; the manager has only the others, in chunks
that the plan does not use. Ordering rules (DESIGN.md section 10):

* a load starts after its own variable's write, and after the writes of the residencies that held its chunks before;
* an allocation waits for the writes of the residencies that held its chunks before;
* what should have died before its chunks are reused is checked to be dead;
* at a step's start every reservation has its step-start chunks again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ooc.errors import StoreFailed
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.acts import ResidencyActs
from ooc.replay.bailout import land_transfers, pinned_by, recorder_so_far, return_records
from ooc.replay.bindings import Bindings, Bound
from ooc.replay.border_relocation import BorderRelocation
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.late_entry import LateEntry
from ooc.replay.op_watch import OpWatch, named_calls
from ooc.replay.ops_beside import OpsBeside
from ooc.replay.plan_switch import Handover, PlanChange, held_for
from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.replay.planned_trials import TrialsInPlans
from ooc.replay.realignment import Realignment
from ooc.replay.rerun_device import RerunDevice
from ooc.replay.reruns import Reruns
from ooc.replay.start_places import start_places
from ooc.replay.unserved import Unserved
from ooc.tracing.recorder import StepRecorder
from ooc.tracing.recording import StepRecording
from vmm.chunks import ChunkPool
from vmm.nvtx_ranges import names_ops
from vmm.torch_cpu import MODE_DEMAND, MODE_PLANNED, AllocatorTable, EventLog

_log = logging.getLogger(__name__)

_RERUNS_READ_IT = "memory was given out (.numpy() or the like) from which ops are to run again"


class Executor:
    """Replays one plan at a time, over the session's residency manager, allocator and dispatcher.

    Attributes:
        run_in_parts: Runs an op of the active plan in parts, called with the plan and the op's index before its
            arguments; to be set by whoever can.
        beside: Ops that run beside the plan.
    """

    def __init__(
        self,
        *,
        manager: ResidencyManager,
        allocator: AllocatorTable,
        dispatcher: Dispatcher,
        recording: StepRecording,
        new_pool: Callable[[], ChunkPool],
        rerun_device: RerunDevice,
        new_trials: Callable[[Callable[[str], None]], TrialsInPlans],
        watch: OpWatch | None = None,
    ) -> None:
        self._manager = manager
        self._allocator = allocator
        self._dispatcher = dispatcher
        self._recording = recording
        self._new_pool = new_pool
        self._watch = watch
        self._space = manager.space
        self._bindings = Bindings(manager, allocator)
        self.active: ExecutablePlan | None = None
        self.run_in_parts: Callable[..., Any] = _not_in_parts
        self.bailout_reason = ""
        self.so_far: StepRecorder | None = None
        """Of the present period, what came before the plan was entered in its middle."""
        self.events = EventLog()  # of the present period
        self._next_death = 0  # in `ExecutablePlan.deaths`
        self.mid_op_pins: list[VariableRecord] = []  # unpinned by `finish`
        self._thread = threading.get_ident()
        self._start_successors: list[tuple[PlanVariable, VariableRecord]] = []
        self._start_foreign: dict[int, VariableRecord] = {}
        self.acts = ResidencyActs(manager, dispatcher, bail_out=self.bail_out)
        self._border = BorderRelocation(manager, self.acts, self.check_deaths, bail_out=self.bail_out)
        self._trials = new_trials(self.bail_out)
        if watch is not None:
            watch.attach(dispatcher)
        self.beside = OpsBeside()
        self.unserved = Unserved(self, manager, allocator, dispatcher, self._bindings, self.acts)
        self.realignment = Realignment(self, manager, allocator, dispatcher, self._bindings, self.acts)
        self.reruns = Reruns(
            manager, allocator, dispatcher, self.acts, rerun_device, self._trials, bail_out=self.bail_out
        )

    def __repr__(self) -> str:
        return f"<Executor of {self.active!r}>"

    # -- between steps

    def enter(
        self,
        executable: ExecutablePlan,
        others: Sequence[ExecutablePlan] = (),
        *,
        is_begun: bool = False,
        so_far: StepRecorder | None = None,
    ) -> bool:
        """Make a plan active: bring all variables to where its step starts. Called at a step boundary, on demand.

        Args:
            executable: The plan.
            others: Inactive plans; their mappings are given up if the kernel's limit on mappings stands in the way.
            is_begun: The first op that touches a variable is about to run.
            so_far: The step's ops so far, where it goes on with this plan in its middle (`ooc.replay.late_entry`).

        Returns:
            False if the plan cannot start from here (`bailout_reason` says why); the step goes on on demand.

        Raises:
            StoreFailed: A transfer failed; the step goes on on demand.
        """
        late = LateEntry(executable, so_far) if so_far is not None else None
        try:
            return self._enter(executable, others, is_begun, late)
        finally:
            if late is not None and self.active is not executable:
                late.undo(self._manager)

    def _enter(
        self, executable: ExecutablePlan, others: Sequence[ExecutablePlan], is_begun: bool, late: LateEntry | None
    ) -> bool:
        manager = self._manager
        if not manager.flights.settle_soon():
            self.bailout_reason = f"not over: {', '.join(manager.flights.names())}"
            return False
        manager.land()
        bound = late.bind(self._bindings, manager) if late else self._bindings.bind(executable, is_begun=is_begun)
        if bound is None:
            self.bailout_reason = self._bindings.refusal
            return False
        manager.end_exports()
        if self.reruns.read_given_out(executable, bound):
            self.bailout_reason = _RERUNS_READ_IT
            return False
        targets = late.targets(bound) if late else start_places(executable, bound, manager)
        if not self._bindings.may_make_way(executable, bound, targets):
            self.bailout_reason = self._bindings.refusal
            return False
        failure = self._bindings.place(executable, others, bound, targets, self._new_pool, self.acts.loads)
        if self._bindings.refusal:
            self.bailout_reason = self._bindings.refusal
            return False
        self._install(executable)
        self._bindings.unbind_freed(executable, bound)
        self._start_period(executable, late.so_far if late is not None else None)
        if failure is not None:
            self.bail_out("a load could not be started")
            raise failure
        self._arrive(bound)
        if late is not None:
            late.begin(bound)
        if self.acts.guards_releases:
            self._bindings.guard_away(executable)  # as at the end of the step, which is over
        return True

    def _arrive(self, bound: Bound) -> None:
        for _, record in bound:
            if record.state is State.LOADING:
                self.acts.arrive(record)

    def retire(self, executable: ExecutablePlan) -> None:
        """Give back what a plan that will not be replayed again keeps for the variables born in it."""
        assert executable is not self.active
        self._bindings.give_up(executable)

    def _install(self, executable: ExecutablePlan) -> None:
        if self._watch is not None:
            executable.calls = self._watch.calls_of(executable)
        executable.calls = self.reruns.calls_of(executable, executable.calls)
        if names_ops():
            executable.calls = named_calls(executable.funcs, executable.calls)
        calls = self._trials.calls_of(executable)
        for op in executable.parts.ops():
            calls[op] = functools.partial(self.run_in_parts, executable, op)
        self._dispatcher.install(*executable.install_arguments(calls))
        self._allocator.state.plan = executable.tables_address
        self._allocator.state.mode = MODE_PLANNED
        self.active = executable

    def _start_period(self, executable: ExecutablePlan, so_far: StepRecorder | None = None) -> None:
        self.so_far = so_far
        self.events = EventLog(so_far.events if so_far is not None else ())
        self.reruns.begin()
        self.beside.begin()
        executable.between.begin()
        self.bailout_reason = ""
        self._next_death = 0
        executable.omitted.clear()
        executable.doubts.clear()
        executable.readdressed.clear()
        self._start_successors = [
            (variable, variable.record)
            for variable in executable.successors
            if variable.record is not None and executable.variable_alive[variable.index]
        ]
        self._start_foreign = dict(self._manager.records)
        if so_far is None:
            self._allocator.state.restart()
        at = so_far.num_ops if so_far is not None else 0
        self._allocator.state.set_between(at)
        self._dispatcher.start(at)

    def num_played(self) -> int:
        """Ops of the present period that the plan has replayed so far."""
        num_before = self.so_far.num_ops if self.so_far is not None else 0
        return self._dispatcher.cursor - num_before - len(self.active.omitted) if self.active is not None else 0

    def is_complete(self) -> bool:
        """Whether every op of the plan has been replayed in this period."""
        return self.active is not None and self._dispatcher.cursor == self.active.num_ops

    def rotate(self) -> bool:
        """Pass from a complete step to the next one of the same plan: rebind the variables.

        Returns:
            False if it had to bail out instead (`bailout_reason`).
        """
        executable = self.active
        assert executable is not None
        if not self._manager.flights.settle_soon():
            self.bail_out(f"not over at the step's end: {', '.join(self._manager.flights.names())}")
            return False
        for residency in executable.last_releases:
            self.acts.write_late(executable, residency)  # if allocated after the last op: no op's end was there
            if self.active is None or not self.acts.release(executable, residency):
                return False
        self.absorb_events()
        if not self._bindings.can_pass_on(executable):
            self.bail_out("a variable that must stay where it is outlived its role in the plan")
            return False
        if self.reruns.read_given_out(executable):
            self.bail_out(_RERUNS_READ_IT)
            return False
        if not self._border.cross(executable):
            return False
        try:
            self._bindings.pass_on(executable)
        except BaseException:  # a write has failed: what comes next is to find a plan that is whole, or none
            with contextlib.suppress(StoreFailed):
                self.bail_out("passing on to the next step has failed", is_over=True)
            raise
        self.acts.prune()
        if self._trials.installed is not executable.trials:
            self._install(executable)
        self._start_period(executable)
        return True

    # -- around an op; called by the dispatcher

    def before(self, index: int, bear: Callable[[Sequence[ExecutableResidency]], bool] | None = None) -> bool:
        """Do the releases, loads, arrivals and births of op `index`. False: the step has bailed out.

        With `bear`, which is called for its births, the op is left out.
        """
        executable = self.active
        if executable is None:  # another thread has just left the plan
            return False
        acts = executable.before[index]
        assert acts is not None
        if self._manager.flights:
            self._manager.flights.poll()
        alive = executable.variable_alive
        if not self.check_deaths(executable, executable.trace.ops[index].start_tick):
            return False
        for residency in acts.releases:
            if residency.is_written_before:
                self.acts.write_late(executable, residency)
            if self.active is None or not self.acts.release(executable, residency):
                return False
        for residency in acts.loads:
            if alive[residency.variable.index]:
                self._manager.counters.num_crowded += 1
                self.acts.start_load(residency)
                if self.active is None:
                    return False
                continue
            self.acts.await_all(residency.waits)  # the next residency of these chunks looks no further back
        started = 0
        for residency in acts.arrivals:
            record = residency.variable.record
            if record is None or not alive[residency.variable.index]:
                continue
            if record.state is State.LOADING:
                started = started or time.monotonic_ns()
                self.acts.arrive(record)
            elif record.state is State.AWAY and record.stored:
                started = started or time.monotonic_ns()
                self.acts.load_late(residency, record)
            elif record.state is not State.RESIDENT:
                self.bail_out("a variable was not where the plan expects it")
                return False
        if acts.rerun is not None:
            started = self.acts.end_wait(executable, index, started)
            if not self.reruns.play(executable, acts.rerun):
                return False
        if bear is not None:
            self.acts.end_wait(executable, index, started)
            return bear(acts.births)
        for residency in acts.births:
            if residency.variable.is_taken(executable.variable_alive):
                self.bail_out("a variable was freed later than planned, and its addresses are to be used again")
                return False
            for other in residency.waits:
                if other.transfer is not None:
                    if not other.transfer.done():
                        started = started or time.monotonic_ns()
                    self.acts.await_transfer(other)  # ended, too: after a failed write nothing may be put there
            self.acts.prepare_birth(residency)
        self.acts.end_wait(executable, index, started)
        return True

    def check_deaths(self, executable: ExecutablePlan, tick: int) -> bool:
        """Evict what should have been freed by `tick` and was not. False: it must stay, and the step has bailed out."""
        deaths, alive = executable.deaths, executable.variable_alive
        while self._next_death < len(deaths) and deaths[self._next_death][0] <= tick:
            variable = executable.variables[deaths[self._next_death][1]]
            self._next_death += 1
            if not alive[variable.index]:
                continue
            record = variable.record
            assert record is not None
            shared = variable.predecessor is not None and variable.predecessor.record is record
            gone = record.state is State.DISCARDED
            may_leave = self._manager.may_leave(record) and (variable.evictable or record.seen)
            if shared or gone or not may_leave:
                self.bail_out("a variable was freed later than planned")
                return False
            if not self.acts.may_move(record):
                return False
            self._bindings.expel(executable, variable)
        return True

    def is_anyone_late(self, executable: ExecutablePlan, tick: int) -> bool:
        """Whether something that should have been freed by `tick` was not."""
        deaths = executable.deaths[self._next_death :]
        return any(executable.variable_alive[index] for death, index in deaths if death <= tick)

    def after(self, index: int) -> None:
        """Do the writes and drops after op `index`."""
        executable = self.active
        if executable is None:  # another thread has just left the plan, and noted what the op wrote
            return
        acts = executable.after[index]
        assert acts is not None
        for variable in acts.dirties:
            if variable.record is not None:
                variable.record.written()
        if self.reruns.broken:
            self.bail_out(self.reruns.broken[-1])
            return
        for residency in acts.writes:
            record = self.acts.movable(executable, residency)
            if record is not None:
                self.acts.start_write(executable, residency, record)
            elif self.active is None:
                return
        for residency in acts.drops:
            record = self.acts.movable(executable, residency)
            if record is not None:
                self.acts.start_write(executable, residency, record)  # in a plan's first step the store has no copy yet
                self.acts.release(executable, residency)
            if self.active is None:
                return
        for residency in acts.discards:
            if not self.reruns.discard(executable, residency):
                return

    def acts_after(self, index: int) -> bool:
        """Whether there is anything to do after op `index` of the plan."""
        return self.active is not None and self.active.after[index] is not None

    def fail(self, index: int) -> None:
        """Note that op `index` raised, perhaps after it had written some of its operands."""
        assert self.active is not None
        for use in self.active.trace.ops[index].uses:
            record = self.active.variables[use.variable].record
            if use.writes and record is not None:
                record.written()

    def mid_op_records(self) -> list[VariableRecord]:
        """Operands, and what was allocated so far, of the op in which the step bailed out."""
        return list(self.mid_op_pins)

    def finish(self) -> None:
        """Unpin the operands of the op in which the step bailed out: it has ended."""
        for record in self.mid_op_pins:
            record.unpin()
        self.mid_op_pins.clear()
        self.reruns.remake()

    def absorb_events(self) -> None:
        """Append the allocator's log to this period's, and free those of its variables that the manager has."""
        for address in self._allocator.drain_to(self.events):
            # Alive again: two variables of a plan may share a reservation, and the second one be the manager's by now.
            if address in self._manager.records and not self._allocator.is_alive(address):
                self._manager.free(address)

    # -- bailout

    def go_over(self, change: PlanChange) -> bool:
        """Go on with another plan of the same step, right before the next op. False: the step goes on on demand.

        So it does when it raises: what bailing out, resizing and remakes raise.
        """
        old, new, noted = self.active, change.new, self.reruns.noted()
        assert old is not None
        if noted is None or not held_for(new, change.way.op_index, lambda v: bool(old.variable_alive[v]), noted):
            return False
        over = Handover(old, change, noted)
        self.bail_out("the budget shrinks", remakes=False)
        recorder, bound = self._recording.recorder, None
        assert recorder is not None
        parts = self._manager, self._bindings, self.reruns
        try:
            bound = over.carry_out(*parts, self.acts.loads, self._new_pool, self.absorb_events)
        finally:
            self.absorb_events()
            recorder.events += self.events.take()
            self.reruns.pending = None
            if bound is None:
                self.reruns.pending = over.remake_of(over.lost(self._manager))
                self.reruns.remake()
        if bound is None:
            return False
        self._install(new)
        self._bindings.unbind_freed(new, bound)
        self.events, self.bailout_reason = EventLog(recorder.events), ""
        self._recording.stop()
        self.reruns.take_over(noted)
        self._allocator.state.set_between(over.at)
        self._dispatcher.start(over.at)
        self._arrive(bound)
        return True

    def bail_out(self, reason: str, *, remakes: bool = True, is_over: bool = False) -> None:
        """Deactivate the plan; the step goes on on demand. The recording goes on after the ops replayed so far.

        Safe at any point: between ops, or inside one (from an allocation), where that op's
        operands and allocations stay pinned until `finish`. Without `remakes` the caller makes again what is discarded.
        With `is_over` the plan was replayed whole, and the caller begins another recording at once.

        Raises:
            StoreFailed: A load had failed. All records are returned nevertheless.
        """
        executable = self.active
        assert executable is not None
        self.bailout_reason = reason
        self._dispatcher.leave()
        self._allocator.state.mode = MODE_DEMAND
        self._allocator.state.plan = None
        self.active = None
        cursor = self._allocator.state.op_index
        # Another thread cannot tell whether the session's is just about to run the op: as if it were.
        is_foreign = threading.get_ident() != self._thread
        inside = self._allocator.state.is_inside_op or (is_foreign and cursor < executable.num_ops)
        if is_foreign and cursor > 0:  # nor whether `after` is about to come
            for record in executable.dirtied_by(cursor - 1):
                record.written()
        self._manager.flights.settle_soon()  # what is not over stays pinned: on demand that is enough
        failure = land_transfers(self._manager, executable, writes=self.acts.writes, loads=self.acts.loads)
        self.acts.writes.clear()
        self.acts.loads.clear()
        self.absorb_events()
        start = {**self._start_foreign, **{record.address: record for _, record in self._start_successors}}
        num_ops = cursor if not is_over else 0  # of the plan; those left out are none of the recording's
        if is_over or not self.beside.is_running or cursor > executable.num_idle:
            self.beside.begin()  # what has begun is the plan's
        earlier, events = self.so_far if not is_over else None, self.events.take()
        recorder = recorder_so_far(executable, num_ops, start, events=events, beside=self.beside, earlier=earlier)
        pinned = pinned_by(executable, cursor) if inside else set()
        self.reruns.leave(executable, cursor + 1 if inside else cursor)
        self.mid_op_pins += return_records(self._manager, self._allocator, executable, pinned)
        if inside:
            self._pin(self._dispatcher.met())
        for variable in executable.variables:
            if not variable.is_born:
                self._bindings.bury(executable, variable)
        self._manager.retake_pool(self._new_pool())
        _log.info("left the plan at op %d: %s", cursor, reason)
        if executable.omitted or recorder.num_ops != cursor or self.beside.is_running:
            state = self._allocator.state  # the recording has fewer ops than the plan, or more
            (state.set_inside if inside or self.beside.is_running else state.set_between)(recorder.num_ops)
        self._recording.resume(recorder)  # also when a transfer had failed: the step goes on on demand
        if failure is not None:
            raise failure
        if remakes and not inside and not is_foreign:
            self.reruns.remake()  # else when the op has ended: `finish`
            self._manager.foresight.begin(self._manager.num_serials, time.monotonic_ns(), knows_births=False)

    def _pin(self, strangers: Sequence[VariableRecord]) -> None:
        """Until `finish`, what the op that runs uses beside the plan."""
        for record in strangers:
            if self._manager.manages(record):
                record.pin()
                self.mid_op_pins.append(record)

    # -- the step's end, and what is alive

    def guard_away(self) -> None:
        """Guard what is away at the step's end, or goes away until `step_begins`: stray touches of it are served."""
        self.acts.guard_releases(True)
        executable = self.active
        if executable is None:
            return
        if self.reruns.any_discarded(executable):
            self.bail_out("the step ended while a variable was discarded")
            return
        self._bindings.guard_away(executable)

    def step_begins(self) -> None:
        """From now on nothing but ops touches variables."""
        self.acts.guard_releases(False)

    def unserve(self) -> None:
        """At the start of a step in debug mode: what was served between steps shows nothing again."""
        self._bindings.unserve(self.active)

    def live_records(self) -> list[VariableRecord]:
        """Records that are bound to a live plan variable now."""
        return self.active.live_records() if self.active is not None else []

    def record_at(self, address: int) -> VariableRecord | None:
        """The record at this address, if it is bound to a live plan variable."""
        return self.active.record_at(address) if self.active is not None else None


def _not_in_parts(executable: ExecutablePlan, index: int, /, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"op {index} of {executable!r} runs in parts, and nobody said how")
