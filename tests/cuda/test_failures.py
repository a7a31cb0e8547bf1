"""Fail the k-th driver call of a short training run, for every k: an error, true books, and work goes on."""

from __future__ import annotations

import gc
import os

import pytest
import torch

import ooc._current
import ooc.session
from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CudaSession, assert_clean, fixed_speed
from vmm.testing.fake_cuda import CUresult

BUDGET_NBYTES = 20 * 64 * 1024
NUM_STEPS = 4
SAMPLED_CALLS = 400
"""Of so many calls, two are failed, each in a run of its own."""


def _step(weights: list[torch.Tensor], index: int) -> torch.Tensor:
    x = torch.full((160, 160), 0.01 * (index + 1))
    for weight in weights:
        x = torch.tanh(x @ weight)
    x.sum().backward()
    with torch.no_grad():
        for weight in weights:
            assert weight.grad is not None
            weight -= 0.01 * weight.grad
            weight.grad = None
    return x


def _run(device: FakeCudaDevice | None, fail_call: int, *, times: int = 1) -> tuple[str, bool, bool]:
    """Train; a step that fails is void, and the variables that it had not changed keep their bytes.

    Returns:
        The end, whether a failure came through, and whether a call failed at all.
    """
    torch.manual_seed(1)
    constants = [torch.randn(160, 160) for _ in range(6)]
    has_failed = is_reached = False
    kept = ""
    with fixed_speed():
        session = CudaSession(BUDGET_NBYTES, device=device, policy="window") if device is not None else None
        try:
            mine = [c.clone() for c in constants]
            weights = [torch.randn(160, 160, requires_grad=True) for _ in range(6)]
            if device is not None:
                device.fake.fail(fail_call, CUresult.CUDA_ERROR_UNKNOWN, times=times)
            for index in range(NUM_STEPS):
                try:
                    if session is not None:
                        with session.step():
                            _step(weights, index)
                    else:
                        _step(weights, index)
                except (RuntimeError, ooc.OocError):
                    has_failed = True
                    for weight in weights:
                        weight.grad = None
                gc.collect()
            if device is not None:
                is_reached = device.fake.has_failed
                device.fake.fail(0)
            kept = "".join(str(torch.equal(a, b)) for a, b in zip(mine, constants, strict=True))
            for weight in weights:
                weight.grad = None
            x = _step(weights, 0)
            assert torch.isfinite(x).all()
            del x
        finally:
            if device is not None:
                device.fake.fail(0)
            if session is not None:
                session.close()
    return kept, has_failed, is_reached


@pytest.mark.parametrize("first", range(2))
def test_every_call_that_fails_leaves_true_books(first: int) -> None:
    """A sample of all calls; with `OOC_ALL_FAILURES=1` each one."""
    stride = 2 if os.environ.get("OOC_ALL_FAILURES") else SAMPLED_CALLS
    fail_call = first * (stride // 2) + 1
    while True:
        device = FakeCudaDevice(seed=fail_call, eagerness=0.2)
        kept, _, is_reached = _run(device, fail_call)
        assert kept == "True" * 6, f"call {fail_call}: a variable that no op changed has other bytes"
        assert ooc._current.session is None
        assert_clean(device)
        if not is_reached:
            break
        fail_call += stride
    assert fail_call > 1000  # there were such calls


def test_a_failure_comes_through() -> None:
    """Not all is made good: a device that fails for good ends the step."""
    device = FakeCudaDevice(eagerness=0.2)
    _, has_failed, _ = _run(device, 40, times=1 << 30)
    assert has_failed
