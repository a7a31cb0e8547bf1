"""What a reader should be warned of, in sentences that say what can be done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ooc.html_report.metrics import Metrics
from ooc.reporting.documents import Document
from ooc.reporting.step_view import StepView
from ooc.units import format_rate

HIGH_STALL = 0.03
"""Share of a step from which waiting is worth a word: the project's own target for stalls."""

_SLOWER_THAN_PLANNED = 1.25


def warnings_of(document: Document, m: Metrics, view: StepView | None, planned: StepView | None) -> list[str]:
    """Warnings of a document, beyond those of its figures (`facts.py`).

    Args:
        view, planned: Its step as it went and as it was planned.
    """
    found = []
    if document.run is not None:
        found += _run_warnings(document.run, m)
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
    if isinstance(ended := run.get("ended_by"), Mapping):
        steps = f"the {m.num_steps} steps" if m.num_steps != 1 else "the one step"
        until = f"all figures are of {steps} that ended before" if m.num_steps else "no step ended before"
        found.append(f"The run was ended by {ended.get('type')}: {until}.")
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
    if past := run.get("past_budgets"):
        times = "once" if len(past) == 1 else f"{len(past)} times"
        found.append(
            f"The budget was changed {times}: it and the peak are of the last one, other figures of all steps."
        )
    store = run.get("store")
    if isinstance(store, Mapping) and store.get("is_direct") is False:
        found.append("The store does without O_DIRECT: its transfers go through the page cache, which is slower.")
    return found


def _link_warnings(view: StepView) -> list[str]:
    """Links that were slower than the plan took them to be."""
    assert view.plan is not None
    machine, found = view.plan.machine, []
    for kind, planned_rate in (("load", machine.load_bytes_per_s), ("evict", machine.evict_bytes_per_s)):
        rate = link_rate(view, kind)
        if rate and rate * 2 < planned_rate:
            found.append(
                f"{'Loads' if kind == 'load' else 'Evictions'} ran at {format_rate(rate)}; the plan took "
                f"{format_rate(planned_rate)}."
            )
    return found


def link_rate(view: StepView, kind: str) -> float:
    """Bytes per second of transfers of a kind ("load", "evict") while any was under way; 0: there is none."""
    moves = [move for move in view.moves if move.kind == kind]
    busy_ns = _union_ns([(move.start_ns, move.stop_ns) for move in moves])
    return sum(move.nbytes for move in moves) / busy_ns * 1e9 if busy_ns else 0.0


def _union_ns(intervals: list[tuple[int, int]]) -> int:
    total, end = 0, None
    for start, stop in sorted(intervals):
        begin = start if end is None else max(start, end)
        total += max(stop - begin, 0)
        end = stop if end is None else max(end, stop)
    return total
