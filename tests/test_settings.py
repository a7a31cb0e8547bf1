"""Settings from the environment are checked like options: value, limit, place and options in the message."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ooc.cli import doctor
from ooc.cli.findings import Verdict
from ooc.cli.main import _spelled_out, main, parser
from ooc.settings import PROGRESS, SETTINGS, BadSetting, check, check_environment, resolve
from ooc.telemetry.progress import When
from tests import forked

SCRIPT = "print('it ran')\n"

BAD = {
    "budget": ("12G", "'12GiB'"),
    "device": ("tpu", "Options: cpu, cuda"),
    "host_budget": ("lots", "is not a size"),
    "store": ("/no/such/directory", "does not exist"),
    "policy": ("best", "Options: auto"),
    "window": ("-1", "is not a size"),
    "chunk": ("1.5", "has a fraction but no unit"),
    "threshold": ("0", "at least 1"),
    "plan": ("/no/such/plan.json", "there is no file"),
    "report": ("/no/such/directory/report.json", "there is no directory /no/such/directory"),
    "progress": ("loud", "Options: never, auto, always"),
}


def test_every_setting_has_a_bad_value_here() -> None:
    assert set(BAD) == {setting.name for setting in SETTINGS}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_told_with_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its variable and from its option: the same words behind another place, and the script does not start."""
    value, said = BAD[name]
    setting = next(setting for setting in SETTINGS if setting.name == name)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for other in SETTINGS:
        monkeypatch.delenv(other.variable, raising=False)
    if name != "budget":
        monkeypatch.setenv("OOC_BUDGET", "1MiB")
    with monkeypatch.context() as patch:
        patch.setenv(setting.variable, value)
        assert main(["run", str(script)]) == 2
    from_variable = capsys.readouterr()
    if name == "progress":  # argparse's own words
        with pytest.raises(BadSetting, match="--progress: progress 'loud'"):
            check(resolve({"progress": value}, {}))
    else:
        assert main(["run", f"{setting.option}={value}", str(script)]) == 2
        from_option = capsys.readouterr()
        assert from_option.err == from_variable.err.replace(setting.variable, setting.option, 1)
    assert from_variable.err.startswith(f"ooc run: {setting.variable}: ")
    assert value in from_variable.err
    assert said in from_variable.err
    assert from_variable.out == ""


def test_switches_are_checked_and_slips_of_the_pen_are_named() -> None:
    assert check_environment({"OOC_PLAN_CACHE": "off", "OOC_NVTX": "1", "OOC_CACHE_DIR": "/x", "OOCYTE": "1"}) == []
    with pytest.raises(BadSetting, match=r"OOC_PLAN_CACHE: 'perhaps' is neither on nor off. Options: 0, 1, off"):
        check_environment({"OOC_PLAN_CACHE": "perhaps"})
    with pytest.raises(BadSetting, match=r"OOC_PLAN_CACHE: '/x/y' .* OOC_CACHE_DIR says in which directory"):
        check_environment({"OOC_PLAN_CACHE": "/x/y"})
    with pytest.raises(BadSetting, match=r"OOC_NVTX: 'on' is neither on nor off. Options: 0, 1"):
        check_environment({"OOC_NVTX": "on"})
    assert check_environment({"OOC_BUGDET": "1GiB"}) == [
        "OOC_BUGDET is set, and means nothing to ooc. Did you mean OOC_BUDGET?"
    ]
    assert check_environment({"OOC_SOMETHING_ELSE_ENTIRELY": "1"}) == []


def test_values_from_the_environment_reach_the_terminal_without_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OOC_STORE", "/no\x1b[31m")
    assert main(["run", "--budget", "1MiB", "script.py"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_doctor_names_a_variable_that_run_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_BUDGET", "12G")
    monkeypatch.setenv("OOC_NVTX", "maybe")
    found = {f.name: f for f in doctor._settings(resolve({}))}
    assert found["OOC_BUDGET"].verdict is Verdict.STOP
    assert "'12GiB'" in found["OOC_BUDGET"].remedy
    assert found["OOC_NVTX"].verdict is Verdict.STOP


@pytest.mark.parametrize(
    ("words", "progress", "target"),
    [
        (["--progress", "train.py", "--progress"], "auto", "train.py"),
        (["--progress=always", "train.py"], "always", "train.py"),
        (["--progress=never", "--budget", "1GiB", "train.py"], "never", "train.py"),
        (["--budget", "--progress", "train.py"], None, "train.py"),  # argparse: a value is missing
        (["--progress", "always"], "auto", "always"),  # the value of a bare flag would be SCRIPT
        (["--store", "here", "--progress", "-m", "package", "--progress"], "auto", "package"),
        (["train.py", "--progress", "--progress=always"], None, "train.py"),
    ],
)
def test_progress_with_and_without_a_value(words: list[str], progress: str | None, target: str) -> None:
    line = _spelled_out(["run", *words])
    if words[0] == "--budget":
        with pytest.raises(SystemExit):
            parser().parse_args(line)
        return
    parsed = parser().parse_args(line)
    assert (parsed.progress, parsed.target) == (progress, target)
    after = words.index(target) + 1
    assert parsed.arguments == words[after:]  # the script's own, as they were


def test_progress_always_speaks_off_a_terminal() -> None:
    script = Path(__file__).parent / "scripts" / "small_net.py"
    command = [sys.executable, "-m", "ooc", "run", "--budget", "64MiB", "--progress=always", str(script)]
    done = forked.run([*command, "--steps", "2"], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "ooc: step 1 learning" in done.stderr


def test_the_options_of_progress_are_those_of_the_session() -> None:
    from typing import get_args

    assert get_args(When) == PROGRESS
