"""Forks of a process with a session: children see what was there at the fork, and may train on.

Data loaders with workers, `os.fork` in and between steps, and subprocesses.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import ooc
from tests import forked
from tests.interop.cases import BUDGET, WIDTH, InCore, build, contents
from tests.quick_plans import QUICK_PLANS
from tests.thinned import thinned

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("one_thread")


class Data(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Tensors made inside the session, more than it holds at once."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.blocks = [torch.randn(64, WIDTH, generator=generator) for _ in range(8)]
        self.inputs = torch.randn(512, WIDTH, generator=generator)
        self.targets = torch.randint(0, 10, (512,), generator=generator)

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + self.blocks[index % 8][index % 64], self.targets[index]


def _load_and_train(session: Any, num_workers: int, context: str | None, *, persistent: bool) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    data = Data()
    model, optimizer = build()
    losses = []
    loader = DataLoader(
        data,
        batch_size=WIDTH // 2,
        num_workers=num_workers,
        multiprocessing_context=context,
        persistent_workers=persistent,
    )
    for _ in range(3):
        for x, y in loader:
            with session.step():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    del loader
    return losses, contents(model)


@thinned("persistent,debug", [False, True], [False, True])
def test_data_loader_fork(persistent: bool, debug: bool) -> None:
    expected = _load_and_train(InCore(), 0, None, persistent=False)
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, **QUICK_PLANS) as session:
        assert _load_and_train(session, 2, "fork", persistent=persistent) == expected
        gc.collect()
        deadline = time.monotonic() + 300
        while session.engine.manager.fork_readers.num_held and time.monotonic() < deadline:
            time.sleep(0.02)
            session.engine.manager.fork_readers.forget_gone()
        assert session.engine.manager.fork_readers.num_held == session.engine.manager.fork_readers.num_retired == 0
        assert [row.mode for row in session.steps.rows][-1] == "planned"


def test_data_loader_spawn() -> None:
    expected = _load_and_train(InCore(), 0, None, persistent=False)
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS) as session:
        assert _load_and_train(session, 1, "spawn", persistent=True) == expected
        assert session.report()["steps"][-1]["mode"] == "planned"


FORK = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import ooc
from tests.interop.cases import build, train, contents, pointers_of, read_all
from tests.quick_plans import QUICK_PLANS
how, num_steps = sys.argv[1], int(sys.argv[2])
def wait(pid):
    status = os.waitpid(pid, 0)[1]
    assert status == 0, status
def fork(check):
    pid = os.fork()
    if pid == 0:
        signal.alarm(500)
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return pid
with ooc.Session("1MiB", chunk_nbytes="64KiB", debug="debug" in how, **QUICK_PLANS) as session:
    model, optimizer = build()
    pointers = pointers_of(model)
    read_end, write_end = os.pipe()
    def go():
        os.read(read_end, 1)
        assert contents(model) == expected
        assert read_all(pointers) == expected
        losses = [train(model, optimizer, i) for i in range(3)]
        os.write(result[1], repr(losses).encode())
    for index in range(num_steps):
        with session.step():
            train(model, optimizer, index)
            if "inside" in how and index == num_steps - 1:
                expected = contents(model)
                result = os.pipe()
                pid = fork(go)
    if "inside" not in how:
        expected = contents(model)
        result = os.pipe()
        pid = fork(go)
    def grandchild():
        assert contents(model) == expected
    losses = []
    for index in range(3):
        with session.step():
            losses.append(train(model, optimizer, index))
    retired = session.engine.manager.fork_readers.num_retired
    assert retired > 0, session.engine.manager.fork_readers
    if "twice" in how:
        expected2, expected = expected, contents(model)
        pid2 = fork(lambda: wait(fork(grandchild)))
        wait(pid2)
        expected = expected2
    os.write(write_end, b"x")
    wait(pid)
    assert eval(os.read(result[0], 1000)) == losses, "training goes on the same way in the child"
    session.engine.manager.fork_readers.forget_gone()
    assert session.engine.manager.fork_readers.num_held == 0
    assert session.engine.manager.fork_readers.num_retired == 0
    before = session.engine.manager.num_free
with torch.no_grad():
    assert len(contents(model)) == 12
print("good")
"""


@pytest.mark.parametrize(
    ("how", "num_steps"),
    [("between", 1), pytest.param("between", 7, marks=pytest.mark.slow), ("inside", 7), ("debug", 7), ("twice", 7)],
)
def test_os_fork(how: str, num_steps: int) -> None:
    """The child waits until the parent has trained on; it still sees the bytes as at the fork, and can train."""
    command = [sys.executable, "-c", FORK, how, str(num_steps)]
    done = forked.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "good" in done.stdout


def test_a_subprocess_costs_nothing() -> None:
    with ooc.Session(BUDGET) as session:
        tensor = torch.randn(WIDTH, WIDTH)
        assert subprocess.run(["/bin/true"], check=True).returncode == 0
        assert session.engine.manager.fork_readers.num_held == 0
        assert tensor.sum().isfinite()


def test_a_child_may_open_a_session_of_its_own() -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB"):
        model, _ = build()
        expected = contents(model)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert ooc.memory_stats() == {}
                with ooc.Session(BUDGET, chunk_nbytes="64KiB"):
                    status = 0 if contents(build()[0]) == expected == contents(model) else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert contents(model) == expected
