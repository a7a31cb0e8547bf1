"""`torchrun --nproc-per-node N -m ooc run`: each rank has its own budget, store and report."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import forked
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


@functools.cache
def in_core() -> list[str]:
    """Hashes without ooc: of two processes with the variables that torchrun would set.

    On a busy machine PyTorch itself may abort when its processes end: then once more.
    """
    run = _ranks_in_core()
    for _ in range(2):
        run = _ranks_in_core() if run.returncode else run
    return hashes(run)


def _ranks_in_core() -> subprocess.CompletedProcess[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
        ranks = [
            forked.start(
                [sys.executable, _SCRIPT],
                env={**environment(), **job, "RANK": rank},
                files=(nothing, output, errors),
            )
            for rank in ("0", "1")
        ]
        try:
            status = max(abs(rank.wait(_TIMEOUT_S)) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(["ranks", _SCRIPT], status, output.read(), errors.read())


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
