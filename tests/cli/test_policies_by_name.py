"""`ooc run --policy NAME`: each policy there is plays a plan of its own over a script that knows nothing of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scheduler.policies import POLICIES
from tests.cli.test_run import SCRIPTS, finish, plain

SCRIPT = str(SCRIPTS / "activations.py")
BUDGET = "1344KiB"
"""Less than the script needs (1.5 MiB): enough also for policies that move nothing."""

_RUNS = f"""
import sys
from ooc.cli.main import main
folder, *policies = sys.argv[1:]
for policy in policies:
    print("policy", policy, flush=True)
    options = ["--policy", policy, "--budget", "{BUDGET}", "--report", f"{{folder}}/{{policy}}.json"]
    print("returned", main(["run", *options, "{SCRIPT}"]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process ran the script by one policy after the other, and left their reports and what they printed."""
    folder = tmp_path_factory.mktemp("policies")
    script = folder / "runs.py"
    script.write_text(_RUNS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OOC_BACKGROUND_PLANNING", "0")  # ten steps may be over before a plan is ready
        done = finish([sys.executable, str(script), str(folder), *sorted(POLICIES)])
    assert done.returncode == 0, done.stderr
    (folder / "printed").write_text(done.stdout)
    return folder


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_each_policy(policy: str, folder: Path) -> None:
    expected = plain(SCRIPT)
    assert expected.returncode == 0, expected.stderr
    _, _, printed = (folder / "printed").read_text().partition(f"policy {policy}\n")
    assert printed.startswith(expected.stdout + "returned 0\n")
    report = json.loads((folder / f"{policy}.json").read_text())
    assert report["policy"] == policy
    assert "planned" in [step["mode"] for step in report["steps"]]
    assert 0 < report["peak_nbytes"] <= report["budget_nbytes"]
