"""What was observed of a step: its `scheduler.Trace`, and which ops and storages are behind it.

A recording's ops and its allocations and frees are merged into one sequence of ticks. Addresses are resolved to
variables in order, since one may belong to several in turn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from ooc.memory.record import VariableRecord
from ooc.tracing.recorded_ops import OpRecord, forward_ops
from scheduler.budget import smallest_num_chunks
from scheduler.plan import Machine
from scheduler.trace import Op, Trace, Use, Uses, Variable
from vmm.table import between_ops, inside_op
from vmm.torch_cpu import ALLOC, GRANULE_NBYTES, Event

Origin = tuple[str, int, int]
"""Where a variable was born: a sequence's family, a step position, and which of the allocations there it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One observation of a step.

    Attributes:
        trace: Without `becomes`: a single step does not show which variable is which in the next.
        funcs: The op of each `trace.ops`.
        occurrences: Per op, the variable of each operand, repeats included.
        start_serials, end_serials: Per variable, the serial of its record where it exists at the
            step's start, or is alive at its end; else None.
        sliced: Per op, `OpRecord.sliced`, of variables.
        flights: Per op, `OpRecord.in_flight`, `is_held` and `landed`, of variables; empty where there is no collective.
        start_ranks: Per variable that exists at the step's start, its record's rank (`ranks_by_age`).
        family: Identity of the sequence of ops; sizes and lifetimes may differ.
        origins: Per variable, where it was born (`VariableRecord.origin`); None where that is not known.
        grad_mode: Whether gradients were enabled when its first op ran.
        num_alive: Variables that existed at the step's start, used or not.
        replaceable: Of a union of steps: variables for which others stand in where they were not made.
        drawn: Variables that stand for operands which are others in each step (`Draws`).
        forward: Per op, `forward_ops`; empty where nobody has asked.
        known: What follows from the rest, once it was asked for; no part of what equals what.
    """

    trace: Trace
    funcs: tuple[Any, ...]
    occurrences: tuple[tuple[int, ...], ...]
    start_serials: tuple[int | None, ...]
    start_ranks: tuple[int | None, ...]
    end_serials: tuple[int | None, ...]
    sliced: tuple[tuple[int, ...] | None, ...] = ()
    flights: tuple[tuple[tuple[int, ...], bool, tuple[int, ...]] | None, ...] = ()
    family: str = ""
    origins: tuple[Origin | None, ...] = ()
    grad_mode: bool = True
    num_alive: int = 0
    replaceable: frozenset[int] = frozenset()
    drawn: frozenset[int] = frozenset()
    forward: tuple[int, ...] = ()
    known: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def strays(self) -> tuple[int, ...]:
        """The variables with which it begins or ends, and that no op has named. Looked for once.

        A library has taken its workspace, or given it up. No other step will be like it.
        """
        if "strays" not in self.known:
            self.known["strays"] = tuple(
                index
                for index, v in enumerate(self.trace.variables)
                if not v.evictable and (v.birth_tick is None or v.death_tick is None)
            )
        found: tuple[int, ...] = self.known["strays"]
        return found


NEED = "largest_need_nbytes"
"""In a trace's metadata: what the worst op, in the step or before it, needed at once (`need_nbytes`)."""


def need_nbytes(trace: Trace) -> int:
    """What its worst op needs at once, in chunks of the smallest size: no budget below that will do."""
    machine = Machine(chunk_nbytes=GRANULE_NBYTES, num_chunks=1, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)
    return smallest_num_chunks(trace, machine) * GRANULE_NBYTES


DRAWN = "drawn anew in each step"
"""What variables are called that stand for what is (`Draws`)."""
_SERIALS = count(-1, -1)
"""No storage has these, and no two drawn variables the same."""
_MOST_OPS_UNTIL_FREED = 32
"""What a collective has used may be held last by the threads of its backend: it was freed up to 27 ops after its last
use. In a trace it dies so many ops after that, or recordings of equal steps would differ in that alone: FSDP2's were
planned by luck."""


@dataclass(slots=True)
class _Draft:
    """A variable while the trace is being built."""

    nbytes: int
    birth_tick: int | None
    death_tick: int | None = None
    is_freed: bool = False
    was_launched: bool = False  # by a collective, which may be the last to let go of it, sooner or later
    last_op: int = 0  # that used it
    seen: bool = False
    start_serial: int | None = None
    kind: str = ""
    label: str = ""
    origin: Origin | None = None


def ranks_by_age(records: Iterable[VariableRecord | StartVariable]) -> dict[int | None, int]:
    """For each record, by serial, how many of the same size are younger.

    A variable that is another storage in every step is identified by its size and this rank: its place in the order
    of allocation. Records that the step does not use are counted, too.
    """
    counts: dict[int, int] = {}
    ranks: dict[int | None, int] = {}
    for record in sorted(records, key=lambda r: -r.serial):
        ranks[record.serial] = counts.get(record.nbytes, 0)
        counts[record.nbytes] = ranks[record.serial] + 1
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StartVariable:
    """What a recording keeps of a record that existed at the step's start."""

    nbytes: int
    serial: int
    seen: bool
    kind: str
    label: str
    origin: Origin | None


class InFlight:
    """Variables that collectives under way use, while the trace is being built; those launched first come first."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self._writes: dict[int, bool] = {}
        self._held: set[int] = set()

    def launch(
        self, variables: Sequence[int], written: Container[int | None], drafts: Sequence[_Draft], is_held: bool
    ) -> None:
        """A collective uses these from now on."""
        if not variables and not self._writes:
            return
        for index in variables:
            self._writes[index] = index in written
            if is_held:
                self._held.add(index)
        excess = sum(drafts[index].nbytes for index in self._writes) - self._limit_nbytes
        for index in [i for i in self._writes if i not in self._held]:
            if excess <= 0:
                break
            excess -= drafts[index].nbytes
            self.end([index])

    def end(self, variables: Iterable[int]) -> None:
        """They are in use no more: named by an op, waited for, or freed."""
        for index in variables:
            self._writes.pop(index, None)
            self._held.discard(index)

    @property
    def written(self) -> set[int]:
        """Those that are written until they are in use no more."""
        return {index for index, writes in self._writes.items() if writes}

    def uses(self, drafts: Sequence[_Draft], *, besides: Container[int]) -> list[Use]:
        """Uses of these during an op that names only `besides`."""
        if not self._writes:
            return []
        self.end([index for index in self._writes if drafts[index].is_freed])
        return [
            Use(variable=index, reads=True, writes=writes)
            for index, writes in self._writes.items()
            if index not in besides
        ]


Draws = AbstractSet[tuple[Any, str]]
"""Ops, by what they call and where in the program, that join what is drawn anew in each step from what earlier steps
have left: samples of a replay buffer. Which those are says nothing, and which were drawn twice, or made just now."""


@dataclass(slots=True)
class TraceBuilder:
    """Builds one observation.

    Attributes:
        start_records: Variables that existed at the step's start, by address.
        in_flight: What collectives under way use.
        family: See `Observed`.
        grad_mode: See `Observed`.
        draws: Ops whose operands are anybody.
    """

    start_records: dict[int, StartVariable]
    in_flight: InFlight
    family: str
    grad_mode: bool
    draws: Draws = frozenset()
    present_op: int = 0
    tick: int = 1  # tick 0 is the start itself: what is freed first of all has lived until then
    drafts: list[_Draft] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)  # address -> draft index
    dying: dict[int, list[int]] = field(default_factory=dict)  # before which op, of those that collectives have used
    ranks: dict[int | None, int] = field(default_factory=dict)  # of records at the start, by serial
    uses: Uses = field(default_factory=Uses)

    def build(self, ops: Sequence[OpRecord], events: Sequence[Event], end_serials: Mapping[int, int]) -> Observed:
        """From ops and events in order, and the serials of what is alive at the end, by address. Once."""
        self.ranks = ranks_by_age(self.start_records.values())
        made: list[Op] = []
        occurrences: list[tuple[int, ...]] = []
        sliced: list[tuple[int, ...] | None] = []
        flights: list[tuple[tuple[int, ...], bool, tuple[int, ...]] | None] = []
        next_event = 0

        def consume(limit: int, label: str) -> list[int]:
            """Apply events with a position below `limit`; the variables that they allocate."""
            nonlocal next_event
            born = []
            while next_event < len(events) and events[next_event].position < limit:
                index = self._apply(events[next_event], label)
                if index is not None:
                    born.append(index)
                next_event += 1
            return born

        for index, op in enumerate(ops):
            self.present_op = index
            consume(inside_op(index), "")
            self._die(index)
            start_tick = self.tick
            self.tick += 1
            if (op.func, op.where) in self.draws and op.sliced is None and not op.in_flight:
                operands = self._drawn(op, end_serials)
            else:
                operands = tuple(v for v in map(self._operand, op.occurrences) if v is not None)
            landed = self._known(op.landed)
            written = {self._operand(address) for address in op.written}
            name = str(op.func)
            born = consume(between_ops(index + 1), f"{name}, {op.where}" if op.where else name)
            for address in (*op.results, *op.in_flight):
                if address in self.live:
                    self.drafts[self.live[address]].seen = True
            written.update(self._known(op.written))  # those that the op has made
            changing = written | self.in_flight.written
            apart = None if op.sliced is None else self._known(op.sliced)
            sliced.append(apart)
            whole = [v for v in dict.fromkeys(operands) if apart is None or v not in apart]
            uses = [self.uses.of(v, reads=True, writes=v in changing) for v in whole]
            uses += [self.uses.of(v, reads=False, writes=True) for v in born]
            # What ends before this op is used and changed in it, too: written out right after the op before, it would
            # be written out before the program's wait.
            uses += self.in_flight.uses(self.drafts, besides=operands)
            self.in_flight.end((*landed, *operands))
            launched = self._known(op.in_flight)
            self.in_flight.launch(launched, written, self.drafts, op.is_held)
            flights.append((launched, op.is_held, landed) if launched or landed else None)
            for variable in operands:
                self.drafts[variable].last_op = index
            for variable in launched:
                self.drafts[variable].was_launched, self.drafts[variable].last_op = True, index
            made.append(
                Op(
                    name=name,
                    where=op.where,
                    start_tick=start_tick,
                    stop_tick=self.tick,
                    duration_ns=op.duration_ns,
                    uses=tuple(uses),
                    replayable=op.replayable,
                )
            )
            occurrences.append(operands)
        consume(between_ops(len(ops) + 1), "")
        for due in sorted(self.dying):
            self._die(due)
        return self._finish(_without_reruns(made, sliced), occurrences, sliced, flights, ops, end_serials)

    def _known(self, addresses: Iterable[int]) -> tuple[int, ...]:
        """The variables alive at these addresses."""
        return tuple(self.live[address] for address in addresses if address in self.live)

    def _drawn(self, op: OpRecord, ends: Container[int]) -> tuple[int, ...]:
        """Operands of an op that joins what is drawn: each that outlives the step is anybody, and twice if it is."""
        operands = []
        for address in op.occurrences:
            born = self.live.get(address)
            is_from_outside = address in self.start_records if born is None else address in ends
            if is_from_outside:
                found = self.drafts[born] if born is not None else self.start_records[address]
                serial, operand = next(_SERIALS), len(self.drafts)
                self.drafts.append(_Draft(nbytes=found.nbytes, birth_tick=None, start_serial=serial, seen=True))
                self.drafts[operand].label = DRAWN
                operands.append(operand)
            elif (known := self._operand(address)) is not None:
                operands.append(known)
        return tuple(operands)

    def _apply(self, event: Event, label: str) -> int | None:
        if event.kind == ALLOC:
            origin = (self.family, event.position, event.ordinal) if event.ordinal else None
            self.drafts.append(_Draft(nbytes=event.nbytes, birth_tick=self.tick, label=label, origin=origin))
            self.live[event.address] = len(self.drafts) - 1
            self.tick += 1
            return len(self.drafts) - 1
        index = self._operand(event.address, seen=False)
        if index is not None:
            draft = self.drafts[index]
            draft.is_freed = True
            del self.live[event.address]
            self.start_records.pop(event.address, None)
            due = draft.last_op + _MOST_OPS_UNTIL_FREED
            if draft.was_launched and self.present_op < due:
                self.dying.setdefault(due, []).append(index)
            else:
                draft.death_tick = self.tick
                self.tick += 1
        return None

    def _die(self, op: int) -> None:
        """Let what is due before this op die: recordings are alike then, whenever a collective let go of it."""
        for index in sorted(self.dying.pop(op, ())):
            self.drafts[index].death_tick = self.tick
            self.tick += 1

    def _operand(self, address: int, *, seen: bool = True) -> int | None:
        """Index of the variable at this address now; None for memory that is no variable's."""
        index = self.live.get(address)
        if index is None:
            record = self.start_records.get(address)
            if record is None:
                return None
            self.drafts.append(
                _Draft(
                    nbytes=record.nbytes,
                    birth_tick=None,
                    start_serial=record.serial,
                    seen=record.seen,
                    kind=record.kind,
                    label=record.label,
                    origin=record.origin,
                )
            )
            index = self.live[address] = len(self.drafts) - 1
        if seen:
            self.drafts[index].seen = True
        return index

    def _finish(
        self,
        made: list[Op],
        occurrences: list[tuple[int, ...]],
        sliced: list[tuple[int, ...] | None],
        flights: list[tuple[tuple[int, ...], bool, tuple[int, ...]] | None],
        ops: Sequence[OpRecord],
        end_serials: Mapping[int, int],
    ) -> Observed:
        ends: dict[int, int] = {
            index: end_serials[address] for address, index in self.live.items() if address in end_serials
        }
        variables = tuple(
            Variable(
                nbytes=d.nbytes,
                birth_tick=d.birth_tick,
                death_tick=d.death_tick,
                evictable=d.seen or (d.death_tick is not None and _within_one_op(d, made)),
                kind=d.kind or ("activation" if d.birth_tick is not None else "other"),
                label=d.label,
            )
            for d in self.drafts
        )
        return Observed(
            trace=Trace(ops=tuple(made), variables=variables, num_ticks=max(self.tick, 1), cyclic=True),
            funcs=tuple(op.func for op in ops),
            occurrences=tuple(occurrences),
            start_serials=tuple(d.start_serial for d in self.drafts),
            start_ranks=tuple(self.ranks.get(d.start_serial) for d in self.drafts),
            end_serials=tuple(ends.get(i) for i in range(len(self.drafts))),
            sliced=tuple(sliced),
            flights=tuple(flights),
            family=self.family,
            origins=tuple(d.origin for d in self.drafts),
            drawn=frozenset(i for i, d in enumerate(self.drafts) if d.start_serial is not None and d.start_serial < 0),
            grad_mode=self.grad_mode,
            num_alive=len(self.ranks),
            forward=forward_ops(ops),
        )


def _without_reruns(ops: list[Op], sliced: Sequence[tuple[int, ...] | None]) -> list[Op]:
    """The ops, of which none is to make again what another uses in slices: no plan sees that use."""
    apart = {variable for variables in sliced if variables for variable in variables}
    if not apart:
        return ops
    return [
        replace(op, replayable=op.replayable and not any(u.writes and u.variable in apart for u in op.uses))
        for op in ops
    ]


def _within_one_op(draft: _Draft, ops: Sequence[Op]) -> bool:
    """Whether a variable lives inside one op, where nothing is ever moved: any answer would do."""

    if draft.birth_tick is None or draft.death_tick is None:
        return False
    index = bisect_right(ops, draft.birth_tick, key=lambda op: op.start_tick) - 1
    return index >= 0 and draft.death_tick < ops[index].stop_tick


def close_cycle(first: Observed, second: Observed) -> Trace:
    """Make the cyclic trace of a repeating step from two observations of it.

    A variable that exists at the start and lives on is *itself* in the next step if both
    observations found the same storage in its place; otherwise it enters and leaves (a batch from
    a list). What is born and lives on becomes one that exists at the start: the one that was born there in the
    step before, which may live on for another step. Where that is not known they are matched by size, in order of
    allocation, which is how the executor will match them.
    """
    trace = second.trace
    if first.trace.fingerprint() != trace.fingerprint():
        raise ValueError("two observations of different sequences do not make a cycle")
    becomes: dict[int, int] = {}
    staying = [
        index
        for index, v in enumerate(trace.variables)
        if v.birth_tick is not None and v.death_tick is None and v.evictable
    ]
    born = {origin: index for index in staying if (origin := second.origins[index]) is not None}
    successors: dict[int, list[tuple[int, int]]] = {}
    for index, v in enumerate(trace.variables):
        serial, origin = second.start_serials[index], second.origins[index]
        if v.birth_tick is not None or serial is None:
            continue
        if first.start_serials[index] == serial:
            if v.death_tick is None:
                becomes[index] = index
        elif origin in born and trace.variables[born[origin]].nbytes == v.nbytes:
            becomes[born.pop(origin)] = index
        elif v.death_tick is not None:
            successors.setdefault(v.nbytes, []).append((serial, index))
    leavers: dict[int, list[tuple[int, int]]] = {}
    for index in staying:
        serial = second.end_serials[index]
        if serial is not None and index not in becomes:
            leavers.setdefault(trace.variables[index].nbytes, []).append((serial, index))
    for nbytes, entering in successors.items():
        leaving = sorted(leavers.get(nbytes, ()), reverse=True)
        for (_, successor), (_, index) in zip(sorted(entering, reverse=True), leaving, strict=False):
            becomes[index] = successor
    variables = tuple(
        v if index not in becomes else replace(v, becomes=becomes[index]) for index, v in enumerate(trace.variables)
    )
    return Trace(ops=trace.ops, variables=variables, num_ticks=trace.num_ticks, cyclic=True, metadata=trace.metadata)
