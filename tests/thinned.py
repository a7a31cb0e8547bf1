"""Grids of parameters of which only a few are run by default: enough to meet each value of each of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def thinned(names: str, *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """All combinations of the axes' values, all but those along the diagonal marked `slow`.

    Args:
        names: The parameters, an axis each.
        axes: Their values. The shorter ones begin anew, each time one further on. Functions go by name.
    """
    longest = max(map(len, axes))
    quick = {tuple((turn + turn // len(axis)) % len(axis) for axis in axes) for turn in range(longest)}
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        found.append(pytest.param(*values, marks=[] if places in quick else [pytest.mark.slow]))
    return pytest.mark.parametrize(names, found, ids=_name)


def _name(value: Any) -> str | None:
    return value.__name__.strip("_") if callable(value) else None
