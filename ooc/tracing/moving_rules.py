"""How ops are cut that move bytes and compute nothing, or add in an order that a cut keeps.

They are cut along the outermost dimension of what is large, so that slices lie together. Where that is the very
dimension along which an op joins or places its operands, each of these has a section of the positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ooc.tracing.part_cuts import Along, Cut, Given, Rule, Section, Split, Stretch, Whole, outermost


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do: it is in memory as a whole, and small."""
    return any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True))


def _joined(is_new: bool) -> Rule:
    """`cat`, or, along a new dimension, `stack`."""

    def rule(_func: Any, given: Given, whole: Whole) -> Split | None:
        out, tensors = whole[0], {k: t for k, t in given.items() if k.startswith("tensors") and isinstance(t, Tensor)}
        if out is None or out.numel() == 0 or any(t.dtype != out.dtype or _overlaps(t) for t in tensors.values()):
            return None
        dim = given.get("dim", 0) % out.dim()
        along = outermost(out, but=dim if is_new else None)  # a whole operand would be a large part
        if along is None:
            return None
        cuts: dict[str, Cut] = dict.fromkeys(tensors, Along(dim=along - (is_new and along > dim)))
        if not is_new:
            lengths = [t.shape[dim] if t.numel() else 0 for t in tensors.values()]
            for name, length, stop in zip(tensors, lengths, accumulate(lengths), strict=True):
                if along == dim or not length:
                    cuts[name] = Section(dim=dim, first=stop - length, length=length)
        return Split(length=out.shape[along], operands=cuts, results=[Along(dim=along)])

    return rule


def _slice_gradient(func: Any, given: Given, whole: Whole) -> Split | None:
    """Zeros of the sizes that were sliced, with the gradient where the slice was."""
    out, gradient = whole[0], given["grad_output"]
    along = outermost(out) if out is not None and out.is_contiguous() else None
    if out is None or along is None or gradient.numel() == 0:
        return None
    dim, length = given["dim"] % out.dim(), out.shape[along]
    if along != dim:
        return _by_rows(func, given, ("grad_output",), along, results=[Along(dim=along)], sizes="input_sizes")
    first = min(max(given["start"] + (length if given["start"] < 0 else 0), 0), length)
    if given["step"] != 1 or _overlaps(gradient):
        return None
    own = Section(first=first, length=gradient.shape[dim], dim=dim)

    def part(given: dict[str, Any], start: int, stop: int) -> Tensor:
        made = _zeros(gradient, out, along, stop - start)
        if given["grad_output"] is not None:
            low, high = own.within(start, stop)
            made.narrow(dim, first + low - start, high - low).copy_(given["grad_output"])
        return made

    return Split(length=length, operands={"grad_output": own}, results=[Along(dim=along)], part=part)


def _select_gradient(func: Any, given: Given, whole: Whole) -> Split | None:
    """Zeros of the sizes of which one position was selected, with the gradient there."""
    out, gradient = whole[0], given["grad_output"]
    along = outermost(out) if out is not None and out.is_contiguous() else None
    if out is None or along is None or gradient.numel() == 0:
        return None
    dim = given["dim"] % out.dim()
    if along != dim:
        return _by_rows(
            func, given, ("grad_output",), along, results=[Along(dim=along)], sizes="input_sizes", missing=dim
        )
    place = given["index"] % out.shape[dim]

    def part(given: dict[str, Any], start: int, stop: int) -> Tensor:
        made = _zeros(gradient, out, along, stop - start)
        if start <= place < stop:
            made.select(dim, place - start).copy_(given["grad_output"])
        return made

    return Split(length=out.shape[dim], results=[Along(dim=along)], part=part)


def _zeros(like: Tensor, out: Tensor, along: int, length: int) -> Tensor:
    sizes = [length if dim == along else size for dim, size in enumerate(out.shape)]
    return torch.zeros(sizes, dtype=like.dtype, device="cpu")


def _by_rows(
    func: Any,
    given: Given,
    names: Sequence[str],
    along: int,
    *,
    results: Sequence[Stretch | None],
    sizes: str = "",
    missing: int | None = None,
    written: frozenset[str] = frozenset(),
) -> Split | None:
    """Each position of one dimension for itself.

    Args:
        func: The op.
        given: Its arguments.
        names: Those that have this dimension.
        along: Which.
        results: How results are cut.
        sizes: The argument that has the sizes of the result.
        missing: A dimension that operands do not have.
        written: Operands that the op writes.
    """
    own = along - (missing is not None and along > missing)
    whole = [name for name in names if _overlaps(given[name])]
    if written & set(whole):
        return None

    def part(given: dict[str, Any], start: int, stop: int) -> Any:
        for name in whole:
            given[name] = given[name].narrow(own, start, stop - start)
        if sizes:
            given[sizes] = [stop - start if dim == along else size for dim, size in enumerate(given[sizes])]
        return func(**given)

    cuts = {name: Along(dim=own) for name in names if name not in whole}
    length = (given[sizes] if sizes else given[names[0]].shape)[along]
    return Split(length=length, operands=cuts, written=written, results=results, part=part)


def _by_index(*names: str) -> Rule:
    """Elements gathered from, or scattered along, one dimension: each position of another one for itself.

    Args:
        names: Arguments that have its positions.
    """

    def rule(func: Any, given: Given, whole: Whole) -> Split | None:
        values, dim = given["self"], given["dim"]
        along = outermost(values)
        used: Mapping[str, Tensor] = {name: given[name] for name in names if isinstance(given.get(name), Tensor)}
        if along is None or along == dim % values.dim() or any(t.dim() != values.dim() for t in used.values()):
            return None
        if any(t.shape[along] != values.shape[along] for t in used.values()):
            return None
        adds = "scatter_add" in func._schema.name
        if adds and any(_overlaps(t) for t in used.values()):
            return None  # torch takes another way through an expanded index, in an order of its own
        is_in_place = whole[0] is values
        return _by_rows(
            func,
            given,
            list(used),
            along,
            results=[None if is_in_place else Along(dim=along)],
            written=frozenset({"self"}) if is_in_place else frozenset(),
        )

    return rule


RULES: dict[str, Rule] = {
    "cat": _joined(is_new=False),
    "stack": _joined(is_new=True),
    "slice_backward": _slice_gradient,
    "select_backward": _select_gradient,
    "gather": _by_index("self", "index"),
    "scatter": _by_index("self", "index", "src"),
    "scatter_": _by_index("self", "index", "src"),
    "scatter_add": _by_index("self", "index", "src"),
    "scatter_add_": _by_index("self", "index", "src"),
}
"""By the op's name."""
LISTS = frozenset({"aten::cat", "aten::stack"})
"""Ops that take a list of several tensors."""
