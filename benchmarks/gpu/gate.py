"""Runs the gate's items in shards, keeps what has been done, and prints a short table last.

    python -m benchmarks.gpu.gate [--shard N] [--only TEXT] [--out DIR] [--fake] [--list]

Results are JSON lines in DIR, one file for each commit and GPU; an item that is there is not run again.
Exit code: 0 when nothing that ran was wrong, 1 when something was, 2 when nothing could run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import Order
from benchmarks.gpu.fake_items import FAKE_ITEMS
from benchmarks.gpu.figures import Figure, Item, Overran
from benchmarks.gpu.items import ITEMS, NOT_THERE
from benchmarks.gpu.machine_items import order_text

ROOT = Path(__file__).parents[2]
SHARD_S = 510
"""A shard's wall time, all of it: machines are lent for ten minutes at a time."""
ITEMS_S = 470
"""The sum of the limits of a shard's items. The rest is for starting, naming the GPU and ending what hangs."""
_LAST_ITEM_S = 485
"""From the gate's start, its own imports not counted: no item goes on longer."""
_SHORTEST_S = 10
_GPU_NAME_S = 90
_NOTE_WIDTH = 70
_ABORT_S = 2
_END_S = 8
"""How long a killed process is waited for: one that hangs in the driver cannot be killed."""
_NUM_TAIL_LINES = 15


class Processes:
    """Starts what an item asks for, until the item's limit is used up.

    Args:
        limit_s: The item's.
        fake: Whether to run over the fake driver.
        log: Where everything is kept that a process told which failed; its end is printed. None: nowhere.
    """

    def __init__(self, *, limit_s: float, fake: bool, log: Path | None = None) -> None:
        self._limit_s = limit_s
        self._stops = time.monotonic() + limit_s
        self._fake = fake
        self._log = log
        self.machine: dict[str, Any] = {}
        self.told: list[str] = []
        """The last lines of what failed."""

    def train(self, order: Order) -> dict[str, Any]:
        """As `Shell.train`."""
        environment = dict(
            os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", OOC_PLAN_CACHE="0", OOC_BACKGROUND_PLANNING="0"
        )
        if order.variant == "expandable_segments":
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        text = order_text(replace(order, fake=self._fake))
        command = [sys.executable, "-m", "benchmarks.gpu.child", text]
        code, out, err = self._run(command, environment)
        lines = (out if out.strip() else err).strip().splitlines()
        try:
            answer: dict[str, Any] = json.loads(lines[-1])
        except (IndexError, ValueError):
            answer = {"error": f"exit code {code}: {lines[-1] if lines else 'no output'}"}
        self.machine = answer.get("machine", self.machine)
        if code != 0 and "error" not in answer:
            answer["error"] = f"exit code {code}, after it had told its figures: {lines[-1][:200]}"
        if "error" in answer and not answer.get("is_too_small"):
            self._tell(command, answer["error"], out, err)
        return answer

    def command(self, arguments: Sequence[str]) -> tuple[int, str]:
        """As `Shell.command`. "compute-sanitizer ... child ORDER" is run where there is one."""
        if self._fake and arguments[-1] in ("benchmarks.gpu.calls", "benchmarks.gpu.preflight"):
            arguments = [*arguments, "fake"]
        if self._fake and ("ooc" in arguments or "benchmarks.gpu.programs" in arguments):
            arguments = ["fake" if argument == "cuda" else argument for argument in arguments]
        environment = dict(os.environ)
        if arguments[0] != "compute-sanitizer":
            # Plug-ins of pytest that an image happens to have are none of ours.
            environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            command = [sys.executable, *arguments]
        else:
            found = shutil.which(arguments[0])
            if found is None or self._fake:
                raise FileNotFoundError(arguments[0])
            command = [found, *arguments[1:-2], sys.executable, "-m", "benchmarks.gpu.child", arguments[-1]]
        code, out, err = self._run(command, environment)
        if code != 0:
            self._tell(command, f"exit code {code}", out, err)
        return code, out if out.strip() else err

    def _run(self, command: Sequence[str], environment: dict[str, str]) -> tuple[int, str, str]:
        """Exit code, output and error output. Raises Overran."""
        left_s = self._stops - time.monotonic()
        if left_s <= 0:
            raise Overran(f"the item's {self._limit_s:.0f} s were used up before")
        environment["PYTHONFAULTHANDLER"] = "1"  # what dies by a signal, or hangs until it is ended, says where
        if self._fake:  # torch computes on the host, where on a busy machine a second thread waits more than it helps
            environment["OMP_NUM_THREADS"] = "1"
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            out, err = _end(process)
            message = f"ended after {left_s:.0f} s, when the item's {self._limit_s:.0f} s were used up"
            self._tell(command, message, out, err)
            raise Overran(message, output=out) from None
        except BaseException:
            _end(process)
            raise
        return process.returncode, out, err

    def _tell(self, command: Sequence[str], what: str, out: str, err: str) -> None:
        """Keep what a process told that failed, and print the end of it: the machine may be gone when it is read."""
        if self._log is None:
            return
        said = "\n".join(part.rstrip() for part in (out, err) if part.strip())
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as file:
            file.write(f"$ {shlex.join(command)}\n{said}\n{what}\n\n")
        tail = [f"  | {line[:300]}" for line in (*said.splitlines()[-_NUM_TAIL_LINES:], what)]
        self.told += tail
        print("\n".join(tail), flush=True)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill it with all that it started: a test's own process would go on holding the device's memory.

    By SIGABRT at first, at which Python tells where each thread is.
    """
    for signal_number, wait_s in ((signal.SIGABRT, _ABORT_S), (signal.SIGKILL, 0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    try:
        return process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        return "", f"process {process.pid} cannot be killed: it hangs in the driver"


def shards(items: Sequence[Item]) -> list[list[Item]]:
    """Items in their order, cut where the next one's limit would not fit into the same shard."""
    found: list[list[Item]] = []
    used_s = ITEMS_S + 1
    for item in items:
        if item.limit_s > ITEMS_S:
            raise ValueError(f"item {item.name!r}: limit {item.limit_s} s, more than a shard's {ITEMS_S} s")
        if used_s + item.limit_s > ITEMS_S:
            found.append([])
            used_s = 0
        found[-1].append(item)
        used_s += item.limit_s
    return found


class Results:
    """What has been measured at one commit, on one machine, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.items: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    found = json.loads(line)
                except ValueError:  # the last line of a run that was cut off
                    continue
                self.items[found["item"]] = found

    def add(self, name: str, figures: Iterable[Figure], *, took_s: float, machine: dict[str, Any], commit: str) -> None:
        """Keep an item's figures, on disk before anything else is run."""
        document = {
            "item": name,
            "commit": commit,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "took_s": round(took_s, 1),
            "machine": machine,
            "figures": [asdict(figure) for figure in figures],
        }
        self.items[name] = document
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(document) + "\n")
            file.flush()
            os.fsync(file.fileno())


def run(
    chosen: Sequence[Item],
    results: Results,
    *,
    fake: bool,
    commit: str,
    machine: Mapping[str, Any] | None = None,
    stops_s: float = math.inf,
    retries: bool = False,
) -> dict[str, list[str]]:
    """Measure what is not there yet. By item, the last lines of what failed.

    Args:
        chosen: The items.
        results: Where figures go, and what has been measured.
        fake: Whether to run over the fake driver.
        commit: What is measured.
        machine: What is known of the machine before anything is trained.
        stops_s: When, by `time.monotonic`, the last item must be over.
        retries: Whether to measure once more what overran or was wrong.
    """
    known, told = dict(machine or {}), {}
    for item in chosen:
        if item.name in results.items and not (retries and _has_failed(results.items[item.name])):
            print(f"{item.name}: measured before")
            continue
        limit_s = min(item.limit_s, stops_s - time.monotonic())
        if limit_s < min(_SHORTEST_S, item.limit_s):
            print(f"{item.name}: no time is left in this shard")
            continue
        print(f"{item.name}: at most {limit_s:.0f} s", flush=True)
        started = time.monotonic()
        shell = Processes(limit_s=limit_s, fake=fake, log=results.path.with_suffix(".log"))
        figures = list(_figures(item, shell))
        known |= shell.machine
        results.add(item.name, figures, took_s=time.monotonic() - started, machine=known, commit=commit)
        if shell.told:
            told[item.name] = shell.told
    return told


def _figures(item: Item, shell: Processes) -> Iterable[Figure]:
    """An item's figures; a fault of its own costs the rest of it, and no other item."""
    try:
        yield from item.measure(shell)
    except Overran as overran:
        yield Figure(variant="gate", metric="ends in time", unit="", value=None, overran=True, note=str(overran))
    except Exception as error:  # noqa: BLE001 - whatever it is, the machine is lent for minutes
        yield Figure(variant="gate", metric="measures", unit="", value=None, is_good=False, note=repr(error))


def table(items: Sequence[Item], results: Results) -> str:
    """These items, measured or not; what is wrong says so."""
    lines = ["", "| item | variant | figure | value | |", "|---|---|---|---:|---|"]
    for item in items:
        found = results.items.get(item.name)
        if found is None:
            lines.append(f"| {item.name} | | | not measured | |")
            continue
        for figure in found["figures"]:
            value = "not measured" if figure["value"] is None else f"{figure['value']:.4g} {figure['unit']}".rstrip()
            verdict = "overran" if figure.get("overran") else _VERDICTS[figure["is_good"]]
            note = " ".join(figure["note"].split())[:_NOTE_WIDTH]
            said = ": ".join(part for part in (verdict, note) if part)
            lines.append(f"| {item.name} | {figure['variant']} | {figure['metric']} | {value} | {said} |")
    lines += [f"| {name} | | | not measured | no item measures it yet |" for name in NOT_THERE]
    return "\n".join(lines)


_VERDICTS = {None: "", True: "good", False: "WRONG"}


def failures(items: Sequence[Item], results: Results, told: Mapping[str, Sequence[str]]) -> str:
    """What is wrong and what overran, each with its note in full and the last lines of its process: read last."""
    lines: list[str] = []
    for item in items:
        found = results.items.get(item.name)
        if found is None or not _has_failed(found):
            continue
        for figure in found["figures"]:
            if figure["is_good"] is False or figure.get("overran"):
                what = "overran" if figure.get("overran") else "WRONG"
                lines.append(f"{what}: {item.name}, {figure['variant']}, {figure['metric']}: {figure['note'][:600]}")
        lines += list(told.get(item.name, ()))[-_NUM_TAIL_LINES:]
    return "\n".join(["", *lines]) if lines else ""


def is_wrong(results: Results) -> bool:
    """Whether anything that was measured is not as it must be."""
    return any(figure["is_good"] is False for found in results.items.values() for figure in found["figures"])


def _has_failed(found: dict[str, Any]) -> bool:
    return any(figure["is_good"] is False or figure.get("overran") for figure in found["figures"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.gate", description=__doc__.splitlines()[0])
    parser.add_argument("--shard", type=int, help="only this one, from 1; all by default")
    parser.add_argument("--only", action="append", metavar="TEXT", help="items so named; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-out" / "gpu-gate", help="directory for results")
    parser.add_argument("--commit", help="what is measured, where git cannot tell (also OOC_COMMIT)")
    parser.add_argument("--retry", action="store_true", help="measure once more what overran or was wrong")
    parser.add_argument("--fake", action="store_true", help="try the gate itself over the fake driver")
    parser.add_argument("--list", action="store_true", help="what would run, shard by shard")
    options = parser.parse_args(arguments)
    items = FAKE_ITEMS if options.fake else ITEMS
    if options.only:
        items = tuple(item for item in items if any(text in item.name for text in options.only))
        if not items:
            parser.error(f"--only {' '.join(options.only)}: no item's name has that; --list names them")
    parts = shards(items)
    if options.shard is not None and not 1 <= options.shard <= len(parts):
        parser.error(f"--shard {options.shard}: there are {len(parts)} shards, 1 to {len(parts)}")
    if options.list:
        for number, part in enumerate(parts, 1):
            print(f"shard {number}: " + ", ".join(f"{item.name} ({item.limit_s} s)" for item in part))
        return 0
    machine = {"gpu": "fake"} if options.fake else _machine()
    if machine is None:
        print("gpu-gate: torch sees no CUDA device here. Options: a machine with a GPU; --fake tries the gate itself.")
        _diagnose()
        return 2
    where = "-".join(machine["gpu"].split()).replace("/", "-")
    commit = options.commit or os.environ.get("OOC_COMMIT") or _commit()
    results = Results(options.out / f"{where}-{commit}.jsonl")
    chosen = parts[options.shard - 1] if options.shard is not None else [item for part in parts for item in part]
    stops_s = started_s + _LAST_ITEM_S if options.shard is not None else math.inf
    told = run(
        chosen,
        results,
        fake=options.fake,
        commit=commit,
        machine=machine,
        stops_s=stops_s,
        retries=options.retry,
    )
    print(table(chosen, results))
    print(failures(chosen, results, told))
    if options.fake:
        print("\nOver the fake driver: verdicts count, times and rates mean nothing.")
    overran = [name for name, found in results.items.items() if any(f.get("overran") for f in found["figures"])]
    if overran:
        print(f"\nOverran, so neither right nor wrong (--retry measures them again): {'; '.join(overran)}")
    print(f"\nResults: {results.path}; what failed, in full: {results.path.with_suffix('.log').name}")
    return 1 if is_wrong(results) else 0


_ASKED = """
import json, os, platform, torch
if torch.cuda.is_available():
    found = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "torch_cuda": torch.version.cuda}
    print(json.dumps(found | {"python": platform.python_version(), "os": platform.platform(), "cores": os.cpu_count()}))
"""


def _machine() -> dict[str, Any] | None:
    """The GPU's name, and versions. Asked in another process: this one must hold no memory of the device."""
    command = [sys.executable, "-c", _ASKED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_GPU_NAME_S)
    except subprocess.TimeoutExpired:
        print(f"gpu-gate: torch did not name the GPU within {_GPU_NAME_S} s: the driver hangs, or the disk is slow.")
        return None
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        print("\n".join(done.stderr.strip().splitlines()[-_NUM_TAIL_LINES:]))
        return None
    return found


def _diagnose() -> None:
    """Let the doctor say what is wrong with this machine."""
    command = [sys.executable, "-m", "ooc", "doctor", "--device", "cuda"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, check=False, timeout=_GPU_NAME_S)


def _commit() -> str:
    """The commit; where there is none, or files differ from it, also a name for what the files hold.

    Else what was mended would count as measured before.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        said = ""
    if said and not said.endswith("-dirty"):
        return said
    contents = hashlib.sha256()
    paths = (path for package in _MEASURED for path in (ROOT / package).rglob("*") if path.suffix in _SUFFIXES)
    for path in sorted(paths):
        contents.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{said or 'no-commit'}-{contents.hexdigest()[:12]}"


_MEASURED = ("ooc", "vmm", "scheduler", "benchmarks", "tests/gpu")
_SUFFIXES = frozenset({".py", ".cpp", ".h"})


if __name__ == "__main__":
    sys.exit(main())
