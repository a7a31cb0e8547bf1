"""What jobs of several processes do. Each case yields, after each step, what must be the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ooc
from tests.harness import SessionLike

NUM_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """This process in the job."""

    index: int
    size: int
    folder: Path


Run = Callable[[Rank, SessionLike], Iterator[list[Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to run, and the budget that forces variables out while collectives are under way.

    Attributes:
        sizes: Numbers of processes to run it with.
        slow_sizes: Further ones, which are run with the slow tests.
        num_planned: At least so many of its steps are played from a plan.
        evicts: Whether something goes to the store.
        budgets: Of ranks that have another one; "" for a rank without a session.
    """

    run: Run
    budget: str
    debug: bool = False
    sizes: tuple[int, ...] = (2,)
    slow_sizes: tuple[int, ...] = ()
    num_planned: int = 1
    evicts: bool = True
    budgets: Mapping[int, str] = field(default_factory=dict)


CASES: dict[str, Case] = {}


def add(name: str, budget: str, **rest: Any) -> Callable[[Run], Run]:
    """Make a function a case."""

    def register(function: Run) -> Run:
        CASES[name] = Case(run=function, budget=budget, **rest)
        return function

    return register


# -- models and loops


def mlp(width: int = 256, depth: int = 6) -> nn.Module:
    """256 KiB a weight: four granules."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Everything that training changes."""
    found = [*model.parameters(), *model.buffers()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        for entries in optimizer.state.values():
            found += [value for value in entries.values() if isinstance(value, Tensor)]
    return [tensor.detach() for tensor in found]


def batch(rank: Rank, step: int, width: int = 256, rows: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank.index)
    return torch.randn(rows, width, generator=generator)


def train(
    rank: Rank, session: SessionLike, model: nn.Module, *, num_steps: int = NUM_STEPS, rows: int = 128
) -> Iterator[list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(num_steps):
        with session.step():
            optimizer.zero_grad(set_to_none=True)
            model(batch(rank, step, rows=rows)).square().mean().backward()
            optimizer.step()
        yield state_of(model, optimizer)


# -- distributed data parallel


class Branches(nn.Module):
    """Two halves that take turns, so that half of the parameters are unused in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(depth=3), mlp(depth=3)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return (self.first if self.step % 2 else self.second)(x)


def _ddp(make: Callable[[], nn.Module] = mlp, *, hook: str = "", num_steps: int = NUM_STEPS, **options: Any) -> Run:
    def run(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
        model = DistributedDataParallel(make(), **{"bucket_cap_mb": 0.5, "init_sync": False, **options})
        _register(model, hook)
        yield from train(rank, session, model, num_steps=num_steps)

    return run


def _register(model: DistributedDataParallel, hook: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "builtin fp16":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Statistics(nn.Module):
    """A running mean of 256 KiB, changed in each forward pass like batch norm's; DDP broadcasts it before the next."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running.mul_(0.9).add_(x.t() @ x, alpha=0.1)
        return x


def with_norms() -> nn.Module:
    layers: list[nn.Module] = []
    for index in range(6):
        layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Tanh()]
        if index % 2:
            layers.append(Statistics())
    return nn.Sequential(*layers)


add("ddp", "2MiB", slow_sizes=(3,))(_ddp())
add("ddp, larger buckets", "2MiB", sizes=(), slow_sizes=(2,))(_ddp(bucket_cap_mb=0.9))
add("ddp, views, debug", "2MiB", debug=True)(_ddp(gradient_as_bucket_view=True))
add("ddp, unused in turn", "2MiB", sizes=(), slow_sizes=(2,))(_ddp(Branches, find_unused_parameters=True, num_steps=10))
add("ddp, unused in turn, views", "2MiB")(
    _ddp(Branches, find_unused_parameters=True, gradient_as_bucket_view=True, num_steps=8)
)
add("ddp, static graph", "2MiB")(_ddp(static_graph=True))
add("ddp, batch norm", "2MiB")(_ddp(with_norms))
add("ddp, fp16 hook", "3MiB")(_ddp(hook="fp16", num_steps=8))
add("ddp, builtin fp16 hook", "3MiB")(_ddp(hook="builtin fp16"))
# (One bucket: between two, Gloo's threads and the program launch PowerSGD's collectives in any order, without us, too.)
add("ddp, PowerSGD hook, debug", "6MiB", debug=True)(_ddp(hook="powersgd", num_steps=9, bucket_cap_mb=25))


@add("ddp, no_sync", "3MiB")
def no_sync(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.5, init_sync=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(NUM_STEPS):
        with session.step():
            optimizer.zero_grad(set_to_none=True)
            with model.no_sync():
                model(batch(rank, 2 * step)).square().mean().backward()
            model(batch(rank, 2 * step + 1)).square().mean().backward()
            optimizer.step()
        yield state_of(model, optimizer)


@add("ddp, join", "4MiB")
def join(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.5, init_sync=False)
    with model.join():
        yield from train(rank, session, model, num_steps=6 + 2 * rank.index, rows=1024)
    yield state_of(model)


def constructor(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """The constructor broadcasts the model, 1.5 MiB, within the budget. Each rank has drawn other weights."""
    torch.manual_seed(100 + rank.index)
    model = DistributedDataParallel(mlp(), find_unused_parameters=True, bucket_cap_mb=0.5)
    yield state_of(model)
    yield from train(rank, session, model)


add("ddp, constructor", "2MiB", sizes=(3,), slow_sizes=(2,))(constructor)
add("ddp, constructor, other budgets", "4MiB", budgets={1: "2MiB"})(constructor)
add("ddp, constructor, one session", "4MiB", budgets={1: ""})(constructor)


@add("ddp, first bucket", "2MiB", num_planned=0, evicts=False)
def first_bucket(_rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """DDP's first bucket needs all gradients, 3 MiB, at once: the error says what avoids it."""
    model = mlp(depth=12)
    if isinstance(session, ooc.Session):
        try:
            DistributedDataParallel(model)
        except ooc.BudgetTooSmall as error:
            if "bucket_cap_mb_list" in str(error):
                yield state_of(model)
        return
    yield state_of(model)


@add("zero", "2MiB", slow_sizes=(3,))
def zero(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.5, init_sync=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(NUM_STEPS):
        with session.step():
            optimizer.zero_grad(set_to_none=True)
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        yield state_of(model, optimizer)


# -- fully sharded


def _fsdp(*, offloads: bool = False, is_mixed: bool = False) -> Run:
    def run(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import DTensor

        policies: dict[str, Any] = {}
        if offloads:
            policies["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if is_mixed:
            policies["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (rank.size,))
        model = mlp()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **policies)
        fully_shard(model, mesh=mesh, **policies)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(NUM_STEPS):
            with session.step():
                optimizer.zero_grad(set_to_none=True)
                model(batch(rank, step)).square().mean().backward()
                optimizer.step()
            yield [t.to_local() if isinstance(t, DTensor) else t for t in state_of(model, optimizer)]

    return run


add("fsdp2", "2MiB", slow_sizes=(3,))(_fsdp())
add("fsdp2, offload, debug", "2MiB", debug=True)(_fsdp(offloads=True))
add("fsdp2, bfloat16", "2MiB")(_fsdp(is_mixed=True))


# -- pipelines


def _pipeline(name: str) -> Run:
    def run(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
        from torch.distributed import pipelining

        module = mlp(depth=4)
        stage = pipelining.PipelineStage(module, rank.index, rank.size, torch.device("cpu"))
        schedule = getattr(pipelining, name)(
            stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean()
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for step in range(NUM_STEPS):
            with session.step():
                optimizer.zero_grad(set_to_none=True)
                whole = batch(rank, step, rows=512)
                if rank.index == 0:
                    schedule.step(whole)
                elif rank.index == rank.size - 1:
                    schedule.step(target=whole, losses=[])
                else:
                    schedule.step()
                optimizer.step()
            yield state_of(module, optimizer)

    return run


add("pipeline, GPipe", "4MiB", sizes=(3,), slow_sizes=(2,))(_pipeline("ScheduleGPipe"))
add("pipeline, 1F1B, debug", "4MiB", debug=True)(_pipeline("Schedule1F1B"))


# -- checkpoints


@add("checkpoint", "2MiB")
def checkpoint(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    import torch.distributed.checkpoint as dcp

    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.5, init_sync=False)
    yield from train(rank, session, model)
    path = str(rank.folder / f"checkpoint of {type(session).__name__}")
    dcp.save({"model": model.module.state_dict()}, checkpoint_id=path)
    yield from train(rank, session, model, num_steps=2)
    loaded = {"model": mlp().state_dict()}
    dcp.load(loaded, checkpoint_id=path)
    yield list(loaded["model"].values())
    model.module.load_state_dict(loaded["model"])
    yield from train(rank, session, model, num_steps=3)
