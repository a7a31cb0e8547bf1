"""Options and skips that all tests share."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

from ooc.cli.trial import settle_vector_functions
from ooc.dispatch import hidden_operands, native_demand
from ooc.replay.rerun_trials import RerunTrial
from tests.planner_faults import refuse_planner_faults
from tests.store_speed import USUAL, store_speed

os.environ["OOC_BACKGROUND_PLANNING"] = "0"  # which step is planned must not depend on how fast the machine is
os.environ["OOC_PLAN_CACHE"] = "0"  # each test plans for itself, whatever ran before it
for name in "CI", "BUILD_NUMBER":  # there pytest spells out how two values differ: of whole chunks that takes hours
    os.environ.pop(name, None)
settle_vector_functions()

with contextlib.suppress(ImportError):  # an image for GPUs does not have it
    from hypothesis import settings

    # The same examples in each run: what fails here fails for everybody. OOC_TEST_TIMES=50 looks for new ones.
    settings.register_profile("repeatable", derandomize=True)
    if os.environ.get("OOC_TEST_TIMES", "1") == "1":
        settings.load_profile("repeatable")

_HANG_S = 900
_stderr = pytest.StashKey[int]()
_frozen_with_dynamo = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="tests marked gpu fail, rather than skip, where there is no CUDA device",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # while nothing is captured
    refuse_planner_faults()
    # A shell without job control starts what runs in the background with Ctrl-C ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    _freeze(session.config)


def _freeze(config: pytest.Config) -> None:
    """Takes all objects that exist by now out of every garbage collection and every search of the heap to come.

    Half a million objects of imported modules are what a session's search for models, and each collection, would
    walk over in every test; they cost more than the tests' own work. torch imports its compiler, another half of
    them, when the first optimizer is made.
    """
    gc.collect()
    gc.freeze()
    config.stash[_frozen_with_dynamo] = "torch._dynamo" in sys.modules


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that hangs ends its process, with a traceback of each thread, instead of the whole run's time."""
    if "torch._dynamo" in sys.modules and not item.config.stash[_frozen_with_dynamo]:
        _freeze(item.config)
    if item.get_closest_marker("slow") is None:
        faulthandler.dump_traceback_later(_HANG_S, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests whose ops are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    """A session's critical sections keep the garbage collector off: each must have ended."""
    before = gc.isenabled()
    yield
    assert gc.isenabled() == before


@pytest.fixture(scope="module", autouse=True)
def heap_of_earlier_modules(pytestconfig: pytest.Config) -> None:
    """What they and their reports have left is walked over no more, either: half a million objects by the end."""
    _freeze(pytestconfig)


@pytest.fixture(scope="module", autouse=True)
def store_of_usual_speed() -> Iterator[None]:
    """Tests of the store itself, which measure it, have a fixture of this name that does nothing."""
    with store_speed(USUAL):
        yield


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[RerunTrial]:
    """All trials that are made."""
    made: list[RerunTrial] = []
    prepare = RerunTrial.prepare

    def counted(self: RerunTrial) -> None:
        made.append(self)
        prepare(self)

    monkeypatch.setattr(RerunTrial, "prepare", counted)
    return made


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    reason = "torch sees no CUDA device"
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"--require-gpu: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def whole_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops run as a whole or not at all: for tests of what is said where one does not fit."""
    monkeypatch.setattr("ooc.dispatch.ops_in_parts.split_of", lambda *_: None)


@pytest.fixture
def kernels_in_cpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Custom ops count as ones whose kernels are in C++: nobody looks into their bodies."""
    monkeypatch.setattr(hidden_operands, "has_python_body", lambda _func: False)
    native_demand.is_special.cache_clear()
    yield
    native_demand.is_special.cache_clear()
