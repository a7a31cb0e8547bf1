"""Planned ops that are played from torch's stack of values, without Python (native/boxed.cpp)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ooc
import ooc.dispatch.mode
from ooc.dispatch.extension import boxed_ops
from ooc.errors import BudgetTooSmall
from tests.dispatch.seen_ops import Seen
from vmm.native_build import NativeBuildError

WIDTH = 160
"""A weight has 100 KiB: it is managed."""

Step = Callable[[], contextlib.AbstractContextManager[object]]


@pytest.fixture(params=["boxed", "through Python"])
def is_boxed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param != "boxed":
        monkeypatch.setattr(ooc.dispatch.mode, "boxed_ops", lambda: None)
    return bool(request.param == "boxed")


@contextlib.contextmanager
def open_session(budget: str = "700KiB") -> Iterator[ooc.Session]:
    with ooc.Session(
        budget, chunk_nbytes="64KiB", threshold_nbytes="64KiB", policy="capuchin", recompute=False
    ) as session:
        yield session


def train(step: Step, *, num_steps: int = 8, within: Callable[[int, Tensor], Tensor] | None = None) -> list[Any]:
    """Train a small model; `within` may do something with what the second layer returns."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=1e-3, foreach=False)
    out: list[Any] = []
    for index in range(num_steps):
        with step():
            x = torch.randn(WIDTH, WIDTH)
            for number, layer in enumerate(layers):
                x = torch.relu(layer(x)) * 2
                if number == 1 and within is not None:
                    x = within(index, x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(x.sum().item())
    out += [p.sum().item() for layer in layers for p in layer.parameters()]
    return out


def compare(**options: Any) -> ooc.Session:
    expected = train(contextlib.nullcontext, **options)
    with open_session() as session:
        found = train(session.step, **options)
    assert found == expected
    return session


def num_boxed(session: ooc.Session) -> int:
    return session.engine.runner.dispatcher.num_boxed


def test_it_is_built_here() -> None:
    """Where ATen's headers can be compiled, and no torch has changed what they say."""
    assert boxed_ops() is not None


@pytest.mark.parametrize("num_failing", [0, 1, 2])
def test_where_memory_is_short_it_is_built_without_the_headers_of_autograd_or_not_at_all(
    num_failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[str, ...]] = []

    def load(name: str, _: list[str], *, flags: tuple[str, ...], memory_nbytes: int, is_optional: bool) -> str:
        assert (name, is_optional) == ("boxed", True)
        built.append(flags)
        if len(built) <= num_failing:
            raise NativeBuildError(f"{memory_nbytes} bytes are not there")
        return "built"

    monkeypatch.setattr("ooc.dispatch.extension._load", load)
    assert boxed_ops.__wrapped__() == ("built" if num_failing < 2 else None)
    assert built == [("-DOOC_SEES_NODES",), ()][: num_failing + 1]


def test_bits_and_plans_are_those_of_the_way_through_python(is_boxed: bool) -> None:
    session = compare()
    rows = session.steps.rows
    assert [row.mode for row in rows][-4:] == ["planned"] * 4
    assert rows[-1].loaded_nbytes > 0  # something is moved, before ops and after them
    assert (num_boxed(session) > 4 * 100) is is_boxed  # of 140 ops a step


def test_another_mode_above_sees_every_op() -> None:
    def seen(step: Step) -> tuple[list[str], list[Any]]:
        @contextlib.contextmanager
        def watched() -> Iterator[None]:
            with step(), mode:
                yield

        mode = Seen()
        return mode.names, train(watched)

    expected = seen(contextlib.nullcontext)
    with open_session() as session:
        assert seen(session.step) == expected
    assert num_boxed(session) > 0  # ours comes below it


def test_a_subclass_that_dispatches_for_itself_is_pythons() -> None:
    compare(within=lambda index, x: x + (TwoTensor(x.detach(), x.detach()) * 2).a)


@pytest.mark.usefixtures("is_boxed")
def test_an_op_that_raises_leaves_the_plan() -> None:
    """Its own error, of C++ or of Python, and right results after it."""

    @torch.library.custom_op("ooc_tests::may_fail", mutates_args=())
    def may_fail(x: Tensor, fails: bool) -> Tensor:
        if fails:
            raise KeyError("as asked")
        return x * 3

    may_fail.register_autograd(lambda ctx, grad: (grad * 3, None))

    def within(index: int, x: Tensor) -> Tensor:
        with contextlib.suppress(KeyError):
            x = may_fail(x, index == 5)
        if index == 6:
            with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
                torch.mm(x, torch.ones(WIDTH + 1, 2))
        return x

    modes = [row.mode for row in compare(within=within, num_steps=10).steps.rows]
    assert modes[4] == "planned"
    assert modes[5] == "off_plan"


@pytest.mark.usefixtures("is_boxed")
def test_an_op_that_allocates_more_than_planned_ends_off_its_plan() -> None:
    """What it has returned is known all the same: it is evicted and comes back."""

    def within(index: int, x: Tensor) -> Tensor:
        picked = torch.masked_select(x, x > (-1.0 if index == 5 else 1.5))
        return x + picked.sum() * 1e-3

    modes = [row.mode for row in compare(within=within).steps.rows]
    assert modes[4] == "planned"
    assert modes[5] == "off_plan"


@pytest.mark.usefixtures("is_boxed")
def test_an_error_before_an_op_is_raised_as_it_is() -> None:
    """Of a store that fails, say: Python's error comes through torch's stack."""
    with open_session() as session:
        before = session.engine.runner.executor.before

        def failing(index: int, *bear: Any) -> bool:
            if is_failing:
                raise LookupError("no such thing")
            return before(index, *bear)

        session.engine.runner.executor.before = failing  # type: ignore[method-assign]
        is_failing = False

        def within(index: int, x: Tensor) -> Tensor:
            nonlocal is_failing
            is_failing = index == 5
            return x

        with pytest.raises(LookupError, match="no such thing"):
            train(session.step, within=within)
        is_failing = False
        assert train(session.step) == train(session.step)


@pytest.mark.usefixtures("is_boxed")
def test_what_does_not_fit_is_said() -> None:
    def within(index: int, x: Tensor) -> Tensor:
        if index == 5:
            torch.masked_select(x.expand(8, -1, -1), torch.ones((), dtype=torch.bool))
        else:
            torch.masked_select(x, x > 1.5)
        return x

    with open_session() as session, pytest.raises(BudgetTooSmall):
        train(session.step, within=within)


@pytest.mark.usefixtures("is_boxed")
def test_ops_within_a_custom_op_see_the_modes_that_it_enters() -> None:
    """The session's mode is off while an op runs, as torch has it, so that others may be on."""
    names: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    @torch.library.custom_op("ooc_tests::watches_itself", mutates_args=())
    def watches_itself(x: Tensor) -> Tensor:
        with Seen():
            return x * 3

    watches_itself.register_autograd(lambda ctx, grad: grad * 3)
    compare(within=lambda index, x: watches_itself(x))
    assert names == ["aten.mul.Tensor"] * 16


def test_a_second_session_plays_as_the_first_did() -> None:
    assert num_boxed(compare()) == num_boxed(compare())
