"""Trains one variant in a process of its own and tells one line of JSON.

    python -m benchmarks.gpu.child '{"workload": "gpt", "budget_nbytes": 1073741824, ...}'

Allocators and budgets belong to processes, so each measurement has one. With `fake` there is no GPU: the
session's device is the fake driver, and torch's ops run on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import ooc
from benchmarks.gpu import rivals
from benchmarks.gpu.aliased import open_aliased
from benchmarks.gpu.disturb import disturb
from benchmarks.gpu.offload_hooks import OffloadHooks
from benchmarks.rivals import checkpointed
from ooc import models
from ooc.devices.host_memory import host_memory_nbytes
from scheduler.placement import in_chunks, lower_bound, problem_from_plan
from vmm.machine import memory_room

VARIANTS = (
    "in_core",
    "ours",
    "save_on_cpu",
    "offload_hooks",
    "checkpoint",
    "expandable_segments",
    "aliased",
    "managed",
    "deepspeed_offload",
)
"""`expandable_segments` is in core in an environment that the parent makes; `aliased` is computation alone, its
results garbage; `managed` is in core in managed memory (`benchmarks.gpu.rivals`), `deepspeed_offload` ZeRO-Offload."""
_ALIASED_NBYTES = 16 << 30
_PINNED_SHARE = 0.88
"""At most this part of the host's available memory is pinned; batches and the process itself need the rest."""
_FAKE_HOST_NBYTES = 256 << 20
"""The fake pins memory that this machine really has, and trains small models."""
_NUM_BATCHES = 2
"""Batches made beforehand and taken in turns where bits are not compared: making one of 1,000 images takes seconds."""
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
        budget_nbytes: The session's; for "aliased" the memory in which everything lies, 16 GiB by default.
        host_budget_nbytes: Host memory to pin; None: the session's default.
        chunk_nbytes: None: the session's default.
        placement: "standing": standing aliases; "remapped" and "best_fit": as in `benchmarks.gpu.ablations`.
        digests: Whether to hash, at each step, all that training changes. Then algorithms are deterministic.
        warns: Whether ops without a deterministic algorithm only warn.
        tf32: Whether products of float32 may be rounded to TF32; torch's default for convolutions.
        builds_on_device: Whether parameters are made where they live, not on the host.
        disturbs: Whether the budget shrinks, grows and goes between steps; what the driver has then is told.
        recompute: Whether the session may recompute; None: its default.
    """

    workload: str
    preset: models.Preset = "full"
    batch_size: int | None = None
    optimizer: str | None = None
    variant: str = "in_core"
    budget_nbytes: int | None = None
    host_budget_nbytes: int | None = None
    chunk_nbytes: int | None = None
    policy: str = "auto"
    placement: Literal["standing", "remapped", "best_fit"] = "standing"
    debug: bool = False
    num_steps: int = 7
    digests: bool = False
    warns: bool = False
    tf32: bool = False
    builds_on_device: bool = False
    disturbs: bool = False
    recompute: bool | None = None
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
        traceback.print_exc()  # the gate keeps it
        answer = {"error": f"{type(error).__name__}: {error}", "is_too_small": isinstance(error, ooc.BudgetTooSmall)}
    print(json.dumps(answer))
    return 0


def run(order: Order) -> dict[str, Any]:
    """Train, and tell times, memory, modes, driver calls and hashes of each step."""
    if order.digests:
        torch.use_deterministic_algorithms(True, warn_only=order.warns)
        torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = order.tf32
    started = time.monotonic()
    workload = models.get(order.workload, order.preset, batch_size=order.batch_size)
    batches = _batches(order, workload)
    print(f"batches made in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    calls: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        session = aliased = None
        if order.variant == "ours":
            session, calls = _open_session(order, stack)
        elif order.variant == "aliased":
            aliased = stack.enter_context(open_aliased(order.budget_nbytes or _ALIASED_NBYTES, fake=order.fake))
        elif order.variant == "managed":
            rivals.use_managed_memory(order.budget_nbytes or _ALIASED_NBYTES, stack, fake=order.fake)
        device = torch.device("cpu" if order.fake else "cuda")
        own_memory = aliased.own_memory if aliased is not None else contextlib.nullcontext
        if aliased is not None:
            with own_memory():
                _warm_up(device)
        torch.manual_seed(0)
        with device if order.builds_on_device else contextlib.nullcontext():
            model = workload.build()
        if order.variant == "checkpoint":
            model = checkpointed(model)
        model.to(device)
        optimizer = workload.make_optimizer(model, order.optimizer)
        if order.variant == "deepspeed_offload":
            model, optimizer = rivals.with_deepspeed(model, optimizer, workload.batch_size)
        saving = _saving(order, device)
        print(f"ready after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        steps = []
        disturbances: list[dict[str, Any]] = []
        for index, batch in enumerate(batches):
            if session is not None and order.disturbs:
                disturbances += disturb(session, index, order.num_steps)
            before = calls.copy()
            started = time.monotonic()
            bits, counted = _step(order, session, model, workload, optimizer, batch, device, own_memory, saving, calls)
            steps.append(
                {
                    "s": time.monotonic() - started,
                    "stopping_calls": _named(counted - before, STOPPING_CALLS),
                    "mapping_calls": _named(counted - before, MAPPING_CALLS),
                    "digest": _digest(bits, model, optimizer) if order.digests else bits,
                    "device_used_nbytes": _device_used_nbytes(order),
                    **(asdict(session.steps.rows[-1]) if session is not None else {"mode": "in_core"}),
                }
            )
            print(f"step {index}: {steps[-1]['mode']}, {steps[-1]['s']:.3f} s", file=sys.stderr, flush=True)
        answer = {"steps": steps, "batch_size": workload.batch_size, **_memory(order, session)}
        if session is not None:
            answer |= {**_planning(session), "disturbances": disturbances}
        if aliased is not None:
            answer["aliased_nbytes"] = aliased.aliased_nbytes
        del model, optimizer
        if order.fake and session is not None:
            answer["num_races"] = len(session.engine.memory.driver.calls.bindings.races)
    return {**answer, "machine": _machine(order)}


def _warm_up(device: torch.device) -> None:
    """Let libraries take the workspaces that they keep."""
    x = torch.ones(256, 256, device=device, requires_grad=True)
    torch.nn.functional.linear(x, x, x[0]).sum().backward()


def _batches(order: Order, workload: models.Workload) -> Iterable[models.Batch]:
    """On the host; made before the session opens, and before anything is timed, where that takes long."""
    if order.digests:
        return map(workload.make_batch, range(order.num_steps))
    made = [workload.make_batch(index) for index in range(min(_NUM_BATCHES, order.num_steps))]
    return [made[index % len(made)] for index in range(order.num_steps)]


def _step(
    order: Order,
    session: ooc.Session | None,
    model: nn.Module,
    workload: models.Workload,
    optimizer: torch.optim.Optimizer,
    batch_on_host: models.Batch,
    device: torch.device,
    own_memory: Any,
    saving: Any,
    calls: Counter[str],
) -> tuple[str, Counter[str]]:
    """The loss's bits, and the driver's calls until the step's end."""
    with session.step() if session is not None else contextlib.nullcontext():
        optimizer.zero_grad(set_to_none=True)
        if session is not None and order.placement == "remapped":
            space: Any = session.engine.memory.space
            space.mark(session.engine.memory.allocator.is_alive)
        with own_memory():
            batch = tuple(tensor.to(device) for tensor in batch_on_host)
        # Inside the block alone: entered once more, the hooks would save what they have saved.
        with saving():
            loss = workload.loss(model, batch)
        if order.variant == "deepspeed_offload":
            rivals.deepspeed_step(model, loss)
        else:
            loss.backward()
            optimizer.step()
        del batch
    counted = calls.copy()
    return loss.item().hex(), counted  # waits for the device


def _saving(order: Order, device: torch.device) -> Any:
    """Makes the context of each forward pass: who keeps what autograd saves."""
    if order.variant == "save_on_cpu":
        return functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=not order.fake)
    if order.variant == "offload_hooks":
        return OffloadHooks(device).forward
    return contextlib.nullcontext


def _named(calls: Counter[str], names: tuple[str, ...]) -> dict[str, int]:
    return {name: calls[name] for name in names if calls[name]}


def _open_session(order: Order, stack: contextlib.ExitStack) -> tuple[ooc.Session, Counter[str]]:
    """Open until the stack is left, and the counts of the driver's calls."""
    assert order.budget_nbytes is not None
    from benchmarks.gpu import ablations

    options: dict[str, Any] = {
        "policy": order.policy,
        "debug": order.debug,
        "plan_cache": False,
        "chunk_nbytes": order.chunk_nbytes,
    }
    if order.recompute is not None:
        options["recompute"] = order.recompute
    if order.placement == "best_fit":
        from ooc.replay import plan_maker

        plan_maker.make_plan = ablations.contiguous_plan
        stack.callback(setattr, plan_maker, "make_plan", ablations.make_plan)
    is_remapped = order.placement == "remapped"
    if order.fake:
        from ooc.testing.fake_device import FakeCudaDevice

        fake_type = ablations.RemappingFakeDevice if is_remapped else FakeCudaDevice
        fake = fake_type(host_budget=min(order.host_budget_nbytes or _FAKE_HOST_NBYTES, _FAKE_HOST_NBYTES))
        session = stack.enter_context(ooc.Session(order.budget_nbytes, device=fake, **options))
        return session, fake.fake.num_calls
    from ooc.devices.cuda import CudaDevice
    from vmm.cuda_calls import load_bindings

    bindings = CountedCalls(load_bindings())
    device_type = ablations.RemappingCudaDevice if is_remapped else CudaDevice
    device = device_type(bindings=bindings, host_budget_nbytes=_host_nbytes(order))
    session = stack.enter_context(ooc.Session(order.budget_nbytes, device=device, **options))
    return session, bindings.num_calls


def _host_nbytes(order: Order) -> int | None:
    """What was asked for, as far as this machine has it: the rest goes to the file."""
    if order.host_budget_nbytes is None:
        return None
    return min(order.host_budget_nbytes, int(host_memory_nbytes(memory_room().available_nbytes) * _PINNED_SHARE))


def _planning(session: ooc.Session) -> dict[str, Any]:
    """What the limit and the ablations are reckoned from."""
    trace, plan = session.trace(), session.plan()
    answer: dict[str, Any] = {
        "link": asdict(session.engine.memory.store.measure()),
        "planning_s": session.engine.learned()["planning_s"],
        "unplannable": list(session.engine.learned()["unplannable"].values()),
        "not_replayable": session.engine.learned()["not_replayable"],
    }
    if trace is not None and plan is not None:
        live = problem_from_plan(plan, trace).problem
        answer |= {
            "predicted_s": plan.predicted["duration_ns"] / 1e9,
            "remap_s": plan.predicted.get("remap_ns", 0) / 1e9,
            "notes": plan.notes,
            "live_nbytes": lower_bound(live),
            "occupied_nbytes": lower_bound(in_chunks(live, session.chunk_nbytes)),
        }
    return answer


def _memory(order: Order, session: ooc.Session | None) -> dict[str, int]:
    if session is not None:
        return {
            "peak_nbytes": session.report()["peak_nbytes"],
            "in_core_peak_nbytes": session.engine.steps.in_core_peak_nbytes,
        }
    if order.variant in ("aliased", "managed"):  # torch's own count is that of its own allocator
        return {"peak_nbytes": order.budget_nbytes or _ALIASED_NBYTES}
    if order.fake:
        return {"peak_nbytes": _fake_peak_nbytes(order)}
    return {
        "peak_nbytes": torch.cuda.max_memory_allocated(),
        "context_nbytes": _device_used_nbytes(order) - torch.cuda.memory_reserved(),
    }


def _fake_peak_nbytes(order: Order) -> int:
    """What a session with room for everything saw: there is no allocator on a fake to ask."""
    workload = models.get(order.workload, order.preset, batch_size=order.batch_size)
    with ooc.Session("64MiB", plan_cache=False) as session:
        model = workload.build()
        optimizer = workload.make_optimizer(model, order.optimizer)
        for index in range(2):
            with session.step():
                optimizer.zero_grad(set_to_none=True)
                workload.loss(model, workload.make_batch(index)).backward()
                optimizer.step()
        return session.engine.steps.in_core_peak_nbytes


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
