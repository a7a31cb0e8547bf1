"""What a workload is, and the registry that finds one by name.

A workload is everything a training run needs except the loop: a model, batches that depend on the
step index alone, a loss, and a customary optimizer. The demo, the benchmarks and the bitwise tests
all train the same workloads, in core and out of core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

Preset: TypeAlias = Literal["small", "full"]
Batch: TypeAlias = tuple[Tensor, ...]

PRESETS: tuple[Preset, ...] = ("small", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model with its data, its loss and its customary optimizer.

    Attributes:
        name: The registered name.
        preset: `"small"` trains in well under a second a step on two cores; `"full"` is the size
            that the demo and the benchmarks use.
        batch_size: Samples in a batch (sequences, for text).
        build: Makes the model from torch's global generator, in training mode. Call it inside
            the session, so that its parameters live in the session's memory.
        make_batch: Step index to inputs and targets. Pure: the same index gives the same bits,
            and torch's global generator is left alone.
        loss: Model and batch to a scalar.
        optimizer: A key of `OPTIMIZERS`.
        description: One line for tables.
    """

    name: str
    preset: Preset
    batch_size: int
    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: str
    description: str

    def make_optimizer(self, model: nn.Module, name: str | None = None) -> torch.optim.Optimizer:
        """The optimizer `name` (default: the workload's own) over the model's trainable parameters."""
        return make_optimizer(name or self.optimizer, (p for p in model.parameters() if p.requires_grad))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "adam": partial(torch.optim.Adam, lr=1e-3, foreach=False),
    "adamw": partial(torch.optim.AdamW, lr=3e-4, foreach=False),
    "adamw_foreach": partial(torch.optim.AdamW, lr=3e-4, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=3e-4, fused=True),
}
"""Named here, so that a child process or a test can ask for one by a word."""

_MAKERS: dict[str, Callable[..., Workload]] = {}


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer `name` of `OPTIMIZERS` over `parameters`."""
    if name not in OPTIMIZERS:
        raise ValueError(f"no optimizer is called {name!r}. Options: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](parameters)


def register(name: str) -> Callable[[Callable[..., Workload]], Callable[..., Workload]]:
    """Enter a maker `(preset, **sizes) -> Workload` under `name`."""

    def enter(maker: Callable[..., Workload]) -> Callable[..., Workload]:
        if name in _MAKERS:
            raise ValueError(f"a workload called {name!r} is registered already")
        _MAKERS[name] = maker
        return maker

    return enter


def names() -> tuple[str, ...]:
    """All registered names, sorted."""
    return tuple(sorted(_MAKERS))


def get(name: str, preset: Preset = "small", *, batch_size: int | None = None, **sizes: Any) -> Workload:
    """The workload `name`.

    Args:
        name: One of `names()`.
        preset: `"small"` or `"full"`.
        batch_size: Instead of the preset's.
        sizes: Sizes of this model instead of the preset's; each maker's signature lists its own.

    Raises:
        ValueError: Unknown name or preset, with the known ones.
    """
    if name not in _MAKERS:
        raise ValueError(f"no workload is called {name!r}. Options: {', '.join(names())}")
    if preset not in PRESETS:
        raise ValueError(f"workload {name!r} has no preset {preset!r}. Options: {', '.join(PRESETS)}")
    if batch_size is not None:
        sizes["batch_size"] = batch_size
    return replace(_MAKERS[name](preset, **sizes), name=name)


def generator(step_index: int, stream: int = 0) -> torch.Generator:
    """A CPU generator that depends on the step index and a stream number alone."""
    return torch.Generator().manual_seed(0x9E3779B9 * (stream + 1) + step_index)


def num_parameters(model: nn.Module) -> int:
    """Distinct parameter elements; a tied parameter counts once."""
    return sum(p.numel() for p in model.parameters())
