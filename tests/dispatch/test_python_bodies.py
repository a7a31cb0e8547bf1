"""Ops that are Python functions may use tensors which they are not given, planned or not: bits as in core."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ooc
from ooc.dispatch.hidden_operands import hides_operands
from ooc.dispatch.native_demand import is_special
from ooc.dispatch.python_bodies import has_python_body
from tests.thinned import thinned

NUM_FEATURES = 16000
tables: dict[str, Tensor] = {}
"""What the functions use beside their arguments."""


@torch.library.custom_op("ooc_tests_bodies::read", mutates_args=())
def _read(x: Tensor) -> Tensor:
    return x + tables["read"].sum()


@torch.library.custom_op("ooc_tests_bodies::read_view", mutates_args=())
def _read_view(x: Tensor) -> Tensor:
    views = [tables["read"].view(2, -1)[0], torch.empty_like(x)]
    views[1].copy_(x)
    return views[1].add_(views[0].sum())


@torch.library.custom_op("ooc_tests_bodies::written", mutates_args=())
def _written(x: Tensor) -> Tensor:
    tables["read"].add_(x.mean())
    return x.clone()


@torch.library.custom_op("ooc_tests_bodies::outer", mutates_args=())
def _outer(x: Tensor) -> Tensor:
    return _read(x).sin() + _written(x)


@torch.library.custom_op("ooc_tests_bodies::changes", mutates_args=("x",))
def _changes(x: Tensor) -> None:
    x.add_(tables["read"][: x.numel()].mean())


@torch.library.custom_op("ooc_tests_bodies::made", mutates_args=())
def _made(n: int) -> Tensor:
    return tables["read"][:n].clone()


def _sums(op: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: op(x).double().sum()


def _in_place(x: Tensor) -> Tensor:
    x = x.clone()
    _changes(x)
    return x.double().sum()


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "read": _sums(_read),
    "a view": _sums(_read_view),
    "written": _sums(_written),
    "nested": _sums(_outer),
    "in place": _in_place,
    "no arguments": lambda x: _made(x.numel()).double().sum(),
}


def _train(use: Callable[[Tensor], Tensor], session: ooc.Session | None = None) -> list[float]:
    """The table is an ordinary operand in the middle of the step, and beside that used by the op unnamed."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(128, 128), nn.ReLU())])
    table = tables["read"] = torch.randn(NUM_FEATURES)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-2, momentum=0.9)
    found = []
    for _ in range(10):
        with contextlib.nullcontext() if session is None else session.step():
            hidden = torch.randn(128, 128)
            sums = []
            for index, layer in enumerate(layers):
                hidden = layer(hidden)
                if isinstance(layer, nn.ReLU):
                    with torch.no_grad():
                        sums.append(use(hidden))
                if index == 5:
                    table.mul_(1.01)
            loss = hidden.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.item(), table.double().sum().item(), *(each.item() for each in sums)]
            del hidden, loss, sums
    return found


@pytest.fixture(autouse=True)
def no_tables() -> Iterator[None]:
    yield
    tables.clear()


@thinned("use,debug", list(USES), [False, True])
def test_what_a_function_uses_unnamed(use: str, debug: bool) -> None:
    expected = _train(USES[use])
    budget = "576KiB" if use == "no arguments" else "640KiB"  # of those at which the table is away then
    with ooc.Session(
        budget, chunk_nbytes="64KiB", threshold_nbytes="16KiB", plan_cache=False, recompute=False, debug=debug
    ) as session:
        found = _train(USES[use], session)
        assert session.report()["steps"][-1]["mode"] == "planned"
    assert found == expected


def test_ops_of_torch_that_a_program_has_replaced() -> None:
    table = torch.randn(NUM_FEATURES)

    def replaced(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x.clone().mul_(tables["read"].sum())

    def forget() -> None:  # another test may have asked
        for asked in (has_python_body, hides_operands, is_special):
            asked.cache_clear()

    library = torch.library.Library("aten", "IMPL")
    forget()
    try:
        library.impl("special_i1", replaced, "CPU")
        assert has_python_body(torch.ops.aten.special_i1.default)
        del table
        expected = _train(_sums(torch.special.i1))
        with ooc.Session(
            "640KiB", chunk_nbytes="64KiB", threshold_nbytes="16KiB", plan_cache=False, recompute=False
        ) as session:
            found = _train(_sums(torch.special.i1), session)
            assert session.report()["steps"][-1]["mode"] == "planned"
        assert found == expected
    finally:
        library._destroy()
        forget()


def test_which_ops_have_one() -> None:
    ours = torch.ops.ooc_tests_bodies
    assert has_python_body(ours.read.default) and has_python_body(ours.changes.default)
    assert not has_python_body(torch.ops.aten.add.Tensor)
    assert not has_python_body(torch.ops.prims.add.default)


class _Passes(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_below_the_session_are_named() -> None:
    with _Passes():
        with pytest.warns(RuntimeWarning, match=r"test_python_bodies\._Passes") as found:
            session = ooc.Session("1MiB", plan_cache=False)
        session.close()
    assert [each.filename for each in found] == [__file__]
    with FlopCounterMode(display=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        ooc.Session("1MiB", plan_cache=False).close()
