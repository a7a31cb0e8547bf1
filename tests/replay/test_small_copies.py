"""Recipes share a copy of a small operand as long as its bytes stay the same, and not a moment longer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.replay.recipes import Recipe, SmallCopies
from ooc.replay.reruns import Reruns
from tests.session.program_reruns import forced_reruns, slow_store


def _write_by_op(small: Tensor) -> None:
    small.add_(1)


def _write_by_data(small: Tensor) -> None:
    small.data.add_(1)


def _write_by_array(small: Tensor) -> None:
    small.numpy()[:] += 1


WRITES: dict[str, Callable[[Tensor], None]] = {"op": _write_by_op, "data": _write_by_data, "array": _write_by_array}


def _recipe(small: Tensor, copies: SmallCopies) -> Recipe:
    return Recipe(
        torch.ops.aten.mul_.Tensor,
        (small, small),
        {},
        variable_of=lambda _: None,
        small_nbytes=1 << 16,
        apart=contextlib.nullcontext,
        copies=copies,
    )


def _again(recipe: Recipe) -> Any:
    return recipe.run(lambda _: pytest.fail("no variable"))


def test_shared_while_it_stays() -> None:
    small, copies = torch.arange(4.0), SmallCopies()
    recipes = [_recipe(small, copies) for _ in range(3)]
    assert len({copy._cdata for recipe in recipes for copy in recipe._copies}) == 1
    for recipe in recipes:  # what one changes when it runs again is not the others'
        assert _again(recipe).tolist() == [0, 1, 4, 9]


@pytest.mark.parametrize("how", WRITES)
def test_as_it_was(how: str) -> None:
    small, copies = torch.arange(4.0), SmallCopies()
    before = _recipe(small, copies)
    version = small._version
    WRITES[how](small)
    assert (small._version == version) == (how != "op")
    after = _recipe(small, copies)
    assert _again(before).tolist() == [0, 1, 4, 9]
    assert _again(after).tolist() == [1, 4, 9, 16]


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (float("nan"), -float("nan"))])
def test_bytes_not_values(one: float, other: float) -> None:
    small, copies = torch.full((2,), one), SmallCopies()
    first = copies.of(small.untyped_storage())
    small.fill_(other)
    assert copies.of(small.untyped_storage()) is not first


def test_another_size_in_the_same_place() -> None:
    small, copies = torch.zeros(4), SmallCopies()
    first = copies.of(small.untyped_storage())
    small.untyped_storage().resize_(32)
    assert copies.of(small.untyped_storage()).nbytes() == 32 != first.nbytes()


def test_a_small_weight_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent net's weight below the threshold: one copy of it, in a step of any length."""
    call, most = Reruns._call_noted, [0, 0]

    def noting(self: Reruns, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        held = {copy._cdata: copy.nbytes() for recipe in self._recipes.values() for copy in recipe._copies}
        most[:] = max(most[0], sum(held.values())), max(most[1], len(self._recipes))
        return result

    def train() -> list[float]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(60, 60) * 0.1)
        optimizer, losses = torch.optim.SGD([weight], lr=1e-2), []
        for _ in range(10):
            hidden = torch.randn(256, 60)
            for _ in range(30):
                hidden = torch.tanh(hidden @ weight) + 0.1 * hidden
            loss = hidden.square().mean()
            del hidden
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
        return losses

    monkeypatch.setattr(Reruns, "_call_noted", noting)
    expected = train()
    with (
        slow_store(),
        forced_reruns(0),
        ooc.Session(
            "1MiB",
            chunk_nbytes="64KiB",
            threshold_nbytes="16KiB",
            plan_cache=False,
            recompute=True,
            step_boundary="optimizer",
        ) as session,
    ):
        losses = train()
        assert session.engine.manager.counters.num_reruns > 0
    assert losses == expected
    assert most[1] > 30
    assert 0 < most[0] < 3 * 60 * 60 * 4
