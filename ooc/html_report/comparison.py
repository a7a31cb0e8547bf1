"""Two documents side by side: what changed from the first to the second, and why, then all figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ooc.html_report.facts import ReportFacts
from ooc.html_report.metrics import Metrics
from ooc.html_report.tables import SYMBOLS, table
from ooc.html_report.time_changes import PHRASES, by_rows, changed_categories, reasons
from ooc.reporting.documents import Document
from ooc.units import format_duration, format_nbytes

SAME = 0.03
"""Steps whose times differ by a smaller share took the same time: runs of one program differ by as much."""


def comparison(documents: Sequence[Document], facts: Sequence[ReportFacts]) -> str:
    one, other = (fact.metrics for fact in facts)
    rows = [row for row in (_compared(*line, one, other) for line in _COMPARED) if row is not None]
    verdicts = "<br>".join(
        f'<span class="verdict {f.verdict}">{SYMBOLS[f.verdict]} {escape(d.name)}</span>'
        for d, f in zip(documents, facts, strict=True)
    )
    head = ("", documents[0].name, documents[1].name, "change")
    note = ""
    traces = [document.trace for document in documents]
    if traces[0] is not None and traces[1] is not None:
        same = traces[0].fingerprint() == traces[1].fingerprint()
        note = (
            "Both run the same sequence of ops on the same variables."
            if same
            else "The two run different sequences of ops: compare their times with care."
        )
    lead = "".join(f"<p>{escape(text)}</p>" for text in leading_lines(documents, facts))
    return (
        f'<section class="comparison" id="comparison"><div class="lead">{lead}</div><p class="verdict">{verdicts}</p>'
        f'{table("Comparison", head, rows, "compared", cards=False)}<p class="quiet">{note}</p></section>'
    )


def leading_lines(documents: Sequence[Document], facts: Sequence[ReportFacts]) -> list[str]:
    """What changed, why, and what was different to begin with: a sentence each, the most important first."""
    name, (one, other) = documents[1].name, (fact.metrics for fact in facts)
    found = []
    if facts[0].verdict != facts[1].verdict and "no" in (facts[0].verdict, facts[1].verdict):
        fits = facts[0].verdict == "no"
        found.append(f"{documents[fits].name} fits, {documents[not fits].name} does not.")
    a, b = one.step_s, other.step_s
    if a and b:
        times = f"{format_duration(b)} a step instead of {format_duration(a)}"
        if abs(b / a - 1) < SAME:
            found.append(f"{name} takes as long as {documents[0].name}: {times}.")
        else:
            share = f"{abs(b / a - 1):.0%} {'more' if b > a else 'less'}"
            cause, details = _due_to(facts, b > a)
            found += [f"{name} takes {times} ({share}){cause}.", *details]
    different = [text for text in _causes(documents, one, other) if text]
    if different:
        found.append(f"Different: {'; '.join(different)}.")
    return found


def _due_to(facts: Sequence[ReportFacts], is_more: bool) -> tuple[str, list[str]]:
    """The categories of time that changed most, in the steps drawn, and what changed there: a sentence each."""
    before, after = ({share.name: share.ns for share in fact.time} for fact in facts)
    parts = changed_categories(before, after, is_more=is_more) if before and after else []
    if not parts:
        cause = by_rows(facts[0].metrics, facts[1].metrics)
        return (f": {cause}" if cause else ""), []
    more = "more" if is_more else "less"
    named = ", ".join(f"{format_duration(change / 1e9)} {more} {PHRASES[name]}" for change, name in parts)
    one, other = (fact.view for fact in facts)
    assert one is not None
    assert other is not None
    return f": in the steps drawn, {named}", reasons(one, other, [name for _, name in parts], is_more=is_more)


def _causes(documents: Sequence[Document], one: Metrics, other: Metrics) -> list[str]:
    """What the two were told, or did otherwise, that can explain their times."""

    def changed(what: str, a: float | None, b: float | None, show: Callable[[float], str], least: float = 0.0) -> str:
        if a is None or b is None or a == b or (a and abs(b / a - 1) < least):
            return ""
        return f"{what} {show(a)}, then {show(b)}"

    policies = [_policy(document) for document in documents]
    return [
        changed("budget", one.budget_nbytes, other.budget_nbytes, _nbytes),
        f"policy {policies[0]}, then {policies[1]}" if policies[0] != policies[1] and all(policies) else "",
        changed("needed in core", one.in_core_peak_nbytes, other.in_core_peak_nbytes, _nbytes, SAME),
        changed("ops in the step", one.num_ops, other.num_ops, "{:g}".format),
        changed("moved a step", one.moved_nbytes, other.moved_nbytes, _nbytes, SAME),
        changed("chunks mapped anew a step", one.num_remapped_chunks, other.num_remapped_chunks, "{:g}".format),
        changed("planned steps", _planned_share(one), _planned_share(other), "{:.0%}".format, SAME),
    ]


def _policy(document: Document) -> str:
    if document.run is not None:
        return str(document.run.get("policy", ""))
    return document.plan.policy if document.plan is not None else ""


def _planned_share(metrics: Metrics) -> float | None:
    return (metrics.num_planned_steps or 0) / metrics.num_steps if metrics.num_steps else None


def _compared(
    name: str, value: Callable[[Metrics], float | None], show: Callable[[float], str], one: Metrics, other: Metrics
) -> tuple[str, str, str, str] | None:
    a, b = value(one), value(other)
    if a is None and b is None:
        return None
    change = "" if a is None or b is None else "same" if a == b else f"{b / a - 1:+.1%}" if a else "new"
    return name, "-" if a is None else show(a), "-" if b is None else show(b), change


def _nbytes(value: float) -> str:
    return format_nbytes(int(value))


_COMPARED: tuple[tuple[str, Callable[[Metrics], float | None], Callable[[float], str]], ...] = (
    ("budget", lambda m: m.budget_nbytes, _nbytes),
    ("peak in the pool", lambda m: m.peak_nbytes, _nbytes),
    ("needed in core", lambda m: m.in_core_peak_nbytes, _nbytes),
    ("process peak", lambda m: m.process_peak_nbytes, _nbytes),
    ("time a step", lambda m: m.step_s, format_duration),
    ("as planned", lambda m: m.planned_s, format_duration),
    ("lower bound", lambda m: m.bound_s, format_duration),
    ("in ops", lambda m: m.compute_s, format_duration),
    ("stall", lambda m: m.stall_s, format_duration),
    ("computed again, as planned", lambda m: m.recompute_s, format_duration),
    ("loaded a step", lambda m: m.loaded_nbytes, _nbytes),
    ("evicted a step", lambda m: m.evicted_nbytes, _nbytes),
    ("dropped a step", lambda m: m.dropped_nbytes, _nbytes),
    ("copied within memory a step, as planned", lambda m: m.relocated_nbytes, _nbytes),
    ("chunks mapped anew a step", lambda m: m.num_remapped_chunks, lambda n: f"{n:g}"),
    ("faults served", lambda m: m.num_faults, lambda n: f"{n:g}"),
    ("steps", lambda m: m.num_steps, lambda n: f"{n:g}"),
    ("of them planned", lambda m: m.num_planned_steps, lambda n: f"{n:g}"),
    ("of them off plan", lambda m: m.num_off_plan_steps, lambda n: f"{n:g}"),
    ("ops in the step", lambda m: m.num_ops, lambda n: f"{n:g}"),
)
