"""What a kernel calls goes through torch's dispatcher as without a mode: autocast, lazy conjugation, inference mode.

Remedy: native/outside.h, and ooc/tracing/composites.py. Everything fits in the budget here: nothing has to move for
this to go wrong.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ooc
from ooc.dispatch import mode
from ooc.replay.dispatcher import Dispatcher
from ooc.tracing.composites import comes_whole, take_apart

pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=dtype)


def turned() -> Tensor:
    """Three-dimensional and not contiguous: `linear` asks whether its weight requires gradients."""
    return randn(2, 64, 64).transpose(0, 1)


def weight(*size: int) -> nn.Parameter:
    return nn.Parameter(randn(*size) / 8)


def linear() -> list[Tensor]:
    x, w, bias = turned(), weight(192, 64), weight(192)
    with torch.inference_mode():
        return [F.linear(x, w, bias), F.linear(x, w)]


def layers() -> list[Tensor]:
    torch.manual_seed(0)
    decoder = nn.TransformerDecoderLayer(64, 4, 128, 0.0, batch_first=True)
    encoder = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    x = randn(2, 64, 64)
    with torch.inference_mode():
        found = [decoder(x, x), encoder(x), attention(x, x, x)[0]]
        return [*found, decoder.eval()(x, x), encoder.eval()(x)]


def transforms() -> list[Tensor]:
    x, y = randn(6, 7), randn(4, 6, 7)
    with torch.inference_mode():
        return [torch.fft.hfft2(x), torch.fft.hfftn(y)]


def bilinear() -> list[Tensor]:
    """Its kernel multiplies, which autocast has done in bfloat16."""
    torch.manual_seed(0)
    layer = nn.Bilinear(40, 30, 20)
    with torch.autocast("cpu"):
        out = layer(randn(16, 40), randn(16, 30))
    return [out, *torch.autograd.grad(out.float().square().sum(), list(layer.parameters()))]


def products() -> list[Tensor]:
    a, b, c, square = weight(16, 24), weight(24, 8), weight(8, 30), weight(16, 16)
    with torch.inference_mode(), torch.autocast("cpu"):
        return [
            torch.linalg.multi_dot([a, b, c]),
            torch.einsum("ij,jk->ik", a, b),
            torch.linalg.matrix_power(square, 5),
            torch.cov(a),
            torch.cdist(a[None], a[None] + 1),
            torch.tensordot(a, b, 1),
        ]


def inverses() -> list[Tensor]:
    x = randn(7, 5, dtype=torch.complex64)
    inverse = torch.linalg.pinv(x)
    return [inverse, inverse @ x, torch.linalg.pinv(x.mH.contiguous())]


CASES: dict[str, Callable[[], list[Tensor]]] = {
    each.__name__: each for each in (linear, layers, transforms, bilinear, products, inverses)
}


def bits(found: list[Tensor]) -> list[Any]:
    whole = [each.detach().resolve_conj().resolve_neg().contiguous() for each in found]
    return [(each.dtype, each.reshape(-1).view(torch.uint8).tolist()) for each in whole]


@contextlib.contextmanager
def through_python(whether: bool) -> Iterator[None]:
    """As where native/boxed.cpp cannot be built."""
    with pytest.MonkeyPatch.context() as patch:
        if whether:
            patch.setattr(mode, "boxed_ops", lambda: None)
        yield


@pytest.mark.parametrize("has_boxed", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_results_have_the_same_bits(name: str, has_boxed: bool) -> None:
    expected = bits(CASES[name]())
    on_thread: list[Any] = []
    with through_python(not has_boxed), ooc.Session("64MiB", plan_cache=False):
        for _ in range(2):  # the second time without Python
            assert bits(CASES[name]()) == expected
        if has_boxed:
            thread = threading.Thread(target=lambda: on_thread.append(bits(CASES[name]())))
            thread.start()
            thread.join()
            assert on_thread == [expected]


@pytest.mark.parametrize("has_boxed", [True, False])
def test_inference_has_the_ops_that_there_are_without_gradients(has_boxed: bool) -> None:
    """So their plans are alike, and what an op makes in between need not be in memory together."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def ops(context: contextlib.AbstractContextManager[Any]) -> list[str]:
        with through_python(not has_boxed), ooc.Session("64MiB", plan_cache=False) as session, context:
            attention(turned(), turned(), turned())
            recorder = session.engine.runner.recording.recorder
            assert recorder is not None
            return [str(func) for func in recorder.funcs()]

    found = ops(torch.inference_mode())
    assert "aten.linear.default" not in found
    assert [op for op in found if "detach" not in op] == [op for op in ops(torch.no_grad()) if "detach" not in op]


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Apart(TorchDispatchMode):
    """Takes composite ops apart as the session does, where nobody knows which keys were off."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if comes_whole(func, args, kwargs or {}):
            return take_apart(func, args, kwargs or {}, mode=self, outside=None)
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_composite_ops_are_taken_apart_where_nobody_knows_the_keys() -> None:
    expected = bits(linear())
    with Apart() as apart:
        assert bits(linear()) == expected
    assert "aten.linear.default" not in apart.names
    assert {"aten.mm.default", "aten.addmm.default"}.intersection(apart.names)


def test_the_keys_are_known() -> None:
    """Of a whole torch for Linux: else boards would go the slower way, and nobody would note."""
    known: list[int | None] = []
    with ooc.Session("64MiB", plan_cache=False) as session:
        dispatcher: Dispatcher = session.engine.runner.dispatcher
        with torch.autocast("cpu"):
            torch.ones(3)
            known.append(dispatcher.outside_keys())
        torch.ones(3)
        known.append(dispatcher.outside_keys())
    on, off = (torch._C.DispatchKeySet.from_raw_repr(keys or 0) for keys in known)
    assert not on.has(torch._C.DispatchKey.AutocastCPU)
    assert off.has(torch._C.DispatchKey.AutocastCPU)


def test_under_another_mode_it_goes_on_as_under_that_alone() -> None:
    """Whose Python it is then that torch hands ops over to."""
    with Passing():
        expected = bits(bilinear())
    with ooc.Session("64MiB", plan_cache=False), Passing():
        assert bits(bilinear()) == expected
    assert bits(bilinear()) != expected  # torch's own way, which is none of ours to mend
