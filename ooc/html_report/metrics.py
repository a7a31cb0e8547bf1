"""The numbers of a document: what reports show, and what two documents are compared by."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ooc.reporting.documents import Document
from ooc.reporting.step_view import StepView
from scheduler.cost.bounds import lower_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The numbers of a document that two documents are compared by; None where it does not know."""

    budget_nbytes: int | None = None
    peak_nbytes: int | None = None
    in_core_peak_nbytes: int | None = None
    process_peak_nbytes: int | None = None
    step_s: float | None = None
    planned_s: float | None = None
    planning_s: float | None = None
    learning_s: float | None = None
    bound_s: float | None = None
    compute_s: float | None = None
    stall_s: float | None = None
    recompute_s: float | None = None
    loaded_nbytes: int | None = None
    evicted_nbytes: int | None = None
    dropped_nbytes: int | None = None
    relocated_nbytes: int | None = None
    num_remapped_chunks: float | None = None
    num_faults: int | None = None
    num_steps: int | None = None
    num_planned_steps: int | None = None
    num_off_plan_steps: int | None = None
    num_ops: int | None = None

    @property
    def stall_fraction(self) -> float | None:
        """Share of the step in which ops waited for transfers."""
        return None if self.stall_s is None or not self.step_s else self.stall_s / self.step_s

    @property
    def moved_nbytes(self) -> int | None:
        """Bytes moved in and out per step."""
        if self.loaded_nbytes is None or self.evicted_nbytes is None:
            return None
        return self.loaded_nbytes + self.evicted_nbytes


def metrics_of(document: Document, view: StepView | None) -> Metrics:
    """The document's numbers; `view` is its step on a time axis, if it has one."""
    plan, trace = document.plan, document.trace
    predicted, bounds = (plan.predicted, plan.bounds) if plan is not None else ({}, {})
    num_steps = _num_steps(document.run)
    values: dict[str, Any] = {
        "in_core_peak_nbytes": trace.peak_nbytes() if trace is not None else None,
        "num_ops": len(trace.ops) if trace is not None else None,
        "planned_s": _seconds(predicted, "duration_ns", num_steps),
        "bound_s": _bound_s(view) / num_steps
        if view is not None and view.source == "measured"
        else _seconds(bounds, "duration_ns", num_steps),
        "recompute_s": _seconds(predicted, "recompute_ns", num_steps),
        "relocated_nbytes": _share(predicted, "relocated_nbytes", num_steps),
        "compute_s": view.compute_ns / 1e9 / num_steps if view is not None else None,
    }
    if document.run is not None:
        values |= _run_metrics(document.run)
    elif plan is not None:
        values |= {
            "budget_nbytes": plan.machine.budget_nbytes,
            "peak_nbytes": _integer(predicted, "peak_nbytes"),
            "step_s": _seconds(predicted, "duration_ns"),
            "stall_s": _seconds(predicted, "stall_ns"),
            **{
                name: _integer(predicted, name)
                for name in ("loaded_nbytes", "evicted_nbytes", "dropped_nbytes", "num_remapped_chunks")
            },
        }
    elif trace is not None:
        values |= {"step_s": trace.duration_ns / 1e9}
    return Metrics(**values)


def _bound_s(view: StepView) -> float:
    """The lower bound of a step whose ops take what they were measured to take.

    The plan's own bound rests on the times of steps on demand, which may be longer.
    """
    assert view.plan is not None
    times = zip(view.trace.ops, view.op_start_ns, view.op_stop_ns, strict=True)
    ops = tuple(replace(op, duration_ns=stop - start, host_ns=0) for op, start, stop in times)
    return lower_bounds(replace(view.trace, ops=ops), view.plan.machine)["duration_ns"] / 1e9


def _run_metrics(run: Mapping[str, Any]) -> dict[str, Any]:
    """Per step: medians of the planned steps, else of all that there are."""
    steps = run["steps"]
    planned = [step for step in steps if step["mode"] == "planned"]
    judged = planned or steps
    values: dict[str, Any] = {
        "budget_nbytes": int(run["budget_nbytes"]),
        "peak_nbytes": int(run["peak_nbytes"]),
        "in_core_peak_nbytes": int(run["in_core_peak_nbytes"]) or None,
        "process_peak_nbytes": _integer(run, "process_peak_nbytes"),
        "planning_s": run["planning_s"] if isinstance(run.get("planning_s"), float) else None,
        "learning_s": run["learning_s"] if isinstance(run.get("learning_s"), float) else None,
        "num_steps": len(steps),
        "num_planned_steps": len(planned),
        "num_off_plan_steps": sum(step["mode"] == "off_plan" for step in steps),
        "num_faults": sum(int(step["num_faults"]) for step in steps),
    }
    if judged:
        values["step_s"] = statistics.median(step["duration_s"] for step in judged)
        values["stall_s"] = statistics.median(step["stall_s"] for step in judged)
        values["num_remapped_chunks"] = statistics.median(step["num_remapped_chunks"] for step in judged)
        for name in ("loaded_nbytes", "evicted_nbytes", "dropped_nbytes"):
            values[name] = int(statistics.median(step[name] for step in judged))
    return values


def _integer(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _num_steps(run: Mapping[str, Any] | None) -> int:
    """Steps that a run's plan is for: more than one where optimizers take turns."""
    plan = run.get("plan") if run is not None else None
    return int(plan.get("num_steps", 1)) if plan else 1


def _share(values: Mapping[str, Any], key: str, num_steps: int) -> int | None:
    """Each step's share of what is told for so many."""
    value = _integer(values, key)
    return None if value is None else value // num_steps


def _seconds(values: Mapping[str, Any], key: str, num_steps: int = 1) -> float | None:
    """Seconds for each step of what is told for so many, in nanoseconds."""
    value = _integer(values, key)
    return None if value is None else value / 1e9 / num_steps
