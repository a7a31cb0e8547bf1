"""The cycle of steps: what happens where one step ends and the next begins.

One *period* reaches from one step's start to the next one's, so what the user does between steps is part of the
cycle. At the boundary the period that ends is learned from, and the next one gets the plan of what is expected.
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
    """Begins and ends steps and periods. One thread, the session's; takes the session's lock where books change.

    Args:
        runner: Runs the ops; its executor replays plans.
        num_resident_nbytes: Bytes in memory now, for the progress line.
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
        """End the range of the step under way. Idempotent."""
        self._range.end()

    def begin_step(self) -> None:
        """A step begins."""
        self._range.begin()
        self._timeline.begin_step(self._executor.active)
        self._steps.begin(planned=self._executor.active is not None)

    def begin_first_step(self) -> None:
        """The first step of a session whose steps end when an optimizer has stepped."""
        self._steps.begin(planned=False)
        self._range.begin()

    def end_step(self) -> None:
        """A step ends; from now on stray touches of what is away are served."""
        with self._lock:
            if self._is_open():
                self._exports.step_ends()
            self._note_step()

    def optimizer_stepped(self) -> None:
        """An optimizer's `step` has returned: a step ends, a period too, and the next step begins."""
        if not self._is_open() or threading.get_ident() != self._thread:
            return
        self._note_step()
        self.begin_period()
        with self._lock:
            self._exports.step_ends()
        self.begin_step()

    def begin_period(self) -> None:
        """The present period ends and the next begins: learn from the one, choose a plan for the other."""
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
                played = executor.active
                refined = sequences.refine(played, self._manager.store)
                if follower is played:
                    follower = refined
                if follower is played and executor.rotate():
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
        """Give back what plans keep that will not be played again."""
        while self._sequences.retired:
            self._executor.retire(self._sequences.retired.pop())

    def position(self) -> Position:
        """How far the present step is. For the progress bar, on its thread: takes no lock."""
        active, recorder = self._executor.active, self._runner.recording.recorder
        if active is not None:
            return Position(mode="planned", num_done=self._runner.dispatcher.cursor, num_ops=active.num_ops)
        num_done = len(recorder.ops) if recorder is not None else 0
        mode = "off plan" if self._sequences.num_plans else "learning"
        return Position(mode=mode, num_done=num_done, num_ops=self._sequences.last_num_ops)

    def _learn(self) -> str | None:
        """The key of the sequence that ran on demand in the period that ends; None if nothing can be learned of it."""
        recorder = self._runner.recording.recorder
        assert recorder is not None
        self._runner.absorb()
        if recorder.is_cut:
            return None
        observed = recorder.build(self._manager.records)
        self._steps.note_trace(observed.trace)
        return self._sequences.learn(observed, self._machine())

    def _machine(self) -> Machine:
        """What plans are made for: the pool without what libraries' workspaces hold."""
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
