"""Forks while memory of away variables is given out, or before it is: arrays and pointers write to the store's file.

What the parent writes through them never reaches a child, whenever the child looks, nor the other way round.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ooc
from ooc.memory.record import State, VariableRecord
from ooc.memory.slices import Slices
from tests.interop.cases import BUDGET, WIDTH, InCore, build, contents, train
from tests.quick_plans import QUICK_PLANS
from tests.thinned import thinned
from vmm.slot_parts import SlotParts
from vmm.store import StoreFull

pytestmark = pytest.mark.usefixtures("one_thread")

NUMEL = 65_536
NUM_TENSORS = 10
"""Of 256 KiB each: in 1 MiB most of them are away."""


class Child:
    """A forked process that looks when it is told to."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self._orders, self._order = os.pipe()
        self._answers, self._answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            signal.alarm(300)
            try:
                while os.read(self._orders, 1) == b"x":
                    os.write(self._answer, json.dumps(look()).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(self._orders)
        os.close(self._answer)

    def look(self) -> Any:
        """What `look` returns there now."""
        os.write(self._order, b"x")
        answer = b""
        while not answer.endswith(b"\n"):
            more = os.read(self._answers, 1 << 16)
            assert more, "the child has ended"
            answer += more
        return json.loads(answer)

    def end(self) -> None:
        os.write(self._order, b".")
        os.close(self._order)
        os.close(self._answers)
        assert os.waitpid(self._pid, 0)[1] == 0


def differing(tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """Tells which of the tensors are no longer what they are now."""
    expected = [t.detach().clone().numpy().tobytes() for t in tensors]
    return lambda: [i for i, t in enumerate(tensors) if t.detach().clone().numpy().tobytes() != expected[i]]


def fill() -> list[torch.Tensor]:
    return [torch.full((NUMEL,), float(i)) for i in range(NUM_TENSORS)]


def record_of(session: ooc.Session, tensor: torch.Tensor) -> VariableRecord | None:
    engine = session.engine
    address = torch._C.StorageBase.data_ptr(tensor.untyped_storage())
    return engine.manager.records.get(address) or engine.executor.record_at(address)


def num_away(session: ooc.Session, tensors: Sequence[torch.Tensor]) -> int:
    records = [record for t in tensors if (record := record_of(session, t)) is not None]
    return sum(record.state is State.AWAY for record in records)


def memset(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        ctypes.memset(tensor.data_ptr(), 255, tensor.nbytes)


# -- what the parent writes


@pytest.mark.parametrize("debug", [False, True])
def test_arrays_held_at_the_fork(debug: bool) -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, **QUICK_PLANS) as session:
        tensors = fill()
        arrays = [t.numpy() for t in tensors]
        for t in tensors:
            t.add_(1)
        assert num_away(session, tensors) > 3
        child = Child(differing(tensors))
        for value in (-1, -2):
            for array in arrays:
                array[:] = value
            assert child.look() == []
            for t in tensors:  # all of it comes, and goes again
                t.mul_(2)
        assert child.look() == []
        assert all(torch.equal(t, torch.full((NUMEL,), -4.0)) for t in tensors)
        child.end()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("how", ["data_ptr", "after a clean drop", "numpy without room"])
def test_memory_given_out_after_the_fork(how: str, debug: bool) -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, **QUICK_PLANS) as session:
        tensors = fill()
        for t in tensors:
            t.add_(1)
        assert num_away(session, tensors) > 3
        child = Child(differing(tensors))
        if how == "after a clean drop":  # the slots of the fork are still those of what was in memory meanwhile
            for t in (*tensors, *tensors):
                t.sum()
        if how == "numpy without room":
            with session.resident(*tensors[6:9]), session.resident(tensors[9]):
                assert num_away(session, tensors[:6]) == 6
                for t in tensors[:6]:
                    t.numpy().view(np.uint8)[:] = 255
                assert num_away(session, tensors[:6]) == 6
            memset(tensors[6:])
        else:
            memset(tensors)
        assert child.look() == []
        assert all(bytes(t.numpy().view(np.uint8)) == b"\xff" * t.nbytes for t in tensors)
        assert session.engine.manager.fork_readers.num_retired > 3
        child.end()
        with session.step():
            assert session.engine.manager.fork_readers.num_held == 0


def _train_and_write(session: Any, how: str, *, is_inside: bool) -> tuple[list[float], list[bytes], list[list[int]]]:
    """Fork in planned training, and write from outside after it, between and in steps. What the child saw, too."""
    model, optimizer = build()
    parameters = list(model.parameters())
    arrays: list[np.ndarray[Any, Any]] = []
    losses, seen = [], []
    child: Child | None = None

    def fork() -> Child:
        if how == "held":
            arrays.extend(p.detach().numpy() for p in parameters)
        if isinstance(session, ooc.Session):
            assert num_away(session, parameters) > 0
        return Child(differing(parameters))

    def write() -> None:
        for array in arrays:
            array[...] *= 0.5
        if how == "data_ptr":
            for p in parameters:
                ctypes.memset(p.data_ptr(), 0, p.nbytes // 2)

    for index in range(14):
        with session.step():
            if child is not None and index < 12:
                write()
            losses.append(train(model, optimizer, index))
            if index == 8 and is_inside:
                child = fork()
        if index == 8 and child is None:
            child = fork()
        if child is not None:
            seen.append(child.look())
            if index < 12:
                write()
            seen.append(child.look())
    assert child is not None
    child.end()
    return losses, contents(model), seen


@thinned("how,is_inside", ["held", "data_ptr"], [False, True])
def test_planned_steps(how: str, is_inside: bool) -> None:
    expected = _train_and_write(InCore(), how, is_inside=is_inside)
    assert not any(expected[2])
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS) as session:
        assert _train_and_write(session, how, is_inside=is_inside) == expected
        modes = [row.mode for row in session.steps.rows]
        assert modes[7] == modes[-1] == "planned"


class Arrays(Dataset[torch.Tensor]):
    """Reads tensors of the session through arrays."""

    def __init__(self) -> None:
        self.blocks = [torch.full((64, WIDTH * 4), float(i)) for i in range(8)]
        self.arrays = [block.numpy() for block in self.blocks]

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.arrays[index % 8][index // 8].copy())


def _load() -> list[float]:
    data = Arrays()
    loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork", prefetch_factor=1)
    found = []
    for epoch in range(2):
        for batch in loader:
            for array in data.arrays:
                array += 100 + epoch
            found.append(batch.sum().item())
    return found


def test_a_data_set_of_arrays() -> None:
    expected = _load()
    with ooc.Session(BUDGET, chunk_nbytes="64KiB"):
        assert _load() == expected


# -- what a child writes


def test_what_a_child_writes_is_its_own() -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        tensors = fill()
        arrays = [t.numpy() for t in tensors[::2]]
        for t in tensors:
            t.add_(1)
        is_same = differing(tensors)
        assert num_away(session, tensors) > 3

        def write() -> list[float]:
            for array in arrays:
                array += 7
            for t in tensors:
                t.mul_(2)
            memset(tensors[:1])
            return [t[5].item() for t in tensors[1:]]

        child = Child(write)
        assert child.look() == [(2.0 * (i + 1 + 7 * (i % 2 == 0))) for i in range(1, NUM_TENSORS)]
        assert is_same() == []
        assert [array[9] for array in arrays] == [i + 1 for i in range(0, NUM_TENSORS, 2)]
        for t in tensors:
            t.add_(0)
        assert is_same() == []
        child.end()


# -- what it costs


def test_children_share_one_copy() -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        tensors = fill()
        for t in tensors:
            t.add_(1)
        look, store = differing(tensors), session.engine.memory.store
        pointers = [t.data_ptr() for t in tensors if num_away(session, [t])]
        assert len(pointers) > 3
        num_before = store.num_slots
        children = [Child(look)]
        num_slots = store.num_slots
        assert num_slots >= num_before + len(pointers)
        children += [Child(look), Child(look)]
        assert store.num_slots == num_slots
        ctypes.memset(pointers[1] + 4 * NUMEL - 1, 77, 1)
        children.append(Child(lambda: [int(t.sum().item()) for t in tensors]))
        assert store.num_slots == num_slots + 1
        sums = [int(t.sum().item()) for t in tensors]
        for pointer in pointers:
            ctypes.memset(pointer, 0, 4 * NUMEL)
        assert [child.look() for child in children] == [[], [], [], sums]
        for child in children:
            child.end()
        with session.step():
            assert store.num_slots == num_slots - len(pointers)


def test_nothing_is_copied_of_what_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        tensors = fill()
        array = tensors[0].numpy()
        del array
        for t in tensors:
            t.add_(1)
        monkeypatch.setattr(Slices, "copy", None)
        assert num_away(session, tensors) > 3
        child = Child(differing(tensors))
        for t in tensors:
            t.add_(1)
        assert child.look() == []
        child.end()
        with session.step():  # it has ended: its slots are ordinary ones
            memset(tensors)


# -- what fails


def _full(*_: Any) -> Any:
    raise StoreFull("says the test", needed_nbytes=1, free_nbytes=0)


def _broken(*_: Any) -> Any:
    raise OSError("says the test")


@pytest.mark.parametrize(("owner", "fails"), [(Slices, _full), (SlotParts, _broken)])
def test_a_store_that_fails_at_the_fork(
    owner: type, fails: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fork cannot be refused: it is said that the child may see what is written, and the parent trains on."""
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        tensors = fill()
        arrays = [t.numpy() for t in tensors]
        for t in tensors:
            t.add_(1)
        away = num_away(session, tensors)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "ooc"):
            patch.setattr(owner, "copy", fails)
            child = Child(lambda: [t[0].item() for t in tensors])
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith(f"a forked process may see what is written later through arrays or "
                                             f"pointers to {away} variables")  # fmt: skip
        assert "says the test" in caplog.messages[0]
        assert child.look() == [i + 1 for i in range(NUM_TENSORS)]
        for array in arrays:
            array += 1
        for t in tensors:
            t.mul_(2)
        again = [t.numpy() for t in tensors]  # what is held already is not moved under its holder
        for one, other in zip(arrays, again, strict=True):
            one += 1
            assert one[7] == other[7]
        assert [t[3].item() for t in tensors] == [2 * (i + 2) + 1 for i in range(NUM_TENSORS)]
        child.end()


def test_a_full_disk_when_memory_is_given_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        tensors = fill()
        for t in tensors:
            t.add_(1)
        child = Child(lambda: 0)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "ooc"):
            patch.setattr(session.engine.memory.store, "allocate", _full)
            num_slots = session.engine.memory.store.num_slots
            memset(tensors)
            assert session.engine.memory.store.num_slots == num_slots
        assert [message.partition(":")[0] for message in caplog.messages] == [
            "a forked process may see what is written through an array or pointer to a variable (256.0 KiB, away)"
        ]
        assert all(bytes(t.numpy().view(np.uint8)) == b"\xff" * t.nbytes for t in tensors)
        child.end()


def test_a_copy_has_room_for_all_of_a_slot() -> None:
    """A reservation may have shrunk since its slot was allocated."""
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        tensors = fill()
        for t in tensors:
            t.add_(1)
        record = record_of(session, tensors[0])
        assert record is not None
        assert record.state is State.AWAY
        session.engine.manager.space.shrink(record.reservation, 64 << 10)
        slices = session.engine.runner.parts.memory.slices
        slot = slices.copy(record)
        assert slot.capacity_nbytes >= record.slot.capacity_nbytes
        assert slices.is_copy(slot, record)
        session.engine.memory.store.free(slot)
