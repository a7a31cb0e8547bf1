"""Finds out whether an element-wise op gives an element the same bits wherever it lies.

Torch's loops compute most elements by vectors, and what is left at the end of a thread's share one by one. Where a
compiler joins a product and a sum into one rounding in one of the two loops only, their bits differ, in a good part of
random elements. So the op is run on some of these as a whole, by vectors, and again in pieces shorter than any vector.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_NUM_ELEMENTS = 1024
_PIECE = 3
_MOST_KNOWN = 4096

_known: dict[tuple[Any, ...], bool] = {}
"""By op, types and numbers: a fact about this machine and torch's build, found once a process."""


def is_probed(func: Any, given: Mapping[str, Any], sliced: frozenset[str], written: frozenset[str]) -> bool:
    """Whether cutting the operands `sliced` anywhere leaves all bits as they are, as far as the probe shows.

    Runs below everything, on small tensors of its own; no byte of the operands is read.

    Args:
        func: The op.
        given: Its arguments by name.
        sliced: Those that are cut, all element by element.
        written: Those of them that it writes.
    """
    key = (func, *((name, _told(value, name in sliced)) for name, value in given.items()))
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = _probe(func, given, sliced, written)
    return found


def _told(value: Any, is_sliced: bool) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, is_sliced, min(value.numel(), 2), min(value.dim(), 1)
    return repr(value)


def _probe(func: Any, given: Mapping[str, Any], sliced: frozenset[str], written: frozenset[str]) -> bool:
    generator = torch.Generator().manual_seed(1)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            values[name] = value
        elif name in sliced or value.numel() > 1:
            values[name] = _random(value.dtype, generator)
        else:  # its own value may be a variable's that is away
            values[name] = torch.tensor([3.0]).div(7.0 if value.dtype.is_floating_point else 1.0).to(value.dtype)
            values[name] = values[name] if value.dim() else values[name][0]
    cut = frozenset(name for name, value in values.items() if isinstance(value, Tensor) and value.numel() > 1)
    whole = _run(func, values, cut, written, [(0, _NUM_ELEMENTS)])
    chooser = random.Random(1)
    points = sorted({0, _NUM_ELEMENTS, *(chooser.randrange(_NUM_ELEMENTS) for _ in range(5))})
    for cuts in (
        [(start, min(start + _PIECE, _NUM_ELEMENTS)) for start in range(0, _NUM_ELEMENTS, _PIECE)],
        list(itertools.pairwise(points)),
    ):
        parts = _run(func, values, cut, written, cuts)
        if len(parts) != len(whole) or not all(map(_same_bits, whole, parts)):
            return False
    return True


def _run(
    func: Any,
    values: Mapping[str, Any],
    cut: frozenset[str],
    written: frozenset[str],
    cuts: Sequence[tuple[int, int]],
) -> list[Tensor]:
    rows: list[list[Tensor]] = []
    for start, stop in cuts:
        given = {name: value[start:stop].clone() if name in cut else _copied(value) for name, value in values.items()}
        result = func(**as_lists(func, given))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        rows.append([*made, *(given[name] for name in sorted(written))])
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def as_lists(func: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as the op takes them: a tensor for which the schema wants a list is a list of one.

    Those of a longer list (`tensors.0`, `tensors.1`, ...) are one again, without those that are None.
    """
    lists = {a.name for a in func._schema.arguments if isinstance(a.type, torch.ListType)}
    made: dict[str, Any] = {}
    for name, value in given.items():
        own, _, place = name.partition(".")
        if place:
            made.setdefault(own, []).extend([] if value is None else [value])
        else:
            made[name] = [value] if name in lists and isinstance(value, Tensor) else value
    return made


def _random(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers of all magnitudes, both signs, zeros and infinities; no NaN, whose payload no op promises."""
    if dtype is torch.bool:
        return torch.randint(0, 2, (_NUM_ELEMENTS,), generator=generator).to(dtype)
    if not dtype.is_floating_point:
        return torch.randint(1, 100, (_NUM_ELEMENTS,), generator=generator).to(dtype)
    numbers = torch.randn(_NUM_ELEMENTS, generator=generator, dtype=torch.float64)
    near = _NUM_ELEMENTS // 2  # about as large as each other, where a joined rounding shows
    spread = torch.randint(-12, 12, (_NUM_ELEMENTS - near,), generator=generator)
    numbers[near:] *= torch.pow(2.0, spread.double())
    numbers[-8:-4] = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=torch.float64)
    numbers[-4:] = torch.tensor([float("inf"), -float("inf"), 1e-40, 65504.0], dtype=torch.float64)
    return numbers.to(dtype)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(torch.equal(first.view(torch.uint8), second.view(torch.uint8)))
