"""Items about the machine and the package, not about training: preflight, doctor, demo, tests, sanitizer, calls."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.child import Order
from benchmarks.gpu.figures import Figure, Measure, Overran, Shell

_MIB = 1 << 20
_NUM_WORKERS = 6


def tests(*paths: str) -> Measure:
    """The suite that needs a GPU, none of it skipped. What has failed is named also when time runs out."""

    def measure(shell: Shell) -> Iterable[Figure]:
        options = ["-v", "-m", "gpu", "--require-gpu", "-p", "no:cacheprovider", "-rfE"]
        if importlib.util.find_spec("xdist") is not None:  # most of a test is starting, on one core
            options += ["-p", "xdist.plugin", "-n", str(_NUM_WORKERS)]
        try:
            code, output = shell.command(["-m", "pytest", *options, *paths])
        except Overran as overran:
            yield from _failed_tests(overran.output)
            raise
        lines = [line for line in output.splitlines() if line.strip()]
        yield Figure(
            variant="pytest",
            metric="exit code",
            unit="",
            value=code,
            is_good=code == 0,
            note=lines[-1].strip("= ") if lines else "no output",
        )
        yield from _failed_tests(output)

    return measure


def _failed_tests(output: str) -> Iterable[Figure]:
    """By the summary, or, where it did not come to that, by the lines that tell each test as it ends."""
    lines = output.splitlines()
    found = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not found:
        ended = (line.split() for line in lines if " FAILED" in line or " ERROR" in line)
        found = [word for words in ended for word in words if "::" in word]
    for line in found:
        name, _, why = line.partition(" - ")
        yield Figure(variant=name.split("::")[-1], metric="passes", unit="", value=0, is_good=False, note=why)


def preflight(shell: Shell) -> Iterable[Figure]:
    """What the machine has, and whether the native parts can be built: before time is spent on anything else."""
    code, output = shell.command(["-m", "benchmarks.gpu.preflight"])
    found = last_line(output)
    if found is None:
        note = f"exit code {code}: {output.strip()[-200:]}"
        yield Figure(variant="preflight", metric="runs", unit="", value=None, is_good=False, note=note)
        return
    for name, (is_good, note) in found.items():
        yield Figure(
            variant=name, metric="is there", unit="", value=float(is_good is not False), is_good=is_good, note=note
        )


def doctor(shell: Shell) -> Iterable[Figure]:
    """`ooc doctor --device cuda`: each finding, and what would mend it."""
    code, output = shell.command(["-m", "ooc", "doctor", "--device", "cuda", "--json"])
    try:
        findings = json.loads(output)["findings"]
    except (KeyError, ValueError):
        note = f"exit code {code}: {output.strip()[-200:]}"
        yield Figure(variant="doctor", metric="runs", unit="", value=None, is_good=False, note=note)
        return
    for found in findings:
        is_good = {"fine": True, "note": None, "stop": False}[found["verdict"]]
        note = " -- ".join(part for part in (found["value"], found["remedy"]) if part)
        yield Figure(
            variant=found["name"],
            metric="finding",
            unit="",
            value=float(is_good is not False),
            is_good=is_good,
            note=note,
        )


def demo(shell: Shell) -> Iterable[Figure]:
    """`ooc demo --device cuda`: what a user sees first. What it prints last is what it found."""
    code, output = shell.command(["-m", "ooc", "demo", "--device", "cuda"])
    yield Figure(variant="gpt", metric="exit code", unit="", value=code, is_good=code == 0)
    for line in output.strip().splitlines():
        what, _, found = line.partition(": ")
        if ", step " not in what:
            yield Figure(variant="gpt", metric=what, unit="", value=None, note=found)


def driver_calls(shell: Shell) -> Iterable[Figure]:
    """Microseconds of each call, the device idle and with work queued."""
    code, output = shell.command(["-m", "benchmarks.gpu.calls"])
    found = last_line(output)
    if found is None:
        yield Figure(variant="calls", metric="time", unit="us", value=None, note=f"exit code {code}: {output[-200:]}")
        return
    for load, times in found.items():
        for name, us in times.items():
            yield Figure(variant=load, metric=name, unit="us", value=us)


def sanitizer(workload: str) -> Measure:
    """A small run under compute-sanitizer, where that is installed."""

    def measure(shell: Shell) -> Iterable[Figure]:
        order = Order(
            workload=workload,
            preset="small",
            variant="ours",
            budget_nbytes=64 * _MIB,
            host_budget_nbytes=256 * _MIB,
            num_steps=4,
        )
        try:
            code, output = shell.command(["compute-sanitizer", "--error-exitcode=9", "child", order_text(order)])
        except FileNotFoundError:
            yield Figure(variant="memcheck", metric="errors", unit="", value=None, note="compute-sanitizer is not here")
            return
        found = [line.strip("= ") for line in output.splitlines() if "ERROR SUMMARY" in line]
        yield Figure(
            variant="memcheck",
            metric="exit code",
            unit="",
            value=code,
            is_good=code == 0,
            note=found[-1] if found else "no summary",
        )

    return measure


def order_text(order: Order) -> str:
    """As `benchmarks.gpu.child` reads it."""
    return json.dumps(asdict(order))


def last_line(output: str) -> Any:
    """The JSON on it; None: it is none."""
    try:
        return json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
