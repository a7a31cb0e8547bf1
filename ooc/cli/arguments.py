"""What is typed for the commands that plan, read and checked: traces, devices, budgets, deadlines, policies."""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from pathlib import Path
from typing import Any

from ooc.output_files import write_output
from ooc.units import KIB, MIB, TIB, format_nbytes, parse_nbytes
from scheduler.plan import Machine
from scheduler.policies import POLICIES
from scheduler.profiles import Profile, load_profile, op_costs, profile_names, retimed
from scheduler.trace import Trace, TraceError

DEFAULT_PROFILE = "desktop"
_MOST_TRACE_NBYTES = 512 * MIB
_MOST_CHUNKS = 1 << 20
_MOST_VARIABLE_NBYTES = 64 * TIB
_MOST_STEP_NS = 30 * 86_400 * 10**9
_TIME = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>ns|us|ms|s|min|h|x)")
_TIME_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}


class UsageError(ValueError):
    """Raised for a wrong argument, or a wrong file."""


def add_script_arguments(command: argparse.ArgumentParser, *, metavar: str, what: str) -> None:
    """Add the script, as `target`, and all that follows it, as `arguments`: the script gets it as it was typed."""
    text = f"{what}; all that follows is the script's own"
    command.add_argument("target", metavar=metavar, nargs=argparse.PARSER, action=_ScriptAction, help=text)


class _ScriptAction(argparse.Action):
    """One positional for both: of two, argparse takes a `--` that stands right behind the first for its own."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        del parser, option_string
        words = values[1:] if values[0] == "--" else values  # ours, where this argparse leaves it
        namespace.target, namespace.arguments = words[0], words[1:]


def add_machine_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the machine that a plan is made for."""
    command.add_argument(
        "--profile",
        metavar="NAME",
        help=f"device: a .json file, or one of {known_profiles()} (default: {DEFAULT_PROFILE})",
    )
    command.add_argument(
        "--keep-times", action="store_true", help="keep the trace's own op times although --profile names a device"
    )
    command.add_argument("--chunk", metavar="SIZE", help="size of a piece of memory (default: by budget)")


def known_profiles() -> str:
    """The names of the devices that we have profiles of, as a list to read."""
    return ", ".join(profile_names())


def read_trace(name: str) -> Trace:
    """The trace in a file, checked for sizes that cannot be meant.

    Raises:
        UsageError: Not readable. TraceError: Not a trace, of another version, or absurd.
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
    """The trace with the op times of the device that was named, and the device.

    A recorded run knows only its own machine's times: it keeps them, unless a device was named.
    """
    profile = load_profile(parsed.profile or DEFAULT_PROFILE)
    if parsed.profile is None or parsed.keep_times or trace.metadata.get("times_of") == profile.name:
        return trace, profile
    if op_costs(trace) is None:
        print("ooc: the trace has its own machine's op times only; they are kept (see --keep-times).", file=sys.stderr)
        return trace, profile
    return retimed(trace, profile), profile


def machine_for(profile: Profile, budget_nbytes: int, chunk: str | None, trace: Trace | None = None) -> Machine:
    """The machine with that budget, in chunks as a session would choose them.

    Where `trace` is of no session (a board's) they are finer below 16 MiB.

    Raises:
        UsageError: Less than a chunk, or more chunks than make sense.
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
