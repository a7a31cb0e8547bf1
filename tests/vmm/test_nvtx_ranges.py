"""Ranges are opened and closed around loads, evictions and waits; without the package nothing is asked of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import vmm.nvtx_ranges
from vmm.cuda import CudaDriver
from vmm.device_store import DeviceStore
from vmm.device_streams import DeviceStreams
from vmm.host_blocks import HostBlocks
from vmm.testing.fake_cuda import FakeCuda

CHUNK = 64 << 10


class FakeNvtx:
    def __init__(self) -> None:
        self.events: list[str] = []

    @contextlib.contextmanager
    def annotate(self, name: str, *, domain: str) -> Iterator[None]:
        assert domain == "ooc"
        self.events.append(f"{name} begins")
        yield
        self.events.append(f"{name} ends")


@pytest.mark.parametrize("has_package", [False, True])
def test_ranges(has_package: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = FakeNvtx()
    monkeypatch.setattr(vmm.nvtx_ranges, "_nvtx", nvtx if has_package else None)
    fake: Any = FakeCuda(granularity=CHUNK, total_nbytes=4 * CHUNK)
    with CudaDriver(2, CHUNK, bindings=fake, arena_nbytes=4 * CHUNK) as driver:
        streams = DeviceStreams(driver.calls, current=lambda: 0)
        blocks = HostBlocks(driver.calls, budget_nbytes=2 * CHUNK, block_nbytes=CHUNK)
        store = DeviceStore(streams, blocks)
        slot = store.allocate(CHUNK)
        store.write(slot, [(driver.view_address, CHUNK)])
        store.read(slot, [(driver.view_address + CHUNK, CHUNK)]).wait()
        store.close()
        streams.close()
    fake.close()
    acts = [event for event in nvtx.events if not event.startswith("wait")]
    assert acts == (["evict begins", "evict ends", "load begins", "load ends"] if has_package else [])
    assert ("wait begins" in nvtx.events) == has_package
