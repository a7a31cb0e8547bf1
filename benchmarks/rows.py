"""Benchmark figures as rows: one JSON object a line, and tables for people."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ooc.cli.main import own_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        value: The median where there are several samples. None: could not be had; `note` says why.
        quantiles: `[10 %, 90 %]` of the samples.
        n: Number of samples.
    """

    scenario: str
    variant: str
    metric: str
    unit: str
    value: float | None
    quantiles: tuple[float, float] | None
    n: int
    commit: str
    machine: str
    versions: Mapping[str, str]
    note: str = ""


def row(scenario: str, variant: str, metric: str, unit: str, samples: Sequence[float], *, note: str = "") -> Row:
    """A row of the samples' median. No samples: a row without a value."""
    ordered = sorted(samples)
    return Row(
        scenario=scenario,
        variant=variant,
        metric=metric,
        unit=unit,
        value=statistics.median(ordered) if ordered else None,
        quantiles=(_quantile(ordered, 0.1), _quantile(ordered, 0.9)) if ordered else None,
        n=len(ordered),
        commit=_commit(),
        machine=_machine(),
        versions=_versions(),
        note=note,
    )


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as JSON lines."""
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))


def markdown(headings: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; the first column to the left, the others to the right."""
    lines = [
        "| " + " | ".join(headings) + " |",
        "|---|" + "---:|" * (len(headings) - 1),
        *("| " + " | ".join(str(cell) for cell in cells) + " |" for cells in body),
    ]
    return "\n".join(lines)


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


@cache
def _commit() -> str:
    root = Path(__file__).parent.parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    if head.returncode != 0:
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


@cache
def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"


@cache
def _versions() -> dict[str, str]:
    return {"ooc": own_version(), "torch": torch.__version__, "python": platform.python_version()}
