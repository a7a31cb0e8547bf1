"""`make` sets up with a line before each phase and shows what pip says; what failed half-way is not ready."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PYTHON = """#!/bin/sh
echo "called: $*"
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
case "$*" in *"$FAILS_AT"*) exit 1;; esac
"""
"""Stands for Python: says how it was called; `-m venv DIR` puts it into DIR."""


def _set_up(folder: Path, *, fails_at: str = "nothing") -> tuple[int, list[str]]:
    python = folder / "python"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", f"PYTHON={python}", f"VENV={folder / 'venv'}", str(folder / "venv/.ready")],
        cwd=_ROOT,
        env={"PATH": "/usr/bin:/bin", "FAILS_AT": fails_at},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_each_phase_is_told_before_it_begins(tmp_path: Path) -> None:
    code, lines = _set_up(tmp_path)
    assert code == 0, lines
    assert (tmp_path / "venv/.ready").exists()
    torch = next(line for line in (_ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    called = [i for i, line in enumerate(lines) if line.startswith("called: -m ")]
    told = [i for i, line in enumerate(lines) if " of 3: " in line]
    assert len(called) == len(told) == 3, lines
    assert sorted(called + told) == [i for pair in zip(told, called, strict=True) for i in pair], lines
    assert torch in lines[told[1]]
    before = " ".join(lines[: told[0]])
    assert torch in before
    assert "MB" in before
    assert "minutes" in before
    for index in called[1:]:
        assert "pip install" in lines[index]
        assert "--quiet" not in lines[index]


@pytest.mark.parametrize("fails_at", ["-m venv", "torch==", ".[dev]"])
def test_what_failed_half_way_is_not_taken_as_ready(tmp_path: Path, fails_at: str) -> None:
    code, lines = _set_up(tmp_path, fails_at=fails_at)
    assert code != 0, lines
    assert not (tmp_path / "venv/.ready").exists()
