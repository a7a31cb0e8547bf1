"""Collectives on a device: NCCL's `Work` orders by events, its kernels run late, on a stream of their own.

torch's own "fake" backend takes the collectives, and does nothing. Here the fake device does what NCCL would: the
collective waits for the stream that launched it, runs on another stream some time later, and `Work.wait` makes the
program's stream wait for it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ooc
from ooc.interop.collectives import Collectives
from ooc.testing.fake_device import FakeCudaDevice, FakeDeviceMemory
from tests.cuda.cases import CHUNK_NBYTES, fixed_speed

pytest.importorskip("torch.testing._internal.distributed.fake_pg")
Work = dist._Work
NUM_RANKS = 2


class NcclMemory(FakeDeviceMemory):
    """The fake's memory, with a stream on which collectives run. All ranks have the same bytes: a sum doubles them."""

    collective_stream = 0
    ended: Any = None
    """An event behind the newest collective."""

    def kernel(self, name: str, *, reads: Any = (), writes: Any = ()) -> None:
        if not name.startswith("c10d.allreduce_"):
            super().kernel(name, reads=reads, writes=writes)
            return
        self.collective_stream = self.collective_stream or self.new_stream()
        calls = self.streams.calls
        launched = self.streams.record(self.streams.follow())
        calls.wait_event(self.collective_stream, launched.handle)
        ranges = [*reads, *writes]
        double = functools.partial(_double, ranges)
        self.fake.launch(self.collective_stream, double, reads=reads, writes=writes, name=name)
        self.ended = self.streams.record(self.collective_stream)

    def wait(self) -> None:
        """As NCCL's `Work.wait`: the current stream waits, the host does not."""
        if self.ended is not None:
            self.streams.calls.wait_event(self.stream, self.ended.handle)


def _double(ranges: list[tuple[int, int]]) -> None:
    for address, nbytes in ranges:
        values = (ctypes.c_float * (nbytes // 4)).from_address(address)
        tensor = torch.frombuffer(values, dtype=torch.float32)
        tensor += tensor


class NcclDevice(FakeCudaDevice):
    memory_type = NcclMemory


@pytest.fixture
def group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def steps(session: Any, num_steps: int, all_reduce: Any) -> list[float]:
    """Gradients are summed over ranks while the backward pass goes on, as in DDP; the budget holds a part of them."""
    torch.manual_seed(1)
    weights = [torch.randn(160, 160) / 16 for _ in range(6)]
    sums = []
    for index in range(num_steps):
        with session.step(), torch.no_grad():
            x = torch.full((160, 160), 0.01 * (index + 1))
            activations = [x]
            for weight in weights:
                x = torch.tanh(x @ weight)
                activations.append(x)
            works, gradients = [], []
            for weight, before in zip(reversed(weights), reversed(activations[:-1]), strict=True):
                gradient = before.T @ x
                works.append(all_reduce(gradient))
                gradients.append(gradient)
                x = x @ weight.T
            for work, gradient, weight in zip(works, gradients, reversed(weights), strict=True):
                work.wait()
                weight -= 1e-3 * gradient
            sums.append(sum(weight.double().sum().item() for weight in weights))
            del x, activations, gradients, gradient, before, works, work
    return sums


class _InCore:
    class step:  # noqa: N801 - as a session's
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def wait(self) -> None:
        pass


def expected(num_steps: int) -> list[float]:
    def all_reduce(gradient: torch.Tensor) -> _InCore:
        gradient += gradient
        return _InCore()

    return steps(_InCore(), num_steps, all_reduce)


def run(seed: int, monkeypatch: pytest.MonkeyPatch, num_steps: int = 5) -> tuple[list[float], Any, Any]:
    device = NcclDevice(seed=seed, eagerness=0.05)
    monkeypatch.setattr(Work, "wait", lambda *_: device.memory.wait())
    monkeypatch.setattr(torch._C._distributed_c10d.FakeWork, "wait", lambda work, *_: Work.wait(work))
    with fixed_speed():
        session = ooc.Session(13 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, plan_cache=False)
        try:
            found = steps(session, num_steps, functools.partial(dist.all_reduce, async_op=True))
            device.fake.cuCtxSynchronize()
            races, report = device.fake.races, session.report()
        finally:
            session.close(bring_back=False)
    return found, races, report


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("seed", [1, 2])
def test_bits_without_a_race(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, races, report = run(seed, monkeypatch)
    assert not races, races[0]
    assert found == expected(5)
    assert [row["mode"] for row in report["steps"]].count("planned") >= 2
    assert sum(row["evicted_nbytes"] for row in report["steps"]) > 0


@pytest.mark.usefixtures("group")
def test_without_the_remedy_bytes_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above notices if the compute stream is not ordered after each collective at once."""
    monkeypatch.setattr(Collectives, "_note_launch", lambda *_: None)
    found, races, _ = run(1, monkeypatch)
    assert races
    assert found != expected(5)
