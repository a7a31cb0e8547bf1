"""The optimizer inside the backward pass: bytes moved, memory and time a step, with and without.

    python -m benchmarks.updates [--scenario TEXT]... [--rounds N] [--out DIR]

Stock PyTorch, ours, and ours with `step_in_backward` take turns of a few steps, each in a process of its own. Losses
are compared bit for bit. CPU time is the process's, I/O threads included; it bears other processes better than time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from benchmarks.child import IN_BACKWARD
from benchmarks.cpu import Contestant, Scenario
from benchmarks.rows import Row, markdown, row, write
from ooc import models
from ooc.cli.trial import TrialOptions, run_trial
from ooc.units import MIB, format_nbytes

_VARIANTS = ("stock", "ours", IN_BACKWARD)
_LEARNING_STEPS = 6
_TURN_STEPS = 4
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

_GPT = {"depth": 6, "width": 512, "context": 128, "batch_size": 4}


def scenarios() -> tuple[Scenario, ...]:
    """VGG16 by both optimizers, and a model whose parameters, gradients and Adam state are four times the budget."""
    parameters_nbytes = 4 * models.num_parameters(models.get("gpt", "full", **_GPT).build())
    return (
        Scenario(name="VGG16 32x32, SGD, 96 MiB", workload="vgg16_cifar", budget_nbytes=96 * MIB),
        Scenario(name="VGG16 32x32, Adam, 96 MiB", workload="vgg16_cifar", budget_nbytes=96 * MIB, optimizer="adam"),
        Scenario(
            name=f"GPT 6 x 512, Adam, {parameters_nbytes // MIB} MiB (a quarter of parameters, gradients and state)",
            workload="gpt",
            sizes=_GPT,
            budget_nbytes=parameters_nbytes // MIB * MIB,
            optimizer="adam",
        ),
    )


class TimedContestant:
    """A variant's child process, and the CPU time of each of its turns."""

    def __init__(self, variant: str, command: list[str]) -> None:
        self.inner = Contestant(variant, command, {**os.environ, "OMP_WAIT_POLICY": "passive"}, None)
        self.cpu_s: list[float] = []

    def __repr__(self) -> str:
        return f"<TimedContestant {self.inner!r}>"

    def close(self) -> None:
        """End the child."""
        self.inner.close()

    def take_turn(self, count: int, *, is_counted: bool) -> None:
        """Take steps; if counted, note the CPU time of one of them, and each one's time but the first's."""
        before = self._cpu_s()
        self.inner.take_steps(count, num_skipped=1 if is_counted else count)
        if is_counted and not self.inner.failure:
            self.cpu_s.append((self._cpu_s() - before) / count)

    def _cpu_s(self) -> float:
        try:
            text = Path(f"/proc/{self.inner._child.process.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * _TICK_S


def measure(scenario: Scenario, *, rounds: int, store: Path) -> tuple[list[Row], list[list[str]]]:
    """Rows, and the lines of the table."""
    baseline = run_trial(TrialOptions(workload="baseline", optimizer=scenario.optimizer, num_steps=3)).peak_nbytes
    with ExitStack() as stack:
        own = [stack.enter_context(closing(_contestant(variant, scenario, store))) for variant in _VARIANTS]
        for each in own:
            each.take_turn(_LEARNING_STEPS, is_counted=False)
        for _ in range(rounds):
            for each in own:
                each.take_turn(_TURN_STEPS, is_counted=True)
    return _rows(scenario, own, baseline), _lines(own, baseline)


def _contestant(variant: str, scenario: Scenario, store: Path) -> TimedContestant:
    trial = TrialOptions(
        workload=scenario.workload,
        sizes=scenario.sizes,
        optimizer=scenario.optimizer,
        num_steps=0,
        budget_nbytes=None if variant == "stock" else scenario.budget_nbytes,
        store=str(store),
    )
    return TimedContestant(variant, [sys.executable, "-m", "benchmarks.child", variant, json.dumps(asdict(trial))])


def _moved(each: TimedContestant) -> list[float]:
    steps = [step for step in each.inner.report.get("steps", ()) if step["mode"] == "planned"]
    return [step["loaded_nbytes"] + step["evicted_nbytes"] for step in steps[2:]]


def _rows(scenario: Scenario, own: Sequence[TimedContestant], baseline_nbytes: int) -> list[Row]:
    rows = []
    for each in own:
        inner = each.inner
        for metric, unit, samples in (
            ("time a step", "s", inner.samples),
            ("CPU time a step", "s", each.cpu_s),
            ("moved a step", "B", _moved(each)),
            ("memory", "B", [inner.peak_nbytes - baseline_nbytes]),
            ("peak of the pool", "B", [inner.report["peak_nbytes"]] if inner.report else []),
        ):
            rows.append(row(scenario.name, inner.variant, metric, unit, samples, note=inner.failure))
    return rows


def _lines(own: Sequence[TimedContestant], baseline_nbytes: int) -> list[list[str]]:
    stock = own[0]
    lines = []
    for each in own:
        inner, moved = each.inner, _moved(each)
        planned = sum(step["mode"] == "planned" for step in inner.report.get("steps", ()))
        is_equal = inner.losses == stock.inner.losses[: len(inner.losses)]
        lines.append(
            [
                inner.variant,
                format_nbytes(int(statistics.median(moved))) if moved else "-",
                format_nbytes(inner.peak_nbytes - baseline_nbytes),
                _figure(inner.samples),
                _ratio(inner.samples, stock.inner.samples),
                _figure(each.cpu_s),
                _ratio(each.cpu_s, stock.cpu_s),
                "yes" if is_equal else "NO",
                inner.failure.splitlines()[0] if inner.failure else f"{planned} planned" if inner.report else "",
            ]
        )
    return lines


def _figure(samples: Sequence[float]) -> str:
    return f"{statistics.median(samples):.3f}" if samples else "-"


def _ratio(samples: Sequence[float], others: Sequence[float]) -> str:
    return f"{statistics.median(samples) / statistics.median(others):.2f}" if samples and others else "-"


def main() -> int:
    """Run the scenarios, print tables, write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", metavar="TEXT", help="only those whose name holds TEXT")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant (default: 3)")
    parser.add_argument("--store", type=Path, default=Path("/var/tmp"), help="disk for files (default: /var/tmp)")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="where the rows go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    headings = ["variant", "moved a step", "memory", "s a step", "to stock", "CPU s a step", "to stock", "losses equal"]
    rows: list[Row] = []
    is_equal = True
    for scenario in scenarios():
        if options.scenario and not any(text.lower() in scenario.name.lower() for text in options.scenario):
            continue
        found, lines = measure(scenario, rounds=options.rounds, store=options.store)
        rows += found
        write(rows, options.out / "updates.jsonl")
        is_equal = is_equal and all(line[7] == "yes" for line in lines)
        print(f"## {scenario.name}\n\n{markdown([*headings, 'remarks'], lines)}\n", flush=True)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
