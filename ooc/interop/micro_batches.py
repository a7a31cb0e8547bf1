"""Micro-batches: one step's batch in several parts, whose gradients are added up (Melon, MobiSys 2022).

Activations take memory by the part, not by the batch. `ooc fit --micro-batch` finds the size that is fastest within a
budget. The sum over the parts is another order of additions than the sum over the batch, so results differ from the
whole batch's in rounding. They are those of plain PyTorch over the same parts, to the last bit: parts are
taken in order, and each one's loss is weighted by its share of the samples before its backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ooc.interop.step_in_backward import accumulating

_log = logging.getLogger(__name__)

Reduction = Literal["mean", "sum"]


def micro_batches(
    batch: Any, *, parts: int | None = None, size: int | None = None, reduction: Reduction = "mean"
) -> Iterator[tuple[Any, float]]:
    """Cut a batch into parts: yields each with the factor that its loss is to be multiplied by.

        for (x, y), weight in ooc.micro_batches((x, y), size=8):
            (loss_of(model(x), y) * weight).backward()
        optimizer.step()

    Parts are views of the batch, all of one size but for the last, which may be smaller.

    Args:
        batch: A tensor, or tuples, lists and mappings of tensors, cut along their first dimension. What is no tensor,
            or has no dimension, goes to every part.
        parts: How many; as with `torch.chunk` they may be fewer, where the samples do not come out even.
        size: Samples of a part, in place of `parts`.
        reduction: How the loss is reduced over samples. "mean": a part weighs its share of the samples; "sum": 1.

    Raises:
        ValueError: Neither or both of `parts` and `size`; tensors of different lengths, or none.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: how the loss is reduced over samples. Options: mean, sum.")
    if (parts is None) == (size is None):
        raise ValueError(f"parts={parts}, size={size}: one of the two. Options: parts=4; size=8, as ooc fit finds it.")
    given = parts if parts is not None else size
    if not isinstance(given, int) or given < 1:
        raise ValueError(f"{'size' if parts is None else 'parts'}={given!r}: a whole number, at least 1")
    length = _length(batch)
    size = size if size is not None else -(-length // given)
    return _parts(batch, length, size, reduction)


def _parts(batch: Any, length: int, size: int, reduction: Reduction) -> Iterator[tuple[Any, float]]:
    for start in range(0, length, size):
        stop = min(start + size, length)
        weight = (stop - start) / length if reduction == "mean" else 1.0
        # Where the optimizer runs inside the backward pass, it is to run in the last one.
        with accumulating() if stop < length else nullcontext():
            yield _cut(batch, start, stop), weight


def run_micro_batches(
    model: Callable[..., Any],
    loss: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
    *,
    parts: int | None = None,
    size: int | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Forward and backward over a batch in parts: see `ooc.Session.micro_batch`."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(
            f"batch: a pair of inputs and targets, not {type(batch).__name__}. Options: (inputs, targets); "
            "`for part, weight in ooc.micro_batches(batch, ...)` for any other form."
        )
    if isinstance(model, nn.Module):
        _warn_of_batch_norm(model)
    total = None
    for (inputs, targets), weight in micro_batches((batch[0], batch[1]), parts=parts, size=size, reduction=reduction):
        own = loss(_call(model, inputs), targets) * weight
        own.backward()
        total = own.detach() if total is None else total + own.detach()
        del own, inputs, targets
    assert total is not None
    return total


def _call(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


_warned: set[type] = set()


def _warn_of_batch_norm(model: nn.Module) -> None:
    """Say, once for a class of models, that its parts are another computation than the whole."""
    if type(model) in _warned:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            _warned.add(type(model))
            _log.warning(
                "micro-batches: %s (%s) normalizes over the samples of a part, and moves its statistics once for each: "
                "another training than with the whole batch. Options: a norm over channels or groups; eval() for it.",
                name,
                type(module).__name__,
            )
            return


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)


def _length(batch: Any) -> int:
    lengths = sorted({tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()})
    if len(lengths) != 1 or not lengths[0]:
        found = ", ".join(map(str, lengths)) or "no tensor at all"
        raise ValueError(
            f"batch: its tensors must have one and the same length in their first dimension; found: {found}. "
            "Options: the batch in the first dimension of each; what does not belong to samples as a number."
        )
    length: int = lengths[0]
    return length


def _cut(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, Tensor):
        return torch.narrow(batch, 0, start, stop - start) if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {name: _cut(value, start, stop) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [_cut(value, start, stop) for value in batch]
        if isinstance(batch, list):
            return values
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch
