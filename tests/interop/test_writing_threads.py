"""A thread writes through arrays into what a session moves: of what it writes nothing is lost, at any moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import ooc
from ooc.errors import StoreFailed
from ooc.memory.guards import Guards
from tests.interop.cases import BUDGET, NUM_STEPS, build, train
from tests.quick_plans import QUICK_PLANS
from tests.thinned import thinned
from vmm.addresses import AddressSpace
from vmm.driver import MemoryFault

pytestmark = pytest.mark.usefixtures("one_thread", "_quick_switches")

NUM_ELEMENTS = 1 << 16


@pytest.fixture
def _quick_switches() -> Iterator[None]:
    """Threads take the GIL from each other often: more places to meet, and less waiting."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(before)


class Buffers:
    """Tensors that each step reads, and a thread that writes into their arrays all the time, and remembers what."""

    def __init__(self, *, whole: bool) -> None:
        self.tensors = [torch.zeros(NUM_ELEMENTS) for _ in range(3)]
        self._arrays = [tensor.numpy() for tensor in self.tensors]
        self._expected = [np.zeros(NUM_ELEMENTS, dtype=np.float32) for _ in self.tensors]
        self._whole = whole
        self._stop = threading.Event()
        self.num_written = 0
        self.num_lost = 0

    def _write(self) -> None:
        choose = np.random.default_rng(0)
        while not self._stop.is_set():
            which, place = int(choose.integers(len(self._arrays))), int(choose.integers(NUM_ELEMENTS))
            array, expected = self._arrays[which], self._expected[which]
            where = slice(None) if self._whole else place
            self.num_lost += array[place] != expected[place]
            self.num_written += 1
            array[where] = expected[where] = self.num_written % (1 << 20)

    @contextmanager
    def written(self) -> Iterator[None]:
        """Within the block the thread writes; after it, what it wrote is compared."""
        thread = threading.Thread(target=self._write)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        self.num_lost += sum(int((a != e).sum()) for a, e in zip(self._arrays, self._expected, strict=True))

    def use(self) -> None:
        for tensor in self.tensors:
            torch.maximum(tensor, tensor)


def _steps(session: Any, buffers: Buffers, number: int, *, varied: bool = False) -> None:
    model, optimizer = build()
    for index in range(number):
        with session.step():
            buffers.use()
            for _ in range(index if varied else 0):  # no two steps are alike
                torch.ones(NUM_ELEMENTS).neg()
            train(model, optimizer, index)


@thinned("varied,delay_ns,whole", [False, True], [2_000_000, 0], [False, True])
def test_nothing_is_lost(varied: bool, delay_ns: int, whole: bool) -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS) as session:
        buffers = Buffers(whole=whole)
        session.engine.memory.store.engine.inject_faults(delay_ns=delay_ns)
        with buffers.written():
            _steps(session, buffers, NUM_STEPS, varied=varied)
        rows = list(session.steps.rows)
    assert buffers.num_written
    assert not buffers.num_lost
    assert any(row.mode == "planned" for row in rows) != varied, [row.why for row in rows]


def test_nothing_is_lost_while_the_budget_changes_and_memory_is_lent() -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS) as session:
        buffers = Buffers(whole=False)
        model, optimizer = build()
        with buffers.written():
            for index in range(2 * NUM_STEPS):
                session.set_budget(("1MiB", "2MiB")[index % 2 if index < NUM_STEPS // 2 else index // 6 % 2])
                with session.step():
                    buffers.use()
                    train(model, optimizer, index)
                if index % 5 == 0:
                    with session.yielded():
                        pass
    assert buffers.num_written
    assert not buffers.num_lost


@pytest.mark.parametrize("direction", ["write", "read"])
def test_nothing_is_lost_where_transfers_fail(direction: Any) -> None:
    num_failed = 0
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS) as session:
        buffers = Buffers(whole=False)
        model, optimizer = build()
        with buffers.written():
            for index in range(2 * NUM_STEPS):
                if index % 3 == 2:
                    faults = {"fail_call": 1 + index, "direction": direction}
                    session.engine.memory.store.engine.inject_faults(**faults)
                try:
                    with session.step():
                        buffers.use()
                        train(model, optimizer, index)
                except StoreFailed:
                    num_failed += 1
                    optimizer.zero_grad()
    assert num_failed
    assert not buffers.num_lost


@pytest.mark.parametrize("name", ["map", "map_file"])
def test_training_goes_on_where_the_kernel_refuses_still_moves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made like all others then; nobody writes meanwhile."""
    real: Callable[..., Any] = getattr(AddressSpace, name)
    refused = []

    def refusing(*arguments: Any, still: Any = None) -> Any:
        if still is not None:
            refused.append(name)
            raise MemoryFault("too many mappings")
        return real(*arguments)

    monkeypatch.setattr(AddressSpace, name, refusing)
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS) as session:
        buffers = Buffers(whole=True)
        for index, tensor in enumerate(buffers.tensors):
            tensor += index
        _steps(session, buffers, NUM_STEPS)
        assert [float(tensor[5]) for tensor in buffers.tensors] == [0, 1, 2]
        rows = list(session.steps.rows)
    assert refused
    assert rows[-1].mode == "planned"


def test_the_ops_of_another_thread_keep_what_is_written_through_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op of a thread writes the first half of a variable that is away, while the second is written by an array."""
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        tensor = torch.zeros(NUM_ELEMENTS)
        array = tensor.numpy()
        record = session.engine.manager.records[array.ctypes.data]
        session.engine.manager.evict([record])
        store = session.engine.memory.store
        write, last = store.write, [0]

        def writing(*arguments: Any, **options: Any) -> Any:
            array[-1] = last[0] = 7  # between the read of the rest and this, if it goes so
            return write(*arguments, **options)

        monkeypatch.setattr(store, "write", writing)

        def work() -> None:
            array[-2] = 6
            tensor[: NUM_ELEMENTS // 2].fill_(5)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        monkeypatch.undo()
        array[-3] = 8
        assert tensor[:3].tolist() == [5, 5, 5]
        assert tensor[-3:].tolist() == [8, 6, *last]


def test_a_leaving_that_fails_is_told_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError(28, "no space")

    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        buffers = Buffers(whole=False)
        monkeypatch.setattr(Guards, "leave", failing)
        with pytest.raises(StoreFailed, match=r"no space.*stays in memory"):
            session.engine.manager.evict([r for r in session.engine.manager.records.values() if r.exports])
        monkeypatch.undo()
        buffers.use()
