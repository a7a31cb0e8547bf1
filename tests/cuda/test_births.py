"""Births on demand over the fake: what is freed is mapped still, and serves the next birth of its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ooc import models
from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CudaSession, fixed_speed
from vmm.device_streams import DeviceEvent, DeviceStreams, WaitRule

MIB = 1 << 20
MAPPING = ("cuMemMap", "cuMemSetAccess", "cuMemUnmap")

pytestmark = pytest.mark.usefixtures("one_thread")


def train(budget_nbytes: int, *, debug: bool = False) -> tuple[list[dict[str, int]], list[str], list[Any]]:
    """Calls of each step that map, losses, and rows."""
    workload = models.get("gpt", "small")
    device = FakeCudaDevice(seed=1, eagerness=0.2)
    calls, losses = [], []
    with fixed_speed(), CudaSession(budget_nbytes, device=device, policy="on_demand", debug=debug) as session:
        torch.manual_seed(0)
        model = workload.build()
        optimizer = workload.make_optimizer(model)
        for index in range(3):
            before = device.fake.num_calls.copy()
            with session.step():
                optimizer.zero_grad(set_to_none=True)
                loss = workload.loss(model, workload.make_batch(index))
                loss.backward()
                optimizer.step()
                losses.append(loss.item().hex())
                del loss
            calls.append({name: device.fake.num_calls[name] - before[name] for name in MAPPING})
        rows = list(session.steps.rows)
    assert {row.mode for row in rows} == {"learning"}, rows
    return calls, losses, rows


def test_nothing_is_mapped_where_sizes_come_again_and_all_fits() -> None:
    calls, _, _ = train(64 * MIB)
    assert calls[0]["cuMemMap"] > 100
    assert calls[-1] == dict.fromkeys(MAPPING, 0), calls


def test_where_memory_is_short_addresses_serve_again_when_their_chunks_are_free() -> None:
    """In debug mode none do, since the use of what was freed is a fault there."""
    calls, losses, rows = train(8 * MIB)
    others, expected, _ = train(8 * MIB, debug=True)
    assert losses == expected
    assert rows[-1].evicted_nbytes > 0
    assert calls[-1]["cuMemMap"] < 0.75 * others[-1]["cuMemMap"], (calls, others)


def test_the_host_waits_for_no_transfer_and_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops wait for what is loaded, and for the writes of whose memory they get. The host waits before it unmaps."""
    rules: list[WaitRule] = []
    observe = DeviceStreams.observe

    def seen(streams: DeviceStreams, rule: WaitRule, event: DeviceEvent) -> None:
        rules.append(rule)
        observe(streams, rule, event)

    _, expected, _ = train(64 * MIB)
    monkeypatch.setattr(DeviceStreams, "observe", seen)
    monkeypatch.setattr(CudaSession, "close", partial_close(CudaSession.close, rules))
    _, losses, rows = train(8 * MIB)
    assert losses == expected
    assert rows[-1].evicted_nbytes > 0 and rows[-1].loaded_nbytes > 0
    assert set(rules) == {WaitRule.HOST_AFTER_USE}, rules


def partial_close(close: Any, rules: list[WaitRule]) -> Any:
    """What is waited for at the session's end is no matter."""

    def closed(session: CudaSession, **options: Any) -> None:
        before = list(rules)
        close(session, **options)
        rules[:] = before

    return closed
