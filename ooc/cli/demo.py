"""`ooc demo`: trains a model in core, then within a budget, and compares losses, memory and time.

It starts four child processes: a baseline (same imports, next to no model), the in-core run, a measuring run (a few
steps in a pool that holds all of the step, to see what it needs), and the out-of-core run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ooc.cli.trial import TrialFailed, TrialOptions, TrialResult, TrialStep, planned_median_s, run_trial
from ooc.output_files import write_picture
from ooc.reporting.memory_curves import Curve
from ooc.units import MIB, format_duration, format_nbytes, parse_nbytes

_MEASURING_STEPS = 4
"""Enough for two equal steps after the one in which the optimizer makes its state."""
_BASELINE_STEPS = 3
_PICTURE_SUFFIXES = (".png", ".svg")
_PLENTY = 1.25
"""The measuring run's pool, as a multiple of the in-core run's memory: storages are rounded up to chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """A model that `--model NAME` trains.

    Attributes:
        share: The default budget, as a share of what the step needs in core.
    """

    workload: str
    num_steps: int
    share: float
    sizes: Mapping[str, Any] = field(default_factory=dict)


DEMO_MODELS: dict[str, DemoModel] = {
    "gpt": DemoModel(workload="gpt", num_steps=30, share=0.2),
    "resnet50": DemoModel(workload="resnet50", num_steps=12, share=0.25),
    "vgg16": DemoModel(workload="vgg16_cifar", num_steps=30, share=0.35),
    "lstm": DemoModel(workload="lstm", num_steps=30, share=0.25),
    "bert": DemoModel(workload="bert", num_steps=10, share=0.25),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    budget_nbytes: int
    baseline: TrialResult
    in_core: TrialResult
    out_of_core: TrialResult


def main(
    *,
    model: str = "gpt",
    budget: str | None = None,
    num_steps: int | None = None,
    out: str,
    store: str | None = None,
    picture: str | None = None,
) -> int:
    """Run the demo, print its table and draw memory over a step.

    Args:
        picture: The file to draw into, ending in .png or .svg. None: `memory-MODEL.png` in `out`.

    Returns:
        0 if all losses are equal to the last bit, 1 if not or if a run failed, 2 for wrong arguments.
    """
    console = Console()
    if model not in DEMO_MODELS:
        console.print(f"ooc demo: no model is called {model!r}. Options: {', '.join(DEMO_MODELS)}.")
        return 2
    if num_steps is not None and num_steps < _MEASURING_STEPS:
        console.print(f"ooc demo: --steps {num_steps} leaves no planned step. Options: at least {_MEASURING_STEPS}.")
        return 2
    path = Path(picture) if picture is not None else Path(out) / f"memory-{model}.png"
    if path.suffix not in _PICTURE_SUFFIXES:
        known = " or ".join(_PICTURE_SUFFIXES)
        console.print(f"ooc demo: --picture {path} is no kind of file that can be drawn. Options: a name with {known}.")
        return 2
    try:
        budget_nbytes = parse_nbytes(budget, what="budget") if budget is not None else None
        path.parent.mkdir(parents=True, exist_ok=True)
        runs = _run_all(console, DEMO_MODELS[model], budget_nbytes, num_steps, store)
    except (TrialFailed, ValueError, OSError) as error:
        print(f"ooc demo: {error}", file=sys.stderr)
        return 1
    is_equal = runs.in_core.losses == runs.out_of_core.losses
    console.print(_table(model, runs))
    if remark := _unwritten(runs):
        console.print(remark)
    plot(runs.out_of_core.curves, runs.budget_nbytes, path, title=_title(model, runs))
    console.print(f"Memory over the step: {path}", soft_wrap=True)
    if not is_equal:
        console.print("[bold red]The losses differ.[/] That must not happen: please report it with this output.")
    return 0 if is_equal else 1


def _run_all(
    console: Console, demo: DemoModel, budget_nbytes: int | None, num_steps: int | None, store: str | None
) -> _Runs:
    options = TrialOptions(workload=demo.workload, sizes=demo.sizes, num_steps=num_steps or demo.num_steps, store=store)
    with _progress(console) as progress:
        baseline = _show(
            progress, "baseline", replace(options, workload="baseline", sizes={}, num_steps=_BASELINE_STEPS)
        )
        in_core = _show(progress, "in core", options)
        if budget_nbytes is None:
            plenty = int(_PLENTY * (in_core.peak_nbytes - baseline.peak_nbytes))
            measured = _show(progress, "measure", replace(options, num_steps=_MEASURING_STEPS, budget_nbytes=plenty))
            budget_nbytes = int(measured.report["in_core_peak_nbytes"] * demo.share) // MIB * MIB
        out_of_core = _show(
            progress,
            f"out of core, {format_nbytes(budget_nbytes)}",
            replace(options, budget_nbytes=budget_nbytes, wants_curves=True),
        )
    return _Runs(budget_nbytes=budget_nbytes, baseline=baseline, in_core=in_core, out_of_core=out_of_core)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
        console=console,
    )


def _show(progress: Progress, name: str, options: TrialOptions) -> TrialResult:
    task = progress.add_task(name, total=options.num_steps, told="")
    if not progress.console.is_terminal:  # the bars are drawn once, at the end
        progress.console.print(f"{name}: {options.num_steps} steps ...")

    def on_step(step: TrialStep) -> None:
        told = f"loss {float.fromhex(step.loss):.4f}, {format_duration(step.duration_s)} a step"
        progress.update(task, advance=1, told=told)

    return run_trial(options, on_step=on_step)


def _table(name: str, runs: _Runs) -> Table:
    a, b, base = runs.in_core, runs.out_of_core, runs.baseline
    report = b.report
    rows = report["steps"]
    planned = [row for row in rows if row["mode"] == "planned"]
    steady = planned[len(planned) // 2 :]
    table = Table(title=f"{name}, {len(a.steps)} steps", title_justify="left")
    table.add_column("")
    table.add_column("in core", justify="right")
    table.add_column("out of core", justify="right")
    equal = sum(x == y for x, y in zip(a.losses, b.losses, strict=True))
    for label, index in (("first loss", 0), ("last loss", -1)):
        table.add_row(label, *(f"{float.fromhex(run.losses[index]):.9g}" for run in (a, b)))
    table.add_row("losses equal to the last bit", "", f"{equal} of {len(a.losses)}")
    table.add_row("budget", "none", format_nbytes(runs.budget_nbytes))
    table.add_row(
        "tensors at the worst moment, as asked for",
        format_nbytes(report["in_core_peak_nbytes"]),
        format_nbytes(report["peak_nbytes"]),
    )
    table.add_row(
        f"memory above a bare process, as written ({b.source})",
        *(format_nbytes(run.peak_nbytes - base.peak_nbytes) for run in (a, b)),
    )
    in_core_s = _median_s(a.steps[1:])
    table.add_row("time a step, median", format_duration(in_core_s), _planned_time(report, in_core_s))
    table.add_row("steps learning / planned / off plan", "", " / ".join(_counts(rows)))
    if steady:
        for label, key in (("moved in a step", "loaded_nbytes"), ("moved out a step", "evicted_nbytes")):
            table.add_row(label, "", format_nbytes(round(statistics.median(row[key] for row in steady))))
        table.add_row("waiting a step", "", format_duration(statistics.median(row["stall_s"] for row in steady)))
        remaps = statistics.median(row["num_remapped_chunks"] for row in steady)
        table.add_row("chunks remapped a step", "", f"{remaps:.0f}")
    return table


def _unwritten(runs: _Runs) -> str:
    """Why the kernel counts less in core than there are tensors; empty where it does not."""
    tensors = runs.out_of_core.report["in_core_peak_nbytes"]
    counted = runs.in_core.peak_nbytes - runs.baseline.peak_nbytes
    if counted >= tensors:
        return ""
    return (
        f"In core the kernel counts {format_nbytes(counted)} for {format_nbytes(tensors)} of tensors: a page counts "
        f"once it is written, and at least {format_nbytes(tensors - counted)} never are (workspaces that an op asks "
        "for and fills in part, as oneDNN's LSTM does). Out of core the whole budget is taken at the start."
    )


def _planned_time(report: Mapping[str, Any], in_core_s: float) -> str:
    planned_s = planned_median_s(report)
    if planned_s is None:
        return "no planned step"
    return f"{format_duration(planned_s)} ({planned_s / in_core_s:.2f} x)"


def _title(model: str, runs: _Runs) -> str:
    """The title of the picture, with the table's times."""
    in_core_s = _median_s(runs.in_core.steps[1:])
    took = f"{format_duration(in_core_s)} in core, {_planned_time(runs.out_of_core.report, in_core_s)} with ooc"
    return f"Memory over one training step of {model}: {took}"


def _counts(rows: list[Mapping[str, Any]]) -> list[str]:
    return [str(sum(row["mode"] == mode for row in rows)) for mode in ("learning", "planned", "off_plan")]


def _median_s(steps: tuple[TrialStep, ...]) -> float:
    return statistics.median(step.duration_s for step in steps)


def plot(curves: Mapping[str, Curve], budget_nbytes: int, path: Path, *, title: str) -> None:
    """Draw memory over one step, with the budget, as `path`: PNG or SVG by its suffix.

    Args:
        curves: As `ooc.reporting.memory_curves.step_curves` gives them.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    styles = {"live": ("in core", "#8a96a3"), "resident": ("with ooc", "#2563eb")}
    figure, axes = plt.subplots(figsize=(8, 4), dpi=160, layout="constrained")
    for name, curve in curves.items():
        label, colour = styles[name]
        seconds, mib = [s for s, _ in curve], [n / MIB for _, n in curve]
        peak = format_nbytes(max(n for _, n in curve))
        axes.fill_between(seconds, mib, step="post", alpha=0.35, color=colour, linewidth=0, label=f"{label}: {peak}")
        axes.step(seconds, mib, where="post", color=colour, linewidth=0.8)
    axes.axhline(
        budget_nbytes / MIB,
        color="#dc2626",
        linewidth=1.5,
        linestyle="--",
        label=f"budget: {format_nbytes(budget_nbytes)}",
    )
    axes.set(xlabel="time within the step, seconds (the median planned step)", ylabel="memory of tensors, MiB")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    axes.legend(
        loc="upper right", fontsize=9, framealpha=0.85, edgecolor="none", title="most at once", title_fontsize=9
    )
    write_picture(figure, path)
    plt.close(figure)
