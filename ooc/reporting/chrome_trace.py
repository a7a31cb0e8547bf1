"""Exports simulated and measured steps as timelines for Perfetto (Chrome Trace JSON).

Each step is a process of its own with tracks for compute, waits, loads, evictions and the disk,
counters for bytes, and an arrow from each transfer to the op that waited for it. A run gives two
steps: as measured and as planned. Measured steps are on torch.profiler's clock: its file has times
since `baseTimeNanoseconds`, and so has this one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ooc.output_files import write_output
from ooc.reporting.documents import MAX_DOCUMENT_NBYTES, BadDocument, Document
from ooc.reporting.report import versions
from ooc.reporting.step_view import StepView
from ooc.units import format_nbytes

_FIRST_PID = 1 << 22
"""Above the kernel's largest process id (PID_MAX_LIMIT), so never one of the profiler's."""

_QUARTER_S = 7_889_238
"""torch.profiler's times count from the last whole multiple of this many seconds since 1970 (libkineto)."""

_OPS, _WAITS, _DISK = 1, 2, 3
_FIRST_LANE = 10
"""Tracks by thread id. Slices on one track must nest, so transfers that overlap go to further lanes."""

_ROUNDING_NS = 2
"""What a start may lose on its way: half a nanosecond as a double of microseconds since the base, and up to one more
when Perfetto cuts it off to whole nanoseconds."""

_Lane = tuple[str, int]


def write_chrome_trace(path: Path, documents: Sequence[Document], *, beside: str | Path | None = None) -> None:
    """Write the steps of `documents` to `path`.

    Args:
        beside: A file of torch.profiler's `export_chrome_trace`, plain or gzip, to put them into: the
            result has both.

    Raises:
        BadDocument: A document has no step to draw, or `beside` is not such a file.
        OSError: The file cannot be written.
    """
    host = _read_profile(Path(beside)) if beside is not None else None
    trace = chrome_trace(documents, base_ns=host["baseTimeNanoseconds"] if host is not None else None)
    if host is not None:
        host["traceEvents"] += trace["traceEvents"]
        trace = host
    write_output(path, json.dumps(trace, separators=(",", ":")))


def chrome_trace(documents: Sequence[Document], *, base_ns: int | None = None) -> dict[str, Any]:
    """The steps of `documents` as one Chrome trace.

    Args:
        base_ns: The moment since 1970 that times count from; the profiler's, if not given.

    Raises:
        BadDocument: A document has no step to draw.
    """
    views: list[tuple[str, StepView]] = []
    for document in documents:
        view, planned = document.view(), document.planned_view()
        if view is None:
            raise BadDocument(_why_empty(document), path=document.name)
        views.append((f"{document.name}, {view.source}", view))
        if planned is not None and view.source == "measured":
            views.append((f"{document.name}, as planned", planned))
    wall_ns = next((view.unix_ns for _, view in views if view.unix_ns is not None), None)
    if base_ns is None:
        base_ns = profiler_base_ns(wall_ns) if wall_ns is not None else 0
    events: list[dict[str, Any]] = []
    for number, (name, view) in enumerate(views):
        start_ns = view.unix_ns if view.unix_ns is not None else wall_ns
        # Transfers may begin before their step; times of a simulation start at 0 with the first of them.
        early_ns = -min((move.start_ns for move in view.moves), default=0)
        offset_ns = start_ns - base_ns if start_ns is not None else max(early_ns, 0)
        events.extend(_step_events(name, view, pid=_FIRST_PID + number, offset_ns=offset_ns, order=number))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "otherData": versions(),
        "traceEvents": events,
    }


def profiler_base_ns(unix_ns: int) -> int:
    """The moment that torch.profiler's times count from, in a process that runs at `unix_ns`."""
    seconds = unix_ns // 10**9
    return (seconds - seconds % _QUARTER_S) * 10**9


def _why_empty(document: Document) -> str:
    if document.kind == "plan":
        return "a plan alone does not know its ops. Options: give its trace, too"
    return (
        "there is no timeline in this report: no step was played from a plan, or it was written without --report. "
        "Options: more steps (a sequence of ops is planned when it was seen twice)"
    )


def _step_events(name: str, view: StepView, *, pid: int, offset_ns: int, order: int) -> Iterator[dict[str, Any]]:
    def at(time_ns: int) -> float:
        return (offset_ns + time_ns) / 1000

    yield _meta("process_name", pid, 0, name=f"ooc: {name}")
    yield _meta("process_sort_index", pid, 0, sort_index=order - 100)
    lanes = _lanes(view)
    tids = {lane: _FIRST_LANE + number for number, lane in enumerate(sorted(set(lanes)))}
    yield _meta("thread_name", pid, _OPS, name="compute")
    yield _meta("thread_name", pid, _WAITS, name="waits")
    yield _meta("thread_name", pid, _DISK, name="disk")
    for (kind, lane), tid in tids.items():
        title = "loads" if kind == "load" else "evictions"
        yield _meta("thread_name", pid, tid, name=title if lane == 0 else f"{title} {lane + 1}")
    yield from _compute_slices(view, pid, at)
    yield from _move_slices(view, [tids[lane] for lane in lanes], pid, at)
    yield from _flows(view, [tids[lane] for lane in lanes], pid, at)
    yield from _counter("live", pid, ((at(time), n) for time, n in view.live_curve()))
    yield from _counter("resident", pid, ((at(time), n) for time, n in view.resident_curve()))
    if view.plan is not None:
        budget = view.plan.machine.budget_nbytes
        yield from _counter("budget", pid, [(at(0), budget), (at(view.duration_ns), budget)])
        yield from _counter("in flight", pid, ((at(time), n) for time, n in _in_flight(view)))


def _compute_slices(view: StepView, pid: int, at: Callable[[int], float]) -> Iterator[dict[str, Any]]:
    """Slices of ops, re-runs and waits."""
    for index, op in enumerate(view.trace.ops):
        start_ns, stop_ns = view.op_start_ns[index], view.op_stop_ns[index]
        arguments = {
            "op": index,
            "where": op.where,
            "bytes": sum(view.trace.variables[u.variable].nbytes for u in op.uses),
        }
        yield _slice(op.name, "op", pid, _OPS, at(start_ns), stop_ns - start_ns, arguments)
    for rerun in view.reruns:
        length_ns = rerun.stop_ns - rerun.start_ns
        yield _slice("run again", "recompute", pid, _OPS, at(rerun.start_ns), length_ns, {"before op": rerun.op})
    if view.relocation is not None:
        start_ns, stop_ns = view.relocation
        yield _slice("moved within memory", "relocate", pid, _OPS, at(start_ns), stop_ns - start_ns, {})
    for wait in view.waits:
        move = view.moves[wait.move]
        asked = {"op": wait.op, "variable": move.variable}
        length_ns = wait.stop_ns - wait.start_ns
        yield _slice(f"wait for {move.kind}", "wait", pid, _WAITS, at(wait.start_ns), length_ns, asked)


def _move_slices(view: StepView, tids: Sequence[int], pid: int, at: Callable[[int], float]) -> Iterator[dict[str, Any]]:
    """Slices of transfers on their tracks, and of the disk's activity."""
    for move, tid in zip(view.moves, tids, strict=True):
        variable = view.trace.variables[move.variable]
        title = f"{move.kind} {variable.label or variable.kind} ({format_nbytes(move.nbytes)})"
        about: dict[str, Any] = {"variable": move.variable, "bytes": move.nbytes, "asked for (us)": at(move.issue_ns)}
        yield _slice(title, move.kind, pid, tid, at(move.start_ns), move.stop_ns - move.start_ns, about)
    for start_ns, stop_ns, reads, writes in _busy(view):
        title = "read and write" if reads and writes else "read" if reads else "write"
        doing = {"reads": reads, "writes": writes}
        yield _slice(title, "disk", pid, _DISK, at(start_ns), stop_ns - start_ns, doing)


def _flows(view: StepView, tids: Sequence[int], pid: int, at: Callable[[int], float]) -> Iterator[dict[str, Any]]:
    """An arrow from each transfer that an op waited for to that op.

    There is none where the op waited for the same transfer of the step before: the one drawn comes after the op.
    """
    for number, wait in enumerate(view.waits):
        move = view.moves[wait.move]
        if move.start_ns > view.op_start_ns[wait.op]:
            continue
        common = {"name": f"op waits for {move.kind}", "cat": "ooc_wait", "id": (pid << 24) + number, "pid": pid}
        inside = at(min(move.start_ns + (move.stop_ns - move.start_ns) // 2, view.op_start_ns[wait.op]))
        yield {**common, "ph": "s", "tid": tids[wait.move], "ts": inside}
        yield {**common, "ph": "f", "bp": "e", "tid": _OPS, "ts": at(view.op_start_ns[wait.op])}


def _lanes(view: StepView) -> list[_Lane]:
    """The kind and lane of each transfer: those in one lane do not overlap."""
    free: dict[str, list[int]] = {"load": [], "evict": []}
    found: list[_Lane] = []
    for move in view.moves:
        ends = free[move.kind]
        lane = next((i for i, end in enumerate(ends) if end <= move.start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = move.stop_ns
        found.append((move.kind, lane))
    return found


def _edges(view: StepView) -> list[tuple[int, int, int, int]]:
    """`(time, change of reads, of writes, of bytes)` at each start and stop of a transfer."""
    found = []
    for move in view.moves:
        load, evict = int(move.kind == "load"), int(move.kind == "evict")
        found.append((move.start_ns, load, evict, move.nbytes))
        found.append((move.stop_ns, -load, -evict, -move.nbytes))
    return sorted(found)


def _busy(view: StepView) -> Iterator[tuple[int, int, int, int]]:
    """Intervals in which the disk does the same thing: `(start, stop, transfers in, transfers out)`."""
    reads = writes = 0
    since = 0
    for time_ns, more_reads, more_writes, _ in _edges(view):
        if (reads or writes) and time_ns > since:
            yield since, time_ns, reads, writes
        reads, writes, since = reads + more_reads, writes + more_writes, time_ns


def _in_flight(view: StepView) -> Iterator[tuple[int, int]]:
    total = 0
    for time_ns, _, _, change in _edges(view):
        total += change
        yield time_ns, total


def _meta(what: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _slice(
    name: str, category: str, pid: int, tid: int, ts: float, length_ns: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """A slice that ends before the next on its track starts, in Perfetto's rounding too: it drops slices that cross."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": max(length_ns - _ROUNDING_NS, 0) / 1000,
        "args": arguments,
    }


def _counter(name: str, pid: int, points: Iterable[tuple[float, int]]) -> Iterator[dict[str, Any]]:
    """Viewers show the series' name behind the counter's: "live bytes"."""
    for ts, value in points:
        yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": {"bytes": value}}


def _read_profile(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as raw:
            is_gzip = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if is_gzip else open(path, "rb") as file:
            body = file.read(MAX_DOCUMENT_NBYTES + 1)
        if len(body) > MAX_DOCUMENT_NBYTES:
            raise BadDocument(f"more than {format_nbytes(MAX_DOCUMENT_NBYTES)}: record fewer steps", path=str(path))
        data = json.loads(body)
    except (OSError, EOFError) as error:
        raise BadDocument(f"cannot be read: {error}", path=str(path)) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadDocument):
            raise
        raise BadDocument(f"not JSON: {error}", path=str(path)) from error
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise BadDocument("not a trace that torch.profiler wrote: it has no 'traceEvents'", path=str(path))
    if type(data.get("baseTimeNanoseconds")) is not int:
        raise BadDocument(
            "it does not say what its times count from ('baseTimeNanoseconds'), so it cannot be laid beside another",
            path=str(path),
        )
    return data
