"""Which ops may run in parts, and along what each of their operands and results is cut.

An op is here only where its parts' bits were found to be those of the whole, on the CPU, over random shapes, one and
two threads, and sizes around the widths of vector registers (`tests/tracing/test_part_rules.py`):

* **Element-wise ops of exact arithmetic.** Which loop computes an element, a vector's or the one for what is left at
  the end of a thread's share, depends on where it lies. So these ops are *probed* on this machine before each kind is
  cut for the first time (`is_probed`): where both loops give the same bits, no cut changes any. Functions such as `exp`
  have other bits in both, rarely, and are not in the table.
* Pooling, padding and upsampling by planes, softmax by rows, layer norm by rows, batch norm by channels; an embedding,
  and its gradient, by rows of the table; rows chosen by their numbers (`data[indices]`, `index_select`).
* What moves bytes and computes nothing: lists joined, gradients of slices, elements gathered
  (`ooc.tracing.moving_rules`).
* Ops that touch no bytes, or whose results depend on nothing but sizes.
* convolution_backward's derivative without its input, of which only the shape matters.

Found not to be equal, and not here: convolution and products of matrices. Their libraries choose kernels by sizes; see
ooc/DESIGN.md, "Ops in parts". A recurrent layer's steps hang on each other, and its library's kernel by its sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ooc.tracing import moving_rules
from ooc.tracing.part_cuts import Along, Blocks, Cut, Given, Rule, Split, Stretch, Whole, outermost
from ooc.tracing.part_probes import as_lists, is_probed

_GRANULE = 1024
"""Of element-wise ops, in elements: parts begin at whole vectors, and at whole blocks of the store's file."""

_COMPOSITE = "CompositeImplicitAutograd"
"""An op that is made of other ops may copy after all."""

_FLOATS = (torch.float32, torch.float64)


def is_view(func: Any) -> bool:
    """Whether an op touches no bytes of its operands: it makes a view of one."""
    return bool(func.is_view) and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def split_of(func: Any, given: Given, whole: Whole) -> Split | None:
    """How to run this call in parts; None: only as a whole. The bytes of its operands, which may be away, are not read.

    Args:
        func: The op.
        given: Its arguments. A list of one tensor counts as that tensor.
        whole: Its results without data.
    """
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    rule = _RULES.get(name)
    if rule is not None:
        split = rule(func, given, whole)
        # A part would resize `out=` to its own sizes; who fills results that are in memory as a whole does not.
        return split if split is None or split.fill is not None or not _writes_out(func) else None
    if name.removeprefix("_foreach_").removesuffix("_") in _ELEMENT_WISE or name in _FUSED:
        return _element_wise(func, given, whole)
    return None


# -- element-wise ops

_ELEMENT_WISE = frozenset(
    {
        *("abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "clamp"),
        *("clamp_max", "clamp_min", "clone", "copy", "div", "eq", "fill", "ge", "gt", "hardtanh", "hardtanh_backward"),
        *("le", "leaky_relu", "leaky_relu_backward", "lerp", "logical_and", "logical_not", "logical_or", "lt"),
        *("masked_fill", "maximum", "minimum", "mse_loss_backward", "mul", "ne", "neg", "reciprocal", "relu", "rsqrt"),
        *("rsub", "sgn", "sigmoid_backward", "sign", "sqrt", "square", "sub", "tanh_backward", "threshold"),
        *("threshold_backward", "where", "zero", "_to_copy"),
    }
)
_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
_FORMAT_ARGUMENTS = frozenset({"memory_format", "layout", "device", "pin_memory", "non_blocking"})
_CONTIGUOUS_ONLY = frozenset({"mse_loss_backward", "hardtanh_backward"})
"""What torch says of strides without data is not so of others."""
_NOT_READ = frozenset({"copy_", "fill_", "zero_"})
"""In-place ops that do not read what they write."""


def _element_wise(func: Any, given: Given, whole: Whole) -> Split | None:
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    base = func._schema.name.removeprefix("aten::").removeprefix("_foreach_")
    if base in _CONTIGUOUS_ONLY and not all(t.is_contiguous() for t in tensors.values()):
        return None
    written = frozenset(_written_names(func) & tensors.keys())
    out = next((t for t in whole if t is not None), None)
    if out is None:  # a list op that returns nothing
        out = next((tensors[name] for name in written if tensors[name].numel() > 1), None)
    if out is None or out.numel() < 2 or _writes_out(func):
        return None
    sliced = {name: value for name, value in tensors.items() if value.numel() > 1}
    shape, stride = out.shape, out.stride()
    cuts: dict[str, Cut]
    result: Cut
    fits_flat = all(t.dim() < 2 for name, t in tensors.items() if name not in sliced)
    if fits_flat and _is_dense(out) and all(t.shape == shape and t.stride() == stride for t in sliced.values()):
        length, granule, result = out.numel(), _GRANULE, Blocks()
        cuts = dict.fromkeys(sliced, result)
    else:
        dim = outermost(out)
        assert dim is not None  # it has two elements
        length, granule, result, cuts = shape[dim], 1, Along(dim=dim), {}
        for name, value in sliced.items():
            own = dim - (out.dim() - value.dim())
            if own >= 0 and value.shape[own] == length:
                cuts[name] = Along(dim=own)
            elif own >= 0 and value.shape[own] != 1:
                return None
    if not written <= cuts.keys() or any(t is not None and t.shape != shape for t in whole):
        return None
    if not is_probed(func, {k: v for k, v in given.items() if k not in _FORMAT_ARGUMENTS}, frozenset(cuts), written):
        return None
    return Split(
        length=length,
        granule=granule,
        operands=cuts,
        written=written,
        overwritten=written if base in _NOT_READ else frozenset(),
        results=[result if t is not None and not _is_operand(t, tensors) else None for t in whole],
        part=functools.partial(_without_format, func),
    )


def _power(func: Any, given: Given, whole: Whole) -> Split | None:
    """A power that is a copy or a product in both loops; others are functions such as `exp`."""
    exponent = given.get("exponent")
    return _element_wise(func, given, whole) if isinstance(exponent, int | float) and exponent in (1, 2, 3) else None


def _without_format(func: Any, given: dict[str, Any], _start: int, _stop: int) -> Any:
    return func(**{name: value for name, value in given.items() if name not in _FORMAT_ARGUMENTS})


# -- by planes, and by rows


def _by_planes(*names: str, sizes: str = "") -> Rule:
    """Of (N, C, H, W) each (H, W) for itself; `sizes` names an argument with the sizes of the result."""

    def rule(func: Any, given: Given, whole: Whole) -> Split | None:
        tensors = [given[name] for name in names]
        found = [*tensors, *whole]
        if any(t is None or t.dim() != 4 or not t.is_contiguous() or t.numel() == 0 for t in found):
            return None
        if tensors[0].dtype not in _FLOATS or len({t.shape[:2] for t in found}) > 1:
            return None

        def part(given: dict[str, Any], start: int, stop: int) -> Any:
            return func(**(given | ({sizes: [1, stop - start, *given[sizes][2:]]} if sizes else {})))

        return Split(
            length=tensors[0].shape[0] * tensors[0].shape[1],
            operands={name: _planes(tensor) for name, tensor in zip(names, tensors, strict=True)},
            results=[_planes(t) for t in whole if t is not None],
            part=part,
        )

    return rule


def _by_images(name: str) -> Rule:
    """Of (N, C, H, W) each (C, H, W) for itself."""

    def rule(func: Any, given: Given, whole: Whole) -> Split | None:
        found, out = _by_planes(name)(func, given, whole), whole[0]
        if found is None or out is None:
            return None
        return Split(length=out.shape[0], operands={name: _rows(given[name])}, results=[_rows(out)])

    return rule


def _planes(tensor: Tensor) -> Blocks:
    return Blocks(unit=math.prod(tensor.shape[2:]), lead=(1,), tail=tuple(tensor.shape[2:]))


def _padding(func: Any, given: Given, whole: Whole) -> Split | None:
    return _by_planes("self")(func, given, whole) if len(given["pad"]) <= 4 else None


def _rows(tensor: Tensor) -> Blocks:
    return Blocks(unit=math.prod(tensor.shape[1:]), tail=tuple(tensor.shape[1:]))


def _softmax(*names: str) -> Rule:
    def rule(_func: Any, given: Given, whole: Whole) -> Split | None:
        tensors = [given[name] for name in names]
        found = [*tensors, whole[0]]
        first = tensors[0]
        if any(t is None or t.dim() < 2 or not t.is_contiguous() or t.shape != first.shape for t in found):
            return None
        if first.dtype not in _FLOATS or any(t is not None and t.dtype != first.dtype for t in found):
            return None
        if given["dim"] % first.dim() != first.dim() - 1:
            return None  # vectors lie across rows, and begin where a thread's share does
        return Split(length=first.shape[0], operands=dict.fromkeys(names, _rows(first)), results=[_rows(first)])

    return rule


def _layer_norm(_func: Any, given: Given, whole: Whole) -> Split | None:
    x, normalized = given["input"], given["normalized_shape"]
    if x.dtype not in _FLOATS or not x.is_contiguous() or len(normalized) >= x.dim() or x.numel() == 0:
        return None
    if any(t is None or not t.is_contiguous() or t.dtype != x.dtype for t in whole):
        return None
    return Split(length=x.shape[0], operands={"input": _rows(x)}, results=[_rows(t) for t in whole if t is not None])


# -- batch norm by channels


def _batch_norm(*names: str) -> Rule:
    def rule(_func: Any, given: Given, whole: Whole) -> Split | None:
        tensors = [given[name] for name in names]
        x = given["input"]
        if x.dim() < 3 or math.prod(x.shape[2:]) < 2 or x.numel() == 0 or x.dtype not in _FLOATS:
            return None  # of single values a channel is no stretch of memory: torch takes it for channels last
        if any(not t.is_contiguous() or t.shape != x.shape or t.dtype != x.dtype for t in tensors):
            return None
        by_channel = {k: v for k, v in given.items() if isinstance(v, Tensor) and k not in names}
        if any(t.dim() != 1 or t.dtype != x.dtype or t.numel() not in (0, x.shape[1]) for t in by_channel.values()):
            return None
        results: list[Stretch | None] = []
        for t in whole:
            if t is None or t.numel() == 0 or (t.dim() == 1 and given.get("training") is False):
                results.append(None)  # of an evaluation nothing is saved
            elif t.shape == x.shape and t.is_contiguous():
                results.append(Along(dim=1))
            elif t.dim() == 1:
                results.append(Along(dim=0))
            else:
                return None
        statistics = {"running_mean", "running_var"} if given.get("training") else set()
        return Split(
            length=x.shape[1],
            operands=dict.fromkeys(names, Along(dim=1))
            | {name: Along(dim=0) for name, t in by_channel.items() if t.numel()},
            written=frozenset(statistics & by_channel.keys()),
            results=results,
        )

    return rule


# -- a table's rows


def _gathered(table: str, chosen: str, *, wraps: bool = False) -> Rule:
    """The rows of a table with these numbers, in their order; with `wraps` negative ones count from its end."""

    def rule(func: Any, given: Given, whole: Whole) -> Split | None:
        rows, numbers, out = given[table], given[chosen], whole[0]
        if given.get("dim", 0) != 0 or rows.dim() == 0 or not rows.is_contiguous() or rows.numel() == 0:
            return None
        if numbers.dtype not in (torch.int32, torch.int64) or numbers.numel() == 0:
            return None  # a mask, for one: how many rows it chooses depends on its bytes
        if out is None or not out.is_contiguous():
            return None
        num_rows = rows.shape[0]

        def fill(given: dict[str, Any], results: Sequence[Tensor], start: int, stop: int) -> None:
            found = given[chosen].reshape(-1)
            if start == 0 and bool(((found < (-num_rows if wraps else 0)) | (found >= num_rows)).any()):
                no_memory = given[table].new_empty(1).expand(rows.shape)
                func(**as_lists(func, given | {table: no_memory}))  # raises what the whole op does
            found = torch.where(found < 0, found + num_rows, found) if wraps else found
            mine = ((found >= start) & (found < stop)).nonzero().view(-1)
            results[0].view(-1, *rows.shape[1:])[mine] = given[table][found[mine] - start]

        return Split(length=num_rows, operands={table: _rows(rows)}, fill=fill)

    return rule


def _embedding_gradient(func: Any, given: Given, whole: Whole) -> Split | None:
    gradient, num_rows = given["grad_output"], given["num_weights"]
    out = whole[0]
    if out is None or not out.is_contiguous() or not gradient.is_contiguous() or gradient.dtype not in _FLOATS:
        return None

    def part(given: dict[str, Any], start: int, stop: int) -> Any:
        indices, padding = given["indices"].reshape(-1), given["padding_idx"]
        mine = ((indices >= start) & (indices < stop)).nonzero().view(-1)
        rows = given["grad_output"].reshape(-1, out.shape[1])[mine]
        own = padding - start if start <= padding < stop else -1
        return func(rows, indices[mine] - start, stop - start, own, given["scale_grad_by_freq"])

    return Split(length=num_rows, results=[_rows(out)], part=part)


# -- what reads nothing


def _filled(value: float | None = None, name: str = "") -> Rule:
    """Every element is the same number: `value`, or the argument `name`."""

    def rule(_func: Any, given: Given, whole: Whole) -> Split | None:
        out = whole[0]
        if out is None or out.numel() == 0 or not _is_dense(out):
            return None
        filler = given[name] if name else value
        if isinstance(filler, Tensor):
            return None

        def part(_given: dict[str, Any], start: int, stop: int) -> Any:
            return torch.full((stop - start,), filler, dtype=out.dtype, device="cpu")

        return Split(length=out.numel(), granule=_GRANULE, unread=frozenset({"self"}), results=[Blocks()], part=part)

    return rule


def _derivative(_func: Any, given: Given, _whole: Whole) -> Split | None:
    """convolution_backward's derivative: the input's bytes do not matter."""
    mask, x = given["output_mask"], given["input"]
    if list(mask) != [True, False, False] or not x.is_contiguous() or x.dtype not in _FLOATS:
        return None
    return Split(unread=frozenset({"input"}))


_RULES: dict[str, Rule] = {
    **moving_rules.RULES,
    "pow": _power,
    "pow_": _power,
    "max_pool2d_with_indices": _by_planes("self"),
    "max_pool2d_with_indices_backward": _by_planes("grad_output", "self", "indices"),
    "avg_pool2d": _by_planes("self"),
    "avg_pool2d_backward": _by_planes("grad_output", "self"),
    "_adaptive_avg_pool2d": _by_planes("self"),
    "_adaptive_avg_pool2d_backward": _by_planes("grad_output", "self"),
    "reflection_pad2d": _by_planes("self"),
    "reflection_pad2d_backward": _by_planes("grad_output", "self"),
    "replication_pad2d": _by_planes("self"),
    "constant_pad_nd": _padding,
    "upsample_nearest2d": _by_planes("self"),
    "upsample_nearest2d_backward": _by_planes("grad_output", sizes="input_size"),
    "upsample_bilinear2d": _by_images("self"),
    "upsample_bilinear2d_backward": _by_planes("grad_output", sizes="input_size"),
    "_softmax": _softmax("self"),
    "_log_softmax": _softmax("self"),
    "_softmax_backward_data": _softmax("grad_output", "output"),
    "_log_softmax_backward_data": _softmax("grad_output", "output"),
    "native_layer_norm": _layer_norm,
    "native_batch_norm": _batch_norm("input"),
    "native_batch_norm_backward": _batch_norm("grad_out", "input"),
    "embedding": _gathered("weight", "indices"),
    "index": _gathered("self", "indices", wraps=True),
    "index_select": _gathered("self", "index"),
    "embedding_dense_backward": _embedding_gradient,
    "convolution_backward": _derivative,
    "zeros": _filled(0),
    "zeros_like": _filled(0),
    "new_zeros": _filled(0),
    "ones": _filled(1),
    "ones_like": _filled(1),
    "new_ones": _filled(1),
    "full": _filled(name="fill_value"),
    "full_like": _filled(name="fill_value"),
}


def _written_names(func: Any) -> set[str]:
    return {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}


def _writes_out(func: Any) -> bool:
    """Whether the op is one that is given where its results go (`out=`)."""
    return any(argument.is_out for argument in func._schema.arguments)


def _is_operand(tensor: Tensor, operands: Mapping[str, Tensor]) -> bool:
    return any(tensor is operand for operand in operands.values())


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a range of its storage, in whatever order of dimensions."""
    reach = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != reach:
            return False
        reach *= length
    return True
