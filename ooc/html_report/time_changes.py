"""Why one step takes longer than another: which category of its time, and there which ops or which transfers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from ooc.html_report.metrics import Metrics
from ooc.html_report.warnings import link_rate
from ooc.reporting.step_view import StepView
from ooc.units import format_duration, format_nbytes, format_rate

OPS, WAITS = "ops", "waiting for transfers"
PHRASES = {
    OPS: "in ops",
    WAITS: "waiting for transfers",
    "computed again": "computing again",
    "moved within memory": "moving within memory",
    "before the first op": "before the first op",
    "between ops": "between ops",
    "after the last op": "after the last op",
}
_LEAST_SHARE = 0.2
"""What explains a smaller share of a change is not named."""
_ALIKE = 0.25
"""Ops that all changed by one factor, give or take so much, were changed by the machine."""
_NUM_NAMED = 2


def changed_categories(before: Mapping[str, int], after: Mapping[str, int], *, is_more: bool) -> list[tuple[int, str]]:
    """The categories that changed most in the direction of the whole: nanoseconds (positive), and the name.

    Args:
        before, after: Nanoseconds of each category of two steps.
    """
    sign = 1 if is_more else -1
    changes = [(sign * (after.get(name, 0) - before.get(name, 0)), name) for name in {**before, **after}]
    whole = sum(change for change, _ in changes)
    if whole <= 0:
        return []
    least = whole * _LEAST_SHARE
    return [(change, name) for change, name in sorted(changes, reverse=True) if change > 0 and change >= least][:2]


def reasons(before: StepView, after: StepView, categories: list[str], *, is_more: bool) -> list[str]:
    """A sentence for each of `categories` that something can be said of."""
    found = []
    if OPS in categories:
        found.append(_ops(before, after, is_more=is_more))
    if WAITS in categories:
        found.append(_waits(before, after, is_more=is_more))
    return [text for text in found if text]


def by_rows(one: Metrics, other: Metrics) -> str:
    """What the figures of all steps say of the change, for steps that are not drawn, or were drawn alike."""
    if one.stall_s is None or other.stall_s is None or not one.step_s or not other.step_s:
        return ""
    change, waited = other.step_s - one.step_s, other.stall_s - one.stall_s
    if change * waited <= 0 or abs(waited) < _LEAST_SHARE * abs(change):
        return "not by waiting for transfers: in ops, or between them"
    more = "more" if waited > 0 else "less"
    rest = "" if abs(waited) > (1 - _LEAST_SHARE) * abs(change) else "; the rest in ops, or between them"
    return f"{format_duration(abs(waited))} {more} waiting for transfers{rest}"


def _ops(before: StepView, after: StepView, *, is_more: bool) -> str:
    """Which ops: by name and place, so that two different sequences can be compared, too."""
    old, new = _op_times(before), _op_times(after)
    whole_old, whole_new = (sum(sum(times) for times in own.values()) for own in (old, new))
    counts = ({key: len(times) for key, times in own.items()} for own in (old, new))
    if whole_old and whole_new and next(counts) == next(counts):
        factor = whole_new / whole_old
        alike = [key for key, times in old.items() if abs(sum(new[key]) / max(sum(times), 1) / factor - 1) <= _ALIKE]
        in_them = sum(sum(old[key]) for key in alike)
        if in_them >= (1 - _LEAST_SHARE) * whole_old and 2 * len(alike) > len(old) > 1:
            machine = "busier or slower" if is_more else "freer or faster"
            return f"All ops alike took {factor:.2f} x as long: the machine was {machine}."
    sign = 1 if is_more else -1
    changes = {key: sign * (sum(new.get(key, ())) - sum(old.get(key, ()))) for key in {**old, **new}}
    least = _LEAST_SHARE * abs(whole_new - whole_old)
    chosen = [key for key in sorted(changes, key=lambda key: (-changes[key], key)) if changes[key] >= max(least, 1)]
    named = [_op_change(key, old.get(key, []), new.get(key, [])) for key in chosen[:_NUM_NAMED]]
    return f"Ops: {'; '.join(named)}." if named else ""


def _op_times(view: StepView) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for op, start, stop in zip(view.trace.ops, view.op_start_ns, view.op_stop_ns, strict=True):
        found[f"{op.name} ({op.where})" if op.where else op.name].append(stop - start)
    return found


def _op_change(name: str, old: list[int], new: list[int]) -> str:
    times = f"{format_duration(sum(new) / 1e9)} instead of {format_duration(sum(old) / 1e9)}"
    if not old or not new:
        return f"{name}, {format_duration((sum(new) or sum(old)) / 1e9)}, in the {'second' if new else 'first'} alone"
    count = f", run {len(new)} times instead of {len(old)}" if len(new) != len(old) else ""
    return f"{name} {times}{count}"


def _waits(before: StepView, after: StepView, *, is_more: bool) -> str:
    """Which transfers: more bytes, a slower link, and the variable that was waited for."""
    parts = []
    for kind, what in (("load", "loads"), ("evict", "evictions")):
        sums = [sum(move.nbytes for move in view.moves if move.kind == kind) for view in (before, after)]
        rates = [link_rate(view, kind) for view in (before, after)]
        if (sums[1] > sums[0]) == is_more and abs(sums[1] - sums[0]) > 0.03 * max(sums):
            done = "loaded" if kind == "load" else "evicted"
            parts.append(f"{format_nbytes(sums[1])} {done} instead of {format_nbytes(sums[0])}")
        if all(rates) and (rates[1] < rates[0]) == is_more and abs(rates[1] / rates[0] - 1) > _LEAST_SHARE:
            parts.append(f"{what} at {format_rate(rates[1])} instead of {format_rate(rates[0])}")
    waits = [_waits_by_variable(view) for view in (before, after)]
    sign = 1 if is_more else -1
    changes = {key: sign * (waits[1][key] - waits[0][key]) for key in waits[0] | waits[1]}
    most = max(changes, key=lambda key: (changes[key], key), default="")
    whole = abs(sum(waits[1].values()) - sum(waits[0].values()))
    if most and changes[most] > 0 and changes[most] >= _LEAST_SHARE * whole:
        times = f"{format_duration(waits[1][most] / 1e9)} instead of {format_duration(waits[0][most] / 1e9)}"
        parts.append(f"most for {most}, {times}")
    return f"Transfers: {'; '.join(parts)}." if parts else ""


def _waits_by_variable(view: StepView) -> Counter[str]:
    found: Counter[str] = Counter()
    for wait in view.waits:
        variable = view.trace.variables[view.moves[wait.move].variable]
        label = str(variable.label) or "a variable"
        found[f"{label} ({format_nbytes(variable.nbytes)})"] += wait.stop_ns - wait.start_ns
    return found
