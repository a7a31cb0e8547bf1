"""Opening a session happens or leaves nothing: whichever of its steps fails, and whenever Ctrl-C comes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ooc
import ooc._current
from tests.harness import Recipe, assert_equal, run_in_core, run_out_of_core
from tests.vmm.memory_cases import num_threads
from vmm.torch_cpu import MODE_OFF, cpu_allocator

BUDGET = "2MiB"
_SLOW = pytest.mark.slow
BUDGET_NBYTES = 8 << 20
RECIPE = Recipe(workload="tied_frozen", num_steps=4)
OURS = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("ooc", "vmm", "scheduler"))
PATCHED = [
    (torch.Tensor, "numpy"),
    (torch.Tensor, "tolist"),
    (torch.Tensor, "data_ptr"),
    (torch.UntypedStorage, "data_ptr"),
    (torch, "save"),
    (torch, "compile"),
    (signal, "signal"),
    (signal, "getsignal"),
]

UNDOING = ("ExitStack.", "_BaseExitStack.", "suppress.", "finalize.", "append", "close", "CriticalLock.")
"""Calls that note what is to be undone, or undo it: they cannot fail, and signals wait while a session opens."""

Site = tuple[CodeType, int, str]


def held_by_the_process() -> dict[str, object]:
    """All that an opening takes, as far as it can be seen from outside."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{name}").split(" ")[0].rstrip("0123456789"))
        except FileNotFoundError:  # the listing's own
            continue
    return {
        "session": ooc._current.session,
        "mode": _get_current_dispatch_mode_stack(),
        "allocator": cpu_allocator().state.mode,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "kernel threads": num_threads(),
        "descriptors": sorted(descriptors),
        "pool and store mapped": sum("ooc" in line and ("memfd" in line or "(deleted)" in line) for line in maps),
        "functions": [owner.__dict__.get(name) for owner, name in PATCHED],
        "handlers": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "optimizer hooks": len(torch_optimizer._global_optimizer_post_hooks),
        "opaque ops": ooc.interop.opaque_ops._run_in_session,
    }


def open_session(**options: Any) -> ooc.Session:
    return ooc.Session(BUDGET, step_boundary="optimizer", progress="always", plan_cache=False, **options)


@contextmanager
def profiled(see: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def site_of(frame: FrameType, event: str, argument: Any) -> Site | None:
    """What is being called from a line of ours, and from where; None if this is no such event."""
    caller = frame.f_back if event == "call" else frame if event == "c_call" else None
    if caller is None or not caller.f_code.co_filename.startswith(OURS):
        return None
    callee = frame.f_code.co_qualname if event == "call" else argument.__name__
    is_undoing = callee.startswith(UNDOING) or caller.f_code.co_qualname.startswith(UNDOING)
    return (caller.f_code, caller.f_lineno, callee) if not is_undoing else None


def sites_of_an_opening() -> list[Site]:
    """Every call that an opening makes from our code, each place once, in order."""
    found: dict[Site, None] = {}
    is_opening = True

    def see(frame: FrameType, event: str, argument: Any) -> None:
        site = site_of(frame, event, argument)
        if site is not None and is_opening:
            found.setdefault(site)

    with profiled(see):
        session = open_session()
        is_opening = False
    session.close()
    return list(found)


@pytest.mark.parametrize(
    ("error", "every"),
    [(OSError, 9), (KeyboardInterrupt, 25), *(pytest.param(e, 1, marks=_SLOW) for e in (OSError, KeyboardInterrupt))],
)
def test_whichever_step_fails_nothing_is_left(error: type[BaseException], every: int) -> None:
    open_session().close()  # what a process takes once, it keeps
    before = held_by_the_process()
    sites = sites_of_an_opening()
    assert len(sites) > 150
    sites = sites[::every]  # all end by way of the same clean-up; the last ones have most to do
    num_failed = 0
    for site in sites:
        has_raised = False

        def fail(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal has_raised
            if not has_raised and site_of(frame, event, argument) == site:  # noqa: B023 - used within the turn
                has_raised = True
                raise error

        try:
            with profiled(fail):
                session = open_session()
        except BaseException as raised:
            num_failed += 1
            raised.__traceback__ = None
        else:
            session.close()  # a wish that did not come true, such as huge pages
        held = held_by_the_process()
        assert held == before, (site, has_raised)
        assert gc.isenabled(), (site, has_raised)
    assert num_failed > 0.8 * len(sites)
    assert_equal(run_in_core(RECIPE), run_out_of_core(RECIPE, BUDGET_NBYTES, ooc.Session))


def test_ctrl_c_at_any_moment_of_an_opening_leaves_nothing() -> None:
    """A timer's signal, at moments spread over an opening: handlers run between bytecodes, as those of Ctrl-C do."""
    open_session().close()
    before = held_by_the_process()
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    num_interrupted = 0
    try:
        for moment in range(1, 81):
            session: ooc.Session | None = None
            try:
                signal.setitimer(signal.ITIMER_REAL, moment * 250e-6)
                session = open_session()
                while True:  # until it comes; `signal.pause` would sleep on if it came right before
                    time.sleep(0.001)
            except KeyboardInterrupt:
                num_interrupted += session is None
            if session is not None:
                session.close()
            del session
            if ooc._current.session is not None:  # it came when the session was open, and nobody had it yet
                open_session().close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert held_by_the_process() == before
    assert num_interrupted > 0
    assert_equal(run_in_core(RECIPE), run_out_of_core(RECIPE, BUDGET_NBYTES, ooc.Session))


@pytest.mark.parametrize(
    "options",
    [
        {"window_nbytes": "5G"},
        {"threshold_nbytes": "x"},
        {"chunk_nbytes": 4097},
        {"policy": "none"},
        {"progress": "loud"},
        {"device": "tpu"},
        {"host_budget": "1MiB"},
        {"store": "/proc"},
    ],
)
def test_a_wrong_argument_takes_nothing(options: dict[str, Any]) -> None:
    open_session().close()
    before = held_by_the_process()
    with pytest.raises((ValueError, OSError, ooc.OocError, RuntimeError)):
        ooc.Session(BUDGET, **options)
    assert held_by_the_process() == before


def test_a_session_that_nobody_holds_gives_way() -> None:
    """As when Ctrl-C comes between its opening and the name that was to hold it."""
    ooc.Session(BUDGET)
    weight = torch.ones(1 << 18)
    with ooc.Session(BUDGET) as session:
        assert ooc._current.session is session
        assert weight.sum().item() == 1 << 18
    assert cpu_allocator().state.mode == MODE_OFF


def test_a_session_that_is_held_does_not() -> None:
    with ooc.Session(BUDGET), pytest.raises(ooc.SessionError, match="open already"):
        ooc.Session(BUDGET)
