"""Sessions over the fake CUDA driver, and what must hold when one has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import ooc
from ooc.testing.fake_device import FakeCudaDevice
from ooc.tracing.observed import Observed, close_cycle
from scheduler.trace import Trace
from tests.session import programs
from vmm.device_store import DeviceStore
from vmm.store_speed import StoreSpeed

CHUNK_NBYTES = 64 << 10
SPEED = StoreSpeed(
    write_bytes_per_s=1e9, read_bytes_per_s=1e9, write_together_bytes_per_s=6e8, read_together_bytes_per_s=6e8
)
STOPPING_CALLS = frozenset(
    {
        "cuCtxSynchronize",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuMemAddressFree",
        "cuMemCreate",
        "cuMemFreeHost",
        "cuMemHostAlloc",
        "cuMemHostRegister",
        "cuMemHostUnregister",
        "cuMemMap",
        "cuMemRelease",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuStreamQuery",
        "cuStreamSynchronize",
    }
)
"""Calls that wait for the device, may do so inside the driver, or ask it how far it is. A planned step makes none."""


class CudaSession(ooc.Session):
    """A session over the fake that looks at its end for races, and for what was not given back."""

    def __init__(self, budget: int, *, device: FakeCudaDevice, **options: Any) -> None:
        self.fake_device = device
        super().__init__(budget=budget, chunk_nbytes=CHUNK_NBYTES, device=device, plan_cache=False, **options)

    def close(self, *, bring_back: bool = True) -> None:
        was_open = self.engine.is_open
        super().close(bring_back=bring_back)
        if was_open:
            assert_clean(self.fake_device)


def assert_clean(device: FakeCudaDevice) -> None:
    """No two accesses that nothing orders, and nothing left behind."""
    races = device.fake.races
    assert not races, f"{len(races)} races, first: {races[0]}"
    assert device.fake.left() == []


@contextmanager
def fixed_speed() -> Iterator[None]:
    """Plans for a link of constant speed and ops of equal length, once, so that each run has the same plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStore, "measure", lambda self, buffer=None: SPEED)
        patch.setattr("ooc.replay.elastic.close_cycle", _with_equal_ops)
        patch.setattr("ooc.replay.sequences._REFINE_AFTER", ())
        yield


@contextmanager
def programs_over(device: FakeCudaDevice) -> Iterator[None]:
    """Random programs open their sessions on this device."""

    def make_session(*, budget: int, chunk_nbytes: int, **options: Any) -> ooc.Session:
        assert chunk_nbytes == programs.CHUNK_NBYTES
        return CudaSession(budget, device=device, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "make_session", make_session)
        yield


def _with_equal_ops(first: Observed, second: Observed) -> Trace:
    trace = close_cycle(first, second)
    return replace(trace, ops=tuple(replace(op, duration_ns=50_000) for op in trace.ops))


def stopping_calls(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """Which calls that may stop the host were made meanwhile, and how often."""
    return {name: after[name] - before[name] for name in sorted(STOPPING_CALLS) if after[name] != before[name]}
