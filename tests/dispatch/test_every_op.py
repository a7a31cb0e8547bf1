"""Every op that torch has samples of gives the same bits under a session as without: whatever its kernel calls.

The samples are those of torch's own tests. What differs from one run without a session to the next counts for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import ooc

pytest.importorskip("expecttest", reason="torch's samples need it")
pytestmark = pytest.mark.usefixtures("one_thread")

_MOST_SAMPLES = 2
_LEFT_OUT = "empty", "nested", "_efficient_attention", "lstsq"
"""What is in memory that nobody has written; of a prototype; other bits each time, without a session, too."""


class Way(NamedTuple):
    """How ops are called."""

    name: str
    dtype: torch.dtype = torch.float32
    is_cast: bool = False
    has_gradients: bool = False
    is_inference: bool = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        with (
            torch.set_grad_enabled(self.has_gradients),
            torch.inference_mode(self.is_inference),
            torch.autocast("cpu", torch.bfloat16, enabled=self.is_cast),
        ):
            yield


WAYS = (
    Way("training under autocast", is_cast=True, has_gradients=True),
    Way("training on complex numbers", dtype=torch.complex64, has_gradients=True),
    Way("inference under autocast", is_cast=True, is_inference=True),
)
SLOW_WAYS = (
    Way("training", has_gradients=True),
    Way("inference", is_inference=True),
    Way("inference on complex numbers", dtype=torch.complex64, is_inference=True),
)


def _ops() -> list[Any]:
    with warnings.catch_warnings(action="ignore"):
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if not any(part in op.name for part in _LEFT_OUT)]


def _turned(value: Any) -> Any:
    """The same, as it lies in memory when its first two dimensions have been exchanged."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.layout is not torch.strided:
        return value
    return value.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(value.requires_grad)


def _bits(tensors: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for each in tensors:
        if isinstance(each, Tensor) and each.layout is torch.strided:
            whole = each.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest = hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).digest() if whole.numel() else b""
            found.append((each.dtype, each.shape, digest))
    return found


def _call(op: Any, sample: Any, way: Way) -> list[Any]:
    """The bits of its results, and of gradients; or what it has raised."""
    torch.manual_seed(1)
    try:
        with way.taken():
            found = [t for t in tree_leaves(op(sample[0], *sample[1], **sample[2])) if isinstance(t, Tensor)]
        bits = _bits(found)
        sums = [t.abs().sum() if t.is_complex() else t.sum() for t in found if t.requires_grad]
        inputs = [t for t in tree_leaves(sample) if isinstance(t, Tensor) and t.requires_grad]
        if way.has_gradients and sums and inputs:
            bits += _bits(torch.autograd.grad(sums, inputs, allow_unused=True))
    except Exception as error:  # samples of what a device, or a type, has not
        return [type(error).__name__]
    return bits


def _results(op: Any, way: Way) -> list[list[Any]]:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    has_gradients = way.dtype in op.supported_backward_dtypes("cpu")
    try:
        samples = list(islice(op.sample_inputs("cpu", way.dtype, requires_grad=has_gradients), _MOST_SAMPLES))
    except Exception:  # as above
        return []
    given = [(each.input, each.args, each.kwargs) for each in samples]
    return [_call(op, sample, way) for each in given for sample in (each, tree_map(_turned, each))]


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=way.name, marks=pytest.mark.slow if way in SLOW_WAYS else ()) for way in WAYS + SLOW_WAYS],
)
@pytest.mark.filterwarnings("ignore")
def test_same_bits(way: Way) -> None:
    ops = [op for op in _ops() if way.dtype in op.supported_dtypes("cpu")]
    expected = [_results(op, way) for op in ops]
    with ooc.Session("64MiB", threshold_nbytes="4KiB", plan_cache=False):
        found = [_results(op, way) for op in ops]
    others = [op for op, one, other in zip(ops, expected, found, strict=True) if one != other]
    differing = {f"{op.name} {op.variant_test_name}" for op in others if _results(op, way) == expected[ops.index(op)]}
    assert not differing
    assert sum(map(len, found)) > 1000
