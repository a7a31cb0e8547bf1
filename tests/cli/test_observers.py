"""Tools that look at a running session from outside or from a signal: faulthandler and py-spy disturb nothing."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.session.continuation import Trainer

ROOT = Path(__file__).parents[2]
NUM_STEPS = 9

SCRIPT = """
import faulthandler, signal, sys
import ooc, torch
from tests.session.continuation import BUDGET, Trainer
faulthandler.register(signal.SIGUSR1, all_threads=True)
torch.set_num_threads(1)
with ooc.Session(BUDGET, debug=sys.argv[1] == "debug", plan_cache=False) as session:
    trainer = Trainer()
    for index in range(int(sys.argv[2])):
        with session.step():
            loss = trainer.step(index % 4)
        print(session.steps.rows[-1].mode, loss, flush=True)
    sys.stdin.readline()
"""


def _begin(mode: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode, str(NUM_STEPS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """The losses in core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = Trainer()
    losses = [trainer.step(index % 4) for index in range(NUM_STEPS)]
    torch.set_num_threads(before)
    return losses


@pytest.mark.parametrize("mode", ["", "debug"])
def test_faulthandler_prints_and_training_goes_on(mode: str, undisturbed: list[str]) -> None:
    """A traceback on demand at steps of every kind; touches of what is away are served or reported as before."""
    process = _begin(mode)
    assert process.stdout is not None
    losses = []
    for line in islice(process.stdout, NUM_STEPS):
        losses.append(line.split()[1])
        process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert line.startswith("planned")
    assert losses == undisturbed
    assert "most recent call first" in errors
    assert "Fatal Python error" not in errors


def test_py_spy_sees_the_script_and_disturbs_nothing(undisturbed: list[str]) -> None:
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if spy is None:
        pytest.skip("py-spy is not installed: pip install py-spy")
    process = _begin()
    assert process.stdout is not None
    losses, shown, refused = [], "", ""
    for line in islice(process.stdout, NUM_STEPS):
        losses.append(line.split()[1])
        for native in ([], ["--native"]) if len(losses) in (2, NUM_STEPS) else ():
            done = subprocess.run(
                [spy, "dump", "--pid", str(process.pid), *native], capture_output=True, text=True, check=False
            )
            shown += done.stdout
            refused = refused or done.stderr * bool(done.returncode)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert line.startswith("planned")
    assert losses == undisturbed
    if not shown:
        pytest.skip(f"py-spy may not look at another process here: {refused.splitlines()[0]}")
    assert "<module> (<string>" in shown
