"""The command line: its flags, who gets which argument, and exit codes."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ooc.cli.main import _spelled_out, main, parser
from ooc.settings import resolve

FLAGS = {
    "": ["--help", "--version", "-h"],
    "run": [
        "--budget",
        "--chunk",
        "--debug",
        "--device",
        "--diagnose",
        "--help",
        "--host-budget",
        "--no-recompute",
        "--plan",
        "--policy",
        "--progress",
        "--recompute",
        "--report",
        "--step-in-backward",
        "--store",
        "--threshold",
        "--window",
        "-h",
        "-m",
    ],
    "demo": ["--budget", "--device", "--help", "--model", "--out", "--picture", "--steps", "--store", "-h"],
    "doctor": ["--device", "--help", "--json", "--store", "-h"],
    "fragmentation": [
        "--alloc-conf",
        "--allocator",
        "--capacity",
        "--device",
        "--help",
        "--json",
        "--png",
        "-h",
    ],
    "trace": ["--budget", "--fake", "--help", "--output", "--profile", "--store", "-h", "-m", "-o"],
    "plan": [
        "--budget",
        "--chunk",
        "--deadline",
        "--help",
        "--json",
        "--keep-times",
        "--no-recompute",
        "--objective",
        "--output",
        "--points",
        "--policy",
        "--profile",
        "--sweep",
        "-h",
        "-o",
    ],
    "fit": [
        "--budget",
        "--chunk",
        "--fake",
        "--help",
        "--json",
        "--keep-times",
        "--micro-batch",
        "--most",
        "--policy",
        "--profile",
        "--slowdown",
        "-h",
    ],
    "profile": ["--help", "--name", "--output", "--store", "-h", "-o"],
    "report": ["--beside", "--endurance", "--help", "--output", "--trace-json", "-h", "-o"],
}


def _sub_parsers(top: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    return {"": top, **action.choices}


def test_the_flags_are_frozen() -> None:
    """Scripts depend on them. Add, but do not rename; a removal needs a major version."""
    found = {name: sorted(p._option_string_actions) for name, p in _sub_parsers(parser()).items()}
    assert found == FLAGS


@pytest.mark.parametrize("first", [[], ["--"], ["--", "--"]])
@pytest.mark.parametrize("before", [[], ["--"]])
def test_everything_after_the_script_is_the_scripts_own(before: list[str], first: list[str]) -> None:
    """Also a `--` right behind it, which argparse takes for its own where the rest is another positional."""
    own = [*first, "--budget", "3", "-m", "--help", "--", "-x", "--store=here"]
    parsed = parser().parse_args(["run", "--budget", "1GiB", "--policy", "window", *before, "train.py", *own])
    assert (parsed.target, parsed.arguments) == ("train.py", own)
    assert (parsed.budget, parsed.policy, parsed.store, parsed.is_module) == ("1GiB", "window", None, False)


def test_a_module_takes_the_scripts_place() -> None:
    parsed = parser().parse_args(["run", "--budget=1GiB", "-m", "package.train", "-m", "x"])
    assert (parsed.target, parsed.arguments, parsed.is_module) == ("package.train", ["-m", "x"], True)


def test_flags_are_not_abbreviated() -> None:
    """An abbreviation would change its meaning when a flag is added."""
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(["run", "--bud", "1GiB", "train.py"])
    assert stopped.value.code == 2


def test_argument_beats_variable_beats_default() -> None:
    environment = {"OOC_BUDGET": "1GiB", "OOC_STORE": "/var/tmp", "OOC_POLICY": ""}
    found = resolve({"budget": "2GiB", "store": None}, environment)
    assert (found["budget"].value, found["budget"].source) == ("2GiB", "argument")
    assert (found["store"].value, found["store"].source) == ("/var/tmp", "OOC_STORE")
    assert (found["policy"].value, found["policy"].source) == (None, "default")


def test_without_a_budget_run_says_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OOC_BUDGET", raising=False)
    assert main(["run", "train.py"]) == 2
    assert "--budget SIZE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        (["train.py", "--budget", "1GiB", "--lr", "3"], "ooc run --budget 1GiB train.py ..."),
        (["train.py", "--lr", "3", "--budget=1GiB", "--debug", "x"], "ooc run --budget=1GiB --debug train.py ..."),
        (["-m", "package.train", "--budget", "1 GiB"], "ooc run --budget '1 GiB' -m package.train ..."),
        (["train.py", "--step-in-backward=3"], "ooc run --step-in-backward=3 train.py ..."),
        (["train.py", "--diagnose"], "ooc run --diagnose train.py ..."),
        (["train.py", "--progress", "--budget", "1GiB"], "ooc run --progress --budget 1GiB train.py ..."),
        (["train.py", "--budget"], "ooc run --budget train.py ..."),
        (["train.py", "--budgets", "1GiB"], None),
        (["train.py", "x", "--", "--budget", "1GiB"], None),
        (["train.py", "budget", "-m"], None),
    ],
)
def test_options_behind_the_script_are_told_where_there_is_no_budget(
    typed: list[str], right: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OOC_BUDGET", raising=False)
    monkeypatch.delenv("OOC_PLAN", raising=False)
    assert main(["run", *typed]) == 2
    error = capsys.readouterr().err
    assert "no budget" in error
    assert (right in error) if right is not None else ("go before it" not in error)


def test_each_option_of_run_is_known_behind_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OOC_BUDGET", raising=False)
    monkeypatch.delenv("OOC_PLAN", raising=False)
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    options = {option for action in commands.choices["run"]._actions for option in action.option_strings}
    for option in options - {"-h", "--help", "-m"}:
        assert main(["run", "train.py", option]) == 2
        assert f"ooc run {option} train.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [([], None), (["--step-in-backward"], "first"), (["--step-in-backward=4"], 4)],
)
def test_step_in_backward_takes_a_number_or_none(typed: list[str], expected: object) -> None:
    """Bare, it does not take the script for its value."""
    parsed = parser().parse_args(_spelled_out(["run", *typed, "train.py", "--step-in-backward"]))
    assert (parsed.step_in_backward, parsed.target) == (expected, "train.py")
    assert parsed.arguments == ["--step-in-backward"]


@pytest.mark.parametrize("number", ["0", "-1", "two", ""])
def test_step_in_backward_takes_no_other_number(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", f"--step-in-backward={number}", "train.py"])
    assert "backward passes to a step. Options: a number from 1 on" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("ooc ")


def test_run_end_to_end(tmp_path: Path) -> None:
    """A script's output, arguments and exit code; the report where it was asked for."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(512, 512)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(64, 512)).sum().backward()\n"
        "    optimizer.step()\n"
        "print(sys.argv[1:])\n"
        "sys.exit(5)\n"
    )
    command = [sys.executable, "-m", "ooc", "run", "--report", "report.json", str(script), "--budget", "7"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OOC_BUDGET": "16MiB", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("['--budget', '7']\n", 5), done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["budget_nbytes"] == 16 << 20
    assert len(report["steps"]) == 3


def test_run_refuses_a_bad_size_before_the_script_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it ran')")
    assert main(["run", "--budget", "12G", str(script)]) == 2
    assert "'12GiB'" in capsys.readouterr().err


def test_a_budget_beyond_the_machine_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Readable sizes, what there is, and a budget that would do."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it ran')")
    assert main(["run", "--budget", "999TiB", str(script)]) == 2
    told = capsys.readouterr().err
    assert "a pool of 999.0 TiB (" in told
    assert re.search(r"into memory: \d+\.\d [MG]iB are available", told)
    assert re.search(r"Options: a budget of at most \d+MiB;", told)
    assert main(["run", "--budget", "5kB", str(script)]) == 2
    assert "budget of 4.9 KiB (5000 bytes): less than one chunk of 64.0 KiB" in capsys.readouterr().err
