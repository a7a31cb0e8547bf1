"""`StepNotes`: what is told of each step, to the report, the progress line and the profiler."""

from __future__ import annotations

from collections.abc import Callable

from ooc.dispatch.op_runner import OpRunner
from ooc.op_counts import NumOps, OpCounts
from ooc.replay.sequences import Sequences
from ooc.telemetry.progress import Progress
from ooc.telemetry.steps import StepLog
from ooc.telemetry.why import UnplannedSteps
from vmm.nvtx_ranges import NamedRange


class StepNotes:
    """Notes each step of one session as it begins and ends, on its thread.

    Args:
        runner: Runs the ops.
        sequences: What has a plan.
        counts: Of ops.
        steps, progress: Where steps are noted.
        why: Why steps were not planned.
        resident_nbytes: Bytes in memory now, for the progress line.
    """

    def __init__(
        self,
        *,
        runner: OpRunner,
        sequences: Sequences,
        counts: OpCounts,
        steps: StepLog,
        progress: Progress,
        why: UnplannedSteps,
        resident_nbytes: Callable[[], int],
    ) -> None:
        self._runner = runner
        self._executor = runner.executor
        self._sequences = sequences
        self._counts = counts
        self._steps = steps
        self._progress = progress
        self._why = why
        self._resident_nbytes = resident_nbytes
        self._range = NamedRange("step")
        self._at_begin = NumOps(0, 0)

    def __repr__(self) -> str:
        return f"<StepNotes of {self._steps!r}>"

    def close(self) -> None:
        """End the profiler range of the present step. Idempotent."""
        self._range.end()

    def begin(self) -> None:
        """A step begins."""
        self._range.begin()
        self._at_begin = self._counts.now()
        self._steps.begin(planned=self._executor.active is not None)

    def end(self, *, in_segments: bool) -> None:
        """The step ends; `in_segments`: its period is planned by its segments."""
        self._range.end()
        before, is_planned = self._steps.num_steps, self._executor.active is not None
        recorder = self._runner.recording.recorder
        reason = self._why.explain(
            recorder if not is_planned else None,
            was_planned=self._steps.began_planned,
            bailout=self._executor.bailout_reason,
            in_segments=in_segments,
        )
        planned, on_demand = self._counts.now().since(self._at_begin)
        if recorder is not None and recorder.is_cut:  # it began anew in this step
            planned, on_demand = max(planned, 0), max(on_demand, 1)
        if is_planned and on_demand and not reason.cause:
            reason = self._why.in_part(planned, on_demand)
        self._executor.reruns.count_times()
        self._steps.end(
            num_planned_ops=planned,
            num_demand_ops=on_demand,
            policy=self._executor.active.plan.policy if self._executor.active is not None else "",
            learned=self._sequences.num_plans > 0,
            reason=reason,
        )
        if self._progress.is_on and self._steps.num_steps > before:
            self._progress.note_step(self._steps.num_steps, self._steps.rows[-1], self._resident_nbytes())
