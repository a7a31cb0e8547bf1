"""What a reader wants to know first, as plain facts: the verdict, the figures, warnings, what costs most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ooc.html_report.metrics import Metrics, metrics_of
from ooc.html_report.time_shares import TimeShare, time_shares
from ooc.html_report.warnings import HIGH_STALL, warnings_of
from ooc.reporting.documents import Document
from ooc.reporting.step_view import StepView
from ooc.units import TIB, format_duration, format_nbytes
from scheduler.cost.bounds import lower_bounds
from scheduler.plan import Machine
from scheduler.trace import Trace

DAY_S = 86_400
DEFAULT_ENDURANCE_NBYTES = 100 * TIB
"""Bytes that a small consumer disk is rated for; cards are often rated for less. `--endurance` says another."""

_NUM_COSTLY = 10
_TRACE_CHUNK_NBYTES = 64 << 10
_OUT_OF_MEMORY = ("BudgetTooSmall", "OutOfMemoryError", "MemoryError")

Verdict = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the first screen: what it is, its value with a unit, and a remark.

    Attributes:
        warning: What is wrong with it and what can be done; empty: nothing. A figure is marked if, and only if, its
            warning is among the page's.
    """

    name: str
    value: str
    remark: str = ""
    warning: str = ""


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
class ReportFacts:
    """All of the first screen, and the step that it is of."""

    verdict: Verdict
    headline: str
    metrics: Metrics
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]
    time: tuple[TimeShare, ...]
    variables: tuple[CostlyVariable, ...]
    ops: tuple[CostlyOp, ...]
    view: StepView | None


def make_facts(
    document: Document,
    view: StepView | None,
    planned: StepView | None,
    endurance_nbytes: int = DEFAULT_ENDURANCE_NBYTES,
) -> ReportFacts:
    """The facts of a document.

    Args:
        view: The document's step on a time axis, if it has one.
        planned: The same step as the plan expected it.
        endurance_nbytes: Bytes that the disk may be written with in its life.
    """
    metrics = metrics_of(document, view)
    verdict, headline = _verdict(document, metrics)
    figures = tuple(_figures(metrics, endurance_nbytes))
    warnings = [figure.warning for figure in figures if figure.warning]
    return ReportFacts(
        verdict=verdict,
        headline=headline,
        metrics=metrics,
        figures=figures,
        warnings=(*warnings, *warnings_of(document, metrics, view, planned)),
        time=time_shares(view) if view is not None else (),
        variables=costly_variables(view) if view is not None else (),
        ops=costly_ops(view, planned) if view is not None else (),
        view=view,
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
    return [*_memory_figures(m), *_time_figures(m), *_traffic_figures(m, endurance_nbytes)]


def _memory_figures(m: Metrics) -> Iterator[Figure]:
    if m.budget_nbytes is not None and m.peak_nbytes is not None:
        share = m.peak_nbytes / m.budget_nbytes if m.budget_nbytes else 0.0
        over = (
            f"{format_nbytes(m.peak_nbytes - m.budget_nbytes)} more than the budget were held at once: a plan for "
            "another budget, or a fault of ooc."
        )
        yield Figure(
            name="Peak against budget",
            value=f"{format_nbytes(m.peak_nbytes)} of {format_nbytes(m.budget_nbytes)}",
            remark=f"{share:.0%}",
            warning=over if m.peak_nbytes > m.budget_nbytes else "",
        )
    if m.in_core_peak_nbytes is not None:
        remark = "all variables alive at once"
        if m.budget_nbytes is not None:
            remark = f"the budget is {m.budget_nbytes / m.in_core_peak_nbytes:.0%} of it"
        yield Figure(name="In core it needs", value=format_nbytes(m.in_core_peak_nbytes), remark=remark)
    if m.process_peak_nbytes is not None:
        remark = "as the kernel counts it, interpreter and libraries included"
        yield Figure(name="The whole process", value=format_nbytes(m.process_peak_nbytes), remark=remark)


def _time_figures(m: Metrics) -> Iterator[Figure]:
    if m.step_s is not None:
        yield Figure(name="Time a step", value=format_duration(m.step_s), remark=_against_bound(m.step_s, m.bound_s))
    if m.stall_s is not None:
        fraction = m.stall_fraction or 0.0
        remark = f"{fraction:.1%} of the step"
        slow = ""
        if fraction > HIGH_STALL:
            options = "Options: a larger budget; a faster store; another policy."
            slow = f"Ops wait for transfers {fraction:.1%} of the time. {options}"
        yield Figure(name="Stall a step", value=format_duration(m.stall_s), remark=remark, warning=slow)
    if m.recompute_s:
        remark = f"{m.recompute_s / m.step_s:.1%} of the step" if m.step_s else ""
        yield Figure(name="Computed again a step", value=format_duration(m.recompute_s), remark=remark)
    if m.planning_s is not None:
        remark = "in all; other plans were made beside the steps"
        yield Figure(name="Waited for planning", value=format_duration(m.planning_s), remark=remark)
    if m.learning_s is not None:
        remark = "in all, between steps; waiting for plans is a part of it"
        yield Figure(name="Spent on comparing steps", value=format_duration(m.learning_s), remark=remark)


def _against_bound(step_s: float, bound_s: float | None) -> str:
    if not bound_s:
        return ""
    bound = f"{step_s / bound_s:.2f} x the bound of {format_duration(bound_s)}"
    return bound if step_s >= bound_s else f"{bound} (for the last step's ops, with the store as fast as when planned)"


def _traffic_figures(m: Metrics, endurance_nbytes: int) -> Iterator[Figure]:
    if m.loaded_nbytes is not None and m.evicted_nbytes is not None and m.moved_nbytes is not None:
        remark = f"{format_nbytes(m.loaded_nbytes)} in, {format_nbytes(m.evicted_nbytes)} out"
        yield Figure(name="Moved a step", value=format_nbytes(m.moved_nbytes), remark=remark)
        yield from _wear(m, endurance_nbytes)


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
    wears = (
        f"A disk rated for {rated} of writes lasts {lasts} of such training. Options: a larger budget, so that less is "
        "written; a store on another disk; --endurance with what yours is rated for."
    )
    return [
        written,
        Figure(
            name="Written a day",
            value=format_nbytes(int(per_day)),
            remark=f"{rated} of rated writes last {lasts} of training",
            warning=wears if days < 365 else "",
        ),
    ]
