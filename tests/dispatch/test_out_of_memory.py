"""Errors: each with the value, the limit, the place and the options; after each, work goes on in the process."""

from __future__ import annotations

import _thread
import contextlib
import errno
import gc
import inspect
import os
import re
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ooc
import ooc._current
import ooc.session
from tests import forked
from tests.session.continuation import BUDGET, Trainer, assert_books_true
from vmm import machine
from vmm.files import is_in_memory
from vmm.store import StoreFull, StoreUnavailable

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _in_core_work_goes_on() -> Iterator[None]:
    """After each test: no session is open, and training in core does what it always does."""
    yield
    assert ooc._current.session is None
    before = Trainer()
    with ooc.Session("64MiB"):
        again = Trainer()
        losses = [again.step(index) for index in range(2)]
    assert [before.step(index) for index in range(2)] == losses


class Net(nn.Module):
    """Two convolutions with a name each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.stem(x))  # type: ignore[no-any-return]


def run_net(budget: str) -> None:
    with ooc.Session(budget) as session, session.step():
        Net()(torch.randn(8, 3, 64, 64)).sum().backward()


# -- the budget


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_op_on_nested_tensors_larger_than_the_budget() -> None:
    """torch's older kind of them refuses to tell its shape."""
    nested = torch.nested.nested_tensor([torch.ones(length, 256) for length in (500, 300, 700)])
    with ooc.Session("2MiB"):
        made = nested * 2
        with pytest.raises(ooc.BudgetTooSmall, match=r"aten\.mul.* float32\[nested\] 1\.5 MiB"):
            made.mul(3)


def test_forward_op_larger_than_the_budget() -> None:
    """The second convolution: 4 MiB in (8 x 32 x 64 x 64 floats), 4 MiB out."""
    with pytest.raises(ooc.BudgetTooSmall) as caught:
        run_net("6400KiB")
    error = caught.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert error.op_name.startswith("aten.convolution")
    assert error.budget_nbytes == 6400 * 1024
    assert error.needed_nbytes >= 8 * MIB
    assert any("float32[8, " in label for label, _ in error.operands)
    text = str(error)
    for part in (f"op {error.op_index} (", "the budget is 6.2 MiB", "in memory together:", "Options: budget >= "):
        assert part in text


def test_place_is_the_module_and_the_line() -> None:
    """Its first convolution fits 9 MiB, its second has oneDNN's copies beside operand and result."""
    with pytest.raises(ooc.BudgetTooSmall) as caught:
        run_net("9MiB")
    line = inspect.getsourcelines(Net.forward)[1] + 1
    assert caught.value.where == f"body.1 (tests/dispatch/test_out_of_memory.py:{line})"
    assert caught.value.where in str(caught.value)
    assert any(
        re.fullmatch(r"input \(made by op \d+, .*, body\.0 \(.*:\d+\)\) .*", label)
        for label, _ in caught.value.operands
    )


def test_advised_budget_gets_past_the_op() -> None:
    """Follow the advice until it works: each error must name a larger budget, and a few suffice."""
    budget, needed = "5MiB", []
    while (error := too_small(budget)) is not None:
        needed.append(error.needed_nbytes)
        match = re.search(r"budget >= (\d+MiB)", str(error))
        assert match is not None, error
        budget = match[1]
    assert needed == sorted(set(needed))
    assert 1 <= len(needed) <= 5


def test_what_an_op_takes_for_itself_is_listed_and_may_not_be_all() -> None:
    """A matrix exponential allocates one temporary after the other, all freed by the time that the error is made."""
    with pytest.raises(ooc.BudgetTooSmall) as caught, ooc.Session("4MiB"):
        torch.linalg.matrix_exp(torch.randn(512, 512) / 100)
    error = caught.value
    assert sum(nbytes for _, nbytes in error.operands) >= error.needed_nbytes
    assert "for this op as far as it came: it has temporaries" in str(error)


def test_torchscript_does_not_swallow_the_message() -> None:
    """Its interpreter makes a RuntimeError without text out of any error of Python's."""
    traced = torch.jit.trace(nn.Sequential(nn.Linear(512, 1024), nn.GELU()), torch.randn(2, 512))  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="TorchScript") as caught, ooc.Session("1MiB"):
        traced(torch.randn(256, 512))
    (note,) = caught.value.__notes__
    assert note.startswith("ooc.errors.BudgetTooSmall: op ")
    assert "Options: budget >= " in note


def test_an_error_of_torchscripts_own_is_left_alone() -> None:
    traced = torch.jit.trace(nn.Linear(512, 1024), torch.randn(2, 512))  # type: ignore[no-untyped-call]

    def run() -> None:
        with contextlib.suppress(ooc.BudgetTooSmall):
            torch.randn(4096, 1024)
        traced(torch.randn(256, 13))

    with pytest.raises(RuntimeError) as caught, ooc.Session("8MiB"):
        run()
    assert not hasattr(caught.value, "__notes__")


def too_small(budget: str) -> ooc.BudgetTooSmall | None:
    """The error that `run_net` ends with under this budget, if any."""
    try:
        run_net(budget)
    except ooc.BudgetTooSmall as error:
        return error
    return None


def train_two_layers(session: ooc.Session) -> None:
    """Parameters, gradients and Adam's two states of 4 MiB each, two of each."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(2):
        with session.step():
            model(torch.randn(64, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_refusal_knows_the_larger_ones_before_it_and_where_to_ask() -> None:
    """A program that goes on after refusals is told of the largest of them."""
    with ooc.Session("4MiB"):
        with pytest.raises(ooc.BudgetTooSmall) as first:
            torch.empty(2048, 1024).relu()  # 8 MiB
        large = first.value.needed_nbytes
        with pytest.raises(ooc.BudgetTooSmall) as second:
            torch.empty(1200, 1024).relu()  # 4.7 MiB
    assert first.value.largest_needed_nbytes == second.value.largest_needed_nbytes == large
    assert second.value.needed_nbytes < large
    assert f"budget >= {-(-large // MIB)}MiB (for the largest need seen so far;" in str(second.value)
    assert "(for this op;" in str(first.value)
    assert "ooc fit SCRIPT" in str(first.value)
    assert "ooc fit --fake SCRIPT" in str(first.value)


@pytest.mark.usefixtures("whole_ops")
def test_optimizer_state_is_named() -> None:
    """addcdiv_ needs a parameter of 4 MiB and two more of its size."""
    with ooc.Session("9MiB") as session, pytest.raises(ooc.BudgetTooSmall) as caught:
        train_two_layers(session)
    labels = " ".join(label for label, _ in caught.value.operands)
    assert "(0.weight) float32[1024, 1024]" in labels
    assert "exp_avg of 0.weight" in labels
    line = inspect.getsourcelines(train_two_layers)[1] + 7
    assert caught.value.where == f"0, tests/dispatch/test_out_of_memory.py:{line}"
    assert caught.value.needed_nbytes == 12 * MIB


def test_session_goes_on_after_a_budget_too_small() -> None:
    """On demand, and in a step that began on a plan."""
    with ooc.Session(BUDGET, debug=True) as session:
        trainer = Trainer()
        for index in range(6):
            with session.step():
                trainer.step(index)
            if index in (0, 4):
                with pytest.raises(ooc.BudgetTooSmall), session.step():
                    torch.randn(700, 700).relu()  # 1.9 MiB twice; the budget is 1.5 MiB
                assert_books_true(session)
        assert session.steps.rows[-1].mode == "planned"


def test_allocation_on_another_thread() -> None:
    """It raises torch's own error there, and leaves no trace in the error of an op here.

    The thread is none of the `threading` module's, as a C thread: what those allocate is not the session's.
    """
    errors: list[Exception] = []
    is_open, is_over = threading.Event(), threading.Event()

    def allocate() -> None:
        is_open.wait()
        try:
            torch.empty(4 * MIB)
        except torch.OutOfMemoryError as error:
            errors.append(error)
        finally:
            is_over.set()

    _thread.start_new_thread(allocate, ())
    with ooc.Session("1MiB"):
        is_open.set()
        is_over.wait()
        (error,) = errors
        assert f"cannot allocate {16 * MIB} bytes within the session's budget" in str(error)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.zeros(200, 300) @ torch.zeros(200, 300)


def test_an_op_that_goes_on_without_the_memory_that_it_was_refused_fails() -> None:
    """It would take another algorithm, and so give other bits (as cuDNN does without a workspace)."""

    def frugal(x: torch.Tensor) -> torch.Tensor:
        try:
            torch.empty(8 * MIB)
        except torch.OutOfMemoryError:
            return x + 1
        return x + 2

    library = torch.library.Library("ooc_test", "FRAGMENT")
    library.define("frugal(Tensor x) -> Tensor")
    library.impl("frugal", frugal, "CPU")
    with ooc.Session("1MiB") as session:
        x = torch.ones(40_000)
        with pytest.raises(ooc.BudgetTooSmall, match=r"frugal(.|\n)*32.0 MiB"):
            torch.ops.ooc_test.frugal(x)
        for _ in range(5):
            with session.step():
                assert (x * 2).sum() == 80_000
        with session.step(), pytest.raises(ooc.BudgetTooSmall):
            torch.ops.ooc_test.frugal(x)
        assert x.sum() == 40_000
    assert torch.ops.ooc_test.frugal(x)[0] == 3
    library._destroy()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"budget": 1000}, ["budget of 1000 bytes", "64.0 KiB", "Options"]),
        ({"budget": "1MiB", "chunk_nbytes": "2MiB"}, ["less than one chunk", "Options"]),
        ({"budget": "1MiB", "chunk_nbytes": 1000}, ["chunk size 1000 ", "multiple of 64.0 KiB"]),
        ({"budget": "12G"}, ["'12G'", "12GiB"]),
        ({"budget": "lots"}, ["'lots' is not a size", "400MiB"]),
        ({"budget": 0}, ["0", "at least 1"]),
        ({"budget": "1MiB", "device": "tpu"}, ["'tpu'", "'cpu'"]),
        ({"budget": "1MiB", "policy": "oracle"}, ["'oracle'", "auto"]),
        ({"budget": "1MiB", "step_boundary": "batch"}, ["'batch'", "explicit", "optimizer"]),
    ],
)
def test_arguments(arguments: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the parts are the match
        ooc.Session(**arguments)
    for part in parts:
        assert part in str(caught.value)


# -- the store


def test_store_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    cases = {str(tmp_path / "missing"): "does not exist", str(file): "is not a directory", "/proc": "store directory"}
    for directory, reason in cases.items():
        with pytest.raises(StoreUnavailable, match=reason) as caught:
            ooc.Session(BUDGET, store=directory)
        assert directory in str(caught.value)
        assert "Options" in str(caught.value)


def test_store_in_memory() -> None:
    if not is_in_memory("/dev/shm"):
        pytest.skip("/dev/shm is not in memory here")
    with pytest.raises(StoreUnavailable, match="kept in memory"):
        ooc.Session(BUDGET, store="/dev/shm")


@pytest.fixture
def file_size_limit() -> Iterator[Any]:
    """A limit on file size stands for a full disk: the kernel refuses to extend the store's file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_store_full_while_learning(file_size_limit: Any) -> None:
    """The step fails with the numbers; what was in memory still is; with room again, training goes on."""
    with ooc.Session(BUDGET, debug=True) as session:
        trainer = Trainer()
        file_size_limit(256 * 1024)
        with pytest.raises(StoreFull, match=r"bytes\) more; the file system has") as caught, session.step():
            trainer.step(0)
        assert "Options" in str(caught.value)
        assert caught.value.needed_nbytes > 0
        assert_books_true(session)
        file_size_limit(resource.RLIM_INFINITY)
        for index in range(5):
            with session.step():
                trainer.step(index)
        assert session.steps.rows[-1].mode == "planned"


def test_store_full_when_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose evictions the disk cannot hold is not begun: the step stays on demand and says why."""
    in_core = Trainer()
    expected = [in_core.step(index) for index in range(6)]
    with ooc.Session(BUDGET, debug=True, recompute=False) as session:  # else it may be that nothing is evicted
        asked = []

        def reserve(nbytes: int) -> None:
            asked.append(nbytes)
            raise session.engine.memory.store._full(nbytes, OSError(errno.ENOSPC, "full"))

        monkeypatch.setattr(session.engine.memory.store, "reserve", reserve)
        trainer = Trainer()
        losses = []
        for index in range(6):
            with session.step():
                losses.append(trainer.step(index))
        report = session.report()
    assert losses == expected
    assert asked  # how much it asks for depends on what has been written behind
    assert "planned" not in [step["mode"] for step in report["steps"]]
    assert report["not_played"]
    assert all("more; the file system has" in reason and "Options" in reason for reason in report["not_played"])


# -- the machine


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that has opened no session yet."""
    command = [sys.executable, "-c", code]
    return forked.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, cwd=ROOT, timeout=600)


IN_CORE_AFTERWARDS = """
import ooc, torch
try:
    ooc.Session("8MiB")
except Exception as error:
    print(type(error).__name__, error)
print("in core:", float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()))
"""


def test_no_compiler(tmp_path: Path) -> None:
    done = run_python(IN_CORE_AFTERWARDS, CXX="no-such-compiler", OOC_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "CompilerMissing" in done.stdout
    assert "no-such-compiler" in done.stdout
    assert "Options" in done.stdout
    assert "in core: 27000000.0" in done.stdout


def test_no_python_headers(tmp_path: Path) -> None:
    code = "import sysconfig; sysconfig.get_paths = lambda: {'include': '/nowhere'}\n" + IN_CORE_AFTERWARDS
    done = run_python(code, OOC_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "NativeBuildError" in done.stdout
    assert "/nowhere/Python.h" in done.stdout
    assert "python3-dev" in done.stdout
    assert "in core: 27000000.0" in done.stdout


def test_map_count_exhausted() -> None:
    """No room for a plan's standing mappings: the step stays on demand, says why, and is right."""
    in_core = Trainer()
    expected = [in_core.step(index) for index in range(7)]
    with ooc.Session(BUDGET, debug=True) as session:
        trainer = Trainer()
        losses = []
        for index in range(7):
            with session.step():
                losses.append(trainer.step(index))
            if index == 1:  # from here on, a handful more than now
                gc.collect()  # what earlier tests have left
                driver = session.engine.memory.driver
                driver._mappings._max_map_count = machine.map_count() + 512 + 12
                driver._mappings._num_mappings_unchecked = 0
        modes = [row.mode for row in session.steps.rows]
        report = session.report()
    assert losses == expected
    assert "planned" not in modes
    assert report["not_played"]
    assert all("vm.max_map_count" in reason and "Options" in reason for reason in report["not_played"])


# -- sessions


def test_session_in_a_session() -> None:
    with ooc.Session(BUDGET) as session:
        with pytest.raises(ooc.SessionError, match="open already"):
            ooc.Session(BUDGET)
        trainer = Trainer()
        with session.step():
            trainer.step(0)


def test_a_message_warns_of_nothing() -> None:
    """To know what the op would make, it is run on tensors without data, which warns of what it would resize."""
    with ooc.Session("384KiB", plan_cache=False):
        x, weight, out = torch.randn(300, 192), torch.randn(192, 192), torch.empty(100, 192)
        with warnings.catch_warnings(action="error"), pytest.raises(ooc.BudgetTooSmall):
            torch.mm(x, weight, out=out)


def test_session_after_its_end() -> None:
    with ooc.Session(BUDGET) as session:
        pass
    session.close()
    with pytest.raises(ooc.SessionError, match="closed"), session.step():
        pass


def test_session_on_another_thread() -> None:
    errors: list[Exception] = []

    def use(session: ooc.Session) -> None:
        try:
            with session.step():
                pass
        except ooc.SessionError as error:
            errors.append(error)

    with ooc.Session(BUDGET) as session:
        thread = threading.Thread(target=use, args=(session,))
        thread.start()
        thread.join()
    (error,) = errors
    assert "thread" in str(error)


def test_failed_write_has_the_systems_error() -> None:
    """See test_io_failures.py for every call; here, what the message says."""
    with ooc.Session(BUDGET, debug=True) as session:
        trainer = Trainer()
        session.engine.memory.store.engine.inject_faults(fail_call=1, error=errno.ENOSPC, direction="write")
        with pytest.raises(ooc.StoreFailed) as caught, session.step():
            trainer.step(0)
    assert caught.value.errno == errno.ENOSPC
    assert "No space left on device" in str(caught.value)
    assert "The step is void" in str(caught.value)
