"""`ooc fit`: the smallest budget for a step, or the largest batch for a budget."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ooc import planning_cli
from ooc.units import format_duration, format_nbytes
from scheduler.bounds import lower_bounds
from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.compare import DeadlineTooShort
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.trace import Trace

PLACEHOLDER = "{batch}"
_TRACE_LIMIT_S = 600


def run(parsed: argparse.Namespace) -> int:
    """The command. Raises `planning_cli.UsageError`, `PlanError` and what reading files raises."""
    (policy,) = planning_cli.policies_of(parsed.policy) if "," not in parsed.policy else (parsed.policy,)
    if policy != parsed.policy or parsed.policy == "all":
        raise planning_cli.UsageError(f"--policy {parsed.policy}: one policy")
    if parsed.slowdown is not None and not 1 <= parsed.slowdown <= 1e6:
        raise planning_cli.UsageError(f"--slowdown {parsed.slowdown}: from 1 to 1000000")
    return _largest_batch(parsed) if parsed.budget is not None else _smallest_budget(parsed)


def smallest_budget(trace: Trace, machine: Machine, policy: str, *, slowdown: float | None = None) -> Plan:
    """The plan of the smallest budget with which `policy` keeps the step within `slowdown` times its ops' time.

    By bisection, as if the time never grew with the budget (which holds but for the search's noise).

    Raises:
        DeadlineTooShort: Not even with room for everything.
        PlanError: The policy finds no plan for that either.
    """
    limit_ns = None if slowdown is None else round(slowdown * trace.duration_ns)

    def plan_in_time(num_chunks: int) -> Plan | None:
        try:
            plan = make_plan(trace, replace(machine, num_chunks=num_chunks), policy)
        except PlanError:
            return None
        return plan if limit_ns is None or plan.step_ns <= limit_ns else None

    low = max(smallest_num_chunks(trace, machine), 1)
    high = max(lower_bounds(trace, machine)["in_core_nbytes"] // machine.chunk_nbytes, low)
    best = plan_in_time(high)
    if best is None:
        plan = make_plan(trace, replace(machine, num_chunks=high), policy)
        assert limit_ns is not None
        raise DeadlineTooShort(
            deadline_ns=limit_ns,
            fastest_ns=plan.step_ns,
            policy=policy,
            bound_ns=plan.bounds["duration_ns"],
        )
    while low < high:
        middle = (low + high) // 2
        found = plan_in_time(middle)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    return best


def largest_batch(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch from 1 to `most` that `fits`, by doubling and bisection; 0 if not even 1 does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _smallest_budget(parsed: argparse.Namespace) -> int:
    if parsed.arguments:
        raise planning_cli.UsageError(
            f"{' '.join(parsed.arguments)}: a trace takes no arguments. Options: fit's own options before the trace; "
            "--budget SIZE for a script."
        )
    trace, profile = planning_cli.timed_for(planning_cli.read_trace(parsed.target), parsed)
    machine = planning_cli.machine_for(profile, max(trace.peak_nbytes(), 64), parsed.chunk)
    plan = smallest_budget(trace, machine, parsed.policy, slowdown=parsed.slowdown)
    body = {
        "budget_nbytes": plan.machine.budget_nbytes,
        "in_core_nbytes": plan.bounds["in_core_nbytes"],
        "duration_ns": plan.step_ns,
        "ops_ns": trace.duration_ns,
        "policy": parsed.policy,
    }
    if parsed.json:
        print(json.dumps(body))
    else:
        print(
            f"smallest budget: {format_nbytes(plan.machine.budget_nbytes)} ({plan.machine.budget_nbytes} bytes), "
            f"{plan.machine.budget_nbytes / max(plan.bounds['in_core_nbytes'], 1):.0%} of what it needs in core; "
            f"a step then takes {format_duration(plan.step_ns / 1e9)} "
            f"({plan.step_ns / max(trace.duration_ns, 1):.2f} x its ops), by {parsed.policy}"
        )
    return 0


def _largest_batch(parsed: argparse.Namespace) -> int:
    budget_nbytes = planning_cli.budget_of(parsed.budget)
    if not any(PLACEHOLDER in argument for argument in parsed.arguments):
        raise planning_cli.UsageError(
            f"the script's arguments do not contain {PLACEHOLDER}, so its batch cannot be varied. "
            f"Options: ooc fit --budget {parsed.budget} {parsed.target} --batch-size {PLACEHOLDER}; "
            "without --budget, a recorded step."
        )
    if parsed.most < 1:
        raise planning_cli.UsageError(f"--most {parsed.most}: at least 1")
    reasons: dict[int, str] = {}

    def fits(batch: int) -> bool:
        trace = _record(parsed, batch)
        timed, profile = planning_cli.timed_for(trace, parsed)
        try:
            plan = make_plan(timed, planning_cli.machine_for(profile, budget_nbytes, parsed.chunk), parsed.policy)
        except BudgetTooSmall as error:
            reasons[batch] = str(error)
            print(f"batch {batch}: does not fit", file=sys.stderr)
            return False
        times = plan.step_ns / max(timed.duration_ns, 1)
        in_time = parsed.slowdown is None or times <= parsed.slowdown
        reasons[batch] = f"a step takes {times:.2f} x its ops' own time; --slowdown allows {parsed.slowdown}"
        print(f"batch {batch}: {'fits' if in_time else 'too slow'}, {times:.2f} x its ops", file=sys.stderr)
        return in_time

    best = largest_batch(fits, parsed.most)
    if best == 0:
        raise PlanError(f"not even a batch of 1: {reasons[1]}")
    if parsed.json:
        print(json.dumps({"batch": best, "budget_nbytes": budget_nbytes, "policy": parsed.policy}))
    else:
        print(f"largest batch: {best} within {format_nbytes(budget_nbytes)}, by {parsed.policy}")
    return 0


def _record(parsed: argparse.Namespace, batch: int) -> Trace:
    """A step of the script with that batch, on fake tensors, in a process of its own."""
    from ooc.record import RecordingFailed

    with tempfile.TemporaryDirectory(prefix="ooc-fit-") as folder:
        output = Path(folder) / "step.json"
        command = [sys.executable, "-m", "ooc.cli", "trace", "--fake", "--budget", parsed.budget, "-o", str(output)]
        if parsed.profile is not None:
            command += ["--profile", parsed.profile]
        command += [parsed.target, *(argument.replace(PLACEHOLDER, str(batch)) for argument in parsed.arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRACE_LIMIT_S, check=False)
        if done.returncode != 0 or not output.exists():
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise RecordingFailed(f"batch {batch} could not be recorded (exit code {done.returncode}): {last[0]}")
        return planning_cli.read_trace(str(output))
