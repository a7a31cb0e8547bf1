"""The recording of the present step, shared by those who note ops and those who leave plans."""

from __future__ import annotations

from collections.abc import Mapping

from ooc.memory.record import VariableRecord
from ooc.tracing.call_sites import CallSites
from ooc.tracing.recorder import StepRecorder


class StepRecording:
    """The recording of the present step: its ops so far while it runs on demand, nothing while a plan is replayed.

    Attributes:
        recorder: The ops so far; None while a plan is replayed.
        call_sites: Where in the program ops come from.
    """

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = StepRecorder({})
        self._flight_nbytes = 0
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
        self.resume(StepRecorder(start_records, is_cut=is_cut))

    def resume(self, recorder: StepRecorder) -> None:
        """A step goes on on demand, after what `recorder` has."""
        self.recorder = recorder
        recorder.flight_nbytes = self._flight_nbytes
        self.call_sites.clear()

    def stop(self) -> None:
        """A plan is replayed from now on."""
        self.recorder = None
