"""How precise torch's float32 products are, on the host: what its kernels read of it, and how to put it back.

Torch has a setting for each kind of op of each backend, one for each backend, and one for all of them. A kernel reads
the first of the three that is set, and so do torch's getters: what is set at each level they do not tell. Beside these
there is the older `torch.set_float32_matmul_precision`, which torch refuses to tell while the newer ones contradict it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["ONEDNN_OPS", "matmul_precision", "precision", "precisions_unset", "set_precision"]

_C: Any = torch._C  # whose stubs lack some of these

ONEDNN_OPS = ("conv", "matmul", "rnn")
"""The kinds of op of oneDNN that have a precision of their own."""

_LEVELS = tuple((backend, op) for backend in ("mkldnn", "cuda") for op in ("all", *ONEDNN_OPS))
_EVERYTHING = ("generic", "all")


def precision(backend: str, op: str) -> str:
    """The precision that kernels of a backend ("mkldnn", "cuda") read for a kind of op."""
    found: str = _C._get_fp32_precision_getter(backend, op)
    return found


def set_precision(backend: str, op: str, value: str) -> None:
    """Set the precision of a kind of op of a backend."""
    _C._set_fp32_precision_setter(backend, op, value)


def matmul_precision() -> str | None:
    """What `torch.set_float32_matmul_precision` has set; None: newer settings contradict it, and torch refuses."""
    try:
        found: str = _C._get_float32_matmul_precision()
    except RuntimeError:
        return None
    return found


@contextlib.contextmanager
def precisions_unset() -> Iterator[None]:
    """Within the block no precision is set, so that each kind of op may be given its own, "none" included.

    After it, what is set at each level is what was set there before, not only what kernels read the same.
    """
    levels = {_EVERYTHING: precision(*_EVERYTHING)}
    older: str | None = None
    try:
        set_precision(*_EVERYTHING, "none")
        for level in _LEVELS:  # a backend's own before those of its ops, which would else be told as the backend's
            levels[level] = precision(*level)
            set_precision(*level, "none")
        older = matmul_precision()
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)  # before the newer ones: it sets two of them
        for level, value in levels.items():
            set_precision(*level, value)
