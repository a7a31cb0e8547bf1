"""A document as the compact columns that the page's charts are drawn from."""

from __future__ import annotations

from typing import Any

from ooc.reporting.documents import Document
from ooc.reporting.step_view import StepView
from scheduler.plan import Residency

_MAX_STEPS_DRAWN = 5_000


def chart_data(document: Document, view: StepView | None, planned: StepView | None) -> dict[str, Any]:
    """JSON-able columns. Times in nanoseconds since the step's start, sizes in bytes."""
    plan = document.plan
    budget = plan.machine.budget_nbytes if plan is not None else None
    data: dict[str, Any] = {
        "name": document.name,
        "kind": document.kind,
        "budget": int(document.run["budget_nbytes"]) if document.run is not None else budget,
        "steps": _steps(document),
    }
    if view is None:
        return data
    names = _Names()
    spans = view.spans()
    stays = plan.residencies if plan is not None and view.plan is not None else None
    data |= {
        "source": view.source,
        "duration": view.duration_ns,
        "chunk": plan.machine.chunk_nbytes if plan is not None else None,
        "chunks": plan.machine.num_chunks if plan is not None else None,
        "ops": {
            "name": [names.add(op.name) for op in view.trace.ops],
            "where": [names.add(op.where) for op in view.trace.ops],
            "a": list(view.op_start_ns),
            "b": list(view.op_stop_ns),
            "pa": list(planned.op_start_ns) if planned is not None and view.source == "measured" else [],
            "pb": list(planned.op_stop_ns) if planned is not None and view.source == "measured" else [],
        },
        "vars": {
            "n": [variable.nbytes for variable in view.trace.variables],
            "kind": [names.add(variable.kind) for variable in view.trace.variables],
            "label": [names.add(variable.label) for variable in view.trace.variables],
        },
        "spans": {
            "v": [span.variable for span in spans],
            "a": [span.start_ns for span in spans],
            "b": [span.stop_ns for span in spans],
            "how": [_how(stays[span.residency], names) if stays is not None else -1 for span in spans],
            "c": [_flat(stays[span.residency]) if stays is not None else [] for span in spans],
        },
        "moves": {
            "k": "".join("l" if move.kind == "load" else "e" for move in view.moves),
            "v": [move.variable for move in view.moves],
            "a": [move.start_ns for move in view.moves],
            "b": [move.stop_ns for move in view.moves],
            "n": [move.nbytes for move in view.moves],
        },
        "waits": {
            "op": [wait.op for wait in view.waits],
            "a": [wait.start_ns for wait in view.waits],
            "b": [wait.stop_ns for wait in view.waits],
            "m": [wait.move for wait in view.waits],
        },
        "reruns": {
            "op": [rerun.op for rerun in view.reruns],
            "a": [rerun.start_ns for rerun in view.reruns],
            "b": [rerun.stop_ns for rerun in view.reruns],
        },
        "live": _curve(view.live_curve()),
        "resident": _curve(view.resident_curve()),
    }
    data["names"] = names.texts
    return data


class _Names:
    """Texts, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def add(self, text: object) -> int:
        text = str(text)
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]


def _how(stay: Residency, names: _Names) -> int:
    return names.add(f"{type(stay.start).__name__.lower()}, {type(stay.stop).__name__.lower()}")


def _flat(stay: Residency) -> list[int]:
    return [number for run in stay.chunks for number in run]


def _curve(points: list[tuple[int, int]]) -> dict[str, list[int]]:
    return {"t": [time for time, _ in points], "n": [nbytes for _, nbytes in points]}


def _steps(document: Document) -> dict[str, Any]:
    rows = document.run["steps"] if document.run is not None else []
    first = max(len(rows) - _MAX_STEPS_DRAWN, 0)
    rows = rows[first:]
    return {
        "first": first,
        "mode": "".join(row["mode"][0] for row in rows),
        "s": [round(row["duration_s"], 7) for row in rows],
        "stall": [round(row["stall_s"], 7) for row in rows],
        "moved": [row["loaded_nbytes"] + row["evicted_nbytes"] for row in rows],
    }
