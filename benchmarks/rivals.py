"""Other ways to train in less memory, in plain PyTorch: checkpointing, and saved tensors on disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_SEGMENTED = ("blocks", "stages", "layers", "features")
_SMALLEST_SAVED_NBYTES = 64 * 1024
"""As small as our own threshold: below it a file costs more than the memory is worth."""


_Packed = tuple[Path, torch.dtype, torch.Size, tuple[int, ...]]


class CheckpointedSequential(nn.Module):
    """A sequence cut into `num_segments` parts whose inner activations are computed again."""

    def __init__(self, layers: list[nn.Module], num_segments: int) -> None:
        super().__init__()
        length = -(-len(layers) // num_segments)
        self.segments = nn.ModuleList(
            nn.Sequential(*layers[start : start + length]) for start in range(0, len(layers), length)
        )

    def forward(self, x: Tensor) -> Tensor:
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=False)
        return x


def checkpointed(model: nn.Module, *, num_segments: int = 4) -> nn.Module:
    """`model` with its main sequence of layers checkpointed. Four segments, as ANCHORS's figures have."""
    name = next((name for name in _SEGMENTED if hasattr(model, name)), None)
    if name is None:
        raise ValueError(f"{type(model).__name__} has none of {', '.join(_SEGMENTED)} to checkpoint")
    setattr(model, name, CheckpointedSequential(list(getattr(model, name)), num_segments))
    return model


@contextlib.contextmanager
def saved_tensors_on_disk(folder: str | None) -> Iterator[None]:
    """Tensors that autograd saves go to files in `folder`, and come back when the backward asks.

    Parameters stay: they are in memory anyway. A tensor saved by two ops is written twice, since
    the hooks cannot tell.
    """
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        yield from _hooked(Path(directory))


def _hooked(directory: Path) -> Iterator[None]:
    number = 0

    def pack(tensor: Tensor) -> Tensor | _Packed:
        nonlocal number
        if isinstance(tensor, nn.Parameter) or tensor.numel() * tensor.element_size() < _SMALLEST_SAVED_NBYTES:
            return tensor
        path = directory / str(number)
        number += 1
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tofile(path)
        return path, tensor.dtype, tensor.shape, tensor.stride()

    def unpack(packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        path, dtype, shape, stride = packed
        tensor = torch.from_numpy(np.fromfile(path, dtype=np.uint8)).view(dtype).view(shape)
        os.unlink(path)
        # As it was: a product of matrices may have other bits where one of them is transposed.
        return tensor if tensor.stride() == stride else torch.empty_strided(shape, stride, dtype=dtype).copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
