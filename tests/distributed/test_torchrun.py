"""`torchrun --nproc-per-node N -m ooc run`: each rank has its own budget, store and report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.distributed.test_jobs import environment

_SCRIPT = str(Path(__file__).parents[1] / "scripts" / "data_parallel.py")
_TIMEOUT_S = 600


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    """Two processes, on a port that is free."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *command], capture_output=True, text=True, env=environment(), timeout=_TIMEOUT_S, check=False
    )


def hashes(run: subprocess.CompletedProcess[str]) -> list[str]:
    assert run.returncode == 0, run.stderr
    return sorted(line for line in run.stdout.splitlines() if line.startswith("rank "))


def in_core() -> list[str]:
    """Hashes without ooc. On a busy machine PyTorch itself may abort when its processes end: then once more."""
    run = torchrun(_SCRIPT)
    for _ in range(2):
        run = torchrun(_SCRIPT) if run.returncode else run
    return hashes(run)


def test_each_rank_trains_within_its_own_budget_to_the_same_bits(tmp_path: Path) -> None:
    expected = in_core()
    report = tmp_path / "run.json"
    found = hashes(torchrun("-m", "ooc", "run", "--budget", "2MiB", "--report", str(report), _SCRIPT))
    assert len(expected) == 2
    assert found == expected
    modes: list[str] = []
    for path in (report, tmp_path / "run.rank1.json"):
        document = json.loads(path.read_text())
        assert document["peak_nbytes"] <= document["budget_nbytes"] == 2 << 20
        assert document["collectives"]["num_collectives"] > 0
        modes += [step["mode"] for step in document["steps"]]
    assert "planned" in modes  # not on each rank: gloo's threads free what they have used at moments of their own


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    arguments = ["-m", "ooc", "run", "--budget", "2MiB", "--report", str(report), _SCRIPT, "--fail", "1"]
    failed = torchrun(*arguments)
    assert failed.returncode == 1
    assert "ValueError: as asked for" in failed.stderr
    assert json.loads((tmp_path / "run.rank1.json").read_text())["ended_by"]["type"] == "ValueError"
