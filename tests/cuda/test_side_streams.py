"""A program that uses several streams, with and without `record_stream`, over the fake.

The fake's ops run on the host in the program's order; what is modelled is which stream each belongs to.
"""

from __future__ import annotations

import pytest
import torch

from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CudaSession, fixed_speed
from vmm.device_streams import DeviceStreams, WaitRule

BUDGET_NBYTES = 3 << 20
NUM_LAYERS = 12


def _train(session: CudaSession | None, device: FakeCudaDevice | None, num_steps: int = 6) -> list[str]:
    """Layers take turns on two streams: what one makes the other uses, frees, and allocates anew."""
    torch.manual_seed(0)
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(NUM_LAYERS)]
    other = device.memory.new_stream() if device is not None else 0
    losses = []
    for index in range(num_steps):
        with session.step() if session is not None else torch.enable_grad():
            x = torch.full((256, 256), 0.01 * (index + 1))
            for number, weight in enumerate(weights):
                if device is not None and number % 3 == 1:
                    with device.memory.on_stream(other):
                        x = torch.tanh(x @ weight)
                else:
                    x = torch.tanh(x @ weight)
            loss = x.sum()
            loss.backward()
            with torch.no_grad():
                for weight in weights:
                    assert weight.grad is not None
                    weight -= 0.01 * weight.grad
                    weight.grad = None
            losses.append(loss.item().hex())
            del x, loss
    return losses


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_streams_that_the_program_orders_itself(seed: int) -> None:
    expected = _train(None, None)
    device = FakeCudaDevice(seed=seed, eagerness=0.1)
    with fixed_speed(), CudaSession(BUDGET_NBYTES, device=device) as session:
        assert _train(session, device) == expected
        assert [row.mode for row in session.steps.rows][-3:] == ["planned"] * 3
        assert session.steps.rows[-1].evicted_nbytes > 0


def test_without_the_order_between_streams_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = DeviceStreams.wait

    def deaf(self: DeviceStreams, rule: WaitRule, stream: int, event: object) -> None:
        if rule is not WaitRule.OP_AFTER_OTHER_STREAM:
            wait(self, rule, stream, event)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceStreams, "wait", deaf)
    device = FakeCudaDevice(eagerness=0.1)
    with fixed_speed(), pytest.raises(AssertionError), CudaSession(BUDGET_NBYTES, device=device) as session:
        assert _train(session, device) == _train(None, None)
