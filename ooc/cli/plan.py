"""The commands that plan without training: `ooc trace`, `ooc plan`, `ooc fit`, `ooc profile`.

Exit codes: 0 success; 1 nothing fits, the deadline cannot be met, or no step could be recorded; 2 the command line or a
file is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from ooc.cli.arguments import (
    DEFAULT_PROFILE,
    UsageError,
    add_machine_arguments,
    add_script_arguments,
    budget_of,
    deadline_ns,
    known_profiles,
    machine_for,
    policies_of,
    read_trace,
    timed_for,
    write_text,
)
from ooc.units import GIB, KIB, format_duration, format_nbytes
from scheduler.plan import PlanError
from scheduler.policies import POLICIES
from scheduler.profiles import Profile, ProfileError, load_profile
from scheduler.trace import Trace, TraceError
from vmm.printable import printable

COMMANDS = ("trace", "plan", "fit", "profile")

_SWEEP_POINTS = 9


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the four commands to `ooc`'s."""
    _add_trace(commands)
    _add_plan(commands)
    _add_fit(commands)
    _add_profile(commands)


def run(parsed: argparse.Namespace) -> int:
    """Run one of the commands. Returns the exit code; what a recorded script raises is not caught."""
    from ooc.cli import fit
    from ooc.cli.run import RunError
    from ooc.cli.trace import RecordingFailed

    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "trace": _trace,
        "plan": _plan,
        "fit": fit.run,
        "profile": _profile,
    }
    try:
        return actions[parsed.command](parsed)
    except (PlanError, RecordingFailed) as error:
        print(f"ooc {parsed.command}: {printable(str(error))}", file=sys.stderr)
        return 1
    except RunError as error:
        print(f"ooc {parsed.command}: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except (UsageError, TraceError, ProfileError) as error:
        print(f"ooc {parsed.command}: {printable(str(error))}", file=sys.stderr)
        return 2


# -- arguments


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = commands.add_parser(
        "trace",
        help="record one training step of a script, for ooc plan",
        description="Run a script until two successive training steps were the same, and write that step to a file. "
        "With --fake nothing is computed and no memory is needed: times then come from a profile, and an op's own "
        "temporaries are not seen. Everything after SCRIPT belongs to the script.",
        usage="ooc trace [options] SCRIPT ARGS...\n       ooc trace [options] -m MODULE ARGS...",
        allow_abbrev=False,
    )
    trace.add_argument("-o", "--output", required=True, metavar="FILE", help="the trace: .json, or .json.gz")
    trace.add_argument("--fake", action="store_true", help="on fake tensors: no memory, no arithmetic")
    trace.add_argument(
        "--budget",
        metavar="SIZE",
        help="record as a session of this budget would run the step (default: half of the memory, at most 2GiB)",
    )
    trace.add_argument(
        "--profile",
        metavar="NAME",
        help=f"whose op times --fake writes (default: {DEFAULT_PROFILE}); {known_profiles()}",
    )
    trace.add_argument("--store", metavar="DIR", help="directory for the file of evicted bytes (without --fake)")
    trace.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    add_script_arguments(trace, metavar="SCRIPT", what="the script, or with -m the module")


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="does a recorded step fit a budget, how fast, by which policy",
        description="Plan a recorded step by several policies and compare them: does it fit, how long does a step "
        "take, how far is that from the best possible. Nothing is trained.",
        allow_abbrev=False,
    )
    plan.add_argument("trace", metavar="TRACE", help="what ooc trace wrote")
    plan.add_argument("--budget", metavar="SIZE", help="bytes for all large tensors, such as 400MiB")
    plan.add_argument("--policy", default="all", metavar="NAMES", help=f"all, or some of {', '.join(POLICIES)}")
    plan.add_argument("--objective", default="time", choices=("time", "energy"), help="what the best plan has least of")
    plan.add_argument("--deadline", metavar="TIME", help="the step must not take longer: 1.5s, 200ms, or 1.2x its ops")
    plan.add_argument(
        "--no-recompute",
        action="store_true",
        help="run no op again where a policy can do without: what a session can play",
    )
    plan.add_argument("--sweep", action="store_true", help="plan for many budgets instead of one; -o takes a .png")
    plan.add_argument("--points", type=int, default=_SWEEP_POINTS, metavar="N", help="budgets of a sweep (default: 9)")
    plan.add_argument("-o", "--output", metavar="FILE", help="the best plan (JSON), or a sweep's picture (PNG)")
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_machine_arguments(plan)


def _add_fit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    fit = commands.add_parser(
        "fit",
        help="the smallest budget for a step, or the largest batch for a budget",
        description="With a SCRIPT: the smallest budget that it runs with, found by recording a few steps of it, at "
        "last within that very budget; --fake only estimates it, without the memory. With a TRACE: the smallest "
        "budget of its step. --slowdown asks for one with which a step takes at most so many times the time of its "
        "ops. With --budget and a SCRIPT whose arguments contain {batch}: the largest batch that fits, searched on "
        "fake tensors, then tried (not with --fake). With --micro-batch as well: how large the parts of a batch should "
        "be that runs forward and backward in parts, by steps recorded on fake tensors.",
        usage="ooc fit [options] SCRIPT ARGS...\n       ooc fit [options] TRACE\n       "
        "ooc fit [options] --budget SIZE [--micro-batch N] SCRIPT ARGS... {batch} ARGS...",
        allow_abbrev=False,
    )
    fit.add_argument("--budget", metavar="SIZE", help="search the largest batch for this budget")
    fit.add_argument(
        "--micro-batch",
        type=int,
        metavar="N",
        help="search the best parts of a batch of N: gradients added up, one optimizer step",
    )
    fit.add_argument("--fake", action="store_true", help="only fake tensors: fast, but ops' temporaries are not seen")
    fit.add_argument("--slowdown", type=float, metavar="X", help="at most this many times the ops' own time")
    fit.add_argument("--policy", default="auto", metavar="NAME", help="who plans (default: auto)")
    fit.add_argument("--most", type=int, default=65536, metavar="N", help="largest batch to try (default: 65536)")
    fit.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_machine_arguments(fit)
    add_script_arguments(fit, metavar="TRACE|SCRIPT", what="a recorded step, or a script")


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure this machine, for ooc plan --profile",
        description="Measure arithmetic, memory and the store of this machine (seconds), and write a profile.",
        allow_abbrev=False,
    )
    profile.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: print it)")
    profile.add_argument("--name", default="this_machine", help="what to call it (default: this_machine)")
    profile.add_argument("--store", metavar="DIR", help="directory to measure (default: where a session would put it)")


# -- commands


def _trace(parsed: argparse.Namespace) -> int:
    from ooc.cli.trace import record_fake, record_real

    budget_nbytes = budget_of(parsed.budget) if parsed.budget is not None else None
    output = str(Path(parsed.output).absolute())  # the script may change directory
    if not Path(output).parent.is_dir():
        raise UsageError(f"--output {parsed.output}: there is no directory {Path(output).parent}")
    if parsed.profile is not None and not parsed.fake:
        raise UsageError("--profile goes with --fake: a real run has the times that it takes")
    if parsed.fake:
        trace = record_fake(
            parsed.target,
            parsed.arguments,
            profile=load_profile(parsed.profile or DEFAULT_PROFILE),
            is_module=parsed.is_module,
            budget_nbytes=budget_nbytes,
        )
    else:
        trace = record_real(
            parsed.target, parsed.arguments, budget=budget_nbytes, is_module=parsed.is_module, store=parsed.store
        )
    write_text(output, trace.to_json())
    made_up = trace.metadata.get("num_made_up_values", 0)
    if made_up:
        print(
            f"ooc trace: the script asked for {made_up} values, which fake tensors do not have; it got 1 or False. "
            f"If they decide what runs, the real step differs.",
            file=sys.stderr,
        )
    print(
        f"{parsed.output}: {len(trace.ops)} ops, {len(trace.variables)} variables, "
        f"{format_duration(trace.duration_ns / 1e9)} of ops, {format_nbytes(trace.peak_nbytes())} alive at most",
        file=sys.stderr,
    )
    return 0


def _plan(parsed: argparse.Namespace) -> int:
    trace, profile = timed_for(read_trace(parsed.trace), parsed)
    policies = policies_of(parsed.policy)
    if parsed.objective == "energy":
        profile.require_energy()
    from ooc.replay.native_colouring import colour_natively

    colour_natively()
    if parsed.sweep:
        return _sweep(parsed, trace, profile, policies)
    if parsed.budget is None:
        raise UsageError("no budget. Options: --budget SIZE, such as --budget 2GiB; --sweep.")
    from ooc.cli.plan_tables import comparison_table, notes_of, outcome_row, print_table
    from scheduler.compare import choose, compare

    deadline = deadline_ns(parsed.deadline, trace) if parsed.deadline is not None else None
    machine = machine_for(profile, budget_of(parsed.budget), parsed.chunk, trace)
    outcomes = compare(
        trace,
        machine,
        policies,
        profile=profile,
        recompute=not parsed.no_recompute,
        objective=parsed.objective,
        deadline_ns=deadline,
    )
    error: PlanError | None = None
    best = None
    try:
        eligible = [o for o in outcomes if not (parsed.no_recompute and o.plan is not None and o.plan.recomputes)]
        if not eligible:
            raise PlanError("every plan found runs ops again. Options: leave --no-recompute out; --policy auto.")
        best = choose(eligible, objective=parsed.objective, deadline_ns=deadline)
    except PlanError as raised:
        error = raised
    if parsed.json:
        rows = [outcome_row(o) for o in outcomes]
        print(json.dumps({"chosen": best.policy if best is not None else None, "outcomes": rows}, indent=1))
    else:
        title = f"{len(trace.ops)} ops within {format_nbytes(machine.budget_nbytes)} on {profile.name}"
        print_table(comparison_table(outcomes, title=title, chosen=best))
        for note in notes_of(outcomes):
            print(printable(note))
    if error is not None:
        raise error
    if parsed.output is not None and best is not None and best.plan is not None:
        write_text(parsed.output, best.plan.to_json())
        hint = " (it runs ops again)" if best.plan.recomputes else ""
        print(f"{parsed.output}: the plan of {best.policy}{hint}", file=sys.stderr)
    return 0


def _sweep(parsed: argparse.Namespace, trace: Trace, profile: Profile, policies: tuple[str, ...]) -> int:
    from ooc.cli.plan_tables import SweepMarks, draw_sweep, outcome_row, print_table, sweep_table
    from scheduler.compare import budgets_between, knee, least_budgets, sweep

    if parsed.budget is not None or parsed.deadline is not None:
        raise UsageError("--sweep goes through all budgets; leave --budget and --deadline out")
    if not 2 <= parsed.points <= 1000:
        raise UsageError(f"--points {parsed.points}: from 2 to 1000")
    if parsed.output is not None and not parsed.output.endswith(".png"):
        raise UsageError(f"--output {parsed.output}: a sweep is drawn as .png")
    peak_nbytes = max(trace.peak_nbytes(), 64)
    machine = machine_for(profile, max(peak_nbytes, 64 * KIB), parsed.chunk, trace)
    budgets = budgets_between(trace, machine, parsed.points)
    points = sweep(trace, machine, budgets, policies, profile=profile, recompute=not parsed.no_recompute)
    least = least_budgets(trace, machine, points, profile=profile, recompute=not parsed.no_recompute)
    bend = knee(points)
    marks = SweepMarks(
        least={policy: None if count is None else count * machine.chunk_nbytes for policy, count in least.items()},
        knee=None if bend is None else bend * machine.chunk_nbytes,
    )
    title = f"{len(trace.ops)} ops on {profile.name}: time of a step by budget, and how far above the bound"
    if parsed.json:
        rows = [{"budget_nbytes": n * machine.chunk_nbytes, **outcome_row(o)} for n, own in points for o in own]
        found = {"least_budget_nbytes": dict(marks.least), "knee_nbytes": marks.knee}
        print(json.dumps({"outcomes": rows, **found}, indent=1))
    else:
        print_table(sweep_table(points, chunk_nbytes=machine.chunk_nbytes, title=title, marks=marks))
        print("\n".join(marks.lines()))
    if parsed.output is not None:
        try:
            draw_sweep(points, chunk_nbytes=machine.chunk_nbytes, path=Path(parsed.output), title=title, marks=marks)
        except OSError as error:
            raise UsageError(f"cannot write {parsed.output}: {error}") from error
    return 0


def _profile(parsed: argparse.Namespace) -> int:
    from ooc.cli.profile import measure_profile
    from ooc.units import format_rate
    from vmm.store import StoreError

    try:
        profile = measure_profile(parsed.name, store=parsed.store)
    except StoreError as error:
        print(f"ooc profile: {error}", file=sys.stderr)
        return 1
    if parsed.output is None:
        print(profile.to_json())
        return 0
    write_text(parsed.output, profile.to_json() + "\n")
    assert profile.flops_per_s is not None
    print(
        f"{parsed.output}: {profile.flops_per_s / 1e9:.0f} Gflop/s, memory {format_rate(profile.memory_bytes_per_s)}, "
        f"store in {format_rate(profile.load_bytes_per_s)}, out {format_rate(profile.evict_bytes_per_s)}, "
        f"{profile.op_overhead_ns} ns an op, {profile.memory_nbytes / GIB:.1f} GiB of memory",
        file=sys.stderr,
    )
    return 0
