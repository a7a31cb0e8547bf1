"""Training loops that others own, of Hugging Face, Lightning and timm: equal bits within the budget.

Not run by default: `make test-frameworks` installs the frameworks and runs these. Models are small, with random
weights.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_scripts import SCRIPTS, Script
from ooc.units import parse_nbytes

pytestmark = pytest.mark.frameworks
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "scripts"
NOTEBOOK = Path(__file__).parent / "notebook.py"
TIMEOUT_S = 600
OURS = {script.name: script for script in SCRIPTS if script.needs}


def _script(name: str) -> Script:
    script = OURS[name]
    if script.missing:
        pytest.skip(f"not installed: {', '.join(script.missing)} (make test-frameworks)")
    return script


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """One thread, nothing from a hub, and plans made where training waits for them: the same steps are planned."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@functools.cache
def _plain(name: str) -> str:
    return _run(str(FOLDER / f"{name}.py")).stdout


def _check(script: Script, report: dict[str, Any]) -> None:
    assert report["peak_nbytes"] <= parse_nbytes(script.budget, what="budget") < report["in_core_peak_nbytes"]
    modes = [step["mode"] for step in report["steps"]]
    assert "planned" in modes
    assert all(step["why"] for step in report["steps"] if step["mode"] != "planned")
    assert not report["unplannable"]


@pytest.mark.parametrize("name", OURS)
def test_ooc_run_changes_no_bit(name: str, tmp_path: Path) -> None:
    script, report = _script(name), tmp_path / "run.json"
    path = str(FOLDER / f"{name}.py")
    done = _run("-m", "ooc", "run", "--budget", script.budget, "--report", str(report), path)
    assert done.stdout == _plain(name)
    _check(script, json.loads(report.read_text()))


@pytest.mark.parametrize("name", OURS)
def test_a_session_in_a_notebook_changes_no_bit(name: str, tmp_path: Path) -> None:
    script, report = _script(name), tmp_path / "run.json"
    done = _run(str(NOTEBOOK), str(FOLDER / f"{name}.py"), script.budget, str(report))
    assert done.stdout == _plain(name)
    _check(script, json.loads(report.read_text()))
