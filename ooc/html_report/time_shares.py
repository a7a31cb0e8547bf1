"""Where the time of a step went: every nanosecond of it, in one of a few categories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ooc.reporting.step_view import StepView

_Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    """One category of a step's time.

    Attributes:
        name: What it is.
        ns: How long; the shares of a step add up to its duration.
        remark: What is in it.
    """

    name: str
    ns: int
    remark: str


def time_shares(view: StepView) -> tuple[TimeShare, ...]:
    """The step's time by category. They never overlap: where two claim a moment, the first one has it."""
    stop = view.duration_ns
    waits = _merged(((w.start_ns, w.stop_ns) for w in view.waits), stop)
    waits = _merged([*waits, *view.stalls], stop)
    reruns = _without(_merged(((r.start_ns, r.stop_ns) for r in view.reruns), stop), waits)
    taken = _merged([*waits, *reruns], stop)
    copies = _without(_merged([view.relocation] if view.relocation is not None else [], stop), taken)
    taken = _merged([*taken, *copies], stop)
    ops = _without(_merged(zip(view.op_start_ns, view.op_stop_ns, strict=True), stop), taken)
    taken = _merged([*taken, *ops], stop)
    first, last = (taken[0][0], taken[-1][1]) if taken else (stop, stop)
    found = [
        TimeShare(name="ops", ns=_total(ops), remark="computing, by the ops that are recorded"),
        TimeShare(name="waiting for transfers", ns=_total(waits), remark="what an op needed was not there yet"),
        TimeShare(name="computed again", ns=_total(reruns), remark="instead of being loaded"),
        TimeShare(
            name="moved within memory", ns=_total(copies), remark="between two steps, to where the next one starts"
        ),
        TimeShare(name="before the first op", ns=first, remark="the script, the data loader, the step's own beginning"),
        TimeShare(
            name="between ops",
            ns=last - first - _total(taken),
            remark="Python, autograd, ooc's own bookkeeping, and ops on tensors below the threshold",
        ),
        TimeShare(name="after the last op", ns=stop - last, remark="the script, and what ends a step"),
    ]
    return tuple(share for share in found if share.ns or share.name in ("ops", "between ops"))


def _merged(intervals: Iterable[_Interval], stop: int) -> list[_Interval]:
    """The union of intervals within `[0, stop)`, in order."""
    found: list[_Interval] = []
    for low, high in sorted((max(a, 0), min(b, stop)) for a, b in intervals):
        if low >= high:
            continue
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _without(intervals: Sequence[_Interval], others: Sequence[_Interval]) -> list[_Interval]:
    """What of `intervals` none of `others` covers; both are in order and do not overlap among themselves."""
    found, at = [], 0
    for low, high in intervals:
        while at and others[at - 1][1] > low:
            at -= 1
        while at < len(others) and others[at][1] <= low:
            at += 1
        position = at
        while position < len(others) and others[position][0] < high:
            if low < others[position][0]:
                found.append((low, others[position][0]))
            low = max(low, others[position][1])
            position += 1
        if low < high:
            found.append((low, high))
    return found


def _total(intervals: Iterable[_Interval]) -> int:
    return sum(stop - start for start, stop in intervals)
