"""The bytes of a strided view, as pieces of its storage, and the layout of a dense copy of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A strided view's bytes.

    Attributes:
        pieces: `(offset, nbytes)` within the storage, in ascending order.
        size: The view's.
        stride: Of a copy of these pieces one after the other. Of a dimension along which the view repeats itself, 0.
        num_elements: That the pieces have.
    """

    pieces: tuple[tuple[int, int], ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    num_elements: int


def pieces_of(size: Sequence[int], stride: Sequence[int], offset: int, item_nbytes: int) -> Pieces | None:
    """The pieces of a view, its offset in elements. None where elements overlap otherwise than by repetition."""
    order = sorted((d for d in range(len(size)) if size[d] > 1 and stride[d] != 0), key=lambda d: stride[d])
    if any(length == 0 for length in size) or any(step < 0 for step in stride):
        return None
    dense = [0 if size[d] > 1 else 1 for d in range(len(size))]
    run, reach, count = 1, 1, 1
    outer: list[int] = []
    for d in order:
        if stride[d] < reach:
            return None
        dense[d] = count
        count *= size[d]
        if not outer and stride[d] == run:
            run *= size[d]
        else:
            outer.append(d)
        reach = stride[d] * (size[d] - 1) + reach
    starts = itertools.product(*(range(0, size[d] * stride[d], stride[d]) for d in reversed(outer)))
    pieces = tuple(((offset + sum(start)) * item_nbytes, run * item_nbytes) for start in starts)
    return Pieces(pieces=pieces, size=tuple(size), stride=tuple(dense), num_elements=count)
