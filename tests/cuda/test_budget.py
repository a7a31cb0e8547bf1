"""A session on the fake device whose budget changes, or that gives all memory back, down to the driver: same bits."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ooc
from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CHUNK_NBYTES, CudaSession, assert_clean, fixed_speed
from vmm.driver import MemoryFault
from vmm.testing.fake_cuda import CUresult

SPARE_NBYTES = 2 << 20


def free_chunks(device: FakeCudaDevice) -> int:
    """By the driver's own answer, what other processes could have."""
    _, free, _ = device.fake.cuMemGetInfo()
    return int(free) // CHUNK_NBYTES


class ChangingSession(CudaSession):
    """Changes its budget, or yields all of it, before steps and after them; looks at the driver's free memory."""

    def __init__(self, num_chunks: list[int], *, device: FakeCudaDevice, seed: int = 0, **options: Any) -> None:
        super().__init__(num_chunks[0] * CHUNK_NBYTES, device=device, **options)
        self._sizes = num_chunks
        self._random = random.Random(seed)
        self.num_acts = [0, 0, 0]  # nothing, a change, a yield
        self._total = free_chunks(device) + num_chunks[0]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.disturb()
        with super().step():
            self.disturb()
            yield
            self.disturb()
        self.disturb()

    def disturb(self) -> None:
        act = self._random.choice((0, 0, 0, 1, 2))
        self.num_acts[act] += 1
        if act == 1:
            self.set_budget(self._random.choice(self._sizes) * CHUNK_NBYTES)
        elif act == 2:
            with self.yielded():
                assert free_chunks(self.fake_device) == self._total
        assert free_chunks(self.fake_device) == self._total - self.budget_nbytes // CHUNK_NBYTES


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_size_and_none(seed: int, debug: bool) -> None:
    device = FakeCudaDevice(seed=seed, eagerness=0.1 * seed, spare=SPARE_NBYTES)
    with fixed_speed(), ChangingSession([12, 9, 8, 30], device=device, seed=seed, debug=debug) as session:
        found = train_anew(session, 10)
        assert min(session.num_acts) > 3
        report = session.report()
    assert found == train_in_core(10)
    assert all(row["peak_nbytes"] <= row["budget_nbytes"] for row in report["past_budgets"])


def train_in_core(num_steps: int) -> tuple[list[float], list[list[float]]]:
    class NoSession:
        step = staticmethod(contextlib.nullcontext)

    return train_anew(NoSession(), num_steps)


def train_anew(session: Any, num_steps: int) -> tuple[list[float], list[list[float]]]:
    """Losses, and the last bits of all parameters and momenta."""
    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = train(session, model, optimizer, num_steps)
    state = [p.detach() for p in model.parameters()] + [s["momentum_buffer"] for s in optimizer.state.values()]
    return losses, [tensor.flatten().tolist() for tensor in state]


def net() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.Tanh())])


def train(session: Any, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        with session.step():
            loss = model(torch.randn(128, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    return losses


def test_plans_survive_a_yield() -> None:
    """The next step enters its plan again, at the same budget, without learning anew."""
    device = FakeCudaDevice()

    class Yielding(CudaSession):
        @contextlib.contextmanager
        def step(self) -> Iterator[None]:
            with super().step():
                yield
            with self.yielded():
                assert free_chunks(device) == 12

    with fixed_speed(), Yielding(12 * CHUNK_NBYTES, device=device) as session:
        found = train_anew(session, 8)
        modes = [row["mode"] for row in session.report()["steps"]]
    assert found == train_in_core(8)
    assert modes[-4:] == ["planned"] * 4, modes


def test_in_the_block_no_op_may_use_the_sessions_tensors() -> None:
    device = FakeCudaDevice(eagerness=0.1)
    with CudaSession(6 << 20, device=device) as session:
        model = net()
        with session.yielded():
            mine = torch.ones(300, 300)  # torch's own memory, as without a session
            assert (mine @ mine)[0, 0] == 300
            with pytest.raises(ooc.SessionError, match=r"while session\.yielded"):
                model(torch.ones(1, 128))
            with pytest.raises(ooc.SessionError, match="nothing can be loaded"), session.resident(model[0].weight):
                pass
            for act in (lambda: session.set_budget("4MiB"), lambda: session.step().__enter__()):
                with pytest.raises(ooc.SessionError, match="within yielded"):
                    act()
            with pytest.raises(ooc.SessionError, match="given back already"), session.yielded():
                pass
        assert torch.isfinite(model(mine[:1, :128])).all()


def test_what_was_given_out_must_stay() -> None:
    with CudaSession(6 << 20, device=FakeCudaDevice()) as session:
        tensor = torch.ones(256, 256)
        tensor.data_ptr()
        with pytest.raises(ooc.SessionError, match="was given out"), session.yielded():
            pass
        with session.step():
            pass
        with session.resident(tensor), pytest.raises(ooc.SessionError, match="holds it"), session.yielded():
            pass
        with session.yielded():
            pass
        assert tensor.sum().item() == 256 * 256


def test_others_take_the_memory_meanwhile() -> None:
    """Then the session stays without any, all is in the store, and a smaller budget goes on where it was."""
    device = FakeCudaDevice(host_budget=64 << 20)
    with CudaSession(6 << 20, device=device) as session:
        model = net()
        before = [p.detach().clone() for p in model.parameters()]
        handles = session.engine.memory.driver._handles
        with pytest.raises(MemoryFault, match="does not fit device") as caught, session.yielded():
            handles.create(10_000, 10_040)
        assert "set_budget" in "".join(caught.value.__notes__)
        with pytest.raises(ooc.SessionError, match="could not get its memory back"), session.step():
            pass
        with pytest.raises(MemoryFault):
            session.set_budget("6MiB")
        session.set_budget("3MiB")
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        handles.release(10_000, 10_040)
        session.set_budget("6MiB")
        train(session, model, torch.optim.SGD(model.parameters(), lr=0.01), 2)


def test_it_closes_within_the_block() -> None:
    device = FakeCudaDevice()
    session = CudaSession(6 << 20, device=device)
    tensor = torch.full((256, 256), 3.0)
    with session.yielded():
        session.close()
    assert bool((tensor == 3).all())
    assert_clean(device)


@pytest.mark.parametrize("act", ["smaller", "larger", "yield", "yield in debug mode"])
def test_every_call_that_fails(act: str) -> None:
    """Of a change of the budget, or of giving all back: an error or none, and then the same bits, and none left over.

    A sample; with `OOC_ALL_FAILURES=1` each call.
    """
    stride = 1 if os.environ.get("OOC_ALL_FAILURES") else 23 if "yield" in act else 7
    expected, _ = run_with_failure(act, 0)
    fail_call = 1
    while True:
        found, is_reached = run_with_failure(act, fail_call)
        assert found == expected, f"call {fail_call}"
        if not is_reached:
            break
        fail_call += stride
    assert fail_call > 12


def run_with_failure(act: str, fail_call: int) -> tuple[list[float], bool]:
    """Three steps, of which the third is planned; the change, of which a driver's call fails; two more steps."""
    device = FakeCudaDevice(seed=fail_call, eagerness=0.2, host_budget=4 << 20, spare=1 << 20)
    with fixed_speed(), CudaSession(6 * CHUNK_NBYTES, device=device, debug="debug" in act) as session, torch.no_grad():
        total = free_chunks(device) + 6
        weights = [torch.full((128, 128), 0.1 * index) for index in range(7)]
        losses = add_up(session, weights, 3)
        assert session.report()["steps"][-1]["mode"] == "planned"
        device.fake.fail(fail_call, CUresult.CUDA_ERROR_UNKNOWN)
        with contextlib.suppress(MemoryFault, ooc.OocError):
            if "yield" in act:
                with session.yielded():
                    pass
            else:
                session.set_budget((4 if act == "smaller" else 9) * CHUNK_NBYTES)
        is_reached = device.fake.has_failed
        device.fake.fail(0)
        if session.engine._yielded is not None:
            session.set_budget(session.budget_nbytes)
        assert free_chunks(device) == total - session.budget_nbytes // CHUNK_NBYTES
        losses += add_up(session, weights, 2)
    return losses, is_reached


def add_up(session: CudaSession, weights: list[torch.Tensor], num_steps: int) -> list[float]:
    sums = []
    for _ in range(num_steps):
        with session.step():
            total = torch.zeros(128, 128)
            for weight in weights:
                total = total * 0.5 + weight
                weight += 0.25
            sums.append(total.sum().item())
            del total
    return sums
