"""Makes the report of a session as plain data, and writes it as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ooc.engine import Engine
from ooc.output_files import write_output
from ooc.reporting.hints import hint, planned_share
from ooc.units import format_duration, format_nbytes

REPORT_SCHEMA_VERSION = 1


def make_report(engine: Engine) -> dict[str, Any]:
    """The report of the session so far. Every size is in bytes, every time in seconds unless its name says `_ns`."""
    plan, log = engine.sequences.last_plan, engine.steps
    log.memory.sample()
    peak = log.memory.peak
    report: dict[str, Any] = {
        "schema": "ooc.report",
        "schema_version": REPORT_SCHEMA_VERSION,
        "budget_nbytes": engine.budget_nbytes,
        "chunk_nbytes": engine.options.chunk_nbytes,
        "threshold_nbytes": engine.options.threshold_nbytes,
        "peak_nbytes": log.peak_chunks * engine.options.chunk_nbytes,
        "process_peak_nbytes": peak.nbytes if peak is not None else None,
        "process_memory": asdict(peak) if peak is not None else None,
        "in_core_peak_nbytes": log.in_core_peak_nbytes,
        "store": {"directory": str(engine.memory.store.directory), "is_direct": engine.memory.store.is_direct},
        "past_budgets": log.past_budgets.document(),
        "steps": [asdict(row) for row in log.rows],
        "policy": engine.options.policy,
        "plan": None
        if plan is None
        else {
            "policy": plan.policy,
            "num_steps": engine.cycle.rounds.num_steps,
            "predicted": dict(plan.predicted),
            "bounds": dict(plan.bounds),
            "parameters": dict(plan.parameters),
            "machine": asdict(plan.machine),
        },
        **engine.learned(),
        "collectives": engine.collectives.document(),
        "guest_threads": engine.runner.guests.document(),
        "refused": engine.runner.refusals.document(),
        "ended_by": None,
        "versions": versions(),
    }
    report["hint"] = hint(report)
    return report


def versions() -> dict[str, str]:
    """Versions of ooc, torch, Python and the kernel."""
    try:
        own = version("ooc")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "ooc": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document as `write_output` does: a regular file whole or not at all. Raises OSError."""
    write_output(path, _readable(document))


def _readable(document: Mapping[str, Any]) -> str:
    """JSON for people and programs: indented, except that the timeline's columns of numbers take a line each."""
    text = json.dumps({name: value for name, value in document.items() if name != "timeline"}, indent=1)
    if "timeline" in document:
        timeline = json.dumps(document["timeline"], separators=(",", ":"))
        text = f'{text[:-2]},\n "timeline": {timeline}\n}}'
    return f"{text}\n"


def summary(report: Mapping[str, Any]) -> str:
    """A report in one line."""
    steps = report["steps"]
    counts = {mode: sum(step["mode"] == mode for step in steps) for mode in ("learning", "planned", "off_plan")}
    parts = [
        f"{len(steps)} steps ({', '.join(f'{n} {mode}' for mode, n in counts.items() if n) or 'none'})",
        f"peak {format_nbytes(report['peak_nbytes'])} of {format_nbytes(report['budget_nbytes'])}",
    ]
    if report["in_core_peak_nbytes"]:
        parts.append(f"in core {format_nbytes(report['in_core_peak_nbytes'])}")
    planned = [step for step in steps if step["mode"] == "planned"]
    if planned:
        count = len(planned)
        moved = sum(step["loaded_nbytes"] + step["evicted_nbytes"] for step in planned)
        duration_s, stall_s = (sum(step[name] for step in planned) for name in ("duration_s", "stall_s"))
        parts.append(
            f"a planned step takes {format_duration(duration_s / count)}, of it {format_duration(stall_s / count)} "
            f"waiting, and moves {format_nbytes(moved // count)}"
        )
    if steps:
        parts.append(f"{planned_share(steps):.0%} of the steps' time planned")
    return "; ".join(parts)
