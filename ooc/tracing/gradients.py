"""Reads a tensor's gradient as torch has it, below what `ooc.interop.gradient_access` puts in front of `.grad`."""

from __future__ import annotations

import torch

_GRAD = torch._C.TensorBase.grad


def raw_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient that is there now; None if there is none, whatever a training loop would expect to find."""
    found: torch.Tensor | None = _GRAD.__get__(tensor)
    return found


def set_raw_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set the gradient, seen by nobody."""
    _GRAD.__set__(tensor, gradient)
