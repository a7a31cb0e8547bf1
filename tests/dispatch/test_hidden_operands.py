"""Operands that an object or a quantizer keeps: later ops read them without naming them, planned or not."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.dispatch.hidden_operands import hides_operands

NUM_FEATURES = 16000

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says that quantized tensors will go


def _quantized(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(tensor, 0.01, 0, torch.qint8)


def _packed_bias(seen: Tensor) -> Callable[[], Tensor]:
    packed = torch.ops.quantized.linear_prepack(_quantized(torch.ones(NUM_FEATURES, 1)), seen)
    return lambda: torch.ops.quantized.linear_dynamic(torch.ones(1, 1), packed, False).double().sum()


def _unpacked_bias(seen: Tensor) -> Callable[[], Tensor]:
    """Ops name the bias that the object has, and not the tensor that it was made of."""
    weight = _quantized(torch.ones(NUM_FEATURES, 1))
    packed = torch.ops.quantized.linear_prepack(weight, seen.clone())
    bias = torch.ops.quantized.linear_unpack(packed)[1]
    named = iter(range(10**6))

    def read() -> Tensor:
        if next(named) % 4 == 0:
            return bias.sum()
        return torch.ops.quantized.linear_dynamic(torch.ones(1, 1), packed, False).double().sum()

    return read


def _scales(seen: Tensor) -> Callable[[], Tensor]:
    scales = seen.detach().double().abs() + 0.05
    zeros = torch.zeros(NUM_FEATURES, dtype=torch.long)
    quantized = torch.quantize_per_channel(torch.ones(NUM_FEATURES, 2), scales, zeros, 0, torch.qint8)
    named = iter(range(10**6))
    return lambda: scales.sum() if next(named) % 4 == 0 else quantized.dequantize().double().sum()


def _given_scales(seen: Tensor) -> Callable[[], Tensor]:
    """What torch has made of them within the op, and gives out by another."""
    zeros = torch.zeros(NUM_FEATURES, dtype=torch.long)
    quantized = torch.quantize_per_channel(
        torch.ones(NUM_FEATURES, 2), seen.detach().abs() + 0.05, zeros, 0, torch.qint8
    )
    scales, named = quantized.q_per_channel_scales(), iter(range(10**6))
    return lambda: scales.sum() if next(named) % 4 == 0 else quantized.dequantize().double().sum()


HIDING = {"object": _packed_bias, "unpacked": _unpacked_bias, "quantizer": _scales, "given": _given_scales}


def _train(hide: Callable[[Tensor], Callable[[], Tensor]], session: ooc.Session | None = None) -> list[float]:
    torch.backends.quantized.engine = "fbgemm"
    torch.manual_seed(0)
    layers = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(128, 128), nn.ReLU())])
    head = nn.Linear(8, NUM_FEATURES)
    optimizer = torch.optim.SGD([*layers.parameters(), *head.parameters()], lr=1e-2, momentum=0.9)
    read, found = hide(head.bias.detach()), []
    for _ in range(14):
        with contextlib.nullcontext() if session is None else session.step():
            inputs = torch.randn(128, 128)
            loss = head(inputs[:4, :8]).square().mean()
            hidden = inputs
            sums = []
            for layer in layers:
                hidden = layer(hidden)
                if isinstance(layer, nn.ReLU):
                    with torch.no_grad():
                        sums.append(read())
            loss = loss + hidden.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.item(), *(each.item() for each in sums)]
            del inputs, hidden, loss, sums
    return found


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs fbgemm")
@pytest.mark.parametrize("hiding", HIDING)
def test_read_unnamed(hiding: str) -> None:
    expected = _train(HIDING[hiding])
    with ooc.Session(
        "1MiB", chunk_nbytes="64KiB", threshold_nbytes="16KiB", plan_cache=False, recompute=False
    ) as session:
        found = _train(HIDING[hiding], session)
        assert session.report()["steps"][-1]["mode"] == "planned"
    assert found == expected


def test_which_ops() -> None:
    quantized, aten = torch.ops.quantized, torch.ops.aten
    assert all(
        hides_operands(op)
        for op in (
            quantized.linear_prepack.default,
            quantized.conv2d_prepack.default,
            quantized.linear_unpack.default,
            quantized.make_quantized_cell_params.default,
            aten.quantize_per_channel.default,
            aten.q_per_channel_zero_points.default,
        )
    )
    assert not any(
        hides_operands(op)
        for op in (
            quantized.linear_dynamic.default,
            quantized.conv2d.new,
            torch.ops.profiler._record_function_enter_new.default,
            torch.ops.profiler._record_function_exit._RecordFunction,
            aten.quantize_per_tensor.default,
            aten.add.Tensor,
        )
    )
