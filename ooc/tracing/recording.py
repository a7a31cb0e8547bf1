"""The recording of the present step, shared by those who note ops and those who leave plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from typing import Protocol

from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.memory.step_uses import Operands
from ooc.tracing.call_sites import CallSites, Place
from ooc.tracing.op_log import OpLog
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recorder import StepRecorder

MOST_HEAD_OPS = 512
"""So many ops at the head of a plan may touch no variable: those of a loader that makes a batch, sample by sample."""


class Head(IntEnum):
    """Which ops on demand Python sees because something that has a plan may begin with them; native/demand.h."""

    NONE = 0
    TOUCHING = 1  # a variable, or in another grad mode than those before, which ran with gradients
    TOUCHING_WITHOUT_GRADIENTS = 2


class NativeLogging(Protocol):
    """Runs and logs ops on demand without Python: the native dispatcher."""

    def new_log(self) -> OpLog:
        """An empty log."""

    def demand(self, log: OpLog | None) -> None:
        """Log ops there from now on; None: leave each to Python."""

    def at_head(self, head: int, /) -> None:
        """Leave these ops to Python all the same: it has yet to see what begins."""

    def compare(self, whether: bool, /) -> None:
        """As `StepRecorder.is_compared`, of the log."""


class StepRecording:
    """The recording of the present step: its ops so far while it runs on demand, nothing while a plan is replayed.

    Attributes:
        recorder: The ops so far; None while a plan is replayed.
        call_sites: Where in the program ops come from.
        was_cut: Whether a recording has begun in mid-step, of a step of too many ops.
    """

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = StepRecorder({})
        self.was_cut = False
        self._is_compared = True
        self._flight_nbytes = 0
        self._native: NativeLogging | None = None
        self.call_sites = CallSites()

    def __repr__(self) -> str:
        return f"<StepRecording {self.recorder!r}>"

    def note_limit(self, flight_nbytes: int) -> None:
        """So many bytes of operands of collectives under way are kept in use in traces (`StepRecorder`)."""
        self._flight_nbytes = flight_nbytes
        if self.recorder is not None:
            self.recorder.flight_nbytes = flight_nbytes

    def begin(self, start_records: Mapping[int, VariableRecord], *, is_cut: bool = False) -> None:
        """A step begins on demand, with these variables."""
        self.was_cut = self.was_cut or is_cut
        self.resume(StepRecorder(start_records, is_cut=is_cut))

    def resume(self, recorder: StepRecorder) -> None:
        """A step goes on on demand, after what `recorder` has."""
        self.recorder = recorder
        recorder.flight_nbytes = self._flight_nbytes
        recorder.is_compared = recorder.is_compared and self._is_compared
        self.call_sites.clear()
        if self._native is not None:
            recorder.log = self._native.new_log()
            self._native.demand(recorder.log)
            self._watch_head(recorder)

    def compare(self, whether: bool) -> None:
        """Whether what is recorded from now on is compared with other recordings (`StepRecorder.is_compared`)."""
        self._is_compared = whether
        if self.recorder is not None:
            self.recorder.is_compared = whether and (self.recorder.is_compared or self.recorder.num_ops == 0)
        if self._native is not None:
            self._native.compare(whether)

    def place_of_this_op(self) -> Place:
        """The call site and the node of the op that is being dispatched, as far as anybody is to know."""
        return self.call_sites.place_of_this_op() if self._is_compared else Place(where="", node=0)

    def most_called(self) -> str:
        """Which op most of the step's so far are, for people."""
        funcs = self.recorder.funcs() if self.recorder is not None else []
        name, number = next(iter(Counter(map(str, funcs)).most_common(1)), ("none", 0))
        return f"{number} of them {name}"

    def note_head(self, op: OpRecord, *, grad_mode: bool) -> None:
        """Note an op that has run before any touched a variable, or the first that did: it tells what has begun."""
        recorder = self.recorder
        assert recorder is not None
        recorder.grad_mode = grad_mode
        recorder.is_begun = bool(op.occurrences or op.results)
        self._watch_head(recorder)

    def _watch_head(self, recorder: StepRecorder) -> None:
        if self._native is None:
            return
        head = Head.NONE
        if not recorder.is_begun:
            head = Head.TOUCHING if recorder.grad_mode else Head.TOUCHING_WITHOUT_GRADIENTS
        self._native.at_head(head)

    def log_natively(self, dispatcher: NativeLogging) -> None:
        """From now on ops that need nothing from Python are logged without it."""
        self._native = dispatcher
        dispatcher.compare(self._is_compared)

    def see_every_op(self) -> None:
        """From now on Python sees every op on demand."""
        if self._native is not None:
            self._native.demand(None)
            self._native = None

    def stop(self) -> None:
        """A plan is replayed from now on."""
        if self._native is not None:
            self._native.demand(None)
        self.recorder = None


class OpsSoFar:
    """The ops of the present step as `ooc.memory.foresight` asks for them."""

    def __init__(self, recording: StepRecording, manager: ResidencyManager) -> None:
        self._recording = recording
        self._manager = manager

    def __repr__(self) -> str:
        return f"<OpsSoFar of {self._recording!r}>"

    def ops_since(self, start: int) -> Operands:
        """Ops from one on."""
        recorder = self._recording.recorder
        return recorder.operands_since(start) if recorder is not None else Operands([], [])

    def variable_at(self, address: int) -> tuple[int, int] | None:
        """The serial and the bytes of the variable at this address, if one is there now."""
        record = self._manager.records.get(address)
        return (record.serial, record.nbytes) if record is not None else None

    def next_serial(self) -> int:
        """More than any serial so far."""
        return self._manager.num_serials
