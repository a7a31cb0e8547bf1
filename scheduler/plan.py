"""The plan: where every variable is at every moment of a step, as data.

A plan is a set of **residencies**. One residency is one stay of one variable in the pool: how it
begins (born, loaded, recomputed, or kept from the step before), how it stops (dies, evicted, dropped,
discarded, or kept for the next step), and which chunks it holds meanwhile. What an executor does at each op follows
from the residencies alone, so the same plan drives the CPU, a GPU, the simulator and the checker.

An eviction is two acts. The *write* starts right after op `write_op`; the *release*, when the
chunks pass to their next occupant, is at the start of op `release_op`. A plan that writes early
releases without waiting (DESIGN.md section 9).

A **re-run** is how discarded bytes come back: ops of this step are run once more, all together,
right before an op. `scheduler.reruns` says which ops may be, and what a re-run costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from scheduler.trace import Trace

PLAN_SCHEMA_VERSION = 4

# What a plan without copies at the border is written as, with writes over it, re-runs or neither, so that an older ooc
# reads it.
_BORDER_SCHEMA_VERSION = 3
_RERUN_SCHEMA_VERSION = 2
_BASE_SCHEMA_VERSION = 1

DEFAULT_COPY_BYTES_PER_S = 4e9


class PlanError(ValueError):
    """A plan that breaks a rule, or a file that is not a plan."""


@dataclass(frozen=True, slots=True)
class Born:
    """Begins with the variable's allocation, at its `birth_tick`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Begins with a load issued right before op `before_op`, which need not be the op that uses it.

    The residency counts from that op's `start_tick`; each op that uses the variable waits for
    the load to be complete.
    """

    before_op: int


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Begins with a re-run of `ops` right before op `before_op`: earlier ops of the step, in the step's order.

    All recomputed residencies with the same `before_op` are made by *one* re-run: the union of
    their `ops`, each op once, in the order of the trace. Which residency lists an op does not
    matter. The re-run happens at that op's `start_tick`, before anything that the op allocates, and the
    residency counts from there. What the re-run reads and does not make itself must be resident
    at that tick; what it allocates beside the residencies it makes (temporaries, results that nobody
    keeps) lives in the plan's `Scratch` for that op, at that one tick.

    What the program has freed may be made again, too, for later re-runs to read: a **ghost**, recomputed after the
    variable's death and discarded within the step.
    """

    before_op: int
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """Crosses the step boundary in memory: begins at the step's start, or stops at its end.

    In a cyclic trace, a variable that stops by `Kept` becomes a variable that starts by `Kept`, and the other way
    round: in the same chunks, or in those to which the plan's `BorderCopy` list brings its bytes.
    """


@dataclass(frozen=True, slots=True)
class Dies:
    """Stops with the variable's free, at its `death_tick`."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Written out and released.

    The write starts right after op `write_op` (no op of this residency writes the variable
    later); no op from `release_op` on uses it in this residency. The chunks count until
    `release_op`'s `start_tick` (`release_op == len(ops)`: until the end of the step), and
    whoever takes them waits for the write. A variable allocated after the last op has
    `write_op == len(ops) - 1`; its write starts at the end of the step.

    **Over the border**: a negative `write_op` counts from the step's end, and means the step before. The residency
    starts `Kept`, and nothing writes the variable between that write and the release. So what an update has changed is
    written while the link is idle, stays in memory over the step's border, and goes in the next step without a wait.
    Only a variable that becomes itself may do so: the same storage in each step.
    """

    write_op: int
    release_op: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Released without a write right after op `after_op`, because the store's copy is current.

    Legal if the variable came by `Loaded` and no op of this residency wrote it, or came by
    `Kept` from such a residency, or came by `Recomputed` after such a residency. Counts until that
    op's `stop_tick`.
    """

    after_op: int


@dataclass(frozen=True, slots=True)
class Discarded:
    """Released without a write right after op `after_op`, although the store has no current copy.

    Whatever comes next for this variable is `Recomputed`, or nothing at all until it dies. Counts
    until that op's `stop_tick`.
    """

    after_op: int


Start: TypeAlias = Born | Loaded | Recomputed | Kept
Stop: TypeAlias = Dies | Evicted | Dropped | Discarded | Kept

_STARTS: dict[str, type[Start]] = {"born": Born, "loaded": Loaded, "recomputed": Recomputed, "kept": Kept}
_STOPS: dict[str, type[Stop]] = {
    "dies": Dies,
    "evicted": Evicted,
    "dropped": Dropped,
    "discarded": Discarded,
    "kept": Kept,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """One stay of one variable in the pool.

    Attributes:
        chunks: Runs `(first chunk, count)` in the order in which the variable's bytes lie in
            them. Empty in a plan that has not been coloured yet.
    """

    variable: int
    start: Start
    stop: Stop
    chunks: tuple[tuple[int, int], ...] = ()

    def chunk_indices(self) -> tuple[int, ...]:
        """The runs spelled out, one index a chunk, in the order of the variable's bytes."""
        return tuple(c for first, count in self.chunks for c in range(first, first + count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Room for what the re-run before one op allocates and does not keep.

    Attributes:
        before_op: The op; the chunks are held at its `start_tick`, and at no other tick.
        chunks: Runs `(first chunk, count)`, as many chunks as `scheduler.reruns.scratch_chunks` says.
    """

    before_op: int
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderCopy:
    """A copy within memory at the step's border, of neighbouring chunks to others that hold nothing then.

    All copies of a plan come after the last op and all releases of one step, and before the next one's first op or
    load, each after the one before. What was copied is given up where it was. Together they bring all that is kept
    from the chunks in which it ends a step to those in which it starts the next; where chunks change places in a ring,
    one of them goes by way of a free chunk. Whoever held a target last may still be on its way out: a copy waits for
    that, as it waits for the load of what it copies.

    Attributes:
        source, target: The first chunk of each. The two do not overlap.
        num_chunks: How many.
    """

    source: int
    target: int
    num_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a plan is made for.

    Attributes:
        chunk_nbytes: Size of one chunk; every variable occupies whole chunks.
        num_chunks: The budget, in chunks.
        load_bytes_per_s, evict_bytes_per_s: Measured rate of the store, each way alone.
        shared_bytes_per_s: Rate of both ways together when both are busy; None: no contention.
        latency_ns: Fixed cost of one transfer.
        remap_ns: What mapping one chunk elsewhere costs the thread that computes; None: as on the CPU, by its bytes. On
            a GPU each is some calls of the driver, and the host must first have seen the end of the last use.
        rerun_op_ns: What running an op again takes beyond the op's own time.
        copy_bytes_per_s: Rate of a copy within memory, by the thread that computes. The default is a board's; a
            desktop's memory does 15e9.
    """

    chunk_nbytes: int
    num_chunks: int
    load_bytes_per_s: float = 2e9
    evict_bytes_per_s: float = 2e9
    shared_bytes_per_s: float | None = None
    latency_ns: int = 50_000
    remap_ns: int | None = None
    rerun_op_ns: int = 0
    copy_bytes_per_s: float = DEFAULT_COPY_BYTES_PER_S

    def __post_init__(self) -> None:
        if self.chunk_nbytes <= 0 or self.num_chunks < 0:
            raise ValueError(f"machine with {self.num_chunks} chunks of {self.chunk_nbytes} bytes")
        if min(self.load_bytes_per_s, self.evict_bytes_per_s, self.copy_bytes_per_s) <= 0 or self.latency_ns < 0:
            raise ValueError("rates of transfers and copies must be positive and latency not negative")
        if self.remap_ns is not None and self.remap_ns < 0:
            raise ValueError(f"remap_ns={self.remap_ns}: must not be negative")
        if self.rerun_op_ns < 0:
            raise ValueError(f"rerun_op_ns={self.rerun_op_ns}: must not be negative")

    @property
    def budget_nbytes(self) -> int:
        """The pool's size."""
        return self.chunk_nbytes * self.num_chunks

    @property
    def chunks_per_latency(self) -> float:
        """What a transfer costs beyond its bytes, as chunks that would move in that time."""
        return self.latency_ns / 1e9 * min(self.load_bytes_per_s, self.evict_bytes_per_s) / self.chunk_nbytes

    def chunks_of(self, nbytes: int) -> int:
        """Chunks that a variable of `nbytes` occupies."""
        return -(-nbytes // self.chunk_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A coloured schedule for one trace on one machine.

    Attributes:
        trace_fingerprint: `Trace.fingerprint()` of the trace that it was made for.
        policy, parameters: Who made it, and how.
        residencies: Ordered by start (op, tick), then variable.
        predicted: What the simulator says of it (`duration_ns`, `stall_ns`, `peak_nbytes`,
            `loaded_nbytes`, `evicted_nbytes`, `dropped_nbytes`, `num_remapped_chunks`, `remap_ns`; with
            re-runs also `recompute_ns`, `discarded_nbytes`; with copies at the border `relocate_ns`,
            `relocated_nbytes`). See `step_ns`.
        bounds: Lower bounds for any plan of this trace on this machine.
        scratch: Room for re-runs that need some, in order of op.
        border_copies: Copies within memory between two steps, in order.
        notes: What the policy has to say of how it came about: a solver's gap, a way out that was taken.
    """

    trace_fingerprint: str
    policy: str
    machine: Machine
    residencies: tuple[Residency, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, int] = field(default_factory=dict)
    scratch: tuple[Scratch, ...] = ()
    border_copies: tuple[BorderCopy, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def recomputes(self) -> bool:
        """Whether some op is run again."""
        return any(isinstance(r.start, Recomputed) or isinstance(r.stop, Discarded) for r in self.residencies)

    @property
    def writes_over_border(self) -> bool:
        """Whether something is written in one step and released in the next."""
        return any(isinstance(r.stop, Evicted) and r.stop.write_op < 0 for r in self.residencies)

    @property
    def step_ns(self) -> int:
        """The step's predicted time, with that of its remaps."""
        return self.predicted["duration_ns"] + self.predicted.get("remap_ns", 0)

    def to_json(self) -> str:
        """The plan as JSON text with a schema version; `from_json` reads it back equal."""
        document = {
            "schema": "ooc.plan",
            "schema_version": self._schema_version(),
            "trace_fingerprint": self.trace_fingerprint,
            "policy": self.policy,
            "parameters": dict(self.parameters),
            "machine": _machine_to_json(self.machine),
            "predicted": dict(self.predicted),
            "bounds": dict(self.bounds),
            "residencies": [
                {
                    "variable": r.variable,
                    "start": _act_to_json(r.start),
                    "stop": _act_to_json(r.stop),
                    "chunks": [list(run) for run in r.chunks],
                }
                for r in self.residencies
            ],
            **({"scratch": [_scratch_to_json(s) for s in self.scratch]} if self.scratch else {}),
            **(
                {"border_copies": [[c.source, c.target, c.num_chunks] for c in self.border_copies]}
                if self.border_copies
                else {}
            ),
            **({"notes": list(self.notes)} if self.notes else {}),
        }
        return json.dumps(document, separators=(",", ":"))

    def _schema_version(self) -> int:
        if self.border_copies:
            return PLAN_SCHEMA_VERSION
        if self.writes_over_border:
            return _BORDER_SCHEMA_VERSION
        return _RERUN_SCHEMA_VERSION if self.recomputes else _BASE_SCHEMA_VERSION

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back. Raises `PlanError` naming what is wrong with the text."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:  # nested too deeply, a number too long
            raise PlanError(f"not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("schema") != "ooc.plan":
            raise PlanError("not an ooc plan: its 'schema' is not 'ooc.plan'")
        if document.get("schema_version") not in range(_BASE_SCHEMA_VERSION, PLAN_SCHEMA_VERSION + 1):
            raise PlanError(
                f"plan has schema version {document.get('schema_version')!r}; "
                f"this version of ooc reads {_BASE_SCHEMA_VERSION} to {PLAN_SCHEMA_VERSION}. Plan the trace again."
            )
        try:
            return cls(
                trace_fingerprint=document["trace_fingerprint"],
                policy=document["policy"],
                parameters=document["parameters"],
                machine=Machine(**document["machine"]),
                predicted=document["predicted"],
                bounds=document["bounds"],
                residencies=tuple(
                    Residency(
                        variable=r["variable"],
                        start=_start_from_json(*r["start"]),
                        stop=_STOPS[r["stop"][0]](*r["stop"][1:]),
                        chunks=tuple((first, count) for first, count in r["chunks"]),
                    )
                    for r in document["residencies"]
                ),
                scratch=tuple(
                    Scratch(
                        before_op=s["before_op"],
                        chunks=tuple((first, count) for first, count in s["chunks"]),
                    )
                    for s in document.get("scratch", ())
                ),
                border_copies=tuple(
                    BorderCopy(source=source, target=target, num_chunks=count)
                    for source, target, count in document.get("border_copies", ())
                ),
                notes=tuple(str(note) for note in document.get("notes", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a complete plan: {type(error).__name__}: {error}") from error


def occupied_ticks(residency: Residency, trace: Trace) -> tuple[int, int]:
    """`[start, stop)` in ticks during which the residency holds its chunks."""
    v = trace.variables[residency.variable]
    match residency.start:
        case Born():
            assert v.birth_tick is not None
            start = v.birth_tick
        case Loaded(before_op=op) | Recomputed(before_op=op):
            start = trace.ops[op].start_tick
        case Kept():
            start = 0
    match residency.stop:
        case Dies():
            assert v.death_tick is not None
            stop = v.death_tick
        case Evicted(release_op=op):
            stop = trace.ops[op].start_tick if op < len(trace.ops) else trace.num_ticks
        case Dropped(after_op=op) | Discarded(after_op=op):
            stop = trace.ops[op].stop_tick
        case Kept():
            stop = trace.num_ticks
    return start, stop


def _act_to_json(act: Start | Stop) -> list[Any]:
    match act:
        case Loaded(before_op=op):
            return ["loaded", op]
        case Evicted(write_op=write, release_op=release):
            return ["evicted", write, release]
        case Recomputed(before_op=op, ops=ops):
            return ["recomputed", op, list(ops)]
        case Dropped(after_op=op):
            return ["dropped", op]
        case Discarded(after_op=op):
            return ["discarded", op]
        case Born() | Dies() | Kept():
            return [type(act).__name__.lower()]


def _start_from_json(kind: str, *where: Any) -> Start:
    if kind == "recomputed":
        before_op, ops = where
        return Recomputed(before_op, tuple(ops))
    return _STARTS[kind](*where)


def _machine_to_json(machine: Machine) -> dict[str, Any]:
    """Without the rate of copies where that is the default: an older ooc does not know it."""
    found = asdict(machine)
    if machine.copy_bytes_per_s == DEFAULT_COPY_BYTES_PER_S:
        del found["copy_bytes_per_s"]
    return found


def _scratch_to_json(scratch: Scratch) -> dict[str, Any]:
    return {"before_op": scratch.before_op, "chunks": [list(run) for run in scratch.chunks]}
