"""Trains one variant in a process of its own and tells one line of JSON.

    python -m benchmarks.gpu.child '{"workload": "gpt", "budget_nbytes": 1073741824, ...}'

Allocators and budgets belong to processes, so each measurement has one. With `fake` there is no GPU: the
session's device is the fake driver, and torch's ops run on the CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ooc
from benchmarks.rivals import checkpointed
from ooc import models

VARIANTS = ("in_core", "ours", "save_on_cpu", "checkpoint", "expandable_segments")
"""`expandable_segments` is in core in an environment that the parent makes."""
STOPPING_CALLS = (
    "cuCtxSynchronize",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamQuery",
    "cuStreamSynchronize",
)
MAPPING_CALLS = ("cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to train and what to tell.

    Attributes:
        variant: One of `VARIANTS`.
        host_budget_nbytes: Host memory to pin; None: the session's default.
        digests: Whether to hash, at each step, all that training changes. Then algorithms are deterministic.
    """

    workload: str
    preset: models.Preset = "full"
    batch_size: int | None = None
    optimizer: str | None = None
    variant: str = "in_core"
    budget_nbytes: int | None = None
    host_budget_nbytes: int | None = None
    policy: str = "auto"
    debug: bool = False
    num_steps: int = 7
    digests: bool = False
    fake: bool = False


class CountedCalls:
    """The driver's bindings, with a count of calls by name."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self.num_calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bindings, name)
        if not name.startswith("cu") or not callable(found):
            return found

        def counted(*arguments: Any) -> Any:
            self.num_calls[name] += 1
            return found(*arguments)

        setattr(self, name, counted)
        return counted


def main() -> int:
    """Train as the command line says. The answer is the last line of the output."""
    order = Order(**json.loads(sys.argv[1]))
    try:
        answer = run(order)
    except (RuntimeError, ValueError, OSError) as error:
        answer = {"error": f"{type(error).__name__}: {error}", "is_too_small": isinstance(error, ooc.BudgetTooSmall)}
    print(json.dumps(answer))
    return 0


def run(order: Order) -> dict[str, Any]:
    """Train, and tell times, memory, modes, driver calls and hashes of each step."""
    if order.digests:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    workload = models.get(order.workload, order.preset, batch_size=order.batch_size)
    calls: Counter[str] = Counter()
    steps: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        session = None
        if order.variant == "ours":
            session, calls = _open_session(order)
            stack.enter_context(session)
        device = torch.device("cpu" if order.fake else "cuda")
        torch.manual_seed(0)
        model = workload.build()
        if order.variant == "checkpoint":
            model = checkpointed(model)
        model.to(device)
        optimizer = workload.make_optimizer(model, order.optimizer)
        saved = torch.autograd.graph.save_on_cpu(pin_memory=not order.fake)
        for index in range(order.num_steps):
            before = calls.copy()
            started = time.monotonic()
            with session.step() if session is not None else contextlib.nullcontext():
                optimizer.zero_grad(set_to_none=True)
                batch = tuple(tensor.to(device) for tensor in workload.make_batch(index))
                with saved if order.variant == "save_on_cpu" else contextlib.nullcontext():
                    loss = workload.loss(model, batch)
                loss.backward()
                optimizer.step()
                del batch
            counted = calls - before
            bits = loss.item().hex()  # waits for the device
            del loss
            steps.append(
                {
                    "s": time.monotonic() - started,
                    "mode": session.steps.rows[-1].mode if session is not None else "in_core",
                    "num_remapped_chunks": session.steps.rows[-1].num_remapped_chunks if session is not None else 0,
                    "stopping_calls": {name: counted[name] for name in STOPPING_CALLS if counted[name]},
                    "mapping_calls": {name: counted[name] for name in MAPPING_CALLS if counted[name]},
                    "digest": _digest(bits, model, optimizer) if order.digests else bits,
                    "device_used_nbytes": _device_used_nbytes(order),
                }
            )
        answer = {"steps": steps, "batch_size": workload.batch_size, **_memory(order, session)}
        del model, optimizer
    return {**answer, "machine": _machine(order)}


def _open_session(order: Order) -> tuple[ooc.Session, Counter[str]]:
    assert order.budget_nbytes is not None
    options: dict[str, Any] = {"policy": order.policy, "debug": order.debug, "plan_cache": False}
    if order.fake:
        from ooc.fake_device import FakeCudaDevice

        fake = FakeCudaDevice(host_budget=order.host_budget_nbytes or 1 << 30)
        session = ooc.Session(order.budget_nbytes, device=fake, **options)
        return session, fake.fake.num_calls
    from ooc.cuda_device import CudaDevice
    from vmm.cuda_calls import load_bindings

    bindings = CountedCalls(load_bindings())
    device = CudaDevice(bindings=bindings, host_budget_nbytes=order.host_budget_nbytes)
    return ooc.Session(order.budget_nbytes, device=device, **options), bindings.num_calls


def _memory(order: Order, session: ooc.Session | None) -> dict[str, int]:
    if session is not None:
        return {"peak_nbytes": session.report()["peak_nbytes"], "in_core_peak_nbytes": session.in_core_peak_nbytes()}
    if order.fake:
        return {"peak_nbytes": _fake_peak_nbytes(order)}
    return {
        "peak_nbytes": torch.cuda.max_memory_allocated(),
        "context_nbytes": _device_used_nbytes(order) - torch.cuda.memory_reserved(),
    }


def _fake_peak_nbytes(order: Order) -> int:
    """What a session with room for everything saw: there is no allocator on a fake to ask."""
    workload = models.get(order.workload, order.preset, batch_size=order.batch_size)
    with ooc.Session("1GiB", plan_cache=False) as session:
        model = workload.build()
        optimizer = workload.make_optimizer(model, order.optimizer)
        for index in range(2):
            with session.step():
                optimizer.zero_grad(set_to_none=True)
                workload.loss(model, workload.make_batch(index)).backward()
                optimizer.step()
        return session.in_core_peak_nbytes()


def _device_used_nbytes(order: Order) -> int:
    """By the driver's own count, other processes included."""
    if order.fake:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _machine(order: Order) -> dict[str, Any]:
    if order.fake:
        return {"gpu": "the fake driver: figures mean nothing", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    from vmm.cuda_calls import CudaCalls, load_bindings

    driver = CudaCalls(load_bindings()).call("cuDriverGetVersion", what="the driver's version")
    return {
        "gpu": properties.name,
        "gpu_memory_nbytes": properties.total_memory,
        "driver_cuda": int(driver),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _digest(loss: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One hash of the loss, gradients, parameters, buffers, optimizer state and the generators' states."""
    found = hashlib.sha256(loss.encode())
    for name, value in _all_state(model, optimizer):
        found.update(name.encode())
        if not isinstance(value, Tensor):
            found.update(repr(value).encode())
            continue
        copied = np.empty(value.numel() * value.element_size(), dtype=np.uint8)
        if copied.size:
            torch.from_numpy(copied).view(value.dtype).view(value.shape).copy_(value.detach())
        found.update(copied)
    return found.hexdigest()[:32]


def _all_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        if parameter.grad is not None:
            yield f"{name} grad", parameter.grad
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name} {key}", value
    yield from model.named_buffers()
    yield "generator", torch.get_rng_state()
    if torch.cuda.is_initialized():
        yield "device generator", torch.cuda.get_rng_state()


if __name__ == "__main__":
    sys.exit(main())
