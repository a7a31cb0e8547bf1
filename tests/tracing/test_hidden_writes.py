"""Ops that write operands though their schemas do not say so, each found by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ooc
from ooc.tracing.op_semantics import written_arguments


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class _Changes(TorchDispatchMode):
    """Which arguments of ops have other bytes afterwards, and which of these `written_arguments` has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.told: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        given = [*zip(names, args, strict=False), *kwargs.items()]
        tensors = [(name, each) for name, value in given for each in tree_leaves(value) if isinstance(each, Tensor)]
        before = [_bytes(tensor).clone() for _, tensor in tensors]
        result = func(*args, **kwargs)
        for (name, tensor), copy in zip(tensors, before, strict=True):
            if not torch.equal(_bytes(tensor), copy):
                self.found.add((str(func), name))
        self.told.update((str(func), name) for _, name in written_arguments(func) or ())
        return result


def _lstm() -> Tensor:
    layers = nn.LSTM(16, 24, num_layers=2)
    return layers(torch.ones(5, 3, 16))[0].sum()


def _batch_norm() -> Tensor:
    return nn.BatchNorm1d(8)(torch.randn(4, 8)).sum()


@pytest.mark.parametrize(
    ("program", "hidden"),
    [
        (_lstm, ("aten.mkldnn_rnn_layer_backward.default", "workspace")),
        (_batch_norm, ("aten.native_batch_norm.default", "running_mean")),
    ],
)
def test_what_they_write_is_known(program: Callable[[], Tensor], hidden: tuple[str, str]) -> None:
    torch.manual_seed(0)
    with _Changes() as changes:
        program().backward()
    if hidden[0] not in {name for name, _ in changes.told | changes.found}:
        pytest.skip(f"this torch does not call {hidden[0]}")
    assert hidden in changes.found  # else the table need not have it
    assert changes.found <= changes.told


def _two_passes() -> list[Any]:
    """Two backward passes over an LSTM, before each of which it was evicted."""
    torch.manual_seed(0)
    layers = nn.LSTM(64, 160)
    out: list[Any] = []
    for _ in range(4):
        loss = layers(torch.randn(20, 16, 64))[0].square().sum()
        for is_last in (False, True):
            others = [torch.full((1 << 18,), float(index)) for index in range(7)]
            out.append(sum(other.sum().item() for other in others))
            del others
            loss.backward(retain_graph=not is_last)
        out += [loss.item(), *(int(p.grad.view(torch.int32).sum()) for p in layers.parameters() if p.grad is not None)]
    return out


def test_a_second_pass_finds_what_the_first_has_written() -> None:
    expected = _two_passes()
    with ooc.Session("8MiB", debug=True):
        assert _two_passes() == expected
