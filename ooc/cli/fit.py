"""`ooc fit`: finds the smallest budget for a step, or the largest batch for a budget."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ooc.cli.arguments import UsageError, budget_of, machine_for, policies_of, read_trace, timed_for
from ooc.errors import BudgetTooSmall as BudgetTooLow
from ooc.tracing.observed import NEED, need_nbytes
from ooc.units import format_duration, format_nbytes
from scheduler.budget import pins_of, require_budget, smallest_num_chunks
from scheduler.compare import DeadlineTooShort
from scheduler.cost.bounds import lower_bounds
from scheduler.micro_batch import choose_micro_batch, require_no_cross_sample_layers
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.policies import POLICIES
from scheduler.trace import Trace
from vmm.torch_cpu import GRANULE_NBYTES

PLACEHOLDER = "{batch}"
_TRACE_LIMIT_S = 3600
_MOST_ROUNDS = 8
_RAISE_FRACTION = 16
"""A budget that proved too small is raised by 1/16."""


class TooSmall(Exception):
    """Raised when an op of the script did not fit the budget within which it was recorded."""


def run(parsed: argparse.Namespace) -> int:
    """Run the command. Raises `UsageError`, `PlanError` and what reading files raises."""
    (policy,) = policies_of(parsed.policy) if "," not in parsed.policy else (parsed.policy,)
    if policy != parsed.policy or parsed.policy == "all":
        raise UsageError(f"--policy {parsed.policy}: one policy")
    if parsed.slowdown is not None and not 1 <= parsed.slowdown <= 1e6:
        raise UsageError(f"--slowdown {parsed.slowdown}: from 1 to 1000000")
    from ooc.replay.native_colouring import colour_natively

    colour_natively()
    if parsed.micro_batch is not None:
        return _micro_batch(parsed)
    return _largest_batch(parsed) if parsed.budget is not None else _smallest_budget(parsed)


def smallest_budget(
    trace: Trace, machine: Machine, policy: str, *, slowdown: float | None = None, least: int = 1
) -> Plan:
    """Find the smallest budget with which `policy` keeps the step within `slowdown` times its ops' time; its plan.

    The least that any plan needs is tried first (without a limit on the time it nearly always does), then by bisection,
    as if the time never grew with the budget (which holds but for the search's noise).

    Args:
        least: The fewest chunks that the budget may have, whatever the step needs.

    Raises:
        DeadlineTooShort: Even with room for everything the step takes longer.
        PlanError: The policy finds no plan even then.
    """
    limit_ns = None if slowdown is None else round(slowdown * trace.duration_ns)

    def plan_in_time(num_chunks: int) -> Plan | None:
        try:
            plan = _session_plan(trace, replace(machine, num_chunks=num_chunks), policy)
        except PlanError:
            return None
        return plan if limit_ns is None or plan.step_ns <= limit_ns else None

    low = max(smallest_num_chunks(trace, machine), least, 1)
    if (at_once := plan_in_time(low)) is not None:
        return at_once
    high = max(lower_bounds(trace, machine)["in_core_nbytes"] // machine.chunk_nbytes, low)
    best = plan_in_time(high)
    if best is None:
        plan = _session_plan(trace, replace(machine, num_chunks=high), policy)
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


def _session_plan(trace: Trace, machine: Machine, policy: str) -> Plan:
    """The plan that a session would make: training waits for it, so it is not the thorough one."""
    quick = {"thorough": False} if "thorough" in POLICIES[policy].parameters else {}
    return make_plan(trace, machine, policy, **quick)


def largest_batch(fits: Callable[[int], bool], most: int) -> int:
    """Find the largest batch from 1 to `most` that `fits`, by doubling and bisection; 0 if not even 1 does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _smallest_budget(parsed: argparse.Namespace) -> int:
    if _is_trace(parsed.target):
        if parsed.arguments:
            raise UsageError(
                f"{' '.join(parsed.arguments)}: a trace takes no arguments. Options: fit's own options before the "
                "trace; a script in place of the trace."
            )
        recorded = read_trace(parsed.target)
    else:
        recorded = _record_within_least(parsed)
    trace, profile = timed_for(recorded, parsed)
    machine = machine_for(profile, max(trace.peak_nbytes(), 64), parsed.chunk, trace)
    least = -(-int(trace.metadata.get(NEED, 0)) // machine.chunk_nbytes)
    plan = smallest_budget(trace, machine, parsed.policy, slowdown=parsed.slowdown, least=least)
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
        if "times_of" in trace.metadata:
            print("It was recorded on fake tensors: ops' own temporaries come on top (not seen).")
    return 0


def _is_trace(name: str) -> bool:
    """Whether the file is a trace (JSON, or compressed) and not a script."""
    try:
        with Path(name).open("rb") as file:
            return file.read(2)[:1] == b"{" or name.endswith((".json", ".gz"))
    except OSError:
        return name.endswith((".json", ".gz"))


def need_of(trace: Trace) -> int:
    """Fewest bytes with which the step, and what ran before it, can run."""
    return max(need_nbytes(trace), int(trace.metadata.get(NEED, 0)))


def _record_within_least(parsed: argparse.Namespace) -> Trace:
    """Record a step of the script within (about) the smallest budget that it runs with.

    How much large ops need depends on the budget, since a session runs some of them in parts. So the step is recorded
    with much memory, then within what that took, and so on until it takes no less.
    """
    trace = _record(parsed, None, fake=parsed.fake)
    best, budget_nbytes = trace, need_of(trace)
    too_small = 0
    for _ in range(_MOST_ROUNDS):
        print(f"ooc fit: {format_nbytes(budget_nbytes)} would do; recording within that", file=sys.stderr)
        try:
            trace = _record(parsed, budget_nbytes, fake=parsed.fake)
        except TooSmall:
            too_small = budget_nbytes
            budget_nbytes += max(budget_nbytes // _RAISE_FRACTION // GRANULE_NBYTES, 1) * GRANULE_NBYTES
            continue
        best = replace(trace, metadata={**trace.metadata, NEED: budget_nbytes})
        need = need_of(trace)
        if too_small or need >= budget_nbytes:
            return best
        budget_nbytes = need
    return best


def _require_placeholder(parsed: argparse.Namespace) -> None:
    if not any(PLACEHOLDER in argument for argument in parsed.arguments):
        raise UsageError(
            f"the script's arguments do not contain {PLACEHOLDER}, so its batch cannot be varied. "
            f"Options: ooc fit --budget {parsed.budget} {parsed.target} --batch-size {PLACEHOLDER}; "
            "without --budget, a recorded step."
        )


def part_sizes(batch: int) -> tuple[int, ...]:
    """The micro-batch sizes to try: the batch, its halves as long as they are whole, and 1; each divides the batch."""
    sizes = [batch]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return tuple(dict.fromkeys([*sizes, 1]))


def _micro_batch(parsed: argparse.Namespace) -> int:
    """Find the best micro-batch size, from a step recorded at each size."""
    if parsed.budget is None:
        raise UsageError("--micro-batch goes with --budget SIZE: parts are for what does not fit")
    budget_nbytes = budget_of(parsed.budget)
    _require_placeholder(parsed)
    if parsed.micro_batch < 1:
        raise UsageError(f"--micro-batch {parsed.micro_batch}: at least 1")
    if parsed.slowdown is not None:
        raise UsageError("--micro-batch asks for the fastest; leave --slowdown out")
    traces: dict[int, Trace] = {}
    for size in part_sizes(parsed.micro_batch):
        try:
            trace = _record(parsed, budget_nbytes, fake=True, batch=size)
        except TooSmall:
            print(f"batch {size}: an op of it does not fit", file=sys.stderr)
            continue
        traces[size], profile = timed_for(trace, parsed)
        require_no_cross_sample_layers(trace)
    if not traces:
        raise PlanError(f"not even a batch of 1 fits {format_nbytes(budget_nbytes)}")
    machine = machine_for(profile, budget_nbytes, parsed.chunk, traces[min(traces)])
    best, tried = choose_micro_batch(
        traces,
        machine,
        batch_size=parsed.micro_batch,
        add_bytes_per_s=profile.memory_bytes_per_s,
        policy=parsed.policy,
    )
    for own in tried:
        took = "does not fit" if own.plan is None else f"{format_duration(own.plan.step_ns / 1e9)} a step"
        print(f"{own.count} x {own.size}: {took}", file=sys.stderr)
    assert best.plan is not None
    if parsed.json:
        body = {"micro_batch": best.size, "batch": parsed.micro_batch, "duration_ns": best.plan.step_ns}
        print(json.dumps({**body, "budget_nbytes": budget_nbytes, "policy": parsed.policy}))
    else:
        print(
            f"best micro-batch: {best.size}, {best.count} to a batch of {parsed.micro_batch} within "
            f"{format_nbytes(budget_nbytes)}; a step then takes {format_duration(best.plan.step_ns / 1e9)}, "
            f"by {parsed.policy}. In the script: session.micro_batch(model, loss, batch, size={best.size})"
        )
    return 0


def _largest_batch(parsed: argparse.Namespace) -> int:
    budget_nbytes = budget_of(parsed.budget)
    _require_placeholder(parsed)
    if parsed.most < 1:
        raise UsageError(f"--most {parsed.most}: at least 1")
    reasons: dict[int, str] = {}

    def fits(batch: int) -> bool:
        trace = _record(parsed, budget_nbytes, fake=True, batch=batch)
        timed, profile = timed_for(trace, parsed)
        machine = machine_for(profile, budget_nbytes, parsed.chunk, timed)
        try:
            if (need := need_of(timed)) > budget_nbytes:
                require_budget(timed, machine, pins_of(timed))
                raise PlanError(f"an op before the first step needs {format_nbytes(need)} at once")
            plan = _session_plan(timed, machine, parsed.policy)
        except PlanError as error:
            reasons[batch] = str(error)
            print(f"batch {batch}: does not fit", file=sys.stderr)
            return False
        times = plan.step_ns / max(timed.duration_ns, 1)
        in_time = parsed.slowdown is None or times <= parsed.slowdown
        reasons[batch] = f"a step takes {times:.2f} x its ops' own time; --slowdown allows {parsed.slowdown}"
        print(f"batch {batch}: {'fits' if in_time else 'too slow'}, {times:.2f} x its ops", file=sys.stderr)
        return in_time

    def runs(batch: int) -> bool:
        try:
            _record(parsed, budget_nbytes, fake=False, batch=batch)
        except TooSmall:
            reasons[batch] = "an op needs more, with its own temporaries, than fake tensors show"
            print(f"batch {batch}: does not run", file=sys.stderr)
            return False
        print(f"batch {batch}: runs", file=sys.stderr)
        return True

    best = largest_batch(fits, parsed.most)
    if best and not parsed.fake and not runs(best):
        best = largest_batch(runs, best - 1)  # up to here, what fake tensors show fits
    if best == 0:
        raise PlanError(f"not even a batch of 1: {reasons[1]}")
    if parsed.json:
        print(json.dumps({"batch": best, "budget_nbytes": budget_nbytes, "policy": parsed.policy}))
    else:
        print(f"largest batch: {best} within {format_nbytes(budget_nbytes)}, by {parsed.policy}")
    return 0


def _record(parsed: argparse.Namespace, budget_nbytes: int | None, *, fake: bool, batch: int | None = None) -> Trace:
    """Record a step of the script in a process of its own, as a session of that budget runs it (None: much memory).

    Raises:
        TooSmall: An op did not fit.
        RecordingFailed: No step was recorded for another reason.
    """
    from ooc.cli.trace import RecordingFailed

    with tempfile.TemporaryDirectory(prefix="ooc-fit-") as folder:
        output = Path(folder) / "step.json"
        command = [sys.executable, "-m", "ooc", "trace", "-o", str(output)]
        command += ["--fake"] if fake else []
        command += ["--budget", str(budget_nbytes)] if budget_nbytes is not None else []
        if parsed.profile is not None and fake:
            command += ["--profile", parsed.profile]
        given = parsed.arguments if batch is None else [a.replace(PLACEHOLDER, str(batch)) for a in parsed.arguments]
        command += [parsed.target, *given]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TRACE_LIMIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise RecordingFailed(f"no step was recorded in {_TRACE_LIMIT_S} s") from error
        if done.returncode == 0 and output.exists():
            return read_trace(str(output))
    lines = done.stderr.strip().splitlines()
    if any(line.startswith(f"{BudgetTooLow.__module__}.{BudgetTooLow.__qualname__}: ") for line in lines):
        raise TooSmall(done.stderr)
    what = "the script" if batch is None else f"batch {batch}"
    raise RecordingFailed(
        f"{what} could not be recorded (exit code {done.returncode}): {(lines or ['no message'])[-1]}"
    )
