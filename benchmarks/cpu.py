"""Training on the CPU: ours against stock PyTorch and the other ways to train in less memory.

    python -m benchmarks.cpu [--scenario NAME]... [--variant NAME]... [--rounds N] [--out DIR]

Each variant trains in a process of its own. In each round every variant takes a few steps in
turn, so that a slow minute hits all of them; the first step of a turn is not counted, because
transfers of the step before had time to end while the others ran. Losses are compared bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.child import VARIANTS
from benchmarks.rows import Row, markdown, row, write
from benchmarks.swap import SwapFile, SwapUnavailable
from ooc import models
from ooc.cli.memory_group import MeasuredProcess, MemoryGroupUnavailable
from ooc.cli.trial import TrialOptions, TrialStep, run_trial
from ooc.units import GIB, MIB, format_nbytes

_TURN_STEPS = 4
_WARM_UP_STEPS = 2
_LEARNING_STEPS = 8
"""Ours learns, plans, and has its first planned steps, in which the store's file still grows."""
_SWAP_NBYTES = 2 * GIB
_JEMALLOC = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A workload within a budget.

    Attributes:
        budget_nbytes: For ours; and, above a bare process, for stock in a control group.
        variants: Those that make sense here.
    """

    name: str
    workload: str
    budget_nbytes: int
    optimizer: str = "sgd"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[str, ...] = VARIANTS


SCENARIOS = (
    Scenario(name="conv_stack at 247 MiB", workload="conv_stack", budget_nbytes=247 * MIB),
    Scenario(name="ResNet-50 at 364 MiB", workload="resnet50", budget_nbytes=364 * MIB),
    Scenario(name="encoder at 97 MiB", workload="encoder", budget_nbytes=97 * MIB),
    Scenario(name="VGG16 32x32 at 68 MiB", workload="vgg16_cifar", budget_nbytes=68 * MIB),
    Scenario(
        name="2,000 tiny ops", workload="tiny_ops", budget_nbytes=64 * MIB, variants=("stock", "jemalloc", "ours")
    ),
    Scenario(
        name="2,000 tiny ops on variables",
        workload="tiny_ops",
        sizes={"width": 16384},
        budget_nbytes=64 * MIB,
        variants=("stock", "jemalloc", "ours"),
    ),
)


class Contestant:
    """One variant's child process, stepped on demand."""

    def __init__(self, variant: str, command: list[str], environment: dict[str, str], limit_nbytes: int | None) -> None:
        self.variant = variant
        self.losses: list[str] = []
        self.samples: list[float] = []
        self.report: Mapping[str, Any] = {}
        self.peak_nbytes = 0
        self.failure = ""
        self._child = MeasuredProcess(command, environment=environment, limit_nbytes=limit_nbytes, is_told=True)

    def __repr__(self) -> str:
        return f"<Contestant {self.variant}, {len(self.losses)} steps{', failed' if self.failure else ''}>"

    def take_steps(self, count: int, *, num_skipped: int) -> None:
        """Let the child take `count` steps; the first `num_skipped` are not counted as samples."""
        for number in range(count):
            step = self._step()
            if step is None:
                return
            self.losses.append(step.loss)
            if number >= num_skipped:
                self.samples.append(step.duration_s)

    def close(self) -> None:
        """Let the child end by itself, and take its report and its peak memory."""
        process = self._child.process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for line in process.stdout:
            self._end(json.loads(line))
        process.wait()
        self.peak_nbytes = self._child.peak_nbytes()
        self._child.close()

    def _step(self) -> TrialStep | None:
        process = self._child.process
        if self.failure:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("step\n")
            process.stdin.flush()
        line = process.stdout.readline()
        event = json.loads(line) if line else {}
        if event.pop("event", None) == "step":
            return TrialStep(**event)
        self.failure = event.get("message") or f"ended with exit code {process.wait()}"
        return None

    def _end(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "done":
            self.report = event["report"]
        else:
            self.failure = self.failure or event.get("message", "")


def main() -> int:
    """Run the scenarios, print tables, write rows."""
    options = _parse()
    # So that a swap file and control groups are removed on `timeout` and `kill`, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    tables: list[str] = []
    is_equal = True
    for scenario in SCENARIOS:
        if options.scenario and not any(name.lower() in scenario.name.lower() for name in options.scenario):
            continue
        print(f"{scenario.name} ...", file=sys.stderr, flush=True)
        found, table, equal = measure(scenario, options)
        rows += found
        tables.append(f"## {scenario.name}\n\n{table}\n")
        is_equal = is_equal and equal
        print(tables[-1], flush=True)
        write(rows, options.out / "cpu.jsonl")
        (options.out / "cpu.md").write_text("\n".join(tables))
    return 0 if is_equal else 1


def measure(scenario: Scenario, options: argparse.Namespace) -> tuple[list[Row], str, bool]:
    """All variants of one scenario, interleaved: rows, a table, and whether ours has stock's losses."""
    baseline = run_trial(TrialOptions(workload="baseline", optimizer=scenario.optimizer, num_steps=3)).peak_nbytes
    contestants: list[Contestant] = []
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for variant in (v for v in scenario.variants if not options.variant or v in options.variant):
            try:
                contestant = stack.enter_context(_enter(variant, scenario, baseline, options))
                contestants.append(contestant)
            except (SwapUnavailable, MemoryGroupUnavailable, FileNotFoundError) as reason:
                missing[variant] = str(reason)
        for contestant in contestants:
            contestant.take_steps(_LEARNING_STEPS if contestant.variant == "ours" else _WARM_UP_STEPS, num_skipped=99)
        for _ in range(options.rounds):
            for contestant in contestants:
                contestant.take_steps(_TURN_STEPS, num_skipped=1)
    equal = {c.variant: _same_losses(contestants, c) for c in contestants}
    rows = [found for c in contestants for found in _rows(scenario, c, baseline, equal[c.variant])]
    rows += [row(scenario.name, v, "time a step", "s", [], note=why) for v, why in missing.items()]
    return rows, _table(scenario, contestants, missing, baseline, equal), equal.get("ours", True)


@contextlib.contextmanager
def _enter(variant: str, scenario: Scenario, baseline_nbytes: int, options: argparse.Namespace) -> Iterator[Contestant]:
    with contextlib.ExitStack() as stack:
        environment = dict(os.environ)
        limit_nbytes = None
        if variant == "jemalloc":
            environment |= {**_JEMALLOC, "LD_PRELOAD": _find_jemalloc()}
        elif variant == "cgroup_swap":
            stack.enter_context(SwapFile(options.store, _SWAP_NBYTES))
            limit_nbytes = baseline_nbytes + scenario.budget_nbytes
        trial = TrialOptions(
            workload=scenario.workload,
            sizes=scenario.sizes,
            optimizer=scenario.optimizer,
            num_steps=0,
            budget_nbytes=scenario.budget_nbytes if variant == "ours" else None,
            store=str(options.store),
            policy=options.policy,
        )
        command = [sys.executable, "-m", "benchmarks.child", variant, json.dumps(asdict(trial))]
        contestant = Contestant(variant, command, environment, limit_nbytes)
        try:
            yield contestant
        finally:
            contestant.close()


def _find_jemalloc() -> str:
    name = ctypes.util.find_library("jemalloc")
    if name is None:
        raise FileNotFoundError("no libjemalloc.so.2 (Debian: apt install libjemalloc2)")
    return name


def _same_losses(contestants: Sequence[Contestant], one: Contestant) -> bool:
    """Whether `one` has stock's losses, to the last bit, as far as both went."""
    stock = next((c for c in contestants if c.variant == "stock"), one)
    length = min(len(stock.losses), len(one.losses))
    return length > 0 and stock.losses[:length] == one.losses[:length]


def _rows(scenario: Scenario, c: Contestant, baseline_nbytes: int, is_equal: bool) -> list[Row]:
    note = c.failure.splitlines()[0] if c.failure else "" if is_equal else "other losses than stock"
    rows = [row(scenario.name, c.variant, "time a step", "s", c.samples, note=note)]
    if c.peak_nbytes:
        rows.append(row(scenario.name, c.variant, "memory", "B", [c.peak_nbytes - baseline_nbytes]))
    planned = [step for step in c.report.get("steps", ()) if step["mode"] == "planned"]
    for metric, key, unit in (
        ("stall a step", "stall_s", "s"),
        ("moved in a step", "loaded_nbytes", "B"),
        ("moved out a step", "evicted_nbytes", "B"),
        ("chunks remapped a step", "num_remapped_chunks", "1"),
    ):
        if planned:
            rows.append(row(scenario.name, c.variant, metric, unit, [step[key] for step in planned[3:]]))
    if c.report:
        rows.append(row(scenario.name, c.variant, "planned steps", "1", [len(planned)]))
    return rows


def _table(
    scenario: Scenario,
    contestants: Sequence[Contestant],
    missing: Mapping[str, str],
    baseline_nbytes: int,
    equal: Mapping[str, bool],
) -> str:
    medians = {c.variant: statistics.median(c.samples) for c in contestants if c.samples}
    body = []
    for c in contestants:
        time_s = medians.get(c.variant)
        ratios = [f"{time_s / medians[v]:.2f}" if time_s and v in medians else "-" for v in ("stock", "jemalloc")]
        memory = format_nbytes(c.peak_nbytes - baseline_nbytes) if c.peak_nbytes else "-"
        cells = [c.variant, f"{time_s:.4g}" if time_s else "-", *ratios, memory, "yes" if equal[c.variant] else "NO"]
        body.append([*cells, _remark(c)])
    body += [[variant, "-", "-", "-", "-", "-", why] for variant, why in missing.items()]
    headings = ["variant", "s a step", "to stock", "to jemalloc", "memory", "losses equal", "remarks"]
    text = markdown(headings, body)
    if scenario.workload == "tiny_ops" and {"stock", "ours"} <= medians.keys():
        num_ops = count_ops(scenario)
        cost_us = (medians["ours"] - medians["stock"]) / num_ops * 1e6
        text += f"\n\nOurs costs {cost_us:.2f} us an op more than stock, over {num_ops} ops."
    return text


def _remark(c: Contestant) -> str:
    if c.failure:
        return c.failure.splitlines()[0]
    steps = c.report.get("steps", ())
    planned = [step for step in steps if step["mode"] == "planned"][3:]
    if not planned:
        return "" if not steps else "no planned step"
    median = {key: statistics.median(step[key] for step in planned) for key in planned[0] if key != "mode"}
    share = median["stall_s"] / median["duration_s"]
    return (
        f"out {format_nbytes(int(median['evicted_nbytes']))}, in {format_nbytes(int(median['loaded_nbytes']))} a step; "
        f"stall {share:.1%}; {median['num_remapped_chunks']:.0f} chunks remapped; "
        f"{len([s for s in steps if s['mode'] == 'planned'])} of {len(steps)} steps planned"
    )


class _OpCounter(TorchDispatchMode):
    """Counts the ops that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def count_ops(scenario: Scenario) -> int:
    """ATen calls in one step of the scenario's workload."""
    workload = models.get(scenario.workload, "full", **scenario.sizes)
    model = workload.build()
    optimizer = workload.make_optimizer(model, scenario.optimizer)
    with _OpCounter() as counter:
        workload.loss(model, workload.make_batch(0)).backward()
        optimizer.step()
    return counter.num_ops


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", metavar="TEXT", help="only those whose name holds TEXT")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only these")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant (default: 3)")
    parser.add_argument("--policy", default="auto", help="who plans for ours (default: auto)")
    parser.add_argument("--store", type=Path, default=Path("/var/tmp"), help="disk for files (default: /var/tmp)")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="where rows and tables go")
    options = parser.parse_args()
    return options


if __name__ == "__main__":
    sys.exit(main())
