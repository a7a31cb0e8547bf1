"""One hint at the end of a run where most of its time was not planned, with what helps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ooc.units import MIB, format_nbytes

_LEARNING_STEPS = 3
"""Steps at the beginning that are never planned: the optimizer makes its state, then two equal ones must be seen."""
_MOST_UNPLANNED = 0.5
"""A hint is given where more than this part of the later steps' time was not planned."""

_REMEDIES = {
    "sizes": (
        "most steps had the ops of the one before on other sizes. A size that comes twice is planned: pad batches to a "
        "multiple of 16 (pad_to_multiple_of=16), sort them by length, drop the last one (drop_last=True)"
    ),
    "ops": "most steps, or parts of them, had other ops than those before them",
    "left": "most steps left their plan",
    "refused": "most steps did not enter the plan that there is",
    "segment": "most steps had a part that did not come twice",
    "unplannable": "there is no plan for most steps",
    "unlearned": (
        "most steps came again, and were not learned: where steps vary, learning takes a part of the time and no more. "
        "With fewer kinds of steps (batches padded to a few sizes) it keeps up; with OOC_BACKGROUND_PLANNING=0 it "
        "takes what time it needs, and plans are made while training waits"
    ),
    "again": "the run ended before a plan was made, or was expected where it would have done",
    "unknown": "most steps were not like one that was seen twice",
    "first": "the run ended before a step came twice",
}

NO_STEP = (
    "no step ended, so nothing was planned: a step ends when an optimizer's step() returns; without torch.optim, when "
    "loss.backward(), torch.autograd.grad() or what torch.func.grad made does. For other loops: `with session.step():` "
    "around each one, with ooc.Session in the script"
)

_ELSEWHERE = (
    "no step ended on the session's thread, and other threads allocated {nbytes} outside the budget: train on the "
    "thread that opens the session, under `ooc run` the main one"
)


def planned_share(steps: list[Mapping[str, Any]]) -> float:
    """The part of the steps' time that was planned; 0 without steps."""
    total = sum(step["duration_s"] for step in steps)
    return sum(step["duration_s"] * _planned_part(step) for step in steps) / total if total else 0.0


def _planned_part(step: Mapping[str, Any]) -> float:
    """The part of a step that was planned, by its ops: in a step of many segments one may have been new."""
    if step["mode"] == "planned":
        return 1.0
    planned = step.get("num_planned_ops", 0)
    num_ops = planned + step.get("num_demand_ops", 0)
    return planned / num_ops if num_ops else 0.0


def apart_nbytes(report: Mapping[str, Any]) -> int:
    """What threads other than the session's have allocated in large pieces, all together."""
    return int(report.get("guest_threads", {}).get("apart_nbytes", 0))


def trains_elsewhere(report: Mapping[str, Any]) -> bool:
    """Whether no step ended on the session's thread, and others have allocated more than the budget."""
    return not report["steps"] and apart_nbytes(report) > report.get("budget_nbytes", math.inf)


def went_on_without(report: Mapping[str, Any]) -> str | None:
    """What is to be said of a script that did not end by it, where ops did not fit; None: nothing."""
    refused = report["refused"]
    num = refused["num"]
    if not num:
        return None
    ops = "an op" if num == 1 else f"{num} ops"
    return (
        f"{ops} did not fit the budget and raised BudgetTooSmall ({refused['last']}), and the script went on without: "
        f"its results are not those of a run with --budget={math.ceil(refused['needed_nbytes'] / MIB)}MiB, where "
        f"{'it fits' if num == 1 else 'these fit, as far as they came'}"
    )


def hint(report: Mapping[str, Any]) -> str | None:
    """The hint for a run, in one line; None where most of its time was planned, or it was too short to tell."""
    steps = report["steps"]
    if not steps:
        return _ELSEWHERE.format(nbytes=format_nbytes(apart_nbytes(report))) if trains_elsewhere(report) else NO_STEP
    later = steps[_LEARNING_STEPS:]
    later = [step for step in later if step.get("cause") != "fits"]
    if len(later) < max(2, len(steps) // 2) or planned_share(later) >= 1 - _MOST_UNPLANNED:
        return None
    spent: dict[str, float] = {}
    for step in later:
        if step["mode"] != "planned":
            cause = step.get("cause", "unknown")
            spent[cause] = spent.get(cause, 0.0) + step["duration_s"] * (1 - _planned_part(step))
    known = {cause: seconds for cause, seconds in spent.items() if cause != "unknown"} or spent
    cause = max(known, key=lambda name: known[name])
    example = next(step for step in later if step.get("cause", "unknown") == cause and step["mode"] != "planned")
    text = f"{1 - planned_share(later):.0%} of the time after the first {_LEARNING_STEPS} steps was not planned: "
    text += _REMEDIES.get(cause, cause)
    if example.get("why"):
        why = example["why"].rstrip(".")
        text += f". For example: {'a step was ' if why.startswith('as ') else ''}{why}"
    needs = report.get("in_core_peak_nbytes", 0)
    if needs <= report.get("budget_nbytes", 0):  # what is missing is the room between variables
        return text
    return (
        f"{text}. The nearer --budget is to {math.ceil(needs / MIB)}MiB, what its tensors take at once, the less moves"
    )
