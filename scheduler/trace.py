"""The trace: one training step as data.

A trace is what the planner knows of a step, and all it knows: ops in order, the variables they
use, and when each variable is allocated and freed. It holds no tensors and imports no torch, so
a trace recorded on a board can be planned on a workstation.

Time has two scales. *Durations* are integer nanoseconds. *Order* is counted in **ticks**: every
event of a step (an op's start, an allocation, a free) takes one tick, in the order in which it
happened. Ops are too coarse for lifetimes: within one op a temporary may be freed and its
address handed out again, and a log bucketed by op index loses that (DESIGN.md section 8).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

TRACE_SCHEMA_VERSION = 2

# What a trace without replayable ops is written as, so that an older ooc reads it; also a part of every fingerprint.
_BASE_SCHEMA_VERSION = 1


_Made = TypeVar("_Made")


class TraceError(ValueError):
    """A trace that contradicts itself, or a file that is not a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One op's use of one variable. A fresh output or temporary is `writes` without `reads`."""

    variable: int
    reads: bool
    writes: bool


class Uses:
    """Makes the uses of one trace, one for all ops that use a variable in the same way.

    Traces are kept, and the cycle collector of Python follows each object in them.
    """

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[int, bool, bool], Use] = {}

    def __repr__(self) -> str:
        return f"<Uses: {len(self._made)}>"

    def of(self, variable: int, *, reads: bool, writes: bool) -> Use:
        """A use of a variable: see `Use`."""
        key = variable, reads, writes
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Use(variable=variable, reads=reads, writes=writes)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One ATen call as the dispatcher sees it (the papers' *function*).

    Attributes:
        name: The operator, e.g. `"aten.convolution_backward.default"`.
        where: Module and line that called it, e.g. `"layers.17 (model.py:41)"`; empty when unknown.
        start_tick: The tick of the op's own start.
        stop_tick: One past the op's last event. Events in `[start_tick + 1, stop_tick)` happened
            inside the op; those between one op's `stop_tick` and the next op's `start_tick`
            happened between the two (frees by Python, mostly).
        duration_ns: Time that the op took, without waiting for memory or transfers; what lies between two ops and is
            no wait counts for the second.
        host_ns: So much of that came before the op itself: the program's own time, torch's, the executor's. A re-run
            does not take it. 0 where it was not measured.
        uses: Distinct variables in operand order, then results and temporaries in order of
            allocation (the papers' V_i).
        replayable: Whether the op may be run again later in the same step: from the same operands it
            makes the same bits (no random numbers, no route that depends on the moment), changes
            nothing but the variables it lists as written, and what it reads below the size
            threshold is not changed later in the step. Only who recorded the op can know; older
            traces, which do not say, are read as "no".
    """

    name: str
    start_tick: int
    stop_tick: int
    duration_ns: int
    uses: tuple[Use, ...]
    where: str = ""
    replayable: bool = False
    host_ns: int = 0

    @property
    def own_ns(self) -> int:
        """Time of the op itself."""
        return self.duration_ns - self.host_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One tensor storage at or above the size threshold; views share it.

    Attributes:
        nbytes: Bytes as requested (the largest seen, where a size varies with the data).
        birth_tick: Tick of its allocation; None if it exists when the step starts.
        death_tick: Tick of its free; None if it is alive when the step ends. At `death_tick`
            itself the variable is already gone: its lifetime is `[birth_tick, death_tick)`.
        becomes: For a variable alive at the end of a cyclic trace, the variable that it is at
            the start of the next step: itself for a parameter, another index for, say, a
            gradient that is freed and allocated anew in each step. None otherwise.
        evictable: False for memory that an op allocated and kept without ever naming it as an
            operand or result (a library's workspace): later ops may use it unseen, so it must
            never be away.
        kind: parameter, gradient, optimizer_state, buffer, activation, temporary, input, other.
        label: For people: a parameter's name, or the op that made it, with its place.
    """

    nbytes: int
    birth_tick: int | None
    death_tick: int | None
    becomes: int | None = None
    evictable: bool = True
    kind: str = "other"
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step. Validated when made; immutable.

    Attributes:
        ops: In execution order; `Op.start_tick` grows strictly.
        variables: Indexed by `Use.variable`.
        num_ticks: One past the last event of the step.
        cyclic: True when steps repeat: what is alive at the end is alive at the next start, and
            residency wraps around. False for a step taken alone: what exists at its start is
            outside (in the store), and must be outside at its end if still alive.
        metadata: Free-form facts for reports (model, torch version); not in the fingerprint.
        op_starts: The start tick of each op, to look ops up by; follows from `ops`.
    """

    ops: tuple[Op, ...]
    variables: tuple[Variable, ...]
    num_ticks: int
    cyclic: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)
    op_starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _fingerprint: list[str] = field(init=False, repr=False, compare=False, default_factory=list)  # once asked for
    _known: list[dict[Hashable, Any]] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "op_starts", tuple(op.start_tick for op in self.ops))
        _validate(self)

    @property
    def duration_ns(self) -> int:
        """Sum of all op durations: the step's time if memory were free."""
        return sum(op.duration_ns for op in self.ops)

    def lifetime(self, variable: int) -> tuple[int, int]:
        """`[start, stop)` in ticks, with the step's own ends for what crosses them."""
        v = self.variables[variable]
        start = 0 if v.birth_tick is None else v.birth_tick
        stop = self.num_ticks if v.death_tick is None else v.death_tick
        return start, stop

    def uses_by_variable(self) -> tuple[tuple[tuple[int, Use], ...], ...]:
        """For each variable, its `(op index, use)` pairs in order."""
        found: list[list[tuple[int, Use]]] = [[] for _ in self.variables]
        for index, op in enumerate(self.ops):
            for use in op.uses:
                found[use.variable].append((index, use))
        return tuple(tuple(uses) for uses in found)

    def live_nbytes(self) -> Iterator[tuple[int, int]]:
        """`(tick, bytes alive from this tick on)` at every tick where it changes, from tick 0."""
        change: dict[int, int] = {0: 0}
        for index, v in enumerate(self.variables):
            start, stop = self.lifetime(index)
            change[start] = change.get(start, 0) + v.nbytes
            if stop < self.num_ticks:
                change[stop] = change.get(stop, 0) - v.nbytes
        total = 0
        for tick in sorted(change):
            total += change[tick]
            yield tick, total

    def peak_nbytes(self) -> int:
        """Most bytes alive at once: what the step needs in core, unrounded."""
        return max((nbytes for _, nbytes in self.live_nbytes()), default=0)

    def fingerprint(self) -> str:
        """Identity of the *sequence*: ops, operands, sizes, lifetimes; not durations or labels."""
        if self._fingerprint:
            return self._fingerprint[0]
        body = (
            _BASE_SCHEMA_VERSION,
            self.num_ticks,
            self.cyclic,
            tuple(
                (o.name, o.start_tick, o.stop_tick, tuple((u.variable, u.reads, u.writes) for u in o.uses))
                for o in self.ops
            ),
            tuple((v.nbytes, v.birth_tick, v.death_tick, v.becomes, v.evictable) for v in self.variables),
        )
        self._fingerprint.append(hashlib.sha256(repr(body).encode()).hexdigest()[:32])
        return self._fingerprint[0]

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Within it, what follows from the trace is worked out once (see `once`); afterwards it is forgotten."""
        if self._known:
            yield
            return
        self._known.append({})
        try:
            yield
        finally:
            self._known.clear()

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` returns, which must follow from the trace and `key` alone, and which nobody may change."""
        known = next(iter(self._known), None)
        if known is None:
            return make()
        if key not in known:
            known[key] = make()
        found: _Made = known[key]
        return found

    def to_json(self) -> str:
        """The trace as JSON text with a schema version; `from_json` reads it back equal."""
        has_replayable = any(o.replayable for o in self.ops)
        document = {
            "schema": "ooc.trace",
            "schema_version": TRACE_SCHEMA_VERSION if has_replayable else _BASE_SCHEMA_VERSION,
            "cyclic": self.cyclic,
            "num_ticks": self.num_ticks,
            "metadata": dict(self.metadata),
            "variables": [asdict(v) for v in self.variables],
            "ops": [
                {
                    "name": o.name,
                    "where": o.where,
                    "start_tick": o.start_tick,
                    "stop_tick": o.stop_tick,
                    "duration_ns": o.duration_ns,
                    "uses": [[u.variable, ("r" if u.reads else "") + ("w" if u.writes else "")] for u in o.uses],
                    **({"replayable": True} if o.replayable else {}),
                    **({"host_ns": o.host_ns} if o.host_ns else {}),
                }
                for o in self.ops
            ],
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read a trace back. Raises `TraceError` naming what is wrong with the text."""
        document = _load(text)
        try:
            return cls(
                ops=tuple(
                    Op(
                        name=o["name"],
                        where=o["where"],
                        start_tick=o["start_tick"],
                        stop_tick=o["stop_tick"],
                        duration_ns=o["duration_ns"],
                        uses=tuple(Use(variable=v, reads="r" in how, writes="w" in how) for v, how in o["uses"]),
                        replayable=o.get("replayable", False),
                        host_ns=o.get("host_ns", 0),
                    )
                    for o in document["ops"]
                ),
                variables=tuple(Variable(**v) for v in document["variables"]),
                num_ticks=document["num_ticks"],
                cyclic=document["cyclic"],
                metadata=document["metadata"],
            )
        except (KeyError, TypeError) as error:
            raise TraceError(f"not a complete trace: {type(error).__name__}: {error}") from error


def _load(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # nested too deeply, a number too long
        raise TraceError(f"not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != "ooc.trace":
        found = document.get("schema") if isinstance(document, dict) else None
        raise TraceError(
            f"not an ooc trace: its 'schema' is {found!r}, not 'ooc.trace'. Options: record a step (ooc trace -o FILE)"
        )
    if document.get("schema_version") not in range(_BASE_SCHEMA_VERSION, TRACE_SCHEMA_VERSION + 1):
        raise TraceError(
            f"trace has schema version {document.get('schema_version')!r}; "
            f"this version of ooc reads {_BASE_SCHEMA_VERSION} to {TRACE_SCHEMA_VERSION}. Record the step again."
        )
    return document


def _validate(trace: Trace) -> None:
    """Raise for the first thing that is wrong. Messages are made only then: a step has tens of thousands of uses."""
    num_ticks, variables = trace.num_ticks, trace.variables
    lifetimes = [trace.lifetime(index) for index in range(len(variables))]
    previous_stop = 0
    for i, op in enumerate(trace.ops):
        start_tick, stop_tick = op.start_tick, op.stop_tick
        if start_tick < previous_stop:
            raise TraceError(f"op {i} ({op.name}) starts before op {i - 1} has ended")
        if stop_tick <= start_tick:
            raise TraceError(f"op {i} ({op.name}): stop_tick {stop_tick} <= start_tick")
        if stop_tick > num_ticks:
            raise TraceError(f"op {i} ({op.name}) ends after the step's {num_ticks} ticks")
        if op.duration_ns < 0:
            raise TraceError(f"op {i} ({op.name}): negative duration {op.duration_ns}")
        if not 0 <= op.host_ns <= op.duration_ns:
            raise TraceError(f"op {i} ({op.name}): host_ns {op.host_ns} of {op.duration_ns}")
        previous_stop = stop_tick
        seen = [use.variable for use in op.uses]
        if len(seen) != len(set(seen)):
            raise TraceError(f"op {i} ({op.name}) lists a variable twice in {seen}")
        for variable in seen:
            if not 0 <= variable < len(variables):
                raise TraceError(f"op {i} uses unknown variable {variable}")
            start, stop = lifetimes[variable]
            if start >= stop_tick or stop <= start_tick:
                raise TraceError(f"op {i} ({op.name}) uses variable {variable} outside its lifetime [{start}, {stop})")
    heirs: set[int] = set()
    for index, (v, (start, stop)) in enumerate(zip(variables, lifetimes, strict=True)):
        if v.nbytes <= 0:
            raise TraceError(f"variable {index} has {v.nbytes} bytes")
        if not 0 <= start < stop <= num_ticks:
            raise TraceError(f"variable {index}: lifetime [{start}, {stop}) is empty or outside")
        if v.becomes is not None:
            _validate_heir(trace, index, heirs)
            heirs.add(v.becomes)


def _validate_heir(trace: Trace, index: int, heirs: set[int]) -> None:
    """Raise where a variable cannot become the one that it is to become; `heirs`: those of the variables before."""
    v = trace.variables[index]
    assert v.becomes is not None
    if not trace.cyclic:
        raise TraceError(f"variable {index} has an heir in a trace that is not cyclic")
    if v.death_tick is not None:
        raise TraceError(f"variable {index} dies and cannot become {v.becomes}")
    if not 0 <= v.becomes < len(trace.variables):
        raise TraceError(f"variable {index} becomes unknown variable {v.becomes}")
    if v.becomes in heirs:
        raise TraceError(f"two variables become variable {v.becomes}")
    heir = trace.variables[v.becomes]
    if heir.birth_tick is not None:
        raise TraceError(f"variable {index} becomes {v.becomes}, which is born within the step")
    if heir.nbytes != v.nbytes:
        raise TraceError(f"variable {index} ({v.nbytes} bytes) becomes {v.becomes} ({heir.nbytes})")
