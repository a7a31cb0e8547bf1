"""Driver, streams and store over the real driver where there is a GPU, and the very same over the fake.

No torch op is involved: fills and copies are the driver's own. Each test names the facts of vmm/DESIGN.md
("CUDA driver behaviour we rely on") that it sees.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import pytest

from vmm.cuda import CudaDriver
from vmm.cuda_calls import load_bindings
from vmm.device_space import DeviceSpace
from vmm.device_store import DeviceStore
from vmm.device_streams import DeviceStreams
from vmm.device_timer import DeviceTimer
from vmm.host_blocks import HostBlocks
from vmm.testing.fake_cuda import FakeCuda

NUM_CHUNKS = 8
NUM_HOST_BLOCKS = 24


class Bench:
    """A pool of eight chunks, its streams, and host memory for three times as much."""

    def __init__(self, bindings: Any, chunk_nbytes: int) -> None:
        self.chunk_nbytes = chunk_nbytes
        self.driver = CudaDriver(NUM_CHUNKS, chunk_nbytes, bindings=bindings, arena_nbytes=64 * chunk_nbytes)
        self.calls = self.driver.calls
        self.compute = self.calls.create_stream()
        self.streams = DeviceStreams(self.calls, current=lambda: self.compute)
        blocks = HostBlocks(self.calls, budget_nbytes=(NUM_HOST_BLOCKS + 1) * chunk_nbytes, block_nbytes=chunk_nbytes)
        self.seen = blocks.segments(blocks.take(1) or (), chunk_nbytes)[0][0]
        self.store = DeviceStore(self.streams, blocks)
        self.space = DeviceSpace(self.driver, self.streams)

    def view(self, chunk: int) -> int:
        return self.driver.view_address + chunk * self.chunk_nbytes

    def fill(self, address: int, value: int) -> None:
        what = f"fill with {value}"
        self.calls.call("cuMemsetD8Async", address, value, self.chunk_nbytes, self.streams.follow(), what=what)

    def value(self, address: int) -> int:
        """What a chunk's worth of bytes from here holds, seen by a copy on the compute stream."""
        self.calls.copy_to_host(self.seen, address, self.chunk_nbytes, self.streams.follow())
        self.streams.observe_all()
        found = set(ctypes.string_at(self.seen, self.chunk_nbytes))
        assert len(found) == 1, f"{len(found)} different bytes where one fill went"
        return found.pop()

    def close(self) -> None:
        self.streams.observe_all()
        self.store.close()
        self.space.close()
        self.driver.close()
        self.streams.close()
        self.calls.destroy_stream(self.compute)


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "fake":
        fake = FakeCuda(total_nbytes=NUM_CHUNKS * (2 << 20), seed=1)
        made = Bench(fake, 2 << 20)
        yield made
        made.close()
        assert fake.races == ()
        assert fake.left() == []
        fake.close()
        return
    import torch

    torch.zeros(1, device="cuda")  # makes torch's context current on this thread
    made = Bench(load_bindings(), 2 << 20)
    yield made
    made.close()


def test_aliases_show_each_other_across_launches(bench: Bench) -> None:
    """C1 to C5: a write through one address is seen through another by what comes later in stream order."""
    first, second = bench.space.reserve(bench.chunk_nbytes), bench.space.reserve(2 * bench.chunk_nbytes)
    bench.space.map(first, ((5, 1),))
    bench.space.map(second, ((2, 1), (5, 1)))
    for value in range(1, 6):
        bench.fill(first.address, value)
        assert bench.value(second.address + bench.chunk_nbytes) == value
        bench.fill(second.address + bench.chunk_nbytes, value + 100)
        assert bench.value(bench.view(5)) == value + 100


def test_a_mapping_is_replaced_after_its_last_use_was_seen(bench: Bench) -> None:
    """C6 to C8: whole ranges are unmapped by one call, and bytes stay with their chunks."""
    reservation = bench.space.reserve(4 * bench.chunk_nbytes)
    bench.space.map(reservation, ((0, 4),))
    for index in range(4):
        bench.fill(reservation.address + index * bench.chunk_nbytes, 10 + index)
    bench.space.map(reservation, ((4, 2), (0, 2)))
    assert bench.space.num_stops == 1
    assert bench.value(reservation.address + 2 * bench.chunk_nbytes) == 10
    assert bench.value(bench.view(3)) == 13
    bench.space.unmap(reservation)
    bench.space.map(reservation, ((3, 1), (2, 1), (1, 1), (0, 1)))
    assert [bench.value(reservation.address + i * bench.chunk_nbytes) for i in range(4)] == [13, 12, 11, 10]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_three_times_the_pool_goes_out_and_comes_back(bench: Bench, seed: int) -> None:
    """C16, C17: by streams and events alone; each variable is checked whenever it is in memory."""
    choose = random.Random(seed)
    slots = [bench.store.allocate(bench.chunk_nbytes) for _ in range(3 * NUM_CHUNKS)]
    values: list[int] = [0] * len(slots)
    inside: dict[int, int] = {}  # variable to chunk
    leaving: dict[int, Any] = {}  # chunk to the write of who held it last
    free = list(range(NUM_CHUNKS))
    for _ in range(120):
        variable = choose.randrange(len(slots))
        if variable not in inside:
            if not free:
                victim = choose.choice(list(inside))
                chunk = inside.pop(victim)
                leaving[chunk] = bench.store.write(slots[victim], [(bench.view(chunk), bench.chunk_nbytes)])
                free.append(chunk)
            chunk = inside[variable] = free.pop()
            before = leaving.pop(chunk, None)
            if values[variable]:
                after = [before] if before is not None else []
                bench.store.read(slots[variable], [(bench.view(chunk), bench.chunk_nbytes)], after).order()
            elif before is not None:
                before.order()
        address = bench.view(inside[variable])
        if values[variable] and choose.random() < 0.5:
            assert bench.value(address) == values[variable]
        values[variable] = choose.randrange(1, 256)
        bench.fill(address, values[variable])
    for variable, chunk in inside.items():
        assert bench.value(bench.view(chunk)) == values[variable]


def test_compute_work_is_timed(bench: Bench) -> None:
    """By events with time stamps, and only those: the host has not waited when a stretch is not over."""
    timer = DeviceTimer(bench.streams)
    reservation = bench.space.reserve(bench.chunk_nbytes)
    bench.space.map(reservation, ((0, 1),))
    waited = bench.streams.num_host_waits
    with timer.timing():
        for value in range(5):
            bench.fill(reservation.address, value)
    assert bench.streams.num_host_waits == waited
    bench.streams.observe_all()
    assert timer.take_ns() > 0
    assert timer.take_ns() == 0
