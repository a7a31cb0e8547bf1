"""Reads the files that `ooc report` takes: reports of runs, traces, plans. Nothing in a file is trusted.

A plan alone does not know its ops; given together with its trace, the two become one document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ooc.reporting.report import REPORT_SCHEMA_VERSION
from ooc.reporting.step_view import Measured, Move, StepView, measured_view, simulated_view, traced_view
from ooc.telemetry.timeline import TIMELINE_SCHEMA_VERSION
from ooc.units import MIB, format_nbytes
from scheduler.plan import Plan, PlanError
from scheduler.trace import Trace, TraceError
from scheduler.verify import verify

MAX_DOCUMENT_NBYTES = 256 * MIB
"""A step of 65,536 ops (the most that is recorded) with its plan has some 40 MB as JSON; reading takes
about ten times a file's size in memory."""

_KNOWN = "Read are: reports of `ooc run --report`, traces of a step, and plans, all JSON."
_NUMBERS_OF_A_STEP = ("duration_s", "stall_s", "loaded_nbytes", "evicted_nbytes", "dropped_nbytes")
_COUNTS_OF_A_STEP = ("num_remapped_chunks", "num_faults")
_MODES = ("learning", "planned", "off_plan")

Kind = Literal["run", "trace", "plan"]


class BadDocument(ValueError):
    """Raised for a file of another kind, a damaged one, or one of a version that is not supported.

    Attributes:
        path: The file's name.
        reason: What is wrong, without the file's name.
    """

    def __init__(self, reason: str, *, path: str = "") -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}" if path else reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A run, a trace or a plan to report on.

    Attributes:
        name: Name of the file or files.
        run: The report of a run, checked; None for a trace or a plan.
        trace, plan: The step's; a run has them if it replayed a plan.
        measured: The times of the last planned step of a run.
    """

    name: str
    kind: Kind
    run: Mapping[str, Any] | None = None
    trace: Trace | None = None
    plan: Plan | None = None
    measured: Measured | None = None

    def view(self) -> StepView | None:
        """The step as measured, else as simulated, else as traced; None if there is no trace."""
        if self.trace is None:
            return None
        if self.plan is None:
            return traced_view(self.trace)
        if self.measured is None:
            return simulated_view(self.trace, self.plan)
        return measured_view(self.trace, self.plan, self.measured)

    def planned_view(self) -> StepView | None:
        """The step as the plan expected it; None without a plan and its trace."""
        if self.trace is None or self.plan is None:
            return None
        return simulated_view(self.trace, self.plan)


def read_documents(paths: Sequence[str | Path]) -> list[Document]:
    """Read files; a plan and the trace that it was made for become one document.

    Raises:
        BadDocument: A file cannot be read, is not one of ours, or contradicts itself or the others.
    """
    documents = [
        replace(document, name=name)
        for document, name in zip(map(read_document, paths), _told_apart(paths), strict=True)
    ]
    traces = {d.trace.fingerprint(): d for d in documents if d.kind == "trace" and d.trace is not None}
    used, found = set(), []
    for document in documents:
        partner = traces.get(document.plan.trace_fingerprint) if document.kind == "plan" and document.plan else None
        if partner is None:
            found.append(document)
            continue
        used.add(partner.name)
        _check_pair(document, partner)
        found.append(replace(document, name=f"{document.name} on {partner.name}", trace=partner.trace))
    return [document for document in found if document.kind != "trace" or document.name not in used]


def _told_apart(paths: Sequence[str | Path]) -> list[str]:
    """The files' names, with as many of their folders as it takes to tell them apart."""
    parts = [Path(path).absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{own[-1]} ({number})" for number, own in enumerate(parts, start=1)]  # the same file twice


def read_document(path: str | Path) -> Document:
    """Read one file. Raises `BadDocument`."""
    path = Path(path)
    try:
        return _parse(path.name, _text(path))
    except BadDocument as error:
        raise BadDocument(error.reason, path=str(path)) from error.__cause__


def parse_document(name: str, document: Mapping[str, Any]) -> Document:
    """Parse a document that is in memory already, such as `Session.report()`. Raises `BadDocument`."""
    return _parse(name, json.dumps(document))


def _text(path: Path) -> str:
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_DOCUMENT_NBYTES:
            raise BadDocument(
                f"has {format_nbytes(nbytes)}; up to {format_nbytes(MAX_DOCUMENT_NBYTES)} are read, far more than a "
                f"step of 65,536 ops takes. {_KNOWN}"
            )
        body = path.read_bytes()
    except OSError as error:
        raise BadDocument(f"cannot be read: {error.strerror or error}") from error
    if not body.strip():
        raise BadDocument(f"the file is empty. {_KNOWN}")
    if body[:1] == b"\x80" or body[:2] in (b"PK", b"\x1f\x8b"):
        raise BadDocument(f"a pickle or an archive, not JSON (for snapshots of memory: ooc fragmentation). {_KNOWN}")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument(f"not text: byte {error.start} is not UTF-8. {_KNOWN}") from error


def _parse(name: str, text: str) -> Document:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        what = "cut off" if error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg else "not JSON"
        raise BadDocument(f"{what} at line {error.lineno} of {text.count(chr(10)) + 1}: {error.msg}") from error
    except RecursionError as error:
        raise BadDocument("JSON nested too deeply") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    try:
        match schema:
            case "ooc.report":
                return _run(name, data)
            case "ooc.trace":
                return Document(name=name, kind="trace", trace=Trace.from_json(text))
            case "ooc.plan":
                return Document(name=name, kind="plan", plan=Plan.from_json(text))
    except (TraceError, PlanError) as error:
        raise BadDocument(str(error)) from error
    except (TypeError, AttributeError) as error:
        raise BadDocument(f"not a complete {schema}: {error}") from error
    if isinstance(data, dict) and "traceEvents" in data:
        raise BadDocument(f"a Chrome trace (for memory in it: ooc fragmentation). {_KNOWN}")
    raise BadDocument(f"its 'schema' is {schema!r}. {_KNOWN}")


def _check_pair(plan: Document, trace: Document) -> None:
    assert plan.plan is not None
    assert trace.trace is not None
    _verified(plan.plan, trace.trace, plan.name)


def _verified(plan: Plan, trace: Trace, name: str) -> Plan:
    """Verify a plan with the independent checker, since drawing relies on what it checks. Returns the plan."""
    if plan.trace_fingerprint != trace.fingerprint():
        raise BadDocument("the plan in it was made for another trace than the one beside it", path=name)
    try:
        verify(plan, trace)
    except (PlanError, IndexError) as error:
        raise BadDocument(f"the plan breaks a rule: {error}", path=name) from error
    return plan


# -- reports of runs


def _run(name: str, data: dict[str, Any]) -> Document:
    if data.get("schema_version") != REPORT_SCHEMA_VERSION:
        raise BadDocument(
            f"a report of schema version {data.get('schema_version')!r}; this version of ooc reads "
            f"{REPORT_SCHEMA_VERSION}. Run the script again, or use the ooc that wrote it."
        )
    for key in ("budget_nbytes", "chunk_nbytes", "peak_nbytes", "in_core_peak_nbytes"):
        _number(data, key, "the report")
    if not isinstance(data.get("policy"), str):
        raise BadDocument(f"not a complete report: 'policy' is {data.get('policy')!r}")
    steps = data.get("steps")
    if not isinstance(steps, list):
        raise BadDocument(f"not a complete report: 'steps' is a {type(steps).__name__}, not a list")
    for index, step in enumerate(steps):
        if not isinstance(step, dict) or step.get("mode") not in _MODES:
            raise BadDocument(f"steps[{index}] is not a step: its mode is not one of {', '.join(_MODES)}")
        for key in (*_NUMBERS_OF_A_STEP, *_COUNTS_OF_A_STEP):
            _number(step, key, f"steps[{index}]")
    timeline = data.get("timeline")
    if timeline is None:
        return Document(name=name, kind="run", run=data)
    trace, plan, measured = _timeline(timeline)
    run = {key: value for key, value in data.items() if key != "timeline"}
    return Document(name=name, kind="run", run=run, trace=trace, plan=plan, measured=measured)


def _timeline(data: Any) -> tuple[Trace, Plan, Measured]:
    if not isinstance(data, dict) or data.get("schema_version") != TIMELINE_SCHEMA_VERSION:
        version = data.get("schema_version") if isinstance(data, dict) else None
        raise BadDocument(
            f"its timeline has schema version {version!r}; this version of ooc reads {TIMELINE_SCHEMA_VERSION}"
        )
    trace = Trace.from_json(json.dumps(data.get("trace")))
    plan = _verified(Plan.from_json(json.dumps(data.get("plan"))), trace, "")
    starts = _integers(data, "op_start_ns", len(trace.ops))
    stops = _integers(data, "op_stop_ns", len(trace.ops))
    edges = [edge for pair in zip(starts, stops, strict=True) for edge in pair]
    if any(a > b for a, b in pairwise(edges)):
        raise BadDocument("timeline: an op stops before it starts, or starts before the one before it has stopped")
    clock = data.get("clock")
    if not isinstance(clock, dict):
        raise BadDocument(f"timeline: 'clock' is {clock!r}")
    return (
        trace,
        plan,
        Measured(
            step_index=int(_number(data, "step_index", "timeline")),
            unix_ns=int(_number(clock, "unix_ns", "timeline.clock")),
            duration_ns=max(int(_number(data, "duration_ns", "timeline")), *stops[-1:], 0),
            op_start_ns=starts,
            op_stop_ns=stops,
            moves=tuple(_moves(data.get("transfers"), trace)),
            stalls=tuple(_stalls(data.get("stalls"))),
            num_moves_lost=int(_number(data, "num_transfers_lost", "timeline")),
        ),
    )


def _moves(columns: Any, trace: Trace) -> list[Move]:
    if not isinstance(columns, dict) or not isinstance(columns.get("kind"), list):
        raise BadDocument("timeline: 'transfers' has no columns")
    kinds = columns["kind"]
    if any(kind not in ("load", "evict") for kind in kinds):
        raise BadDocument("timeline.transfers: a kind is neither 'load' nor 'evict'")
    names = ("variable", "nbytes", "submit_ns", "start_ns", "stop_ns")
    numbers = [_integers(columns, name, len(kinds)) for name in names]
    found = []
    for kind, variable, nbytes, issue_ns, start_ns, stop_ns in zip(kinds, *numbers, strict=True):
        if variable >= len(trace.variables) or start_ns > stop_ns:
            raise BadDocument(f"timeline.transfers: of unknown variable {variable}, or it stops before it starts")
        if variable >= 0:  # else the plan does not have it, and it cannot be named here
            found.append(
                Move(
                    kind=kind,
                    variable=variable,
                    residency=None,
                    nbytes=nbytes,
                    issue_ns=issue_ns,
                    start_ns=start_ns,
                    stop_ns=stop_ns,
                )
            )
    return found


def _stalls(columns: Any) -> list[tuple[int, int]]:
    if not isinstance(columns, dict) or not isinstance(columns.get("start_ns"), list):
        raise BadDocument("timeline: 'stalls' has no columns")
    count = len(columns["start_ns"])
    found = zip(_integers(columns, "start_ns", count), _integers(columns, "stop_ns", count), strict=True)
    return [(start, stop) for start, stop in found if start <= stop]


def _number(data: Mapping[str, Any], key: str, where: str) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 62:
        raise BadDocument(f"{where}: '{key}' is {value!r}, not a number that can be")
    return value


def _integers(data: Mapping[str, Any], key: str, length: int) -> tuple[int, ...]:
    values = data.get(key)
    if not isinstance(values, list) or len(values) != length or any(type(value) is not int for value in values):
        raise BadDocument(f"timeline: '{key}' is not a list of {length} integers")
    return tuple(values)
