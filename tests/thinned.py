"""Grids of parameters of which only a few are run by default: enough to meet each value of each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def thinned(names: str, *axes: Sequence[Any], ids: Callable[[Any], str | None] | None = None) -> pytest.MarkDecorator:
    """All combinations of the axes' values, all but those along the diagonal marked `slow`.

    Args:
        names: The parameters, an axis each.
        axes: Their values. The shorter ones begin anew, each time one further on.
        ids: As that of `pytest.mark.parametrize`.
    """
    quick = {
        tuple((turn + turn // len(axis)) % len(axis) if len(axis) < longest else turn for axis in axes)
        for longest in [max(map(len, axes))]
        for turn in range(longest)
    }
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        found.append(pytest.param(*values, marks=[] if places in quick else [pytest.mark.slow]))
    return pytest.mark.parametrize(names, found, ids=ids)
