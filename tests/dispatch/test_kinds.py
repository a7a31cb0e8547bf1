"""Kinds of op: what has to be tried before it may run again, and what counts as the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ooc
from ooc.replay.dispatcher import Dispatcher

aten = torch.ops.aten


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    with ooc.Session(1 << 20) as session:
        yield session.engine.runner.dispatcher


def same(dispatcher: Dispatcher, func: Any, one: tuple[Any, ...], other: tuple[Any, ...], **kwargs: list[Any]) -> bool:
    first, second = ({name: values[i] for name, values in kwargs.items()} for i in range(2))
    return dispatcher.kind(func, one, first) == dispatcher.kind(func, other, second) != 0


def test_generators_and_factors_are_the_same_kind(dispatcher: Dispatcher) -> None:
    """Programs make a generator for each batch: were it a kind of its own, its op would be tried in each step."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    assert same(dispatcher, aten.randn.generator, ([10, 10],), ([10, 10],), generator=generators)
    assert same(dispatcher, aten.mul.Scalar, (torch.ones(9), 0.5), (torch.ones(9), 0.25))


def test_sizes_integers_and_strides_are_not(dispatcher: Dispatcher) -> None:
    generator = torch.Generator()
    assert not same(dispatcher, aten.randn.generator, ([10, 10],), ([10, 11],), generator=[generator, generator])
    assert not same(dispatcher, aten.sum.dim_IntList, (torch.ones(4, 4), [0]), (torch.ones(4, 4), [1]))
    assert not same(dispatcher, aten.sin.default, (torch.ones(4, 8),), (torch.ones(8, 4).t(),))
    assert not same(dispatcher, aten.sin.default, (torch.ones(4),), (torch.ones(4, dtype=torch.float64),))
