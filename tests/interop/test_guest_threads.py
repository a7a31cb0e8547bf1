"""Other Python threads use the session's tensors in planned steps: right bytes, kept writes, steps still planned.

The model has frozen tensors, each full of one value of its own, at a budget where most are away at any moment. In the
middle of each step the session's thread waits until the other has gone through its work twice.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Protocol, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ooc
from ooc.errors import SessionError
from ooc.interop.guest_threads import GuestThreads
from tests.quick_plans import QUICK_PLANS

WIDTH = 192
NUM_LAYERS = 5
BUDGET = "768KiB"
NUM_STEPS = 10
LEAST_PLANNED = 0.8


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Layers that are trained, tensors that are used and never change, and some that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        for index in range(NUM_LAYERS):
            self.register_buffer(f"used_{index}", torch.full((WIDTH, WIDTH), index + 1.0))
            self.register_buffer(f"unused_{index}", torch.full((WIDTH, WIDTH), index + 101.0))

    def forward(self, x: Tensor, pause: Callable[[], None]) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + x @ self.get_buffer(f"used_{index}") * 1e-4
            if index == 2:
                pause()
        return x

    def frozen(self) -> list[tuple[float, Tensor]]:
        """Tensors with the value that all their elements have."""
        used = [(index + 1.0, self.get_buffer(f"used_{index}")) for index in range(NUM_LAYERS)]
        return used + [(index + 101.0, self.get_buffer(f"unused_{index}")) for index in range(NUM_LAYERS)]


Act = Callable[[Net], Any]


class Pool(Protocol):
    """Runs work on another thread."""

    def submit(self, work: Callable[[], Any], /) -> Future[Any]: ...


class Other:
    """A thread that does the same again and again while its `with` block runs, and what went wrong on it."""

    def __init__(self, act: Act, net: Net, pool: Pool | None = None) -> None:
        self.num_done = 0
        self._stop = threading.Event()
        self._failures: list[BaseException] = []

        def loop() -> None:
            try:
                while not self._stop.is_set():
                    act(net)
                    self.num_done += 1
            except BaseException as error:  # raised again on the test's thread
                self._failures.append(error)

        self._thread = threading.Thread(target=loop)
        self._start = self._thread.start if pool is None else lambda: setattr(self, "_task", pool.submit(loop))
        self._task: Any = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._task is not None:
            self._task.result()
        else:
            self._thread.join()
        if self._failures:
            raise self._failures[0]

    def pause(self) -> None:
        """Wait until all of its work was done from start to end meanwhile."""
        target = self.num_done + 2
        while self.num_done < target and not self._failures:
            time.sleep(0.001)


def train(net: Net, step: Callable[[], Any], pause: Callable[[], None], num_steps: int = NUM_STEPS) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for index in range(num_steps):
        with step():
            optimizer.zero_grad()
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(index))
            loss = net(x, pause).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def build() -> Net:
    torch.manual_seed(0)
    return Net()


@lru_cache(maxsize=1)
def expected() -> tuple[list[float], dict[str, Tensor]]:
    net = build()
    return train(net, contextlib.nullcontext, lambda: None), net.state_dict()


def run(act: Act, *, debug: bool = False, pool: Pool | None = None, is_planned: bool = True) -> Net:
    """Train beside a thread that does `act`. Losses, parameters and the share of planned steps are checked."""
    losses, state = expected()
    with ooc.Session(BUDGET, debug=debug, **QUICK_PLANS) as session:
        net = build()
        with Other(act, net, pool) as other:
            assert train(net, session.step, other.pause) == losses
        modes = [step["mode"] for step in session.report()["steps"]]
    assert other.num_done >= 2 * NUM_STEPS
    for name, value in net.state_dict().items():
        if name.startswith("layers"):
            assert torch.equal(value, state[name]), name
    if is_planned:
        learned = modes[modes.index("planned") :] if "planned" in modes else []
        assert len(learned) >= NUM_STEPS // 2, modes
        assert learned.count("planned") >= LEAST_PLANNED * len(learned), modes
    return net


# -- reads


def _check(value: float, tensor: Tensor, what: str) -> None:
    assert tensor.shape == (WIDTH, WIDTH)
    assert bool((tensor == value).all()), f"{what}: {tensor.flatten()[:3].tolist()} instead of {value}"


def copies(net: Net) -> None:
    array = np.empty((WIDTH, WIDTH), dtype=np.float32)
    buffer = torch.from_numpy(array)
    for value, tensor in net.frozen():
        buffer.copy_(tensor)
        assert (array == value).all(), f"copy_: {array[0, :3]} instead of {value}"


def norms(net: Net) -> None:
    for value, tensor in net.frozen():
        assert tensor.norm().item() == pytest.approx(value * WIDTH, rel=1e-4)


def clones(net: Net) -> None:
    for value, tensor in net.frozen():
        _check(value, tensor.clone(), "clone")
        _check(value, tensor.t().contiguous(), "a view")
        assert tensor[3:5, 7].tolist() == [value] * 2


def state_dicts(net: Net) -> None:
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for index in range(NUM_LAYERS):
        _check(index + 1.0, state[f"used_{index}"], "state_dict")
    for value, tensor in copy.deepcopy(net).frozen():
        _check(value, tensor, "deepcopy")


def arrays(net: Net) -> None:
    for value, tensor in net.frozen():
        assert (tensor.numpy() == value).all()


def saves(net: Net, *, is_zip: bool = True) -> None:
    file = io.BytesIO()
    torch.save(net.state_dict(), file, _use_new_zipfile_serialization=is_zip)
    file.seek(0)
    state = torch.load(file)
    for index in range(NUM_LAYERS):
        _check(index + 1.0, state[f"used_{index}"], "torch.save")
        _check(index + 101.0, state[f"unused_{index}"], "torch.save")


@pytest.mark.parametrize("act", [copies, pytest.param(norms, marks=pytest.mark.slow), clones, state_dicts, saves])
def test_reads_in_planned_steps(act: Act) -> None:
    run(act)


@pytest.mark.parametrize("act", [copies, saves])
def test_reads_in_debug_mode(act: Act) -> None:
    run(act, debug=True)


def test_old_files() -> None:
    run(lambda net: saves(net, is_zip=False))


def test_arrays_are_right_and_leave_the_plan() -> None:
    """A pointer is given out: right at any time, at the price of the plan."""
    run(arrays, is_planned=False)


def test_executor_that_was_there_before() -> None:
    """A checkpoint in the background, by a thread that is older than the session."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        run(saves, pool=pool)


class Older:
    """A thread that waits for work, like an executor's, and is no executor's."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.modes_left: list[Any] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.submit(int).result()  # it runs

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        self.modes_left = _get_current_dispatch_mode_stack()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)
        self._thread.join()


@pytest.mark.skipif(not hasattr(ctypes.pythonapi, "_PyEval_SetProfile"), reason="this Python cannot reach threads")
@pytest.mark.parametrize(
    "act", [norms, saves, *(pytest.param(act, marks=pytest.mark.slow) for act in (copies, state_dicts))]
)
def test_thread_that_is_older_than_the_session(act: Act) -> None:
    """It was there before, and is left as it was."""
    with Older() as thread:
        run(act, pool=thread)
        assert thread.submit(_get_current_dispatch_mode_stack).result() == []
        run(act, pool=thread)
    assert thread.modes_left == []


@pytest.mark.skipif(not hasattr(ctypes.pythonapi, "_PyEval_SetProfile"), reason="this Python cannot reach threads")
def test_thread_that_is_older_and_never_stops() -> None:
    """It reads before, in and after a session, and in the next one."""
    box: list[Net] = []

    def loop() -> None:
        while not stopped.is_set():
            for net in box[-1:]:
                copies(net)
                num_done[0] += 1

    def pause() -> None:
        target = num_done[0] + 2
        while num_done[0] < target and not task.done():
            time.sleep(0.001)

    stopped, num_done = threading.Event(), [0]
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(loop)
        try:
            for _ in range(2):
                with ooc.Session(BUDGET, **QUICK_PLANS) as session:
                    box.append(build())
                    train(box[-1], session.step, pause)
        finally:
            stopped.set()
        task.result()


# -- writes


def test_threads_that_cannot_be_reached_are_named() -> None:
    ends = threading.Event()
    older = threading.Thread(target=ends.wait, name="a logger")
    older.start()
    threading.setprofile(lambda *_: None)
    try:
        with pytest.warns(RuntimeWarning, match="a logger"), ooc.Session(BUDGET):
            pass
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        ends.set()
        older.join()


@pytest.mark.parametrize("debug", [False, True])
def test_moving_averages(debug: bool) -> None:
    """Averages are variables, too: written where they are, whatever the step does meanwhile."""
    averages: list[Tensor] = []
    num_turns = [0]

    def average(net: Net) -> None:
        for slot, (_, tensor) in zip(averages, net.frozen(), strict=True):
            assert slot.lerp_(tensor, 0.25) is slot
        num_turns[0] += 1

    def first(net: Net) -> None:
        if not averages:  # allocated on the thread, they would be no variables
            time.sleep(0.001)
            return
        average(net)

    losses, _ = expected()
    with ooc.Session(BUDGET, debug=debug, **QUICK_PLANS) as session:
        net = build()
        averages += [torch.zeros(WIDTH, WIDTH) for _ in net.frozen()]
        with Other(first, net) as other:
            assert train(net, session.step, other.pause) == losses
        modes = [step["mode"] for step in session.report()["steps"]]
        for slot, (value, _) in zip(averages, net.frozen(), strict=True):
            wanted = torch.zeros(1)
            for _ in range(num_turns[0]):
                wanted.lerp_(torch.tensor([value]), 0.25)
            assert num_turns[0] > NUM_STEPS
            _check(wanted.item(), slot, "lerp_")
    learned = modes[modes.index("planned") :]
    assert learned.count("planned") >= LEAST_PLANNED * len(learned), modes


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_no_copy_of_a_nested_tensor() -> None:
    """An error that says so, and what to do; the session's thread may use it as ever."""
    with ooc.Session("8MiB"):
        nested = torch.nested.nested_tensor([torch.ones(length, 256) for length in (300, 500)])
        with ThreadPoolExecutor() as pool, pytest.raises(SessionError, match=r"an operand \(nested\) is a variable"):
            pool.submit(lambda: nested * 2).result()
        assert (nested * 2).to_padded_tensor(0.0).sum().item() == 2 * 800 * 256


def test_part_of_a_variable() -> None:
    """What a write does not name stays as it is, and a result that is a view is one of the variable itself."""

    def write(net: Net) -> None:
        for value, tensor in net.frozen():
            view = tensor.data[1:3]  # `data`, since autograd refuses tensors that others have written
            assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            assert view.mul_(1) is view
            view.fill_(value + 0.5 if value > 100 else value)  # what the step uses must stay as it is

    net = run(write)
    for value, tensor in net.frozen()[NUM_LAYERS:]:
        assert bool((tensor[1:3] == value + 0.5).all())
        assert bool((tensor[0] == value).all())
        assert bool((tensor[3:] == value).all())


# -- what else happens to threads


def test_failing_op_fails_on_its_thread_only() -> None:
    def fail(net: Net) -> None:
        with pytest.raises(RuntimeError, match="shape"):
            net.frozen()[0][1] @ torch.ones(WIDTH + 1, 2)
        copies(net)

    run(fail)


def test_thread_outlives_its_session_and_meets_the_next() -> None:
    """No read is wrong while a session closes, without one, or in another."""
    with contextlib.ExitStack() as stack:
        with ooc.Session(BUDGET, **QUICK_PLANS) as session:
            net = build()
            other = stack.enter_context(Other(copies, net))
            train(net, session.step, other.pause, num_steps=6)
        other.pause()
        with ooc.Session(BUDGET, **QUICK_PLANS) as session:
            others = build()
            with Other(copies, others) as second:
                train(others, session.step, second.pause, num_steps=6)
            other.pause()
    assert "_guest" not in threading.Thread._bootstrap_inner.__code__.co_names  # type: ignore[attr-defined]


def test_fork_while_a_thread_writes() -> None:
    """A child sees what was there at its fork; the parent's threads go on to write."""
    with ooc.Session(BUDGET, **QUICK_PLANS) as session:
        net = build()
        train(net, session.step, lambda: None, num_steps=8)
        go_on, told = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                os.read(go_on, 1)
                status = 0 if all(bool((tensor == value).all()) for value, tensor in net.frozen()) else 2
            os._exit(status)

        def write(net: Net) -> None:
            for value, tensor in net.frozen()[NUM_LAYERS:]:
                tensor.fill_(value + 1)

        with Other(write, net) as other:
            train(net, session.step, other.pause, num_steps=4)
        os.write(told, b".")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for value, tensor in net.frozen()[NUM_LAYERS:]:
            _check(value + 1, tensor, "fill_")
        os.close(go_on)
        os.close(told)


def test_collective_is_refused() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ooc.Session(BUDGET):
            net = build()

            def reduce(net: Net) -> None:
                dist.all_reduce(torch.ones(4))
                with pytest.raises(SessionError, match=r"clone\(\)"):
                    dist.all_reduce(net.frozen()[0][1])

            with Other(reduce, net) as other:
                other.pause()
    finally:
        dist.destroy_process_group()


def test_without_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: with threads as they were before, a read is wrong."""
    monkeypatch.setattr(GuestThreads, "open", lambda self: None)
    with pytest.raises(AssertionError, match="instead of"):
        run(copies)


def test_threads_that_wait_keep_no_session_alive() -> None:
    """What they call at their next event knew its session, for ever: in a notebook, which has such threads."""
    stop, engines = threading.Event(), []
    older = threading.Thread(target=stop.wait)
    older.start()
    try:
        for _ in range(5):
            with ooc.Session("4MiB", chunk_nbytes="64KiB", plan_cache=False) as session:
                weight = torch.ones(1 << 16, requires_grad=True)
                with session.step():
                    (weight * 2).sum().backward()
                engines.append(weakref.ref(session.engine))
            del session
        gc.collect()
        assert [engine() for engine in engines[:-1]] == [None] * 4
    finally:
        stop.set()
        older.join()
