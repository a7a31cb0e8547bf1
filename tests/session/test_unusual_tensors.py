"""Programs with tensors of other layouts and kinds: equal to the run in core, to the last bit."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import ooc

Program = Callable[[Callable[[], contextlib.AbstractContextManager[Any]]], list[Any]]


pytestmark = pytest.mark.usefixtures("one_thread")


def compare(program: Program, budget: str, **options: Any) -> list[str]:
    """Run a program in core and in a session, and compare what it returns. The session's modes by step."""
    torch.manual_seed(0)
    expected = program(contextlib.nullcontext)
    torch.manual_seed(0)
    with ooc.Session(budget, plan_cache=False, **options) as session:
        found = program(session.step)
    assert found == expected
    return [row.mode for row in session.steps.rows]


def sparse_gradients(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Any]:
    embedding = nn.Embedding(2000, 64, sparse=True)
    head = nn.Linear(64, 256)
    sparse, dense = torch.optim.SparseAdam(embedding.parameters()), torch.optim.SGD(head.parameters(), 0.1)
    losses = []
    for _ in range(6):
        with step():
            loss = head(embedding(torch.randint(0, 2000, (64, 20))).mean(1)).logsumexp(1).mean()
            loss.backward()
            sparse.step()
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
        losses.append(loss.item())
    return [*losses, embedding.weight.sum().item(), head.weight.sum().item()]


@pytest.mark.parametrize("recompute", [False, True])
def test_sparse_gradients(recompute: bool) -> None:
    """An op that returns a sparse tensor has no bytes that a trial of its re-run could compare."""
    compare(sparse_gradients, "3MiB", recompute=recompute)


def shrunk_storages(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Any]:
    """FSDP's way: a layer's storage has bytes only from its gathering to its use."""
    layers = [nn.Linear(256, 256, bias=False) for _ in range(3)]
    shards = [layer.weight.detach().clone() for layer in layers]
    losses = []
    for _ in range(6):
        with step():
            x = torch.ones(64, 256)
            for layer, shard in zip(layers, shards, strict=True):
                layer.weight.data.untyped_storage().resize_(0)
                layer.weight.data.untyped_storage().resize_(shard.nbytes)
                layer.weight.data.copy_(shard)
                x = layer(x).tanh()
            x.square().mean().backward()
            for layer, shard in zip(layers, shards, strict=True):
                shard.sub_(layer.weight.grad)
                layer.weight.grad = None
        losses.append(x.sum().item())
    return losses


@pytest.mark.parametrize("recompute", [False, True])
def test_storages_without_their_bytes(recompute: bool) -> None:
    """A tensor of a storage that was resized to 0 has no bytes to compare: reading them was a segmentation fault."""
    compare(shrunk_storages, "3MiB", recompute=recompute)


def nested_tensors(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Any]:
    weight = nn.Parameter(torch.randn(256, 64) * 0.1)
    optimizer = torch.optim.Adam([weight])
    losses = []
    for _ in range(6):
        with step():
            rows = torch.nested.nested_tensor([torch.randn(100 + 10 * j, 64) for j in range(5)])
            hidden = nn.functional.linear(rows, weight).relu()
            loss = torch.stack([part.square().mean() for part in hidden.unbind()]).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, weight.sum().item()]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(recompute: bool) -> None:
    """They have no sizes by which kinds of op could be told apart: such an op is not run again."""
    compare(nested_tensors, "3MiB", recompute=recompute)


def traced(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Any]:
    """A model that begins on the meta device, is exported and traced, and is run on fake tensors between its steps."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    example = torch.randn(128, 256)
    exported = torch.export.export(model, (example,)).module()
    optimizer = torch.optim.SGD(exported.parameters(), 0.1)
    found: list[Any] = []
    for index in range(6):
        with step():
            loss = exported(example).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
        with FakeTensorMode(allow_non_fake_inputs=True):
            found.append(tuple(model(torch.empty(128, 256)).shape))
        if index in (0, 5):
            graph = make_fx(lambda x: model(x).sin())(example)
            found += [graph.code, graph(example).sum().item()]
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_tensors_that_tracing_makes(recompute: bool) -> None:
    """Fake tensors and proxies go on to the modes that made them, and nothing of ours gets into a traced graph."""
    modes = compare(traced, "3MiB", recompute=recompute)
    assert "planned" in modes


def asked_subclasses(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Any]:
    """What `__torch_function__` of a subclass and of a mode is asked, and what class gradients have."""
    asked: Counter[str] = Counter()

    class Asked(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked[getattr(func, "__name__", "a property")] += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked[f"mode: {getattr(func, '__name__', 'a property')}"] += 1
            return func(*args, **(kwargs or {}))

    weight = nn.Parameter((torch.randn(256, 256) * 0.05).as_subclass(Asked))
    other = nn.Parameter(torch.randn(256, 256) * 0.05)
    optimizer = torch.optim.SGD([other], lr=0.1)
    found = []
    for index in range(6):
        with step():
            made = (torch.randn(128, 256) @ other).relu() @ weight
            loss = made.as_subclass(Tensor).square().mean()  # else `backward` is asked, and nothing within it
            with Mode() if index % 2 else contextlib.nullcontext():
                loss.backward()
            found += [type(weight.grad).__name__, type(other.grad).__name__, loss.item()]
            optimizer.step()
            optimizer.zero_grad()
            weight.grad = None
    return [*found, sorted(asked.items())]


def test_torch_functions_are_asked_as_without_a_session() -> None:
    """Below a dispatch mode ops are called from Python, which would ask subclasses again, also in backward passes."""
    compare(asked_subclasses, "1280KiB")
    compare(asked_subclasses, "16MiB")
