"""What critical sections keep out: the recursion limit, the garbage collector, and signals on an op's way to Python.

Else a `RecursionError` would arise half way through a change of the session's state (in an eviction, in an allocation),
and finalizers and handlers would use tensors there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch._library.simple_registry
from torch import nn

import ooc
from ooc.dispatch import op_runner
from ooc.dispatch.extension import boxed_ops
from ooc.memory.residency import ResidencyManager
from vmm.store import FileStore

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LEVELS = 40
"""More than the frames that an allocation with evictions takes."""


def num_frames() -> int:
    frame, number = sys._getframe(), 0
    while frame is not None:
        frame, number = frame.f_back, number + 1  # type: ignore[assignment]
    return number


def up_to_the_limit(act: Callable[[], Any]) -> None:
    """Call `act` with no frame left, then with one, and so on."""

    def descend() -> None:
        with contextlib.suppress(RecursionError):
            descend()
        with contextlib.suppress(RecursionError):
            act()

    limit = sys.getrecursionlimit()
    frames = num_frames()
    for more in range(NUM_LEVELS, 400, 20):  # calls from C count, too, so the least limit is not known
        with contextlib.suppress(RecursionError):
            sys.setrecursionlimit(frames + more)
            break
    try:
        descend()
    finally:
        sys.setrecursionlimit(limit)


def train(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Any]:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(6):
        with step():
            x = torch.randn(128, 256)
            loss = model(x).square().mean()
            loss.backward()
            for parameter in model.parameters():
                up_to_the_limit(lambda p=parameter: p.detach() * 2)  # type: ignore[misc]
            optimizer.step()
            for state in optimizer.state.values():
                up_to_the_limit(lambda s=state: s["exp_avg"] + s["exp_avg_sq"])  # type: ignore[misc]
            optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("debug", [False, True])
def test_bits(debug: bool) -> None:
    gc.collect()  # finalizers of what other tests left would fail so deep in the stack
    torch.manual_seed(0)
    expected = train(contextlib.nullcontext)
    torch.manual_seed(0)
    with ooc.Session("1280KiB", plan_cache=False, debug=debug) as session:
        found = train(session.step)
        assert session.report()["peak_nbytes"] <= 1280 << 10
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, found, strict=True))


def test_an_endless_recursion_through_ops_still_ends() -> None:
    """Each level is an op within an op: were each given frames of its own, the stack would end the process."""
    with ooc.Session("2MiB", plan_cache=False):

        @torch.library.custom_op("ooc_tests::endless", mutates_args=())
        def endless(x: torch.Tensor) -> torch.Tensor:
            return endless(x * 1.0)

        with pytest.raises(RecursionError):
            endless(torch.ones(4))
        assert torch.ones(300, 300).sum().item() == 90_000


def test_the_limit_holds_again_after_each_section() -> None:
    def depth() -> int:
        try:
            return 1 + depth()
        except RecursionError:
            return 0

    def on_a_thread(found: list[int]) -> None:
        weight.detach().clone()
        found.append(depth())

    before = depth()
    alone: list[int] = []
    thread = threading.Thread(target=lambda: alone.append(depth()))
    thread.start()
    thread.join()
    with ooc.Session("1MiB", plan_cache=False) as session:
        weight = torch.ones(256, 256)
        for _ in range(4):
            with session.step():
                x = torch.ones(256, 256)
                (x @ weight).relu_().add_(weight)
        assert depth() == before
        found: list[int] = []
        guest = threading.Thread(target=on_a_thread, args=(found,))
        guest.start()
        guest.join()
    assert abs(found[0] - alone[0]) <= 2  # the frames below differ
    assert depth() == before


class Finalized:
    """Garbage in a cycle: when it is collected, it uses its own tensor and one that others use."""

    def __init__(self, tensor: torch.Tensor, told: list[bool], shared: torch.Tensor, total: torch.Tensor) -> None:
        self.cycle, self.tensor, self.told, self.shared, self.total = self, tensor, told, shared, total
        self.expected = tensor.sum().item(), shared.sum().item()

    def __del__(self) -> None:
        self.told.append((self.tensor.sum().item(), self.shared.sum().item()) == self.expected)
        self.told.append(bool((self.shared * 2 == self.shared + self.shared).all()))
        self.total += 1


def train_with_garbage(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Any]:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters())
    shared, total = torch.randn(256, 256), torch.zeros(200, 200)
    told: list[bool] = []
    losses = []
    before = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(lambda *_: told.append((torch.ones(200, 200) * 2).sum().item() == 80_000))
    gc.set_threshold(3, 1, 1)
    try:
        for index in range(9):
            with step():
                for _ in range(3 if index % 4 == 0 else 0):
                    Finalized(torch.randn(200, 200), told, shared, total)
                loss = model(torch.randn(128, 256) * shared[:128]).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert gc.isenabled()
    gc.collect()
    assert all(told)
    assert total.min() == total.max() == 9
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("debug", [pytest.param(False, marks=pytest.mark.slow), True])
def test_finalizers_that_use_tensors(debug: bool) -> None:
    """The collector may run wherever Python makes an object: but never within the session's own code."""
    torch.manual_seed(0)
    expected = train_with_garbage(contextlib.nullcontext)
    torch.manual_seed(0)
    with ooc.Session("2MiB", plan_cache=False, debug=debug) as session:
        found = train_with_garbage(session.step)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, found, strict=True))


def test_what_a_handler_raises_is_not_lost_in_a_finalizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have waited for the end of a section: the handler comes first, or the callback swallows it."""
    inner = ResidencyManager.allocate
    num_left = num_raised = 0
    kept: list[list[int]] = []

    def allocate(manager: ResidencyManager, *arguments: Any, **named: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            kept.extend([number] for number in range(50))  # enough for the collector to be due
            signal.raise_signal(signal.SIGINT)
        return inner(manager, *arguments, **named)

    monkeypatch.setattr(ResidencyManager, "allocate", allocate)
    monkeypatch.setattr(op_runner, "bear_natively", lambda *_, **__: None)  # each allocation comes by there
    before = gc.get_threshold()
    gc.callbacks.append(lambda *_: None)
    gc.set_threshold(5, 1, 1)
    try:
        with ooc.Session("2MiB", plan_cache=False):
            variable = torch.ones(200, 200)
            for index in range(60):
                num_left = 1 + index % 2
                try:
                    denominator = (variable.sqrt() / 3.0).add_(1e-8)
                    variable.addcdiv_(variable, denominator)
                    num_left = 0
                except KeyboardInterrupt:
                    num_raised += 1
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert num_raised == 60


def test_what_comes_while_garbage_is_collected_is_not_lost() -> None:
    """Python calls handlers within finalizers, and swallows what they raise: here they come when it is over."""

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)
            told.append("went on")

    told: list[str] = []
    others = list(
        gc.callbacks
    )  # hypothesis has one, in Python: after `pop` it is the last, and swallows what comes in it
    gc.callbacks.clear()
    with ooc.Session("1MiB", plan_cache=False):
        for last in (False, True):
            Garbage()
            with pytest.raises(KeyboardInterrupt):
                gc.collect()
            if not last:
                gc.callbacks.pop()  # ours, by a program that takes it for its own
        assert told == ["went on"] * 2
    assert gc.callbacks == []
    gc.callbacks.extend(others)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with ooc.Session("1MiB", plan_cache=False) as session:
            for _ in range(4):
                with session.step():
                    torch.ones(256, 256) @ torch.ones(256, 256)
                    assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_forked_within_an_op_collects_garbage() -> None:
    """By another thread: the one whose section it was is not there to end it."""
    begun, done = threading.Event(), threading.Event()
    ends: list[int] = []

    def fork() -> None:
        begun.wait()
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        done.set()

    with ooc.Session("2MiB", plan_cache=False) as session:

        @torch.library.custom_op("ooc_tests::waits_for_a_fork", mutates_args=())
        def waits_for_a_fork(x: torch.Tensor) -> torch.Tensor:
            assert session.engine.runner.dispatcher.depth > 0
            assert not gc.isenabled()
            begun.set()
            done.wait()
            return x + 1

        forking = threading.Thread(target=fork)
        forking.start()
        assert waits_for_a_fork(torch.ones(300, 300)).sum().item() == 180_000
        forking.join()
        assert gc.isenabled()
    assert ends == [0]


def test_another_threads_garbage_waits_for_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads a variable on another thread holds the session's lock, and changes its books, too."""
    told: list[bool] = []
    found: list[float] = []
    with ooc.Session("2MiB", plan_cache=False):
        first = torch.ones(512, 512)
        others = [torch.full((512, 512), float(index)) for index in range(3)]
        inner = FileStore.read

        def read(store: FileStore, *arguments: Any) -> Any:
            told.append(gc.isenabled())
            return inner(store, *arguments)

        monkeypatch.setattr(FileStore, "read", read)
        guest = threading.Thread(target=lambda: found.append(first.sum().item()))
        guest.start()
        guest.join()
        assert gc.isenabled()
        monkeypatch.undo()
        assert [other[0, 0].item() for other in others] == [0, 1, 2]
    assert found == [512 * 512]
    assert told == [False]


@pytest.mark.skipif(boxed_ops() is None, reason="ops go to Python by torch's own way, which nothing stands before")
@pytest.mark.parametrize("debug", [False, True])
def test_signals_on_the_way_to_python(debug: bool) -> None:
    """Before torch calls a mode it runs Python of its own, with the mode off its stack: handlers wait there, too."""
    rule = torch._library.simple_registry.find_torch_dispatch_rule.__code__
    told: list[bool] = []

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is rule:
            signal.raise_signal(signal.SIGUSR1)

    def train_with_signals(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Any]:
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        optimizer = torch.optim.Adam(model.parameters())
        constants = [torch.full((256, 256), float(index)) for index in range(4)]

        def handler(_number: int, _frame: FrameType | None) -> None:
            sys.setprofile(None)  # once a step
            with torch.no_grad():
                told.extend(bool((c == index).all()) for index, c in enumerate(constants))

        previous = signal.signal(signal.SIGUSR1, handler)
        losses = []
        try:
            for index in range(8):
                with step():
                    x = torch.randn(128, 256)
                    for constant in constants:
                        x = x + constant[:128]
                    sys.setprofile(profile if index in (1, 6) else None)
                    loss = model(x).square().mean()
                    loss.backward()
                    sys.setprofile(None)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        finally:
            sys.setprofile(None)
            signal.signal(signal.SIGUSR1, previous)
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    torch.manual_seed(0)
    expected = train_with_signals(contextlib.nullcontext)
    assert not told  # without a session there is no mode
    torch.manual_seed(0)
    with ooc.Session("2MiB", plan_cache=False, debug=debug) as session:
        found = train_with_signals(session.step)
    assert told
    assert all(told)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, found, strict=True))
