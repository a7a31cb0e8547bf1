"""`FailedOps`: what is left to do after an op on demand that raised, or was refused memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ooc.dispatch.refusals import Call, RefusedAllocations
from ooc.dispatch.signals import CriticalLock
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.rerun_trials import RerunTrial
from ooc.tracing import op_semantics as ops
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recording import StepRecording


class FailedOps:
    """Notes ops that failed, and has those run in parts whose memory was refused.

    Args:
        manager, dispatcher, recording, refusals, lock: The session's.
        set_between: Told how many ops were recorded, when one has ended.
        absorb: Takes the allocator's log.
        resolve: Runs a call in parts, whose error this is, or raises that.
    """

    def __init__(
        self,
        *,
        manager: ResidencyManager,
        dispatcher: Dispatcher,
        recording: StepRecording,
        refusals: RefusedAllocations,
        lock: CriticalLock,
        set_between: Callable[[int], None],
        absorb: Callable[[], None],
        resolve: Callable[[BaseException, Call], Any],
    ) -> None:
        self._manager = manager
        self._dispatcher = dispatcher
        self._recording = recording
        self._refusals = refusals
        self._lock = lock
        self._set_between = set_between
        self._absorb = absorb
        self._resolve = resolve

    def __repr__(self) -> str:
        return f"<FailedOps of {self._recording!r}>"

    def note(self, func: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """Record an op that failed, with its operands: where a program catches such an error, they may come again."""
        recorder = self._recording.recorder
        if recorder is None:
            return
        occurrences = self._dispatcher.occurrences(args, kwargs or {})
        written = self._dispatcher.operands(*ops.written_values(func, args, kwargs or {})) if occurrences else ()
        recorder.append(OpRecord(func=func, where="", occurrences=occurrences, written=written))
        self._set_between(recorder.num_ops)

    def end(
        self,
        call: Call,
        records: list[VariableRecord],
        written: Sequence[VariableRecord],
        *,
        trial: RerunTrial | bool = False,
    ) -> BaseException | None:
        """End an op whose operands `records` are pinned, and which may have written some.

        Returns:
            What explains it, if it was refused memory.
        """
        func, args, kwargs = call
        with self._lock:
            if isinstance(trial, RerunTrial):
                trial.close()
            error: BaseException | None = self._refusals.error(call, records, in_parts=True)  # before the log is taken
            for record in records:
                record.unpin()
            for record in written:
                record.written()
            self.note(func, args, kwargs)
            self._absorb()
        return error

    def on_demand(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        records: list[VariableRecord],
        written: list[int],
        has_raised: bool,
    ) -> tuple[Any] | None:
        """Handle an op that native code ran, and that raised, or was refused memory and went on without.

        It has pinned `records`, and writes what is at `written`. Its result in a tuple, if it was run in parts instead.
        """
        call = (func, args, kwargs or {})
        changed = self._manager.records_at(written) if has_raised else records
        error = self.end(call, records, changed)
        return None if error is None else (self._resolve(error, call),)

    def given_up(self, call: Call, records: list[VariableRecord], trial: RerunTrial | bool, result: Any) -> Any:
        """Handle an op that was refused memory and ended well all the same: by another algorithm, with other bits."""
        error = self.end(call, records, records, trial=trial)
        return result if error is None else self._resolve(error, call)
