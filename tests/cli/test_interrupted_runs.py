"""Ctrl-C to a whole `ooc run`, at any moment of its life: it ends as `python` would, soon, and leaves nothing behind.

`python -m tests.cli.test_interrupted_runs [NUM]` interrupts NUM runs (50) and prints how long each took to end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.shared_memory import shared_memory, shared_memory_beyond
from vmm.native_build import cache_directory

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "interrupted.py"
NUM_RUNS = 50
NUM_QUICK = 5
BUDGET = "3MiB"
"""Of the 8 MB that the script's step needs: learnt in three steps, then planned."""

_HANG_S = 300
_LAUNCH = (
    "import faulthandler, signal, sys, torch, ooc.cli.main, ooc.cli.run\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs inherit it ignored
    "faulthandler.register(signal.SIGUSR1)\nprint('opening', flush=True)\nsys.exit(ooc.cli.main.main(sys.argv[1:]))"
)
"""`ooc run`, saying when everything is imported: until then it is Python's own affair how it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to interrupt.

    Attributes:
        name: Of the phase.
        marker: The line of the script's output with which it begins.
        longest_s: The signal comes at random within this time after the line.
        steps: Of the run, at most.
    """

    name: str
    marker: str
    longest_s: float
    steps: int = 1_000_000


MOMENTS = (
    Moment(name="opening", marker="opening", longest_s=0.4),
    Moment(name="learning", marker="step 0", longest_s=0.3),
    Moment(name="planning", marker="step 2", longest_s=0.5),
    Moment(name="played", marker="step 8", longest_s=0.3),
    Moment(name="closing", marker="closing", longest_s=0.05, steps=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an interrupted run ended: its exit status, its stderr, how long it took from the signal on (by the clock and
    of the processors' time), and what it left behind.
    """

    status: int
    errors: str
    duration_s: float
    processor_s: float
    left: tuple[str, ...]


def interrupt(moment: Moment, seed: int, directory: Path) -> Ending:
    """Start a run in its own process group, interrupt the group as a terminal does, and look at what is left."""
    for name in ("store", "cache"):
        (directory / name).mkdir(exist_ok=True)
    # Not in `directory`: DataLoader's workers make sockets there, whose paths have at most 107 bytes.
    temporary = Path(tempfile.mkdtemp(prefix="ooc-", dir="/tmp"))
    report = directory / "report.json"
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "OOC_CACHE_DIR": str(directory / "cache" / "ooc"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache" / "inductor"),  # torch's own, and it stays
        "PYTHONPATH": str(ROOT),
    }
    if moment.name != "opening" or seed % 2:  # else it is interrupted while it compiles, too
        _copy_libraries(directory / "cache" / "ooc")
    chance = random.Random(f"{moment.name} {seed}")
    options = ["run", "--budget", BUDGET, "--store", str(directory / "store"), "--report", str(report), str(SCRIPT)]
    options += ["--steps", str(moment.steps), "--workers", str(int(seed % 3 == 0))]
    shared_before, spent_before_s = shared_memory(), _spent_by_children_s()
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(moment.marker):
                break
        else:
            raise AssertionError(f"it ended before {moment.marker!r}: {process.communicate()[1]}")
        time.sleep(chance.uniform(0, moment.longest_s))
        started, spent_s = time.monotonic(), _spent_by_group_s(process.pid)
        _signal_group(process.pid, signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=_HANG_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # each thread's stack, to stderr
            time.sleep(1)
            _signal_group(process.pid, signal.SIGKILL)
            _, errors = process.communicate()
        duration_s = time.monotonic() - started
        processor_s = _spent_by_children_s() - spent_before_s - spent_s
        left = [*_group_members(process.pid), *shared_memory_beyond(shared_before)]
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.communicate()
    left += [str(path) for path in (directory / "store").iterdir()]
    left += [str(path) for path in temporary.iterdir()]
    shutil.rmtree(temporary, ignore_errors=True)
    left += [str(path) for path in directory.rglob("*.partial")]
    left += [str(path) for path in directory.rglob(".plan-*")]
    if report.exists():
        json.loads(report.read_text())  # whole or not there
    return Ending(
        status=process.returncode, errors=errors, duration_s=duration_s, processor_s=processor_s, left=tuple(left)
    )


def _copy_libraries(cache: Path) -> None:
    """Native libraries that are built already, so that a run opens soon; its plans are its own."""
    cache.mkdir()
    for library in cache_directory().glob("*.so*"):
        if library.suffix in (".so", ".seal"):
            shutil.copy(library, cache)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_members(group: int) -> list[str]:
    """Processes of the group that are still there, as text."""
    return [f"process {name})" for name, fields in _stats_of_group(group) if fields[0] != "Z"]


def _stats_of_group(group: int) -> Iterator[tuple[str, list[str]]]:
    """`/proc/PID/stat` of the group's processes: up to the name, and the fields behind it."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(rest.split()[2]) == group:
            yield name, rest.split()


def _spent_by_group_s(group: int) -> float:
    """The processors' time of the group's processes, and of those children that they have waited for."""
    ticks = sum(int(field) for _, fields in _stats_of_group(group) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _spent_by_children_s() -> float:
    """The processors' time of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check(moment: Moment, ending: Ending) -> None:
    """Raise AssertionError with what is wrong with an ending."""
    # Who interrupts a run's last moments may be too late: it has ended well, or is in the interpreter's own exit.
    allowed = (-signal.SIGINT, 0) if moment.name == "closing" else (-signal.SIGINT,)
    assert ending.status in allowed, f"{moment.name}: status {ending.status}\n{ending.errors}"
    assert ending.left == (), f"{moment.name}: {ending.left}"
    for bad in ("Fatal Python error", "Segmentation fault", "SessionError", "AssertionError", "SystemError"):
        assert bad not in ending.errors, ending.errors


def _plan(num_runs: int) -> list[tuple[Moment, int]]:
    return [(MOMENTS[number % len(MOMENTS)], number) for number in range(num_runs)]


@pytest.mark.parametrize(
    ("moment", "seed"),
    [
        pytest.param(moment, seed, id=f"{moment.name}-{seed}", marks=[pytest.mark.slow] if seed >= NUM_QUICK else [])
        for moment, seed in _plan(NUM_RUNS)
    ],
)
def test_a_run_ends_by_the_signal_and_leaves_nothing(moment: Moment, seed: int, tmp_path: Path) -> None:
    check(moment, interrupt(moment, seed, tmp_path))


def main(num_runs: int) -> int:
    """Interrupt `num_runs` runs and print a line for each. Returns how many ended wrongly."""
    num_wrong = 0
    for moment, seed in _plan(num_runs):
        with tempfile.TemporaryDirectory() as directory:
            ending = interrupt(moment, seed, Path(directory))
        try:
            check(moment, ending)
            verdict = "fine"
        except AssertionError as error:
            verdict = f"WRONG: {error}"
            num_wrong += 1
        print(
            f"{seed:3} {moment.name:9} status {ending.status:4} after {ending.duration_s:5.2f} s, "
            f"{ending.processor_s:4.2f} s of the processors' time: {verdict}",
            flush=True,
        )
    return num_wrong


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_RUNS) > 0)
