"""Records a step's ops and allocations.

While a step runs on demand, the recorder notes each op with the storage addresses of its operands, and the allocator's
log notes each allocation and free with its position in the step. Only at the step's end are the two merged
(`ooc.tracing.observed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ooc.memory.record import VariableRecord
from ooc.memory.step_uses import Allocation, Operands, StepUses
from ooc.tracing.observed import Draws, InFlight, Observed, StartVariable, TraceBuilder
from ooc.tracing.op_log import OpLog
from ooc.tracing.recorded_ops import OpRecord, RecordedOps
from vmm.torch_cpu import ALLOC, Event


class StepRecorder:
    """The ops and allocator events of one step, in order.

    Attributes:
        is_cut: Recording began in mid-step: no sequence to learn.
        is_compared: Whether it is noted of each op where in the program it comes from, of which node it is, and whether
            it may run again. Without, nothing is learned from the recording.
        flight_nbytes: In the trace so many bytes at once stay in use by collectives under way. Of what is beyond,
            whoever moves it waits.
        grad_mode: Whether gradients were enabled when the first op ran that touches a variable.
        num_replayed: How many of its ops were replayed from a plan, which was then left, or ran beside it.
        num_beside: How many of those ran beside it.
    """

    def __init__(self, start_records: Mapping[int, VariableRecord], *, is_cut: bool = False) -> None:
        self.start_records = dict(start_records)
        self.is_cut = is_cut
        self.is_compared = True
        self.flight_nbytes = 0
        self.grad_mode, self._is_begun = True, False
        self.num_replayed = self.num_beside = 0
        self._events: list[Event] = []
        self._ops = RecordedOps()

    def __repr__(self) -> str:
        return f"<StepRecorder {self.num_ops} ops, {len(self.events)} events>"

    @property
    def log(self) -> OpLog | None:
        """Where native code notes ops that need nothing from Python."""
        return self._ops.log

    @log.setter
    def log(self, log: OpLog | None) -> None:
        self._take_events()
        self._ops.log = log

    @property
    def events(self) -> list[Event]:
        """The allocator's events so far. More may be added to the list."""
        self._take_events()
        return self._events

    @events.setter
    def events(self, events: list[Event]) -> None:
        self._events = events

    def _take_events(self) -> None:
        """Take those that native code has noted since somebody last looked: none have come through Python meanwhile."""
        if self.log is not None:
            self._events.extend(map(Event._make, self.log.take_events()))

    @property
    def is_begun(self) -> bool:
        """Whether an op has touched a variable."""
        return self._is_begun or (self.log is not None and self.log.has_begun)

    @is_begun.setter
    def is_begun(self, value: bool) -> None:
        self._is_begun = value

    @property
    def num_ops(self) -> int:
        """Ops so far. At once, unlike `ops`."""
        return len(self._ops)

    @property
    def ops(self) -> Sequence[OpRecord]:
        """The ops so far; also those that native code has logged, which are turned into records here, for good."""
        return self._ops.records()

    def as_records(self) -> Sequence[OpRecord]:
        """The same, but what is compact stays so."""
        return self._ops.as_records()

    def op(self, index: int) -> OpRecord:
        """One op; what is compact stays so."""
        return self._ops.at(index)

    def funcs(self) -> list[Any]:
        """What the ops so far call."""
        return self.operands_since(0).funcs

    def append(self, op: OpRecord) -> None:
        """Note an op that came through Python."""
        self._ops.extend((op,))

    def extend(self, ops: Sequence[OpRecord]) -> None:
        """Note ops of another recording."""
        self._ops.extend(ops)

    def last_op(self) -> OpRecord | None:
        """The last op so far, if any, to be changed."""
        return self._ops.last()

    def drop_last(self) -> None:
        """Forget the last op."""
        self._ops.drop_last()

    def operands_since(self, start: int) -> Operands:
        """The ops from one on, with the addresses of their operands; no records are made."""
        return self._ops.operands_since(start)

    def finish(self, end_records: Mapping[int, VariableRecord]) -> RecordedStep:
        """What was recorded, which later changes of records do not touch. `end_records` are those alive now.

        On a device the host waits for the last op: recordings are kept, and what the device keeps of each op is not.
        """
        self._ops.settle()
        num_born = Counter(record.birthplace for record in self.start_records.values())
        return RecordedStep(
            recorder=self,
            start={
                address: StartVariable(
                    nbytes=r.nbytes,
                    serial=r.serial,
                    seen=r.seen,
                    kind=r.kind,
                    label=r.label,
                    # Not only of the recording before: between a forward pass and the next one others may have come.
                    origin=r.birthplace if r.origin is None and num_born[r.birthplace] == 1 else r.origin,
                )
                for address, r in self.start_records.items()
            },
            end_serials={address: r.serial for address, r in end_records.items()},
        )

    def build(self, end_records: Mapping[int, VariableRecord]) -> Observed:
        """Build the step's trace. `end_records` are the variables alive now, by address."""
        return self.finish(end_records).build()

    def signature(self) -> int:
        """A hash of the ops, whatever their operands: equal for steps that differ in sizes alone, and cheap."""
        found = self._ops.hashed(_HASH_START, lambda found, func: ((found ^ id(func)) * _HASH_FACTOR) & _HASH_MASK)
        return found if self.grad_mode else found ^ _HASH_MASK


_HASH_START, _HASH_FACTOR, _HASH_MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1
"""FNV-1a, as in native/op_log.h."""


class RecordedStep:
    """A recorded step that has ended. Its trace, which takes longer than recording it, is built when it is needed.

    Attributes:
        signature: See `StepRecorder.signature`.
        family: The same, as a text.
        num_ops: Its ops.
    """

    def __init__(self, *, recorder: StepRecorder, start: dict[int, StartVariable], end_serials: dict[int, int]) -> None:
        self._recorder = recorder
        self.start = start
        self.end_serials = end_serials
        self.signature = recorder.signature()
        self.family = f"{self.signature:x}"
        self.num_ops = recorder.num_ops
        self.grad_mode, self.flight_nbytes = recorder.grad_mode, recorder.flight_nbytes
        self._observed: Observed | None = None
        self._num_draws = 0  # with which that was built
        self._uses: StepUses | None = None

    def __repr__(self) -> str:
        return f"<RecordedStep {self.signature:#x} of {self.num_ops} ops>"

    @property
    def ops(self) -> Sequence[OpRecord]:
        """Its ops. Made anew for whoever asks: they are kept as compact as they came."""
        return self._recorder.as_records()

    def op(self, index: int) -> OpRecord:
        """One of its ops."""
        return self._recorder.op(index)

    def funcs(self) -> list[Any]:
        """What its ops call."""
        return self._recorder.funcs()

    @property
    def events(self) -> Sequence[Event]:
        """Its allocations and frees."""
        return self._recorder.events

    def uses(self) -> StepUses:
        """Which op used which variables, for foresight: less than a trace, and sooner made."""
        if self._uses is not None:
            return self._uses
        recorder = self._recorder
        self._uses = StepUses(
            recorder.operands_since(0),
            start={address: variable.serial for address, variable in self.start.items()},
            allocations=[Allocation(e.address, e.kind != ALLOC, e.position) for e in recorder.events],
        )
        return self._uses

    def note_origins(self, records: Mapping[int, VariableRecord]) -> None:
        """Note in the records of what is alive when the step ends, by address, where in it they were born, if so."""
        born = {event.address: event for event in self._recorder.events if event.kind == ALLOC}
        for address, record in records.items():
            event = born.get(address)
            record.origin = (self.family, event.position, event.ordinal) if event and event.ordinal else None
            if event:
                record.birthplace = record.origin

    def build(self, draws: Draws = frozenset()) -> Observed:
        """The step as it was observed. `draws`: ops whose operands are others in each step."""
        if self._observed is None or self._num_draws != len(draws):
            flights = InFlight(self.flight_nbytes)
            builder = TraceBuilder(dict(self.start), flights, self.family, self.grad_mode, draws)
            self._observed = builder.build(self.ops, self._recorder.events, self.end_serials)
            self._num_draws = len(draws)
        return self._observed
