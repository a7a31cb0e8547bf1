"""Ranks that a script starts itself under `ooc run`: each within the budget, and its bits those of a run without us."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import ooc
from ooc.cli.own_ranks import OwnRanks
from tests import forked
from tests.cli.test_run import environment
from tests.distributed.test_torchrun import in_core

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "own_ranks.py")
BUDGET_NBYTES = 2 << 20
PREFIX = ["-m", "ooc", "run", "--budget", "2MiB", "/there/train.py"]
SPAWN: Any = importlib.import_module("torch.multiprocessing.spawn")  # as an attribute, it is a function of that name
_TIMEOUT_S = 600


def finish(*command: str, is_forked: bool = False) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command]
    env = {name: value for name, value in environment().items() if name not in ("RANK", "LOCAL_RANK")}
    if is_forked:
        return forked.run(words, env=env, timeout=_TIMEOUT_S)
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=_TIMEOUT_S, check=False)


def bits(run: subprocess.CompletedProcess[str]) -> list[str]:
    assert run.returncode == 0, run.stderr
    return sorted(run.stdout.splitlines())


_SLOW = pytest.mark.slow  # three interpreters each


@pytest.mark.parametrize("how", ["spawn", *(pytest.param(how, marks=_SLOW) for how in ("late", "beside", "both"))])
def test_each_rank_has_a_budget_of_its_own(how: str, tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    run = finish("-m", "ooc", "run", "--budget", str(BUDGET_NBYTES), "--report", str(report), SCRIPT, how)
    assert bits(run) == in_core()
    assert run.stderr.count(f"budget {BUDGET_NBYTES}") == 2, run.stderr
    assert "no step ended" not in run.stderr
    for path in (report, tmp_path / "run.rank1.json"):
        document = json.loads(path.read_text())
        assert len(document["steps"]) == 7
        assert document["peak_nbytes"] <= document["budget_nbytes"] == BUDGET_NBYTES
        assert sum(step["evicted_nbytes"] for step in document["steps"]) > 0
    assert (tmp_path / "run.main.json").exists() == (how != "beside")


@pytest.mark.parametrize("how", ["beside", pytest.param("spawn", marks=_SLOW)])
def test_a_rank_that_fails_ends_the_run_as_without_us(how: str, tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    run = finish("-m", "ooc", "run", "--budget", "2MiB", "--report", str(report), SCRIPT, how, "1")
    assert run.returncode == 1
    assert "ValueError: as asked for" in run.stderr
    assert json.loads((tmp_path / "run.rank1.json").read_text())["ended_by"]["type"] == "ValueError"


def test_processes_that_hold_no_budget_are_told_of() -> None:
    run = finish("-m", "ooc", "run", "--budget", "4MiB", SCRIPT, "fork", is_forked=True)
    assert run.stderr.count("is not held to any budget") == 1, run.stderr


def test_what_becomes_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    python = sys.executable
    with ooc.Session("2MiB") as session:
        ranks = OwnRanks(session, PREFIX, None)
        rank_1 = {**os.environ, "LOCAL_RANK": "1"}
        for script in ("train.py", os.path.abspath("train.py")):
            assert ranks.command([python, script, "--lr", "1"], rank_1) == [python, *PREFIX, "--lr", "1"]
            assert ranks.command((python, "-u", script), rank_1) == [python, "-u", *PREFIX]
        assert not ranks.is_first_elsewhere
        helper = [python, "train.py"]
        assert ranks.command(helper, None) is helper  # it is nobody's rank
        assert ranks.command(helper, dict(os.environ)) is helper
        for words in (["ls", "train.py"], "python train.py", [python, "-m", "ooc", "run", "train.py"]):
            assert ranks.command(words, rank_1) is words
        with pytest.warns(RuntimeWarning, match="not held to any budget"):
            assert ranks.command([python, "other.py"], rank_1) == [python, "other.py"]
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert ranks.command(helper, dict(os.environ)) is helper  # our own rank's
        ranks.command([python, "train.py"], {**os.environ, "LOCAL_RANK": "0"})
        assert ranks.is_first_elsewhere


@pytest.mark.parametrize("has_thread", [False, True])
def test_who_waits_for_ranks_gives_its_memory_back(has_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where another thread may use tensors meanwhile. Processes begin before: what they get is still there."""
    held: list[int] = []

    class Context:
        def join(self) -> bool:
            held.append(session.engine.manager.pool.num_chunks)
            return len(held) == 3

    def start_processes(fn: Any, args: Any, nprocs: int, join: bool, daemon: bool, start_method: str) -> Context:
        held.append(session.engine.manager.pool.num_chunks)
        assert (fn.func, fn.args, args) == (print, (max,), (5,))
        assert (nprocs, join, daemon, start_method) == (2, False, False, "spawn")
        return Context()

    monkeypatch.setattr(SPAWN, "start_processes", start_processes)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    if has_thread:
        thread.start()
    with ooc.Session("2MiB") as session:
        kept = torch.arange(1 << 18)
        with OwnRanks(session, PREFIX, print).started():
            torch.multiprocessing.spawn(max, (5,), nprocs=2)
        assert kept.sum() == sum(range(1 << 18))
    stop.set()
    assert held[0] > 0
    assert held[1:] == [held[0] if has_thread else 0] * 2


def test_nothing_is_left_replaced() -> None:
    before = subprocess.Popen.__init__, torch.multiprocessing.start_processes, SPAWN.start_processes
    with ooc.Session("2MiB") as session, OwnRanks(session, PREFIX, None).started():
        assert subprocess.run([sys.executable, "-c", "print(3)"], stdout=subprocess.PIPE).stdout == b"3\n"
        assert torch.multiprocessing.start_processes is not before[1]
    assert (subprocess.Popen.__init__, torch.multiprocessing.start_processes, SPAWN.start_processes) == before
