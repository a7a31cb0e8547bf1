"""Ways of taking a training step: what users do besides forward, backward, step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ooc.models import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """How a step computes gradients.

    Attributes:
        step: `(workload, model, step index) -> loss`, gradients accumulated in `.grad`.
        prepare: Changes the model once, after it is built.
    """

    step: Callable[[Workload, nn.Module, int], Tensor]
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model


def _plain(workload: Workload, model: nn.Module, step_index: int) -> Tensor:
    loss = workload.loss(model, workload.make_batch(step_index))
    loss.backward()
    return loss.detach()


def _accumulation(workload: Workload, model: nn.Module, step_index: int) -> Tensor:
    """Two micro-batches before the optimizer moves."""
    total = torch.zeros(())
    for part in range(2):
        loss = workload.loss(model, workload.make_batch(2 * step_index + part)) / 2
        loss.backward()
        total += loss.detach()
    return total


def _clipping(workload: Workload, model: nn.Module, step_index: int) -> Tensor:
    loss = _plain(workload, model, step_index)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss


def _clipping_by_value(workload: Workload, model: nn.Module, step_index: int) -> Tensor:
    loss = _plain(workload, model, step_index)
    nn.utils.clip_grad_value_(model.parameters(), 0.001)
    return loss


def _autocast(workload: Workload, model: nn.Module, step_index: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = workload.loss(model, workload.make_batch(step_index))
    loss.backward()
    return loss.detach().float()


def _retain_graph(workload: Workload, model: nn.Module, step_index: int) -> Tensor:
    """The same graph walked twice; gradients add up."""
    loss = workload.loss(model, workload.make_batch(step_index))
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return loss.detach()


def _gradient_penalty(workload: Workload, model: nn.Module, step_index: int) -> Tensor:
    """Double backward: the gradients' own size is part of the loss."""
    loss = workload.loss(model, workload.make_batch(step_index))
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    total = loss + 0.01 * torch.stack([g.square().sum() for g in gradients]).sum()
    total.backward()
    return total.detach()


def _inplace_and_views(workload: Workload, model: nn.Module, step_index: int) -> Tensor:
    """In-place updates of activations through views, and of a gradient between backward and step."""
    *inputs, targets = workload.make_batch(step_index)
    y = model(*inputs)
    y = y * 1.0
    y.view(-1)[::2].mul_(0.5)
    y.transpose(0, -1).add_(0.125)
    half = y.shape[0] // 2
    z = torch.cat([y.narrow(0, half, half).relu_(), y.narrow(0, 0, half).clone().clamp_(min=-1.0)], 0)
    loss = F.cross_entropy(z.flatten(0, -2), targets[: 2 * half].flatten()) + z.narrow(0, 0, 1).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.grad.view(-1)[:4] = 0
    return loss.detach()


def _gradient_arithmetic(workload: Workload, model: nn.Module, step_index: int) -> Tensor:
    """Weights read and written outside autograd inside the step, as moving averages do."""
    loss = _plain(workload, model, step_index)
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(p, alpha=1e-3)
                p.lerp_(torch.zeros_like(p), 1e-4)
    return loss


class Checkpointed(nn.Module):
    """A module whose activations are dropped and computed again in the backward pass."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def _checkpoint_blocks(model: nn.Module, *, use_reentrant: bool) -> nn.Module:
    name = next(name for name in ("blocks", "stages", "merge", "layers", "features") if hasattr(model, name))
    blocks = getattr(model, name)
    for index, block in enumerate(blocks):
        blocks[index] = Checkpointed(block, use_reentrant=use_reentrant)
    return model


FEATURES: dict[str, Feature] = {
    "plain": Feature(step=_plain),
    "accumulation": Feature(step=_accumulation),
    "clipping": Feature(step=_clipping),
    "clipping_by_value": Feature(step=_clipping_by_value),
    "autocast": Feature(step=_autocast),
    "retain_graph": Feature(step=_retain_graph),
    "gradient_penalty": Feature(step=_gradient_penalty),
    "inplace_and_views": Feature(step=_inplace_and_views),
    "gradient_arithmetic": Feature(step=_gradient_arithmetic),
    "checkpointing": Feature(step=_plain, prepare=lambda m: _checkpoint_blocks(m, use_reentrant=False)),
    "checkpointing_reentrant": Feature(step=_plain, prepare=lambda m: _checkpoint_blocks(m, use_reentrant=True)),
}
