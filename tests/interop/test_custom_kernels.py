"""Kernels that torch's dispatcher does not know: custom ops by their schemas, Triton's launches by their launcher."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import ooc
from ooc.memory.record import State
from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CHUNK_NBYTES, assert_clean, fixed_speed
from tests.cuda.cases import CudaSession as DeviceSession
from vmm.testing.fake_cuda import RuleBroken

SIDE = 128
"""A tensor of this side is one chunk."""
NUM_WEIGHTS = 8
BUDGET_CHUNKS = 6


@torch.library.custom_op("ooc_kernels_test::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, factor: torch.Tensor) -> None:
    x.mul_(factor)


@torch.library.custom_op("ooc_kernels_test::blend", mutates_args=())
def blend(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 0.5 + y


# -- a stand-in with Triton's launching interface


class KernelInterface:
    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


class JITFunction(KernelInterface):
    """Launches behind the dispatcher's back: by addresses, with no op of torch."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.num_launches = 0

    def run(self, *args: Any, grid: Any, warmup: bool = False, num_warps: int = 4) -> Any:
        assert (grid, num_warps) == ((1,), 4)
        if warmup:
            return None
        self.num_launches += 1
        return self.fn(*[_floats(a) if isinstance(a, torch.Tensor) or hasattr(a, "base") else a for a in args])


class CompiledKernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, stream=None: blend_kernel.fn(*map(_floats, args))


class Autotuner(KernelInterface):
    """As `triton.autotune`: ends in the `run` of the kernel that it decorates."""

    def __init__(self, fn: JITFunction) -> None:
        self.fn = fn

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs)


def _floats(value: Any) -> Any:
    """The memory of a tensor, as a kernel sees it."""
    tensor = getattr(value, "base", value)
    return (ctypes.c_float * tensor.numel()).from_address(torch.Tensor.data_ptr(tensor))


def _blend_into(out: Any, x: Any, y: Any) -> None:
    a, b = torch.frombuffer(x, dtype=torch.float32), torch.frombuffer(y, dtype=torch.float32)
    with torch.utils._python_dispatch._disable_current_modes():
        ctypes.memmove(out, (a * 0.5 + b).numpy().tobytes(), ctypes.sizeof(out))


blend_kernel = JITFunction(_blend_into)
compiled_kernel = CompiledKernel()


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the modules that launch: torch must not find the package, and use the rest of it."""
    vars(blend_kernel).pop("_ooc_op", None)
    vars(compiled_kernel).pop("_ooc_op", None)
    for name, kind in (("triton.runtime.jit", JITFunction), ("triton.compiler.compiler", CompiledKernel)):
        module = ModuleType(name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, name, module)


def by_custom_ops(x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    x = blend(x, weight)
    scale_(weight, factor)
    return x


def by_jit(x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    blend_kernel[(1,)](out, x, weight)
    weight.mul_(factor)
    return out


def by_autotuned(x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    Autotuner(blend_kernel)[(1,)](out, x, SimpleNamespace(base=weight))  # as triton.reinterpret wraps it
    weight.mul_(factor)
    return out


def by_compiled(x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    compiled_kernel[(1, 1, 1)](out, x, weight)
    weight.mul_(factor)
    return out


WAYS = [by_custom_ops, by_jit, by_autotuned, by_compiled]


def train(session: Any, way: Any, num_steps: int = 5) -> list[float]:
    weights = [torch.full((SIDE, SIDE), 0.1 * (index + 1)) for index in range(NUM_WEIGHTS)]
    factor = torch.tensor(1.01)
    sums = []
    for _ in range(num_steps):
        with session.step(), torch.no_grad():
            x = torch.ones(SIDE, SIDE)
            for weight in weights:
                x = way(x, weight, factor)
            sums.append(x.sum().item())
            del x
    return sums + [weight.sum().item() for weight in weights]


class NoSession:
    step = staticmethod(contextlib.nullcontext)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_bits_on_the_cpu(way: Any, debug: bool) -> None:
    expected = train(NoSession(), way)
    with ooc.Session(BUDGET_CHUNKS * CHUNK_NBYTES, chunk_nbytes=CHUNK_NBYTES, plan_cache=False, debug=debug) as session:
        assert train(session, way) == expected
        rows = session.report()["steps"]
    assert [row["mode"] for row in rows[-2:]] == ["planned"] * 2, rows
    assert rows[-1]["evicted_nbytes"] > 0
    assert not hasattr(JITFunction.run, "__wrapped__")


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("way", WAYS)
def test_bits_on_the_fake_device(way: Any) -> None:
    expected = train(NoSession(), way)
    device = FakeCudaDevice(seed=1, eagerness=0.1)
    with fixed_speed(), DeviceSession(BUDGET_CHUNKS * CHUNK_NBYTES, device=device) as session:
        assert train(session, way) == expected
        assert session.report()["steps"][-1]["mode"] == "planned"
    assert_clean(device)


@pytest.mark.usefixtures("triton")
def test_the_plan_names_the_kernel_and_a_warmup_is_no_launch() -> None:
    with ooc.Session(BUDGET_CHUNKS * CHUNK_NBYTES, chunk_nbytes=CHUNK_NBYTES, plan_cache=False) as session:
        x = torch.ones(SIDE, SIDE)
        before = blend_kernel.num_launches
        blend_kernel.run(x, grid=(1,), warmup=True)
        assert blend_kernel.num_launches == before
        train(session, by_jit, 3)
        trace = session.trace()
    assert trace is not None
    assert any("triton._blend_into" in op.name for op in trace.ops)


@pytest.mark.usefixtures("triton")
def test_without_the_hook_bytes_are_wrong_or_it_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above notice if a launch is not an op."""
    monkeypatch.setattr("ooc.interop.triton_launches.TritonLaunches.open", lambda _: None)
    device = FakeCudaDevice(seed=1, eagerness=0.1)
    expected = train(NoSession(), by_jit)
    with fixed_speed():
        session = ooc.Session(BUDGET_CHUNKS * CHUNK_NBYTES, chunk_nbytes=CHUNK_NBYTES, device=device, plan_cache=False)
        try:
            found: Any = train(session, by_jit)
        except Exception as error:  # wrong bits, or whatever they lead to
            found = error
        finally:
            session.close(bring_back=False)
    assert found != expected


def test_debug_mode_finds_a_kernel_that_stays_unseen() -> None:
    """On a device an evicted range shows nothing then: the kernel that was not told of ends with an error."""
    device = FakeCudaDevice(seed=1)
    with fixed_speed(), DeviceSession(BUDGET_CHUNKS * CHUNK_NBYTES, device=device, debug=True) as session:
        weights = [torch.full((SIDE, SIDE), float(index)) for index in range(NUM_WEIGHTS)]
        for weight in weights:
            weight.add_(1)
        record = next(r for r in session.engine.live_records() if r.state is State.AWAY)
        with pytest.raises(RuleBroken):
            device.memory.kernel("one that nobody knows", reads=[(record.address, record.nbytes)])
