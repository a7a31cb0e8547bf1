"""Curves of memory over one step: what the step needs in core, and what a session holds.

`ooc demo` draws them. They come from the last step that was replayed whole, at measured times, so
waits for transfers are part of the time axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ooc.reporting.documents import parse_document
from ooc.reporting.step_view import traced_view
from scheduler.trace import Trace

Curve = list[tuple[float, int]]
"""`(seconds from the step's start, bytes from then on)`, in order; its last point is the step's end."""


def step_curves(report: Mapping[str, Any], trace: Trace | None, *, duration_s: float | None = None) -> dict[str, Curve]:
    """The curves of a session's report.

    Args:
        report: `Session.report(with_timeline=True)`.
        trace: Drawn where no step was replayed whole: its ops one after another, without a plan.
        duration_s: Scale the time axis to this length, say that of the median step, so that a picture
            agrees with the table beside it. None: as measured.

    Returns:
        `live`, the bytes alive, which is what the step holds in core; and, after a planned step,
        `resident`, the bytes of chunks held. Empty if no step was ever recorded.
    """
    view = parse_document("report", report).view()
    if view is None and trace is not None:
        view = traced_view(trace)
    if view is None:
        return {}
    stop_ns = max(view.duration_ns, 1)
    ns_per_s = 1e9 if duration_s is None else stop_ns / duration_s
    found = {"live": view.live_curve(), "resident": view.resident_curve()}
    return {
        name: [(ns / ns_per_s, nbytes) for ns, nbytes in points] + [(stop_ns / ns_per_s, points[-1][1])]
        for name, points in found.items()
        if points
    }
