"""One self-contained HTML page from one document or two: no network, no library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ooc.html_report.charts import chart_data
from ooc.html_report.comparison import comparison
from ooc.html_report.facts import DEFAULT_ENDURANCE_NBYTES, ReportFacts, make_facts
from ooc.html_report.tables import SYMBOLS, table
from ooc.reporting.documents import Document
from ooc.reporting.report import versions
from ooc.units import format_duration, format_nbytes

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("chart.js", "page.js")

_CHARTS = (
    ("steps", "Steps", "One bar a step; the dark part is stall. Colour is the mode: learning, planned, off plan."),
    ("memory", "Memory over the step", "Point at a moment to see what is resident then; drag to zoom."),
    ("schedule", "Schedule", "What runs when: ops, waits for memory, loads, evictions."),
    (
        "chunks",
        "Chunk map",
        "Which variable holds which chunk when; point at a stay to see who else takes turns there.",
    ),
    ("drift", "Plan against reality", "How far behind the plan each op started (line), and how much longer it took."),
)


def make_page(documents: Sequence[Document], *, endurance_nbytes: int = DEFAULT_ENDURANCE_NBYTES) -> str:
    """The page's HTML.

    Args:
        documents: One, or two to compare; the first is drawn first.
        endurance_nbytes: Bytes that the store's disk may be written with in its life.

    Raises:
        ValueError: Not one or two documents.
    """
    if not 1 <= len(documents) <= 2:
        raise ValueError(f"{len(documents)} documents: a page shows one, or compares two")
    facts, data = [], []
    for document in documents:
        view, planned = document.view(), document.planned_view()
        facts.append(make_facts(document, view, planned, endurance_nbytes))
        data.append(chart_data(document, view, planned))
    title = " against ".join(document.name for document in documents)
    sections = [comparison(documents, facts)] if len(documents) == 2 else []
    sections += [
        _summary(document, fact, is_one_of_two=len(documents) == 2)
        for document, fact in zip(documents, facts, strict=True)
    ]
    sections.append(_charts(documents))
    footer = "; ".join(f"{name} {text}" for name, text in versions().items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>ooc report: {escape(title)}</title>\n"
        f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n<header><h1>{escape(title)}</h1></header>\n<main>\n"
        + "\n".join(sections)
        + f"\n</main>\n<footer>{escape(footer)}</footer>\n"
        f'<script type="application/json" id="data">{_embedded(data)}</script>\n'
        f"<script>\n{_script()}</script>\n</body>\n</html>\n"
    )


def _script() -> str:
    """The page's script: its files one after the other, in a scope of their own."""
    return '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "})();\n"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="ascii")


def _embedded(data: Any) -> str:
    """JSON that no text in it can end the script element with."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# -- the first screen


def _summary(document: Document, facts: ReportFacts, *, is_one_of_two: bool) -> str:
    tiles = "".join(
        f'<div class="tile{" bad" if f.warning else ""}"><div class="name">{escape(f.name)}</div>'
        f'<div class="value">{escape(f.value)}</div><div class="remark">{escape(f.remark)}</div></div>'
        for f in facts.figures
    )
    warnings = "".join(f"<li>{escape(text)}</li>" for text in facts.warnings)
    listed = f'<ul class="warnings">{warnings}</ul>' if warnings else '<p class="quiet">No warnings.</p>'
    whose = f'<h2 class="whose">{escape(document.name)}</h2>\n' if is_one_of_two else ""
    return (
        f'<section class="summary">\n{whose}<p class="verdict {facts.verdict}" data-fits="{facts.verdict}">'
        f"<span>{SYMBOLS[facts.verdict]}</span> {escape(facts.headline)}</p>\n"
        f'<p class="quiet">{escape(document.name)}: {escape(_origin(document))}</p>\n'
        f'<div class="tiles">{tiles}</div>\n<h2>Warnings</h2>\n{listed}\n'
        f'<div class="tables">{_time(facts)}{_variables(facts)}{_ops(facts)}</div>\n</section>'
    )


def _origin(document: Document) -> str:
    if document.run is not None:
        steps = document.run["steps"]
        drawn = f"; drawn is step {document.measured.step_index + 1}" if document.measured is not None else ""
        policy = document.run["policy"]
        by = f", by {document.plan.policy}" if drawn and document.plan and document.plan.policy != policy else ""
        return f"a run of {len(steps)} steps, policy {policy}{drawn}{by}"
    if document.plan is not None:
        return f"a plan, policy {document.plan.policy}; times are simulated"
    return "a traced step; times are those of the trace"


def _time(facts: ReportFacts) -> str:
    whole = sum(share.ns for share in facts.time)
    rows = [
        (share.name, share.remark, format_duration(share.ns / 1e9), f"{share.ns / whole:.1%}" if whole else "-")
        for share in facts.time
    ]
    rows += [("the whole step", "as drawn below", format_duration(whole / 1e9), "100.0%")] if rows else []
    return table("Where the step's time goes", ("", "what is in it", "time", "share"), rows, "time")


def _variables(facts: ReportFacts) -> str:
    rows = [
        (
            str(v.index),
            v.label or "-",
            v.kind.replace("_", " "),
            format_nbytes(v.nbytes),
            format_nbytes(v.moved_nbytes),
            format_duration(v.wait_ns / 1e9),
        )
        for v in facts.variables
    ]
    return table(
        "Variables that cost most", ("#", "name or maker", "kind", "size", "moved", "waited for"), rows, "variables"
    )


def _ops(facts: ReportFacts) -> str:
    rows = [
        (
            str(op.index),
            op.name,
            format_duration(op.duration_ns / 1e9),
            format_duration(op.planned_ns / 1e9) if op.planned_ns is not None else "-",
            format_duration(op.wait_ns / 1e9),
        )
        for op in facts.ops
    ]
    return table("Ops that cost most", ("#", "op", "time", "planned", "waits"), rows, "ops")


# -- charts: the script fills the canvases


def _charts(documents: Sequence[Document]) -> str:
    choice = ""
    if len(documents) == 2:
        buttons = "".join(
            f'<button data-document="{i}" aria-pressed="{"true" if i == 0 else "false"}">{escape(d.name)}</button>'
            for i, d in enumerate(documents)
        )
        choice = f'<div class="choice" role="group" aria-label="which to draw">{buttons}</div>'
    figures = "".join(
        f'<figure id="{name}" hidden><figcaption><h2>{title}<span class="drawn"></span></h2>'
        f'<p class="quiet">{escape(remark)}</p></figcaption>'
        f'<div class="legend"></div><canvas tabindex="0" role="img" aria-label="{title}"></canvas>'
        '<div class="readout" aria-live="polite"></div></figure>'
        for name, title, remark in _CHARTS
    )
    return (
        f'<section class="charts">{choice}<div class="zoom" hidden><button data-zoom="in">zoom in</button>'
        '<button data-zoom="out">zoom out</button><button data-zoom="left">&larr;</button>'
        '<button data-zoom="right">&rarr;</button><button data-zoom="all">whole step</button>'
        f'<span id="range"></span></div>{figures}<noscript>The charts need JavaScript; everything above does not.'
        "</noscript></section>"
    )
