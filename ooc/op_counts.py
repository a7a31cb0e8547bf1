"""How many ops were planned, and how many ran on demand; and how far the present step is."""

from __future__ import annotations

from typing import NamedTuple

from ooc.dispatch.op_runner import OpRunner
from ooc.telemetry.progress import Position


class NumOps(NamedTuple):
    """So many ops."""

    planned: int
    on_demand: int

    def since(self, earlier: NumOps) -> NumOps:
        """What has come since then."""
        return NumOps(self.planned - earlier.planned, self.on_demand - earlier.on_demand)


class OpCounts:
    """Counts the ops of one session's steps, on its thread."""

    def __init__(self, runner: OpRunner) -> None:
        self._runner = runner
        self._ended = NumOps(0, 0)  # of sequences that have ended

    def __repr__(self) -> str:
        return f"<OpCounts {self.now()}>"

    def now(self) -> NumOps:
        """Of all so far; the present sequence's, too."""
        executor, recorder = self._runner.executor, self._runner.recording.recorder
        planned, on_demand = self._ended
        if executor.active is not None:
            planned, recorder = planned + executor.num_played(), executor.so_far
        if recorder is not None:
            planned += recorder.num_replayed
            on_demand += recorder.num_ops - recorder.num_replayed
        return NumOps(planned, on_demand)

    def end_sequence(self) -> None:
        """The present sequence ends; another one begins."""
        self._ended = self.now()

    def position(self, num_plans: int, last_num_ops: int | None) -> Position:
        """How many ops of the present step have run. Takes no lock: the progress bar asks from its own thread.

        Args:
            num_plans: That there are.
            last_num_ops: Of the sequence that ended last.
        """
        active, recorder = self._runner.executor.active, self._runner.recording.recorder
        if active is not None:
            return Position(mode="planned", num_done=self._runner.dispatcher.cursor, num_ops=active.num_ops)
        num_done = recorder.num_ops if recorder is not None else 0
        return Position(mode="off plan" if num_plans else "learning", num_done=num_done, num_ops=last_num_ops)
