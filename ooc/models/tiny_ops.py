"""A model of many tiny ops, to measure what one op costs besides its arithmetic."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ooc.models.workload import Batch, Preset, Workload, generator, register


class TinyOps(nn.Module):
    """A chain of `num_links` products with one small parameter, each kept bounded by a sine."""

    def __init__(self, num_links: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.num_links = num_links

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_links):
            x = torch.sin(x * self.scale)
        return x


def _vector_batch(step_index: int, *, batch_size: int, width: int) -> Batch:
    return (torch.randn(batch_size, width, generator=generator(step_index)),)


def _mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).mean()


@register("tiny_ops")
def tiny_ops(
    preset: Preset, *, batch_size: int | None = None, num_links: int | None = None, width: int = 16
) -> Workload:
    """Ops on vectors of `width` elements: about 400 a step when small, 2,000 when full.

    A link is two ops forward (product, sine) and about six backward (cosine, three products, a sum
    over the batch, an addition to the gradient).
    """
    num_links = num_links or (50 if preset == "small" else 250)
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size or 1,
        build=partial(TinyOps, num_links, width),
        make_batch=partial(_vector_batch, batch_size=batch_size or 1, width=width),
        loss=_mean_loss,
        optimizer="sgd",
        description=f"{num_links} links of ops on {width} elements",
    )
