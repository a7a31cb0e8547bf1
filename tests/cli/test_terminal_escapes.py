"""Names in files that others wrote reach the terminal as text: no escape sequence, no markup, no turned-round lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ooc.cli.main import main
from tests.fragmentation.cases import snapshot, written
from tests.html_report.cases import synthetic

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[bold red]name[/]"


def _everywhere(value: Any, *, names: tuple[str, ...]) -> Any:
    """A document with `EVIL` behind each text that has one of these keys."""
    if isinstance(value, dict):
        return {
            key: child + EVIL if key in names and isinstance(child, str) else _everywhere(child, names=names)
            for key, child in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_everywhere(child, names=names) for child in value)
    return value


def _fragmentation(directory: Path) -> list[str]:
    document = _everywhere(snapshot(), names=("name", "filename"))
    return ["fragmentation", str(written(document, directory)), "--capacity", "20MiB"]


def _trace(directory: Path) -> Path:
    document = json.loads(synthetic()[0].to_json())
    path = directory / "trace.json"
    path.write_text(json.dumps(_everywhere(document, names=("label", "name", "where"))))
    return path


def _plan_too_small(directory: Path) -> list[str]:
    return ["plan", str(_trace(directory)), "--budget", "64KiB"]


def _profile(directory: Path) -> list[str]:
    from scheduler.profiles import load_profile

    path = directory / "profile.json"
    document = json.loads(load_profile("desktop").to_json())
    path.write_text(json.dumps({**document, "name": EVIL}))
    return ["plan", str(_trace(directory)), "--budget", "1GiB", "--policy", "auto", "--profile", str(path)]


@pytest.mark.parametrize(
    "command",
    [_fragmentation, _plan_too_small, _profile],
    ids=lambda made: made.__name__.strip("_"),
)
def test_nothing_raw_is_printed(
    command: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(command(tmp_path))
    shown = capsys.readouterr()
    both = shown.out + shown.err
    assert not set(both) & set("\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("command", [_fragmentation, _plan_too_small, _profile])
def test_the_names_are_still_shown(
    command: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the test above would prove nothing."""
    main(command(tmp_path))
    shown = capsys.readouterr()
    both = "".join((shown.out + shown.err).split())
    assert r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[boldred]name[/]" in both
