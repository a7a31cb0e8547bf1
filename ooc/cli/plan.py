"""The commands that plan without training: `ooc trace`, `ooc plan`, `ooc fit`, `ooc profile`.

Exit codes: 0 success; 1 nothing fits, the deadline cannot be met, or no step could be recorded; 2 the command line or a
file is wrong.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from ooc.output_files import write_output
from ooc.units import GIB, KIB, MIB, TIB, format_duration, format_nbytes, parse_nbytes
from scheduler.plan import Machine, PlanError
from scheduler.policies import POLICIES
from scheduler.profiles import Profile, ProfileError, load_profile, op_costs, profile_names, retimed
from scheduler.trace import Trace, TraceError
from vmm.printable import printable

COMMANDS = ("trace", "plan", "fit", "profile")

_DEFAULT_PROFILE = "desktop"
_MOST_TRACE_NBYTES = 512 * MIB
_MOST_CHUNKS = 1 << 20
_MOST_VARIABLE_NBYTES = 64 * TIB
_MOST_STEP_NS = 30 * 86_400 * 10**9
_SWEEP_POINTS = 9
_TIME = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>ns|us|ms|s|min|h|x)")
_TIME_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}


class UsageError(ValueError):
    """Raised for a wrong argument, or a wrong file."""


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
    trace.add_argument("--budget", metavar="SIZE", help="record as a session of this budget would run the step")
    trace.add_argument(
        "--profile", metavar="NAME", help=f"whose op times --fake writes (default: {_DEFAULT_PROFILE}); {_profiles()}"
    )
    trace.add_argument("--store", metavar="DIR", help="directory for the file of evicted bytes (without --fake)")
    trace.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    trace.add_argument("target", metavar="SCRIPT", help="the script, or with -m the module")
    trace.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")


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
    fit.add_argument("target", metavar="TRACE|SCRIPT", help="a recorded step, or a script")
    fit.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")


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


def add_machine_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the machine that a plan is made for."""
    command.add_argument(
        "--profile", metavar="NAME", help=f"device: a .json file, or one of {_profiles()} (default: {_DEFAULT_PROFILE})"
    )
    command.add_argument(
        "--keep-times", action="store_true", help="keep the trace's own op times although --profile names a device"
    )
    command.add_argument("--chunk", metavar="SIZE", help="size of a piece of memory (default: by budget)")


def _profiles() -> str:
    return ", ".join(profile_names())


# -- reading


def read_trace(name: str) -> Trace:
    """Read the trace in a file, and refuse impossible sizes.

    Raises:
        UsageError: It cannot be read.
        TraceError: It is not a trace, of another version, or has impossible sizes.
    """
    path = Path(name)
    try:
        if path.stat().st_size > _MOST_TRACE_NBYTES:
            raise UsageError(f"{name} has {format_nbytes(path.stat().st_size)}; a trace is smaller than 512 MiB")
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not a trace: it is not text. Options: what `ooc trace -o FILE` writes") from error
    except (OSError, EOFError) as error:
        raise UsageError(f"cannot read the trace {name}: {error}") from error
    try:
        trace = Trace.from_json(text)
        _check_sizes(trace)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from error
    return trace


def _check_sizes(trace: Trace) -> None:
    for index, v in enumerate(trace.variables):
        if v.nbytes > _MOST_VARIABLE_NBYTES:
            raise TraceError(
                f"variable {index} ({v.label or v.kind}) has {format_nbytes(v.nbytes)}; at most 64 TiB make sense"
            )
    if trace.duration_ns > _MOST_STEP_NS:
        raise TraceError(f"the step takes {trace.duration_ns / 1e9:.0f} s; at most 30 days make sense")


def write_text(name: str, text: str) -> None:
    """Write a file, compressed if its name ends in .gz. Raises `UsageError` where that fails."""
    try:
        if name.endswith(".gz"):
            write_output(name, gzip.compress(text.encode(), mtime=0))
        else:
            write_output(name, text)
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error}") from error


def timed_for(trace: Trace, parsed: argparse.Namespace) -> tuple[Trace, Profile]:
    """The trace with the op times of the named device, and the profile of that device.

    A recorded run has the times of its own machine, and keeps them unless a device was named.
    """
    profile = load_profile(parsed.profile or _DEFAULT_PROFILE)
    if parsed.profile is None or parsed.keep_times or trace.metadata.get("times_of") == profile.name:
        return trace, profile
    if op_costs(trace) is None:
        print("ooc: the trace has its own machine's op times only; they are kept (see --keep-times).", file=sys.stderr)
        return trace, profile
    return retimed(trace, profile), profile


def machine_for(profile: Profile, budget_nbytes: int, chunk: str | None, trace: Trace | None = None) -> Machine:
    """Make the machine with that budget, in chunks as a session would choose them.

    Where `trace` is not of a session (but of a board), chunks are finer below 16 MiB.

    Raises:
        UsageError: The budget is less than a chunk, or more chunks than make sense.
    """
    chunk_nbytes = _size(chunk, "chunk") if chunk is not None else _chunk_nbytes(budget_nbytes)
    if chunk is None and trace is not None and "threshold_nbytes" in trace.metadata:
        chunk_nbytes = max(chunk_nbytes, 64 * KIB)
    num_chunks = budget_nbytes // chunk_nbytes
    if num_chunks < 1:
        raise UsageError(
            f"budget of {format_nbytes(budget_nbytes)}: less than one chunk of {format_nbytes(chunk_nbytes)}"
        )
    if num_chunks > _MOST_CHUNKS:
        raise UsageError(
            f"budget of {format_nbytes(budget_nbytes)}: {num_chunks} chunks of {format_nbytes(chunk_nbytes)} are more "
            f"than the {_MOST_CHUNKS} that can be planned. Options: a larger --chunk; a budget that some machine has."
        )
    return profile.machine(chunk_nbytes=chunk_nbytes, num_chunks=num_chunks)


def _chunk_nbytes(budget_nbytes: int) -> int:
    nbytes = 64 * KIB
    while nbytes < 2 * MIB and budget_nbytes // nbytes > 4096:
        nbytes *= 2
    while nbytes > 64 and budget_nbytes // nbytes < 256:
        nbytes //= 2
    return nbytes


def _size(text: str, what: str) -> int:
    try:
        return parse_nbytes(text, what=what)
    except ValueError as error:
        raise UsageError(str(error)) from error


def budget_of(text: str) -> int:
    """Parse a budget, into bytes. Raises `UsageError`."""
    nbytes = _size(text, "budget")
    if nbytes > 1024 * TIB:
        raise UsageError(f"budget {text!r} is {nbytes // TIB} TiB; no machine has that. Options: at most 1024TiB.")
    return nbytes


def deadline_ns(text: str, trace: Trace) -> int:
    """Parse a deadline: a time, or a multiple of the ops' own time (`1.2x`). Raises `UsageError`."""
    match = _TIME.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"deadline {text!r} is not a time. Options: 1.5s, 200ms, 1.2x (times the ops' own time).")
    number = float(match["number"])
    whole = number * (trace.duration_ns if match["unit"] == "x" else _TIME_UNITS[match["unit"]])
    if whole < 1:
        raise UsageError(f"deadline {text!r} is 0; it must be at least 1 ns")
    return round(whole)


def policies_of(text: str) -> tuple[str, ...]:
    """Parse policies: `all`, or names with commas. Raises `UsageError` for one that does not exist."""
    names = tuple(sorted(POLICIES)) if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise UsageError(f"policy {name!r}: there is no such policy. Options: all, {', '.join(sorted(POLICIES))}.")
    return names


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
            profile=load_profile(parsed.profile or _DEFAULT_PROFILE),
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
        hint = (
            " (it runs ops again, which a session cannot play yet; see --no-recompute)" if best.plan.recomputes else ""
        )
        print(f"{parsed.output}: the plan of {best.policy}{hint}", file=sys.stderr)
    return 0


def _sweep(parsed: argparse.Namespace, trace: Trace, profile: Profile, policies: tuple[str, ...]) -> int:
    from ooc.cli.plan_tables import draw_sweep, outcome_row, print_table, sweep_table
    from scheduler.compare import budgets_between, sweep

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
    title = f"{len(trace.ops)} ops on {profile.name}: time of a step by budget, and how far above the bound"
    if parsed.json:
        rows = [{"budget_nbytes": n * machine.chunk_nbytes, **outcome_row(o)} for n, own in points for o in own]
        print(json.dumps({"outcomes": rows}, indent=1))
    else:
        print_table(sweep_table(points, chunk_nbytes=machine.chunk_nbytes, title=title))
    if parsed.output is not None:
        try:
            draw_sweep(points, chunk_nbytes=machine.chunk_nbytes, path=Path(parsed.output), title=title)
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
