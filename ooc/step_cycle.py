"""The step boundary: records what the last step did, and chooses the plan that the next one replays.

A *period* reaches from the start of one step to the start of the next, so that what the user does between steps is
planned, too. At the boundary the period that ends is recorded or checked against its plan, and the plan of the sequence
that is predicted to come next is entered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ooc.dispatch.op_runner import OpRunner
from ooc.interop.exports import Exports
from ooc.memory.residency import ResidencyManager
from ooc.replay.sequences import Sequences
from ooc.telemetry.progress import Position, Progress
from ooc.telemetry.steps import StepLog
from ooc.telemetry.timeline import Timeline
from scheduler.plan import Machine
from vmm.nvtx_ranges import NamedRange

_log = logging.getLogger(__name__)


class StepCycle:
    """Begins and ends steps and periods, on the session's thread; takes the session's lock where records change.

    Args:
        runner: Runs the ops; its executor replays plans.
        resident_nbytes: Bytes in memory now, for the progress line.
    """

    def __init__(
        self,
        *,
        runner: OpRunner,
        manager: ResidencyManager,
        sequences: Sequences,
        exports: Exports,
        steps: StepLog,
        timeline: Timeline,
        progress: Progress,
        resident_nbytes: Callable[[], int],
        is_open: Callable[[], bool],
    ) -> None:
        self._runner = runner
        self._executor = runner.executor
        self._lock = runner.lock
        self._manager = manager
        self._sequences = sequences
        self._exports = exports
        self._steps = steps
        self._timeline = timeline
        self._progress = progress
        self._resident_nbytes = resident_nbytes
        self._is_open = is_open
        self._thread = threading.get_ident()
        self._range = NamedRange("step")

    def __repr__(self) -> str:
        return f"<StepCycle after {self._steps.num_steps} steps>"

    def close(self) -> None:
        """End the profiler range of the present step. Idempotent."""
        self._range.end()

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._range.begin()
        self._timeline.begin_step(self._executor.active)
        self._steps.begin(planned=self._executor.active is not None)

    def begin_first_step(self) -> None:
        """Begin the first step of a session in which an optimizer's `step` is the step boundary."""
        self._steps.begin(planned=False)
        self._range.begin()

    def end_step(self) -> None:
        """Note that a step ends; from here on the kernel serves stray touches of evicted variables."""
        with self._lock:
            if self._is_open():
                self._exports.step_ends()
            self._note_step()

    def optimizer_stepped(self) -> None:
        """Handle the return of an optimizer's `step`: end the step and its period, and begin the next ones."""
        if not self._is_open() or threading.get_ident() != self._thread:
            return
        self._note_step()
        self.begin_period()
        with self._lock:
            self._exports.step_ends()
        self.begin_step()

    def begin_period(self) -> None:
        """Learn from the period that ends, and enter the plan that is predicted for the next one."""
        with self._lock:
            self._exports.step_begins()
            executor, sequences = self._executor, self._sequences
            if executor.active is not None and not executor.is_complete():
                self._runner.bail_out("the step ended before the plan")
            if executor.active is not None and executor.persistent_is_missing():
                self._runner.bail_out("a variable that lived across steps was freed")
            self._timeline.end_period(executor.active, self._steps.num_steps - 1)
            key = sequences.active_key if executor.active is not None else self._learn()
            self.give_up_retired()
            follower = sequences.next_after(key)
            if executor.active is not None:
                replayed = executor.active
                refined = sequences.refine(replayed, self._manager.store)
                if follower is replayed:
                    follower = refined
                if follower is replayed and executor.rotate():
                    return
                if executor.active is not None:
                    self._runner.bail_out("another plan is expected")
                self.give_up_retired()
            self._runner.start_recording()
            if follower is not None:
                if executor.enter(follower, sequences.others(follower)):
                    self._runner.recording.stop()
                    self._steps.note_plan(follower.num_chunks)
                else:
                    _log.info("cannot play the plan: %s", executor.bailout_reason)
                    self._steps.note_refusal(executor.bailout_reason)

    def give_up_retired(self) -> None:
        """Free what is held for plans that will not be replayed again."""
        while self._sequences.retired:
            self._executor.retire(self._sequences.retired.pop())

    def position(self) -> Position:
        """How many ops of the present step have run. Takes no lock: the progress bar asks from its own thread."""
        active, recorder = self._executor.active, self._runner.recording.recorder
        if active is not None:
            return Position(mode="planned", num_done=self._runner.dispatcher.cursor, num_ops=active.num_ops)
        num_done = len(recorder.ops) if recorder is not None else 0
        mode = "off plan" if self._sequences.num_plans else "learning"
        return Position(mode=mode, num_done=num_done, num_ops=self._sequences.last_num_ops)

    def _learn(self) -> str | None:
        """The key of the sequence recorded in the period that ends; None if its recording is incomplete."""
        recorder = self._runner.recording.recorder
        assert recorder is not None
        self._runner.absorb()
        if recorder.is_cut:
            return None
        observed = recorder.build(self._manager.records)
        self._steps.note_trace(observed.trace)
        return self._sequences.learn(observed, self._machine())

    def _machine(self) -> Machine:
        """The machine that plans are made for: its pool is the session's, less the workspaces of libraries."""
        manager = self._manager
        num_kept = sum(manager.chunks_of(record.nbytes) for record in manager.workspaces())
        num_chunks = max(manager.pool.num_chunks - num_kept, 1)
        return self._steps.machine(num_chunks, manager.chunk_nbytes, manager.store)

    def _note_step(self) -> None:
        self._range.end()
        before = self._steps.num_steps
        self._steps.end(on_plan=self._executor.active is not None, learned=self._sequences.num_plans > 0)
        if self._progress.is_on and self._steps.num_steps > before:
            self._progress.note_step(self._steps.num_steps, self._steps.rows[-1], self._resident_nbytes())
