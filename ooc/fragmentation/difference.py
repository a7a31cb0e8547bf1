"""What changed between two recordings: of one program before and after a change, or under two settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ooc.fragmentation.by_line import MemoryHolder, holders
from ooc.fragmentation.frames import Origin
from ooc.fragmentation.report import Report
from ooc.units import format_nbytes

MAX_PLACES = 1000
_LINE = re.compile(r":\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """One figure of both recordings. `is_nbytes`: bytes; else a count."""

    name: str
    before: int
    after: int
    is_nbytes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChange:
    """What one place in the program holds at the worst moment of each recording, in bytes; 0: nothing."""

    origin: Origin
    before_nbytes: int
    after_nbytes: int

    @property
    def change_nbytes(self) -> int:
        return self.after_nbytes - self.before_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two reports side by side.

    Attributes:
        headline: One line: better or worse, by how much, and what it is due to.
        settings: What was set differently, as text; empty: nothing.
        figures: Of the allocators that the programs ran with.
        lines: Places by how much they hold more or less, largest change first; equal ones are left out.
    """

    headline: str
    settings: str
    figures: tuple[FigureChange, ...]
    lines: tuple[LineChange, ...]


def compare_reports(before: Report, after: Report) -> Difference:
    """What changed from one report to the other. Lines of code that only moved within their function are the same."""
    lines = _line_changes(before, after)
    figures = [
        FigureChange(name="most live at once", before=before.stream.wanted_nbytes, after=after.stream.wanted_nbytes)
    ]
    one, other = before.reference_summary, after.reference_summary
    if one is not None and other is not None:
        for name in ("live", "internal", "external"):
            attribute = f"{name}_nbytes"
            figures.append(
                FigureChange(
                    name={"live": "live at the peak", "internal": "lost to rounding", "external": "held but free"}[
                        name
                    ],
                    before=getattr(one.peak, attribute),
                    after=getattr(other.peak, attribute),
                )
            )
        a, b = one.replay, other.replay
        figures.insert(1, FigureChange(name="peak held", before=a.peak_reserved_nbytes, after=b.peak_reserved_nbytes))
        for name, x, y in (
            ("calls of the device", a.num_device_allocs + a.num_device_frees, b.num_device_allocs + b.num_device_frees),
            ("retries", a.num_retries, b.num_retries),
        ):
            figures.append(FigureChange(name=name, before=x, after=y, is_nbytes=False))
    failed = (len(before.stream.failures), len(after.stream.failures))
    figures.append(FigureChange(name="failed requests in the file", before=failed[0], after=failed[1], is_nbytes=False))
    return Difference(
        headline=_headline(before, after, figures, lines),
        settings=_settings(before, after),
        figures=tuple(figures),
        lines=tuple(lines),
    )


def difference_document(difference: Difference) -> dict[str, Any]:
    """The difference as JSON-able data."""
    return {
        "headline": difference.headline,
        "settings": difference.settings,
        "figures": [
            {"name": f.name, "before": f.before, "after": f.after, "unit": "byte" if f.is_nbytes else "1"}
            for f in difference.figures
        ],
        "lines": [
            {
                "lines": list(line.origin.lines),
                "module": line.origin.module,
                "doing": line.origin.doing,
                "before_nbytes": line.before_nbytes,
                "after_nbytes": line.after_nbytes,
            }
            for line in difference.lines
        ],
    }


def _headline(before: Report, after: Report, figures: list[FigureChange], lines: list[LineChange]) -> str:
    held = next((f for f in figures if f.name == "peak held"), figures[0])
    change = held.after - held.before
    if change == 0:
        first = f"The peak held is the same: {format_nbytes(held.after)}.{_other_change(before, after, figures)}"
    else:
        more = "more" if change > 0 else "less"
        share = f" ({abs(change) / held.before:.0%})" if held.before else ""
        first = (
            f"{format_nbytes(abs(change))} {more} at the peak{share}: {format_nbytes(held.before)}, "
            f"then {format_nbytes(held.after)}."
        )
    failed = [report.does_not_fit or bool(report.stream.failures) for report in (before, after)]
    if failed[0] != failed[1]:
        first += " The first ran out of memory, the second did not." if failed[0] else " The second ran out of memory."
    live = figures[0].after - figures[0].before
    if change and live * change <= 0:
        why = _settings(before, after)
        how = f": {why}" if why else ""
        return f"{first} Not the program asks for {'more' if change > 0 else 'less'}: how memory is kept changed{how}."
    # The line that has the most part in it, in the same direction.
    due = next((line for line in lines if line.change_nbytes * change > 0), None)
    if due is None or not due.origin.is_known:
        return first
    more = "more" if change > 0 else "less"
    return f"{first} Most of it: {due.origin.texts()[0]}, {format_nbytes(abs(due.change_nbytes))} {more}."


def _settings(before: Report, after: Report) -> str:
    one, other = (report.settings.text() or "defaults" for report in (before, after))
    return "" if one == other else f"{one} -> {other}"


def _other_change(before: Report, after: Report, figures: list[FigureChange]) -> str:
    """What changed although the peak did not: time, by calls that wait for the device; else what was asked for."""
    by_name = {figure.name: figure for figure in figures}
    calls, retries = by_name.get("calls of the device"), by_name.get("retries")
    if after.stream.device.startswith("cuda") and calls is not None and calls.before != calls.after:
        again = ""
        if retries is not None and retries.before != retries.after:
            again = f", {retries.after} of the requests made again instead of {retries.before}"
        settings = _settings(before, after)
        why = f" ({settings})" if settings else ": the program asks for other sizes, or in another order"
        what = "Slower" if calls.after > calls.before else "Faster"
        return (
            f" {what}: {calls.after} calls of the device, which waits for each, instead of {calls.before}{again}{why}."
        )
    live = by_name["most live at once"]
    if live.before != live.after:
        return f" At most {format_nbytes(live.after)} are live at once instead of {format_nbytes(live.before)}."
    settings = _settings(before, after)
    return f" Other settings changed nothing: {settings}." if settings else ""


def _line_changes(before: Report, after: Report) -> list[LineChange]:
    old, new = _by_place(before), _by_place(after)
    changes = []
    for place in old.keys() | new.keys():
        a, b = old.get(place, []), new.get(place, [])
        changes.append(
            LineChange(
                origin=(b or a)[0].origin,
                before_nbytes=sum(h.nbytes for h in a),
                after_nbytes=sum(h.nbytes for h in b),
            )
        )
    changes.sort(key=lambda c: (-abs(c.change_nbytes), c.origin.texts()))
    return [change for change in changes if change.change_nbytes]


def _by_place(report: Report) -> dict[tuple[object, ...], list[MemoryHolder]]:
    own = report.reference_summary
    found: dict[tuple[object, ...], list[MemoryHolder]] = {}
    if own is None:
        return found
    for holder in holders(own.replay, report.stream, report.holders_event, limit=MAX_PLACES):
        origin = holder.origin
        lines = tuple(_LINE.sub("", line) for line in origin.lines)
        found.setdefault((lines, _LINE.sub("", origin.library), origin.module, origin.doing), []).append(holder)
    return found
