"""`ooc run --policy NAME`: each policy there is plays a plan of its own over a script that knows nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.policies import POLICIES
from tests.cli.test_run import SCRIPTS, ours, plain

SCRIPT = str(SCRIPTS / "activations.py")
BUDGET = "1344KiB"
"""Less than the script needs (1.5 MiB): enough also for policies that move nothing."""


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_each_policy(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_BACKGROUND_PLANNING", "0")  # ten steps may be over before a plan is ready
    report_path = tmp_path / "report.json"
    expected = plain(SCRIPT)
    actual = ours(SCRIPT, policy=policy, budget=BUDGET, report=str(report_path))
    assert expected.returncode == 0, expected.stderr
    assert (actual.stdout, actual.returncode) == (expected.stdout, 0), actual.stderr
    report = json.loads(report_path.read_text())
    assert report["policy"] == policy
    assert "planned" in [step["mode"] for step in report["steps"]]
    assert 0 < report["peak_nbytes"] <= report["budget_nbytes"]
