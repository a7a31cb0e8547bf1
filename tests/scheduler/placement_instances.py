"""Generators of placement problems in the shape of instances that are hard in practice, up to 50,000 buffers.

Those with `tiled` are cut out of a full rectangle, so that every byte is occupied at every time and the least height is
known: the rectangle's. Those of `training_step` have the shape of a large model's step.
"""

from __future__ import annotations

import random
from itertools import pairwise

from scheduler.placement import Buffer, Problem


def tiled(
    seed: int, *, num_buffers: int, height: int = 1 << 20, num_times: int = 400, num_huge: int = 3, unit: int = 1 << 10
) -> Problem:
    """A perfect tiling with few huge buffers, many small ones, and chains of equal lifetimes.

    A rectangle of `num_times` by `height` is cut into pieces: first bands in time, in which huge pieces take most of
    the height; then what remains by cuts in time (which make chains: the same bytes, one after the other) and in height
    (which make buffers of equal lifetimes side by side).
    """
    rng = random.Random(seed)
    units = height // unit
    pieces: list[tuple[int, int, int, int]] = []  # start, stop, low, high in units
    huge: list[tuple[int, int, int, int]] = []
    edges = sorted({0, num_times, *(rng.randrange(1, num_times) for _ in range(num_huge - 1))})
    for start, stop in pairwise(edges):
        high = units * rng.randint(9, 14) // 16
        huge.append((start, stop, 0, high))
        pieces.append((start, stop, high, units))
    while len(pieces) + len(huge) < num_buffers:
        at = max(rng.sample(range(len(pieces)), min(4, len(pieces))), key=lambda i: _area(pieces[i]))
        start, stop, low, high = pieces[at]
        if stop - start > 1 and (high - low < 2 or rng.random() < 0.45):
            cuts = sorted(rng.sample(range(start + 1, stop), min(rng.choice((1, 1, 2, 5)), stop - start - 1)))
            times = [start, *cuts, stop]
            made = [(a, b, low, high) for a, b in pairwise(times)]
        elif high - low > 1:
            cut = rng.randrange(low + 1, high)
            made = [(start, stop, low, cut), (start, stop, cut, high)]
        else:
            continue
        pieces[at : at + 1] = made
    rows = huge + pieces
    rng.shuffle(rows)
    return _problem([(a, b, (high - low) * unit) for a, b, low, high in rows])


def training_step(seed: int, *, num_layers: int, ops_per_layer: int = 12) -> Problem:
    """Parameters and moments that live all the time, activations in nested lifetimes, gradients, and short workspaces.

    Sizes come in few kinds, as those of a model of equal layers do, so that ties decide.
    """
    rng = random.Random(seed)
    width = rng.choice((4, 6, 10)) << 18
    kinds = [width, 3 * width, 4 * width, width // 2 + 512, 4096]
    num_forward = num_layers * ops_per_layer
    end = 2 * num_forward + num_layers
    rows = []
    for layer in range(num_layers):
        for size in (4 * width, 4 * width, width, 2048):
            rows.append((0, end, size))
            rows.append((2 * num_forward - (layer + 1) * ops_per_layer + rng.randrange(4), end, size))  # its gradient
        for op in range(ops_per_layer):
            at = layer * ops_per_layer + op
            size = kinds[rng.randrange(len(kinds))]
            if rng.random() < 0.6:  # saved for backward
                rows.append((at, 2 * num_forward - at + rng.randrange(3), size))
            else:
                rows.append((at, at + rng.choice((1, 2, 3)), size))
            back = 2 * num_forward - at - 1
            rows.append((back, back + rng.choice((1, 1, 2, 4)), kinds[rng.randrange(len(kinds))]))
    return _problem(rows)


def _area(piece: tuple[int, int, int, int]) -> int:
    start, stop, low, high = piece
    return (stop - start) * (high - low)


def _problem(rows: list[tuple[int, int, int]]) -> Problem:
    return Problem(buffers=tuple(Buffer(start=a, stop=max(b, a + 1), nbytes=n) for a, b, n in rows))
