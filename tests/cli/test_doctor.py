"""`ooc doctor`: fine here, and stopped where a session would be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ooc.cli import doctor
from ooc.cli.findings import Verdict
from ooc.settings import SETTINGS


def test_a_machine_that_passes_the_tests_is_fine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = doctor.main(store=str(tmp_path), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert code == 0, document["findings"]
    assert document["is_fine"]
    found = {f["name"]: f["value"] for f in document["findings"]}
    assert {"torch", "compiler", "page size", "memory mappings", "store, alone", "session"} <= set(found)
    assert document["settings"]["store"] == {
        "value": str(tmp_path),
        "source": "argument",
        "default": next(s.default for s in SETTINGS if s.name == "store"),
    }
    assert list(tmp_path.iterdir()) == []


def test_tables_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert doctor.main(store=str(tmp_path)) == 0
    assert "Nothing would stop us" in capsys.readouterr().out


def test_a_missing_store_stops_us_and_the_rest_is_still_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = doctor.main(store=str(tmp_path / "missing"), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert code == 1
    stopped = {f["name"]: f for f in document["findings"] if f["verdict"] == "stop"}
    assert set(stopped) == {"store", "session"}
    assert "does not exist" in stopped["store"]["value"]
    assert "mkdir" in stopped["store"]["remedy"]


def test_no_compiler_stops_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    findings = {f.name: f for f in doctor.examine(str(tmp_path))}
    assert findings["compiler"].verdict is Verdict.STOP
    assert "set CXX" in findings["compiler"].remedy


def test_it_says_where_torch_cannot_be_told_of_modes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert {f.name: f for f in doctor.examine(str(tmp_path))}["torch's formulas"].verdict is Verdict.FINE
    monkeypatch.setattr(doctor, "leave_unnoticed", lambda _mode: False)
    finding = {f.name: f for f in doctor.examine(str(tmp_path))}["torch's formulas"]
    assert finding.verdict is Verdict.NOTE
    assert "prod" in finding.remedy


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.10.1", Verdict.STOP),
        ("2.11.0", Verdict.FINE),
        ("2.13.0+cpu", Verdict.FINE),
        ("2.14.1", Verdict.FINE),
        ("2.15.0a0+git1234", Verdict.NOTE),
        ("3.0.0", Verdict.NOTE),
    ],
)
def test_versions_of_torch(version: str, verdict: Verdict) -> None:
    assert doctor.torch_finding(version).verdict is verdict
