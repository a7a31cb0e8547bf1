"""Jobs of two and three processes over gloo: bit for bit as without a session, on demand and on plans.

The processes are started once for each world size and run all of its cases (`ALL_CASES`), once more for those that
are slow; the tests here look at what they wrote.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.distributed.collective_cases import ALL_CASES

_TIMEOUT_S = 850
_ROOT = Path(__file__).parents[2]

_ATTEMPTS = 3

Job = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What each rank of a job of so many processes found, by case. Run once, whoever asks first.

    With a case's name: of another job, of this case alone.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all of pytest's processes

    def results(size: int, *names: str, is_slow: bool = False) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("job") if names else shared / f"job{size}{'slow' if is_slow else ''}"
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                _run(size, folder, *(names or _names(size, is_slow=is_slow)))
                (folder / "done").touch()
        return [json.loads((folder / f"rank{index}.json").read_text()) for index in range(size)]

    return results


def _names(size: int, *, is_slow: bool) -> list[str]:
    """Of the cases to run with so many processes: by default, or with the slow tests."""
    return [name for name, case in ALL_CASES.items() if size in (case.slow_sizes if is_slow else case.sizes)]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "GLOO_SOCKET_IFNAME": "lo",
        "OOC_PLAN_CACHE": "0",
        "PYTHONPATH": str(_ROOT),
    }


def _run(size: int, folder: Path, *names: str) -> None:
    ranks = []
    for index in range(size):
        (folder / f"rank{index}.json").write_text("{}")
        with open(folder / f"rank{index}.log", "w") as log, open(os.devnull) as nothing:
            command = [sys.executable, "-m", "tests.distributed.worker", str(index), str(size), str(folder), *names]
            ranks.append(forked.start(command, cwd=_ROOT, env=environment(), files=(nothing, log, log)))
    try:
        for rank in ranks:
            rank.wait(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass  # what is missing from the results says where
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("size", "name", "is_slow"),
    [
        pytest.param(size, name, is_slow, id=f"{size}-{name}", marks=[pytest.mark.slow] if is_slow else [])
        for name in ALL_CASES
        for size in (2, 3)
        for is_slow in (False, True)
        if name in _names(size, is_slow=is_slow)
    ],
)
def test_bits_are_those_of_a_run_without_a_session(job: Job, size: int, name: str, is_slow: bool) -> None:
    """And steps are planned: on some rank, in some of a few runs. Gloo's threads free what they have used at moments of
    their own, so on one rank of one run it may be that no step is as another.
    """
    num_planned = ALL_CASES[name].num_planned
    planned = _check(name, job(size, is_slow=is_slow))
    for _ in range(_ATTEMPTS - 1):
        if max(planned.values())[0] < num_planned:
            planned = _check(name, job(size, name))
    assert max(planned.values())[0] >= num_planned, planned


def _check(name: str, ranks: list[dict[str, Any]]) -> dict[int, tuple[int, list[str], list[str], list[str]]]:
    """Assert that a case had the right bits. How many steps each rank played from a plan, and why not the others."""
    case = ALL_CASES[name]
    planned = {}
    for index, results in enumerate(ranks):
        assert name in results, f"rank {index} did not come so far"
        result = results[name]
        assert "error" not in result, f"rank {index}: {result['error']}"
        assert result["num_compared"] > 0
        assert not result["wrong"], (
            f"rank {index}: {len(result['wrong'])} of {result['num_compared']}: {result['wrong']}"
        )
        if case.budgets.get(index) == "":
            continue
        assert result["evicted_nbytes"] > 0 or not case.evicts
        planned[index] = result["modes"].count("planned"), result["modes"], result["why"], result["unplannable"]
    return planned
