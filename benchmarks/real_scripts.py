"""Real scripts under `ooc run`: bits against plain Python, share of steps planned, CPU time.

    python -m benchmarks.real_scripts [--wide] [--script NAME]... [--out DIR]

The scripts are in `scripts/`, in the manner of pytorch/examples, nanoGPT and the examples of Hugging Face's libraries,
Lightning and timm; none knows of ooc. Those whose framework is not installed are left out (`make test-frameworks`
installs them). With `--wide` their models are four times as wide, so that an op takes as long as in models that people
train; without, most take a few microseconds, and what ooc does for each of them counts most. Exit code 1 if a script's
output differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, markdown, row, write
from ooc.units import format_nbytes, parse_nbytes

_FOLDER = Path(__file__).parent / "scripts"
_ROOT = Path(__file__).parent.parent
_TIMEOUT_S = 600
_WIDE = "4"
"""So many times as wide are the models with `--wide` (`SIZE` in `scripts/common.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script, the budget that it gets (half of its need or somewhat more), and the packages it needs.

    `wide_budget` is what it gets where its model is wide; None: it has no such model.
    """

    name: str
    budget: str
    wide_budget: str | None = None
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


SCRIPTS = (
    Script(name="word_language_model", budget="32MiB", wide_budget="200MiB"),
    Script(name="dcgan", budget="6MiB", wide_budget="56MiB"),
    Script(name="vae", budget="6MiB", wide_budget="25MiB"),
    Script(name="imagenet_dummy", budget="16MiB"),
    Script(name="time_sequence_prediction", budget="16MiB", wide_budget="128MiB"),
    Script(name="reinforce", budget="1280KiB", wide_budget="20MiB"),
    Script(name="ppo", budget="7MiB"),
    Script(name="nanogpt", budget="9MiB", wide_budget="90MiB"),
    Script(name="skipped_layers", budget="44MiB", wide_budget="740MiB"),
    Script(name="packed_gru", budget="19MiB", wide_budget="260MiB"),
    Script(name="seq2seq", budget="24MiB", wide_budget="106MiB"),
    Script(name="episodes", budget="9984KiB", wide_budget="171MiB"),
    Script(name="hf_trainer", budget="12MiB", wide_budget="96MiB", needs=("transformers", "accelerate")),
    Script(name="hf_resumed", budget="12MiB", wide_budget="96MiB", needs=("transformers", "accelerate")),
    Script(name="hf_lora", budget="8MiB", wide_budget="41MiB", needs=("transformers", "accelerate", "peft")),
    Script(name="accelerate_loop", budget="12MiB", wide_budget="96MiB", needs=("transformers", "accelerate")),
    Script(name="lightning_trainer", budget="2MiB", needs=("lightning",)),
    Script(name="timm_train", budget="96MiB", needs=("timm",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a script printed, the CPU time of an iteration as it told on stderr, and how it ended."""

    stdout: str
    cpu_s: float | None
    failure: str


def run_script(script: Script, environment: Mapping[str, str], options: Sequence[str] = ()) -> Outcome:
    """Run it plainly, or with the options of `ooc run`."""
    path = str(_FOLDER / f"{script.name}.py")
    command = [sys.executable, *(["-m", "ooc", "run", *options] if options else []), path]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=_TIMEOUT_S)
    lines = done.stderr.strip().splitlines()
    told = [json.loads(line)["cpu_s"] for line in lines if line.startswith('{"cpu_s"')]
    failure = "" if done.returncode == 0 else next((line for line in lines if "Error: " in line or "Too" in line), "?")
    return Outcome(stdout=done.stdout, cpu_s=told[-1] if told else None, failure=failure)


def _measure(script: Script, environment: Mapping[str, str], out: Path) -> tuple[list[Row], list[Any], bool]:
    report_path = out / f"script-{script.name}.json"
    report_path.unlink(missing_ok=True)
    plain = run_script(script, environment)
    options = [f"--budget={script.budget}", f"--report={report_path}"]
    ours = run_script(script, environment, options)
    report = json.loads(report_path.read_text()) if report_path.exists() else {}
    steps = report.get("steps", [])
    planned = sum(step["mode"] == "planned" for step in steps)
    planned_ops = sum(step["num_planned_ops"] for step in steps)
    num_ops = planned_ops + sum(step["num_demand_ops"] for step in steps)
    is_equal = not plain.failure and not ours.failure and plain.stdout == ours.stdout
    ratio = ours.cpu_s / plain.cpu_s if ours.cpu_s and plain.cpu_s else None
    failure = plain.failure or ours.failure
    rows = [
        row(script.name, "ours", "planned share", "1", [planned / len(steps)] if steps else []),
        row(
            script.name, "ours", "CPU time to plain", "1", [ratio] if ratio else [], note=plain.failure or ours.failure
        ),
    ]
    needs = report.get("in_core_peak_nbytes", 0)
    share = f"{parse_nbytes(script.budget, what='budget') / needs:.2f}" if needs else "-"
    cells = [
        script.name,
        "yes" if is_equal else "NO",
        f"{planned} of {len(steps)} ({planned_ops / num_ops:.0%} of ops)" if num_ops else "-",
        f"{ratio:.2f}" if ratio else "-",
        f"{script.budget} ({share})",
        format_nbytes(needs) if needs else "-",
        failure,
    ]
    return rows, cells, is_equal


def main() -> int:
    """Run the scripts, print a table, write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wide", action="store_true", help="models four times as wide, at half of their memory")
    parser.add_argument("--script", action="append", metavar="NAME", help="only these")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="where reports and rows go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    paths = [str(_ROOT), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_WAIT_POLICY": "passive"}
    scripts = SCRIPTS
    if options.wide:
        environment["SCRIPT_SIZE"] = _WIDE
        scripts = tuple(replace(each, budget=each.wide_budget) for each in SCRIPTS if each.wide_budget is not None)
    rows: list[Row] = []
    body: list[list[Any]] = []
    are_equal = True
    for script in scripts:
        if options.script and script.name not in options.script:
            continue
        if script.missing:
            print(f"{script.name}: left out, not installed: {', '.join(script.missing)}", file=sys.stderr, flush=True)
            continue
        found, cells, is_equal = _measure(script, environment, options.out)
        rows += found
        body.append(cells)
        are_equal = are_equal and is_equal
        print(f"{script.name}: {', '.join(map(str, cells[1:]))}", file=sys.stderr, flush=True)
        write(rows, options.out / "scripts.jsonl")
    headings = ["script", "equal", "planned", "CPU / plain", "budget (of its need)", "in core", "remarks"]
    print(markdown(headings, body))
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
