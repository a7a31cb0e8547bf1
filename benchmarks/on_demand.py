"""What a step costs that was never seen before: ours against plain PyTorch, in CPU time, step by step in turns.

    python -m benchmarks.on_demand                        # everything fits: what seeing each op costs
    python -m benchmarks.on_demand --case transformer --budget 40MiB

Every step has another length, so with ooc each runs on demand. Both variants take the same steps in processes of their
own, by turns, and their losses are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ooc
from benchmarks.rows import Row, markdown, row, write
from ooc.models.tiny_ops import TinyOps
from ooc.models.transformers import GPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loop whose steps are never the same twice.

    Attributes:
        build: Makes the function that takes one step of a given length and returns the loss.
        lengths: What lengths there are; each comes once.
        budget: At which everything fits.
    """

    build: Callable[[], Callable[[int], float]]
    lengths: range
    budget: str


def _tiny_ops() -> Callable[[int], float]:
    model = TinyOps(1, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(length: int) -> float:
        model.num_links = length
        loss = model(torch.ones(1, 16)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _transformer() -> Callable[[int], float]:
    model = GPT(width=128, depth=4, num_heads=4, context=256, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(length: int) -> float:
        tokens = torch.randint(0, 256, (8, length + 1), generator=torch.Generator().manual_seed(length))
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


CASES = {
    "tiny_ops": Case(build=_tiny_ops, lengths=range(200, 300), budget="64MiB"),
    "transformer": Case(build=_transformer, lengths=range(16, 160), budget="256MiB"),
}


class Contestant:
    """One variant in a process of its own, which takes a step when it is told to."""

    def __init__(self, variant: str, arguments: argparse.Namespace, lengths: list[int]) -> None:
        self.variant = variant
        self.samples: list[dict[str, Any]] = []
        command = [sys.executable, "-m", "benchmarks.on_demand", "--child", variant, "--case", arguments.case]
        command += ["--budget", arguments.budget, "--profile", arguments.profile if variant == "ours" else ""]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lengths = iter(lengths)

    def step(self) -> None:
        """Take the next step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{next(self._lengths)}\n")
        self._process.stdin.flush()
        self.samples.append(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _child(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    case = CASES[arguments.case]
    if arguments.child == "plain":
        _serve(case.build())
        return
    profile: Any = None
    if arguments.profile:
        import cProfile

        profile = cProfile.Profile()
    budget = arguments.budget or case.budget
    with ooc.Session(budget, step_boundary="optimizer", background_planning=False) as session:
        _serve(case.build(), session, profile)
    if profile is not None:
        profile.dump_stats(arguments.profile)


def _serve(step: Callable[[int], float], session: Any = None, profile: Any = None) -> None:
    for number, line in enumerate(sys.stdin):
        if number == 3 and profile is not None:
            profile.enable()
        started, wall = time.process_time(), time.monotonic()
        loss = step(int(line))
        spent, wall = time.process_time() - started, time.monotonic() - wall
        print(json.dumps({"cpu_s": spent, "wall_s": wall, "loss": loss}), flush=True)
        if number == 2:
            gc.collect()
    if profile is not None:
        profile.disable()
    if session is not None:
        rows = session.report()["steps"][3:]
        moved = sum(row["loaded_nbytes"] + row["evicted_nbytes"] for row in rows) / max(len(rows), 1) / 2**20
        stall_s = sum(row["stall_s"] for row in rows) / max(len(rows), 1)
        peak = session.report()["in_core_peak_nbytes"] / 2**20
        modes = sorted({row["mode"] for row in rows})
        print(
            f"{modes}, {moved:.1f} MiB moved and {stall_s:.3f} s waited a step, {peak:.1f} MiB in core", file=sys.stderr
        )


def measure(arguments: argparse.Namespace) -> tuple[list[Row], str]:
    """Let both variants take their steps by turns."""
    case = CASES[arguments.case]
    lengths = list(case.lengths)
    random.Random(0).shuffle(lengths)
    if arguments.same:
        lengths = [arguments.same] * len(lengths)
    lengths = lengths[: arguments.steps + 3]
    num_ops = _count_ops(case, lengths[3:])
    plain, ours = (Contestant(variant, arguments, lengths) for variant in ("plain", "ours"))
    for _ in lengths:
        plain.step()
        ours.step()
    plain.close()
    ours.close()
    if [s["loss"] for s in plain.samples] != [s["loss"] for s in ours.samples]:
        raise SystemExit("losses differ")
    rows: list[Row] = []
    cells: list[tuple[Any, ...]] = []
    pairs = list(zip(plain.samples[3:], ours.samples[3:], num_ops, strict=True))
    ratio = [b["cpu_s"] / a["cpu_s"] for a, b, _ in pairs]
    wall = [b["wall_s"] / a["wall_s"] for a, b, _ in pairs]
    more = [(b["cpu_s"] - a["cpu_s"]) / n * 1e6 for a, b, n in pairs]
    for name, unit, samples in (("cpu_ratio", "", ratio), ("wall_ratio", "", wall), ("cpu_per_op", "us", more)):
        rows.append(row(arguments.case, "ours", name, unit, samples))
        cells.append((name, f"{statistics.median(samples):.2f} {unit}", len(samples)))
    cells.append(("plain cpu", f"{statistics.median(a['cpu_s'] for a, _, _ in pairs) * 1e3:.1f} ms", len(pairs)))
    cells.append(("ops", statistics.median(num_ops), len(pairs)))
    return rows, markdown((arguments.case, "median", "steps"), cells)


def _count_ops(case: Case, lengths: list[int]) -> list[int]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    step = case.build()
    step(lengths[0])
    counts = []
    for length in (min(lengths), max(lengths)):
        with Counter() as counter:
            step(length)
        counts.append(counter.count)
    low, high = min(lengths), max(lengths)
    slope = (counts[1] - counts[0]) / max(high - low, 1)
    return [round(counts[0] + slope * (length - low)) for length in lengths]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_demand", description=__doc__)
    parser.add_argument("--case", choices=sorted(CASES), default="tiny_ops")
    parser.add_argument("--budget", default="", help="by default one at which everything fits")
    parser.add_argument("--same", type=int, default=0, help="every step has this length instead, so they are planned")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", default="", help="write a cProfile of the variant with ooc here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=("plain", "ours"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _child(arguments)
        return 0
    rows, table = measure(arguments)
    print(table)
    if arguments.json is not None:
        write(rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
