"""What a reader wants to know first, as plain facts: the verdict, the figures, warnings, what costs most."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ooc.documents import Document
from ooc.step_view import StepView
from ooc.units import TIB, format_duration, format_nbytes, format_rate
from scheduler.bounds import lower_bounds
from scheduler.plan import Machine
from scheduler.trace import Trace

DAY_S = 86_400
DEFAULT_ENDURANCE_NBYTES = 100 * TIB
"""Bytes that a small consumer disk is rated for; cards are often rated for less. `--endurance` says another."""

_NUM_COSTLY = 10
_HIGH_STALL = 0.03
_SLOWER_THAN_PLANNED = 1.25
_TRACE_CHUNK_NBYTES = 64 << 10
_OUT_OF_MEMORY = ("BudgetTooSmall", "OutOfMemoryError", "MemoryError")

Verdict = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the first screen: what it is, its value with a unit, and a remark."""

    name: str
    value: str
    remark: str = ""
    is_bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CostlyVariable:
    """A variable and what it costs in one step."""

    index: int
    label: str
    kind: str
    nbytes: int
    moved_nbytes: int
    wait_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostlyOp:
    """An op and what it costs in one step. `planned_ns` is None where nothing was planned."""

    index: int
    name: str
    duration_ns: int
    wait_ns: int
    planned_ns: int | None


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
    bound_s: float | None = None
    compute_s: float | None = None
    stall_s: float | None = None
    recompute_s: float | None = None
    loaded_nbytes: int | None = None
    evicted_nbytes: int | None = None
    dropped_nbytes: int | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All of the first screen."""

    verdict: Verdict
    headline: str
    metrics: Metrics
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]
    variables: tuple[CostlyVariable, ...]
    ops: tuple[CostlyOp, ...]


def make_facts(
    document: Document,
    view: StepView | None,
    planned: StepView | None,
    endurance_nbytes: int = DEFAULT_ENDURANCE_NBYTES,
) -> Facts:
    """The facts of a document.

    Args:
        view: The document's step on a time axis, if it has one.
        planned: The same step as the plan expected it.
        endurance_nbytes: Bytes that the disk may be written with in its life.
    """
    metrics = _metrics(document, view)
    verdict, headline = _verdict(document, metrics)
    return Facts(
        verdict=verdict,
        headline=headline,
        metrics=metrics,
        figures=tuple(_figures(metrics, endurance_nbytes)),
        warnings=tuple(_warnings(document, metrics, view, planned)),
        variables=costly_variables(view) if view is not None else (),
        ops=costly_ops(view, planned) if view is not None else (),
    )


def costly_variables(view: StepView, count: int = _NUM_COSTLY) -> tuple[CostlyVariable, ...]:
    """Those that ops waited for longest; then those that move most; then those that fill memory longest."""
    waits = view.wait_by_variable()
    moved: dict[int, int] = {}
    for move in view.moves:
        moved[move.variable] = moved.get(move.variable, 0) + move.nbytes
    held: dict[int, int] = {}
    for span in view.spans():
        held[span.variable] = held.get(span.variable, 0) + span.stop_ns - span.start_ns
    variables = view.trace.variables

    def cost(index: int) -> tuple[int, int, int]:
        return waits.get(index, 0), moved.get(index, 0), variables[index].nbytes * held.get(index, 0)

    chosen = sorted(range(len(variables)), key=cost, reverse=True)[:count]
    return tuple(
        CostlyVariable(
            index=index,
            label=str(variables[index].label),
            kind=str(variables[index].kind),
            nbytes=variables[index].nbytes,
            moved_nbytes=moved.get(index, 0),
            wait_ns=waits.get(index, 0),
        )
        for index in chosen
    )


def costly_ops(view: StepView, planned: StepView | None, count: int = _NUM_COSTLY) -> tuple[CostlyOp, ...]:
    """Those that take longest, their wait for memory included."""
    waits: Counter[int] = Counter()
    for wait in view.waits:
        waits[wait.op] += wait.stop_ns - wait.start_ns
    found = [
        CostlyOp(
            index=index,
            name=f"{op.name} ({op.where})" if op.where else op.name,
            duration_ns=view.op_stop_ns[index] - view.op_start_ns[index],
            wait_ns=waits[index],
            planned_ns=None if planned is None else planned.op_stop_ns[index] - planned.op_start_ns[index],
        )
        for index, op in enumerate(view.trace.ops)
    ]
    return tuple(sorted(found, key=lambda op: (-op.duration_ns - op.wait_ns, op.index))[:count])


def _metrics(document: Document, view: StepView | None) -> Metrics:
    plan, trace = document.plan, document.trace
    predicted, bounds = (plan.predicted, plan.bounds) if plan is not None else ({}, {})
    values: dict[str, Any] = {
        "in_core_peak_nbytes": trace.peak_nbytes() if trace is not None else None,
        "num_ops": len(trace.ops) if trace is not None else None,
        "planned_s": _seconds(predicted, "duration_ns"),
        "bound_s": _bound_s(view)
        if view is not None and view.source == "measured"
        else _seconds(bounds, "duration_ns"),
        "recompute_s": _seconds(predicted, "recompute_ns"),
        "compute_s": view.compute_ns / 1e9 if view is not None else None,
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
    ops = tuple(replace(op, duration_ns=stop - start) for op, start, stop in times)
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


def _verdict(document: Document, metrics: Metrics) -> tuple[Verdict, str]:
    if document.run is not None:
        ended = document.run.get("ended_by")
        if isinstance(ended, Mapping) and ended.get("type") in _OUT_OF_MEMORY:
            return "no", f"Does not fit: {ended.get('message')}"
        assert metrics.peak_nbytes is not None
        assert metrics.budget_nbytes is not None
        if metrics.peak_nbytes > metrics.budget_nbytes:
            return "no", "Over budget: more was held than the budget allows. This is a fault of ooc; please report it"
        if not metrics.num_steps:
            return "unknown", "No step was finished"
        if isinstance(ended, Mapping):
            return "unknown", f"Fitted as far as it went; ended by {ended.get('type')}: {ended.get('message')}"
        return "yes", "Fits"
    if document.plan is not None:
        peak, budget = metrics.peak_nbytes, metrics.budget_nbytes
        assert budget is not None
        if peak is None:
            return "unknown", "The plan does not say what it holds"
        return ("yes", "Fits, by the plan") if peak <= budget else ("no", "Does not fit: the plan exceeds its budget")
    assert document.trace is not None
    smallest = _smallest_nbytes(document.trace)
    return "unknown", (
        f"A trace has no budget. In core it needs {format_nbytes(document.trace.peak_nbytes())}; out of core at least "
        f"{format_nbytes(smallest)}"
    )


def _smallest_nbytes(trace: Trace) -> int:
    plenty = Machine(chunk_nbytes=_TRACE_CHUNK_NBYTES, num_chunks=1 << 40)
    return lower_bounds(trace, plenty)["smallest_budget_nbytes"]


def _figures(m: Metrics, endurance_nbytes: int) -> list[Figure]:
    found = []
    if m.budget_nbytes is not None and m.peak_nbytes is not None:
        share = m.peak_nbytes / m.budget_nbytes if m.budget_nbytes else 0.0
        found.append(
            Figure(
                name="Peak against budget",
                value=f"{format_nbytes(m.peak_nbytes)} of {format_nbytes(m.budget_nbytes)}",
                remark=f"{share:.0%}",
                is_bad=m.peak_nbytes > m.budget_nbytes,
            )
        )
    if m.in_core_peak_nbytes is not None:
        share = m.budget_nbytes / m.in_core_peak_nbytes if m.budget_nbytes is not None else None
        remark = f"the budget is {share:.0%} of it" if share is not None else "all variables alive at once"
        found.append(Figure(name="In core it needs", value=format_nbytes(m.in_core_peak_nbytes), remark=remark))
    if m.process_peak_nbytes is not None:
        remark = "as the kernel counts it, interpreter and libraries included"
        found.append(Figure(name="The whole process", value=format_nbytes(m.process_peak_nbytes), remark=remark))
    if m.step_s is not None:
        bound = f"{m.step_s / m.bound_s:.2f} x the bound of {format_duration(m.bound_s)}" if m.bound_s else ""
        found.append(Figure(name="Time a step", value=format_duration(m.step_s), remark=bound))
    if m.stall_s is not None:
        fraction = m.stall_fraction or 0.0
        found.append(
            Figure(
                name="Stall a step",
                value=format_duration(m.stall_s),
                remark=f"{fraction:.1%} of the step",
                is_bad=fraction > _HIGH_STALL,
            )
        )
    if m.recompute_s:
        share = f"{m.recompute_s / m.step_s:.1%} of the step" if m.step_s else ""
        found.append(Figure(name="Computed again a step", value=format_duration(m.recompute_s), remark=share))
    if m.loaded_nbytes is not None and m.evicted_nbytes is not None and m.moved_nbytes is not None:
        remark = f"{format_nbytes(m.loaded_nbytes)} in, {format_nbytes(m.evicted_nbytes)} out"
        found.append(Figure(name="Moved a step", value=format_nbytes(m.moved_nbytes), remark=remark))
        found.extend(_wear(m, endurance_nbytes))
    if m.planning_s is not None:
        found.append(
            Figure(
                name="Planning took",
                value=format_duration(m.planning_s),
                remark="once, before the steps that it is for",
            )
        )
    return found


def _wear(m: Metrics, endurance_nbytes: int) -> list[Figure]:
    """What the store's writes do to a disk or card."""
    assert m.evicted_nbytes is not None
    written = Figure(name="Written a step", value=format_nbytes(m.evicted_nbytes), remark="to the store")
    if not m.step_s:
        return [written]
    per_day = m.evicted_nbytes / m.step_s * DAY_S
    rated = format_nbytes(endurance_nbytes)
    if not per_day:
        return [written, Figure(name="Written a day", value="0 B", remark="the store wears nothing out")]
    days = endurance_nbytes / per_day
    lasts = f"{days / 365:.1f} years" if days >= 365 else f"{days:.0f} days" if days >= 2 else f"{days * 24:.0f} hours"
    return [
        written,
        Figure(
            name="Written a day",
            value=format_nbytes(int(per_day)),
            remark=f"{rated} of rated writes last {lasts} of training",
            is_bad=days < 365,
        ),
    ]


def _warnings(document: Document, m: Metrics, view: StepView | None, planned: StepView | None) -> list[str]:
    found = []
    if document.run is not None:
        found += _run_warnings(document.run, m)
    if m.stall_fraction is not None and m.stall_fraction > _HIGH_STALL:
        found.append(
            f"Ops wait for transfers {m.stall_fraction:.1%} of the time. Options: a larger budget; a faster store; "
            "another policy."
        )
    if m.num_remapped_chunks:
        found.append(f"{m.num_remapped_chunks:g} chunks a step are mapped anew: each costs a system call and faults.")
    if view is not None and planned is not None and view.source == "measured":
        if view.compute_ns > _SLOWER_THAN_PLANNED * planned.compute_ns > 0:
            found.append(
                f"Ops took {view.compute_ns / planned.compute_ns:.2f} x as long as planned: the machine was busy, or "
                "the plan is of another one."
            )
        found += _link_warnings(view)
    if document.kind == "plan" and document.trace is None:
        found.append("A plan alone does not know its ops: give its trace, too, for memory, schedule and chunk map.")
    if document.measured is not None and document.measured.num_moves_lost:
        found.append(f"{document.measured.num_moves_lost} transfers of the step drawn below are not in the recording.")
    return found


def _run_warnings(run: Mapping[str, Any], m: Metrics) -> list[str]:
    found = []
    if m.num_steps and not m.num_planned_steps:
        found.append(
            "No step was planned: a sequence of ops must be seen twice first. All figures are of steps on demand."
        )
    elif m.num_off_plan_steps and m.num_steps and m.num_off_plan_steps > m.num_steps * 0.1:
        found.append(f"{m.num_off_plan_steps} of {m.num_steps} steps left their plan and went on on demand.")
    for why in ("unplannable", "not_played"):
        reasons = run.get(why)
        for key, value in reasons.items() if isinstance(reasons, Mapping) else ():
            found.append(f"Not planned: {value}" if why == "unplannable" else f"A plan could not be played: {key}")
    if m.num_faults:
        found.append(f"{m.num_faults} touches from outside the dispatcher were served one by one, slowly.")
    store = run.get("store")
    if isinstance(store, Mapping) and store.get("is_direct") is False:
        found.append("The store does without O_DIRECT: its transfers go through the page cache, which is slower.")
    return found


def _link_warnings(view: StepView) -> list[str]:
    """Links that were slower than the plan took them to be."""
    assert view.plan is not None
    machine, found = view.plan.machine, []
    for kind, planned_rate in (("load", machine.load_bytes_per_s), ("evict", machine.evict_bytes_per_s)):
        moves = [move for move in view.moves if move.kind == kind]
        busy_ns = _union_ns([(move.start_ns, move.stop_ns) for move in moves])
        rate = sum(move.nbytes for move in moves) / busy_ns * 1e9 if busy_ns else 0.0
        if rate and rate * 2 < planned_rate:
            found.append(
                f"{'Loads' if kind == 'load' else 'Evictions'} ran at {format_rate(rate)}; the plan took "
                f"{format_rate(planned_rate)}."
            )
    return found


def _union_ns(intervals: list[tuple[int, int]]) -> int:
    total, end = 0, None
    for start, stop in sorted(intervals):
        begin = start if end is None else max(start, end)
        total += max(stop - begin, 0)
        end = stop if end is None else max(end, stop)
    return total


def _integer(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(values: Mapping[str, Any], key: str) -> float | None:
    value = _integer(values, key)
    return None if value is None else value / 1e9
