"""The output of `ooc plan` and `ooc fit`: tables for people, JSON for programs, a picture of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ooc.output_files import write_picture
from ooc.units import MIB, format_duration, format_nbytes
from scheduler.compare import Outcome
from vmm.printable import printable

_MOVED = ("loaded_nbytes", "evicted_nbytes")

Points = Sequence[tuple[int, Sequence[Outcome]]]


def outcome_row(outcome: Outcome) -> dict[str, Any]:
    """One outcome as plain data: bytes, nanoseconds, joules."""
    plan = outcome.plan
    row: dict[str, Any] = {"policy": outcome.policy, "fits": plan is not None}
    if plan is None:
        return {**row, "reason": outcome.reason, "smallest_budget_nbytes": outcome.smallest_budget_nbytes}
    row |= {"budget_nbytes": plan.machine.budget_nbytes, **plan.predicted, "parameters": dict(plan.parameters)}
    row["step_ns"] = outcome.duration_ns  # with its remaps
    row["bound_ns"] = plan.bounds["duration_ns"]
    row["over_bound"] = over_bound(outcome)
    if plan.notes:
        row["notes"] = list(plan.notes)
    if outcome.energy_j is not None:
        row["energy_j"] = outcome.energy_j
        row["energy_bound_j"] = outcome.energy_bound_j
    if outcome.carried_from_nbytes is not None:
        row["carried_from_nbytes"] = outcome.carried_from_nbytes
    return row


def over_bound(outcome: Outcome) -> float:
    """How much longer the step takes than the lower bound of any plan, as a share of that bound."""
    assert outcome.plan is not None
    return outcome.duration_ns / max(outcome.plan.bounds["duration_ns"], 1) - 1


def comparison_table(outcomes: Sequence[Outcome], *, title: str, chosen: Outcome | None) -> Table:
    """Make the table that compares policies; the chosen one is marked."""
    has_energy = any(o.energy_j is not None for o in outcomes)
    table = Table(title=escape(printable(title)))
    table.add_column("policy")
    for heading in ("fits", "peak", "time", "stall", "over bound", "in", "out", "remaps"):
        table.add_column(heading, justify="right")
    if has_energy:
        table.add_column("energy", justify="right")
    for outcome in outcomes:
        table.add_row(*_cells(outcome, has_energy), style="bold" if outcome is chosen else None)
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepMarks:
    """What a reader looks for in a sweep, in bytes.

    Attributes:
        least: Each policy's least budget; None: it has no plan at any.
        knee: The budget from which on more memory buys little time; None: there is no such.
    """

    least: Mapping[str, int | None]
    knee: int | None

    def lines(self) -> list[str]:
        """For people."""
        order = sorted(self.least, key=lambda policy: (self.least[policy] or 1 << 62, policy))
        texts = [f"{p} {format_nbytes(n) if (n := self.least[p]) is not None else 'none'}" for p in order]
        found = [f"Least budget: {', '.join(texts)}."]
        if self.knee is None:
            found.append("No knee: more memory buys little time anywhere.")
        else:
            found.append(f"Knee: {format_nbytes(self.knee)}; beyond it more memory buys little time.")
        return found


def sweep_table(points: Points, *, chunk_nbytes: int, title: str, marks: SweepMarks) -> Table:
    """Make the table of a sweep: a row per budget, a column per policy, with time and excess over the bound.

    The row of the knee is marked, and each policy's first row that has a plan.
    """
    table = Table(title=escape(printable(title)))
    table.add_column("budget", justify="right")
    for outcome in points[0][1] if points else ():
        table.add_column(outcome.policy, justify="right")
    for num_chunks, outcomes in points:
        cells = [
            "-" if o.plan is None else f"{format_duration(o.duration_ns / 1e9)} (+{over_bound(o):.1%})"
            for o in outcomes
        ]
        is_knee = num_chunks * chunk_nbytes == marks.knee
        budget = format_nbytes(num_chunks * chunk_nbytes) + (" knee" if is_knee else "")
        table.add_row(budget, *cells, style="bold" if is_knee else None)
    return table


def notes_of(outcomes: Sequence[Outcome]) -> list[str]:
    """The policies' notes on their plans, a line each."""
    return [f"{o.policy}: {note}." for o in outcomes if o.plan is not None for note in o.plan.notes]


def print_table(table: Table) -> None:
    """Print a table to stdout, as wide as the terminal, or wide enough for a file."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


def draw_sweep(points: Points, *, chunk_nbytes: int, path: Path, title: str, marks: SweepMarks) -> None:
    """Draw time, bytes moved and energy (where known) over the budget, a line per policy, as PNG.

    A dotted line stands at the knee; a tick below the first panel at each policy's least budget.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    policies = [o.policy for o in points[0][1]]
    has_energy = any(o.energy_j is not None for _, outcomes in points for o in outcomes)
    panels: list[tuple[str, Any]] = [
        ("time of a step, s", lambda o: o.duration_ns / 1e9),
        ("moved in a step, MiB", lambda o: sum(o.plan.predicted[key] for key in _MOVED) / MIB),
    ]
    if has_energy:
        panels.append(("energy of a step, J", lambda o: o.energy_j))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), layout="constrained", squeeze=False)
    for axis, (label, value) in zip(axes[0], panels, strict=True):
        for index, policy in enumerate(policies):
            line = [(n * chunk_nbytes / MIB, value(o[index])) for n, o in points if o[index].plan is not None]
            if line:
                style = {"linewidth": 2.5, "zorder": 3} if policy == "auto" else {"linewidth": 1.2}
                (drawn,) = axis.plot(*zip(*line, strict=True), label=policy, **style, **_looks(index))
                if (least := marks.least.get(policy)) is not None and axis is axes[0][0]:
                    axis.axvline(least / MIB, ymax=0.05, color=drawn.get_color(), linewidth=2)
        if marks.knee is not None:
            axis.axvline(marks.knee / MIB, color="0.4", linestyle="--", linewidth=1, label="knee")
        axis.set(xlabel="budget, MiB", ylabel=label)
        axis.grid(alpha=0.3)
    bound = [
        (n * chunk_nbytes / MIB, next(o.plan.bounds["duration_ns"] for o in outcomes if o.plan is not None) / 1e9)
        for n, outcomes in points
        if any(o.plan is not None for o in outcomes)
    ]
    if bound:
        axes[0][0].plot(*zip(*bound, strict=True), color="black", linestyle=":", label="bound")
    axes[0][0].legend(fontsize="small")
    figure.suptitle(title)
    write_picture(figure, path, dpi=110)
    pyplot.close(figure)


def _looks(index: int) -> dict[str, str]:
    """Colour, line and marker of the line number `index`; matplotlib has ten colours, so the next ten are dashed."""
    again, colour = divmod(index, 10)
    line, marker = (("-", "."), ("--", "x"), ("-.", "+"))[again % 3]
    return {"color": f"C{colour}", "linestyle": line, "marker": marker}


def _cells(outcome: Outcome, has_energy: bool) -> list[str]:
    plan = outcome.plan
    if plan is None:
        needed = outcome.smallest_budget_nbytes
        asks = f"needs {format_nbytes(needed)}" if needed is not None else "no plan"
        return [outcome.policy, asks, *["-"] * (8 if has_energy else 7)]
    p = plan.predicted
    cells = [
        outcome.policy,
        "yes",
        format_nbytes(p["peak_nbytes"]),
        format_duration(outcome.duration_ns / 1e9),
        f"{p['stall_ns'] / max(outcome.duration_ns, 1):.1%}",
        f"+{over_bound(outcome):.1%}",
        format_nbytes(p["loaded_nbytes"]),
        format_nbytes(p["evicted_nbytes"]),
        str(p["num_remapped_chunks"]),
    ]
    if has_energy:
        cells.append("-" if outcome.energy_j is None else f"{outcome.energy_j:.4g} J")
    return cells
