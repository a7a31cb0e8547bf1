"""Parts have the bits of the whole: every rule over random shapes, values, cuts and numbers of threads."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ooc.dispatch.ops_in_parts import without_data
from ooc.tracing.part_cuts import Along, Cut, Section, Split, Stretch
from ooc.tracing.part_probes import as_lists
from ooc.tracing.part_rules import split_of
from tests.thinned import thinned

aten = torch.ops.aten
NUM_SHAPES = 12
EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 257, 1025)
"""Around the widths of vector registers, in elements."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same(first: Tensor, second: Tensor) -> bool:
    """Bit for bit, a NaN's payload too; sizes, strides and type as well."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    a, b = (t.contiguous().view(-1) for t in (first, second))
    return a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def slice_of(tensor: Tensor, cut: Stretch, start: int, stop: int) -> Tensor:
    if isinstance(cut, Along):
        return tensor.narrow(cut.dim, start, stop - start)
    offset = tensor.storage_offset() + start * cut.unit
    return tensor.as_strided(((stop - start) * cut.unit,), (1,), offset)


def copy_of(tensor: Tensor, cut: Cut, start: int, stop: int) -> Tensor | None:
    if isinstance(cut, Section):
        low, high = cut.within(start, stop)
        return tensor.narrow(cut.dim, low, high - low).clone() if low < high else None
    made = slice_of(tensor, cut, start, stop).clone()
    return made if isinstance(cut, Along) else made.view(*cut.lead, stop - start, *cut.tail)


def in_parts(func: Any, split: Split, given: dict[str, Any], whole: list[Any], cuts: list[int]) -> list[Any]:
    """As `ooc.dispatch.part_runs`, in ordinary memory: results, and what is written. `given` is changed."""
    results = [
        torch.full_like(torch.empty_strided(w.shape, w.stride(), dtype=w.dtype), 77)
        if isinstance(w, Tensor) and w.device.type == "meta"
        else w
        for w in whole
    ]
    for start, stop in itertools.pairwise(cuts):
        copies = {name: copy_of(given[name], cut, start, stop) for name, cut in split.operands.items()}
        for name in split.overwritten:
            copies[name].fill_(55)
        if split.fill is not None:
            split.fill(given | copies, results, start, stop)
            continue
        arguments = as_lists(func, given | copies)
        returned = split.part(arguments, start, stop) if split.part is not None else func(**arguments)
        made = tree_leaves(returned)
        for index, cut in enumerate(split.results):
            if cut is None:
                if isinstance(whole[index], Tensor) and whole[index].device.type == "meta":
                    results[index] = made[index]
                continue
            target = slice_of(results[index], cut, start, stop)
            target.copy_(made[index].reshape(target.shape))
        for name in split.written:
            way = split.operands[name]
            assert not isinstance(way, Section)
            target = slice_of(given[name], way, start, stop)
            target.copy_(copies[name].reshape(target.shape))
    return [*results, *(given[name] for name in sorted(split.written))]


def check(func: Any, given: dict[str, Any], chooser: random.Random, *, must_split: bool = True) -> bool:
    """Compare the whole op with the op in parts, cut at random. Whether the rule cuts it at all."""
    torch.set_num_threads(chooser.choice((1, 2)))
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    whole, _ = without_data(func, given, tensors)
    split = split_of(func, given, whole)
    if split is None or split.length < 2:
        assert not must_split, (func, {k: getattr(v, "shape", v) for k, v in given.items()})
        return False
    copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    for name, value in tensors.items():
        assert copied[name].stride() == value.stride() or not value.is_contiguous()
        copied[name] = _with_strides(value)
    own = {name: _with_strides(value) if isinstance(value, Tensor) else value for name, value in given.items()}
    expected_results = tree_leaves(func(**as_lists(func, own)))
    expected = [*expected_results, *(own[name] for name in sorted(split.written))]
    for index, (made, told) in enumerate(zip(expected_results, whole, strict=True)):
        if (
            (index >= len(split.results) or split.results[index] is not None)
            and isinstance(told, Tensor)
            and told.device.type == "meta"
        ):
            assert made.stride() == told.stride(), (func, made.stride(), told.stride())
    length = split.length
    points = {0, length, *(chooser.randrange(length + 1) for _ in range(chooser.choice((1, 2, 5))))}
    whole = [own_of(w, given, copied) for w in whole]
    got = in_parts(func, split, copied, whole, sorted(points))
    for index, (wanted, found) in enumerate(zip(expected, got, strict=True)):
        if isinstance(wanted, Tensor):
            assert same(wanted, found), (func, index, torch.get_num_threads(), sorted(points), wanted.shape)
    return True


def own_of(whole: Any, given: dict[str, Any], copied: dict[str, Any]) -> Any:
    for name, value in given.items():
        if whole is value and isinstance(value, Tensor):
            return copied[name]
    return whole


def _with_strides(tensor: Tensor) -> Tensor:
    """A copy of the same sizes and strides."""
    if tensor.numel() == 0:
        return tensor.clone()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    made.as_strided((span,), (1,)).copy_(tensor.as_strided((span,), (1,), tensor.storage_offset()))
    return made


def numel(chooser: random.Random) -> int:
    return chooser.choice(EDGES) * chooser.choice((1, 1, 3, 64, 1000, 5000)) + chooser.choice((0, 0, 1, 5))


def numbers(chooser: random.Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(*shape, dtype=torch.float64)
    if chooser.random() < 0.3:
        made *= torch.pow(2.0, torch.randint(-30, 30, shape).double())
    return made.to(dtype)


def shaped(chooser: random.Random, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tensors of one shape: flat, channels last, transposed, or with one that is broadcast."""
    form = chooser.choice(("flat", "flat", "2d", "last", "transposed", "broadcast"))
    if form == "flat":
        n = max(numel(chooser), 2)
        return [numbers(chooser, n, dtype=dtype) for _ in range(count)]
    b, c, h, w = (chooser.choice((2, 3, 5, 8)) for _ in range(4))
    made = [numbers(chooser, b, c, h * 7, w, dtype=dtype) for _ in range(count)]
    if form == "last":
        return [t.contiguous(memory_format=torch.channels_last) for t in made]
    if form == "transposed":
        return [t.transpose(0, 2) for t in made]
    if form == "broadcast" and count > 1:
        made[-1] = (
            numbers(chooser, c, 1, 1, dtype=dtype)
            if chooser.random() < 0.5
            else made[-1].transpose(0, 1).contiguous().transpose(0, 1)
        )
    return made


ELEMENT_WISE: dict[Any, Callable[[random.Random, torch.dtype], dict[str, Any]]] = {}


def _two(func: Any, *, alpha: bool = False) -> None:
    def make(chooser: random.Random, dtype: torch.dtype) -> dict[str, Any]:
        a, b = shaped(chooser, 2, dtype)
        return {"self": a, "other": b} | ({"alpha": chooser.choice((1, -0.37, 3))} if alpha else {})

    ELEMENT_WISE[func] = make


def _names(func: Any, names: str, more: Callable[[random.Random], dict[str, Any]] = lambda _: {}) -> None:
    def make(chooser: random.Random, dtype: torch.dtype) -> dict[str, Any]:
        found = names.split()
        tensors = shaped(chooser, len(found), dtype)
        return dict(zip(found, tensors, strict=True)) | more(chooser)

    ELEMENT_WISE[func] = make


_two(aten.add.Tensor, alpha=True)
_two(aten.sub.Tensor, alpha=True)
_two(aten.mul.Tensor)
_two(aten.div.Tensor)
_two(aten.maximum.default)
_two(aten.lt.Tensor)
_two(aten.add_.Tensor, alpha=True)
_two(aten.mul_.Tensor)
_two(aten.div_.Tensor)
_names(aten.relu.default, "self")
_names(aten.relu_.default, "self")
_names(aten.neg.default, "self")
_names(aten.sqrt.default, "self")
_names(aten.sqrt_.default, "self")
_names(aten.rsqrt.default, "self")
_names(aten.reciprocal.default, "self")
_names(
    aten.clone.default, "self", lambda c: {"memory_format": c.choice((torch.preserve_format, torch.contiguous_format))}
)
_names(aten.copy_.default, "self src")
_names(aten.zero_.default, "self")
_names(aten.fill_.Scalar, "self", lambda c: {"value": c.random()})
_names(aten.mul.Scalar, "self", lambda c: {"other": c.uniform(-2, 2)})
_names(aten.mul_.Scalar, "self", lambda c: {"other": c.uniform(-2, 2)})
_names(aten.add.Scalar, "self", lambda c: {"other": c.uniform(-2, 2)})
_names(aten.clamp.default, "self", lambda c: {"min": -0.5, "max": c.random()})
_names(aten.clamp_min.default, "self", lambda c: {"min": 0.0})
_names(aten.hardtanh.default, "self", lambda c: {"min_val": 0.0, "max_val": 6.0})
_names(aten.hardtanh_backward.default, "grad_output self", lambda c: {"min_val": 0.0, "max_val": 6.0})
_names(aten.leaky_relu.default, "self", lambda c: {"negative_slope": 0.2})
_names(aten.leaky_relu_backward.default, "grad_output self", lambda c: {"negative_slope": 0.2, "self_is_result": False})
_names(aten.threshold_backward.default, "grad_output self", lambda c: {"threshold": 0.0})
_names(aten.sigmoid_backward.default, "grad_output output")
_names(aten.tanh_backward.default, "grad_output output")
_names(aten.mse_loss_backward.default, "grad_output self target", lambda c: {"reduction": c.choice((0, 1, 2))})
_names(aten.addcmul.default, "self tensor1 tensor2", lambda c: {"value": c.uniform(-2, 2)})
_names(aten.addcmul_.default, "self tensor1 tensor2", lambda c: {"value": 1 - 0.999})
_names(aten.addcdiv.default, "self tensor1 tensor2", lambda c: {"value": c.uniform(-2, 2)})
_names(aten.addcdiv_.default, "self tensor1 tensor2", lambda c: {"value": -1e-3 / (1 - 0.9 ** c.randrange(1, 50))})
_names(aten.lerp.Scalar, "self end", lambda c: {"weight": c.choice((1 - 0.9, 0.7))})
_names(aten.lerp_.Scalar, "self end", lambda c: {"weight": c.choice((1 - 0.9, 0.7))})
_names(aten.where.self, "self other", lambda c: {})
_names(aten._foreach_addcdiv_.Scalar, "self tensor1 tensor2", lambda c: {"value": -0.01})
_names(aten._foreach_lerp_.Scalar, "self tensors1", lambda c: {"weight": 0.1})
_names(aten._foreach_mul_.Scalar, "self", lambda c: {"scalar": 0.9})
_names(aten._foreach_sqrt.default, "self")
_names(aten._foreach_add.List, "self other", lambda c: {"alpha": 0.3})


def _condition(make: Callable[[random.Random, torch.dtype], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda chooser, dtype: (given := make(chooser, dtype)) | {"condition": given["self"] > 0}


ELEMENT_WISE[aten.where.self] = _condition(ELEMENT_WISE[aten.where.self])
for _func in (aten.eq, aten.ne, aten.le, aten.ge, aten.gt):
    _two(_func.Tensor)
    _names(_func.Scalar, "self", lambda c: {"other": 0.25})
for _func in (aten.minimum, aten.logical_and, aten.logical_or):
    _two(_func.default)
for _func in (aten.abs, aten.sgn, aten.sign, aten.logical_not, aten.zeros_like, aten.ones_like):
    _names(_func.default, "self")
_names(aten.full_like.default, "self", lambda c: {"fill_value": 0.3})
_names(aten.threshold.default, "self", lambda c: {"threshold": 0.1, "value": -3.0})
_names(aten.rsub.Scalar, "self", lambda c: {"other": 1.0, "alpha": c.choice((1, 0.3))})
_names(aten.clamp_max.default, "self", lambda c: {"max": 0.3})
_names(aten.square.default, "self")
for _func in (aten.pow.Tensor_Scalar, aten.pow_.Scalar):
    ELEMENT_WISE[_func] = lambda chooser, dtype: {
        "self": numbers(chooser, numel(chooser), dtype=dtype),
        "exponent": chooser.choice((1, 2.0, 3)),
    }
_names(aten._to_copy.default, "self", lambda c: {"dtype": c.choice((torch.float64, torch.float16, torch.int32))})
ELEMENT_WISE[aten.masked_fill.Scalar] = lambda chooser, dtype: (
    {"self": (found := shaped(chooser, 1, dtype)[0]), "mask": found > 0, "value": 0.5}
)
for _func in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor):
    ELEMENT_WISE[_func.Tensor] = lambda chooser, _dtype: (
        {name: t > 0 for name, t in zip(("self", "other"), shaped(chooser, 2), strict=True)}
    )


def _fused(chooser: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    n = max(numel(chooser), 2)
    names = ("self", "grads", "exp_avgs", "exp_avg_sqs")
    found = {name: numbers(chooser, n, dtype=dtype) for name in names}
    found["exp_avg_sqs"] = found["exp_avg_sqs"].abs()
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    more = {"max_exp_avg_sqs": [], "state_steps": torch.tensor(3.0), "amsgrad": False, "maximize": False}
    return found | settings | more


ELEMENT_WISE[aten._fused_adam_.default] = _fused
ELEMENT_WISE[aten._fused_adamw_.default] = _fused


MAY_DIFFER = {aten._fused_adam_.default, aten._fused_adamw_.default}
"""Where vectors and single elements may have other bits, by torch's build: then they are not cut."""


@thinned("func,dtype", list(ELEMENT_WISE), [torch.float32, torch.float64, torch.bfloat16])
def test_element_wise(func: Any, dtype: torch.dtype) -> None:
    chooser = random.Random(str(func))
    torch.manual_seed(1)
    cut = [check(func, ELEMENT_WISE[func](chooser, dtype), chooser, must_split=False) for _ in range(NUM_SHAPES)]
    if dtype is torch.float32 and func not in MAY_DIFFER:
        assert any(cut), "never cut: not exact on this machine?"


def _image(chooser: random.Random, dtype: torch.dtype) -> Tensor:
    b, c = chooser.choice((1, 1, 2, 3, 5)), chooser.choice((1, 2, 3, 16, 17))
    return numbers(chooser, b, c, chooser.randint(5, 40), chooser.randint(5, 40), dtype=dtype)


def _max_pool(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    x, k, s = _image(chooser, dtype), chooser.choice((2, 3)), chooser.choice((1, 2))
    more = {
        "kernel_size": [k, k],
        "stride": [s, s],
        "padding": [k // 2, 0],
        "dilation": [1, 1],
        "ceil_mode": chooser.random() < 0.5,
    }
    yield aten.max_pool2d_with_indices.default, {"self": x, **more}
    y, indices = aten.max_pool2d_with_indices(x, *more.values())
    gradient = {"grad_output": numbers(chooser, *y.shape, dtype=dtype), "self": x, **more, "indices": indices}
    yield aten.max_pool2d_with_indices_backward.default, gradient


def _avg_pool(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    x, k, s = _image(chooser, dtype), chooser.choice((2, 3)), chooser.choice((1, 2))
    more = {
        "kernel_size": [k, k],
        "stride": [s, s],
        "padding": [k // 2, 0],
        "ceil_mode": False,
        "count_include_pad": chooser.random() < 0.5,
        "divisor_override": None,
    }
    yield aten.avg_pool2d.default, {"self": x, **more}
    y = aten.avg_pool2d(x, *more.values())
    yield aten.avg_pool2d_backward.default, {"grad_output": numbers(chooser, *y.shape, dtype=dtype), "self": x, **more}
    size = [chooser.randint(1, 7), chooser.randint(1, 7)]
    yield aten._adaptive_avg_pool2d.default, {"self": x, "output_size": size}
    gradient = numbers(chooser, *x.shape[:2], *size, dtype=dtype)
    yield aten._adaptive_avg_pool2d_backward.default, {"grad_output": gradient, "self": x}


def _pad(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    x, padding = _image(chooser, dtype), [chooser.randint(0, 4) for _ in range(4)]
    yield aten.reflection_pad2d.default, {"self": x, "padding": padding}
    y = aten.reflection_pad2d(x, padding)
    gradient = {"grad_output": numbers(chooser, *y.shape, dtype=dtype), "self": x, "padding": padding}
    yield aten.reflection_pad2d_backward.default, gradient
    yield aten.replication_pad2d.default, {"self": x, "padding": padding}
    yield aten.constant_pad_nd.default, {"self": x, "pad": padding, "value": 0.5}


def _upsample(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    x = _image(chooser, dtype)
    size = [x.shape[2] * 2, x.shape[3] * chooser.choice((1, 2, 3)) + chooser.choice((0, 0, 1))]
    scales = chooser.choice(({}, {"scales_h": 2.0, "scales_w": size[1] / x.shape[3]}))
    gradient = {
        "grad_output": numbers(chooser, *x.shape[:2], *size, dtype=dtype),
        "output_size": size,
        "input_size": list(x.shape),
    }
    yield aten.upsample_nearest2d.default, {"self": x, "output_size": size, **scales}
    yield aten.upsample_nearest2d_backward.default, gradient | scales
    aligned = {"align_corners": chooser.random() < 0.5}
    yield aten.upsample_bilinear2d.default, {"self": x, "output_size": size, **aligned, **scales}
    yield aten.upsample_bilinear2d_backward.default, gradient | aligned | scales


def _softmax(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    shape = chooser.choice(
        ((chooser.choice(EDGES), numel(chooser) % 3000 + 1), (7, chooser.choice(EDGES), chooser.choice(EDGES)))
    )
    x, y = (numbers(chooser, *shape, dtype=dtype) for _ in range(2))
    dim = chooser.choice(range(1, len(shape)))
    for name in ("_softmax", "_log_softmax"):
        yield getattr(aten, name).default, {"self": x, "dim": dim - len(shape), "half_to_float": False}
        backward = getattr(aten, f"{name}_backward_data").default
        yield (
            backward,
            {"grad_output": y, "output": getattr(aten, name)(x, dim, False), "dim": dim, "input_dtype": dtype},
        )


def _layer_norm(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    n = chooser.choice(EDGES[1:])
    x, weight, bias = (
        numbers(chooser, chooser.choice(EDGES), 3, n, dtype=dtype),
        *(numbers(chooser, n, dtype=dtype) for _ in range(2)),
    )
    yield (
        aten.native_layer_norm.default,
        {"input": x, "normalized_shape": [n], "weight": weight, "bias": bias, "eps": 1e-5},
    )


def _batch_norm(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    x = _image(chooser, dtype)
    if chooser.random() < 0.2:
        x = numbers(chooser, chooser.choice(EDGES), chooser.choice(EDGES[1:]), dtype=dtype)
    elif chooser.random() < 0.3:
        x = x.contiguous(memory_format=torch.channels_last)
    c = x.shape[1]
    weight, bias, mean = (numbers(chooser, c, dtype=dtype) for _ in range(3))
    variance = numbers(chooser, c, dtype=dtype).abs() + 0.1
    training = chooser.random() < 0.7
    statistics = {"running_mean": mean, "running_var": variance} if not training or chooser.random() < 0.7 else {}
    affine = {"weight": weight, "bias": bias} if chooser.random() < 0.7 else {}
    # The schema wants all of its tensors, if only as None.
    given = {"weight": None, "bias": None, "running_mean": None, "running_var": None} | affine | statistics
    given = {"input": x} | given | {"training": training, "momentum": 0.1, "eps": 1e-5}
    yield aten.native_batch_norm.default, given
    copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    _, save_mean, save_invstd = aten.native_batch_norm(**copied)
    yield (
        aten.native_batch_norm_backward.default,
        {
            "grad_out": numbers(chooser, *x.shape, dtype=dtype),
            "input": x,
            "weight": given["weight"],
            **{name: given[name] for name in ("running_mean", "running_var")},
            "save_mean": save_mean,
            "save_invstd": save_invstd,
            "train": training,
            "eps": 1e-5,
            "output_mask": [True, bool(affine), bool(affine)],
        },
    )


def _embedding(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    rows, width = chooser.choice(EDGES[1:]), chooser.choice(EDGES)
    indices = torch.randint(0, rows, (chooser.choice(EDGES), 3), dtype=chooser.choice((torch.int64, torch.int32)))
    yield aten.embedding.default, {"weight": numbers(chooser, rows, width, dtype=dtype), "indices": indices}
    yield (
        aten.embedding_dense_backward.default,
        {
            "grad_output": numbers(chooser, *indices.shape, width, dtype=dtype),
            "indices": indices,
            "num_weights": rows,
            "padding_idx": chooser.choice((-1, 0, rows - 1)),
            "scale_grad_by_freq": chooser.random() < 0.3,
        },
    )


def _rows(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    rows, tail = chooser.choice(EDGES[1:]), [chooser.choice(EDGES) for _ in range(chooser.randint(0, 2))]
    table, integer = numbers(chooser, rows, *tail, dtype=dtype), chooser.choice((torch.int64, torch.int32))
    chosen = torch.randint(-rows, rows, [chooser.choice(EDGES) for _ in range(chooser.randint(1, 2))], dtype=integer)
    yield aten.index.Tensor, {"self": table, "indices": chosen}
    yield aten.index_select.default, {"self": table, "dim": 0, "index": chosen.reshape(-1).abs() % rows}


def _sizes(chooser: random.Random, least: int = 1) -> list[int]:
    return [chooser.choice((1, 2, 3, 5, 17, 40)) for _ in range(chooser.randint(least, 4))]


def _lists(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    sizes, dim = _sizes(chooser), chooser.randint(-1, 0)
    dim = chooser.randrange(len(sizes)) + dim * len(sizes)

    def of(length: int) -> Tensor:
        own = [length if place == dim % len(sizes) else size for place, size in enumerate(sizes)]
        made = numbers(chooser, *own, dtype=dtype)
        if chooser.random() < 0.3:
            made = made.transpose(0, -1).contiguous().transpose(0, -1)
        return made.contiguous(memory_format=torch.channels_last) if chooser.random() < 0.3 and len(own) == 4 else made

    joined = [of(chooser.choice((0, 1, 2, 7, 33))) for _ in range(chooser.randint(2, 6))]
    if chooser.random() < 0.2:
        joined.insert(1, numbers(chooser, 0, dtype=dtype))
    yield aten.cat.default, {**{f"tensors.{i}": t for i, t in enumerate(joined)}, "dim": dim}
    stacked = [of(5) for _ in range(chooser.randint(2, 6))]
    place = chooser.randint(-len(sizes) - 1, len(sizes))
    yield aten.stack.default, {**{f"tensors.{i}": t for i, t in enumerate(stacked)}, "dim": place}


def _of_views(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    sizes = _sizes(chooser, 2)
    dim, x = chooser.randrange(len(sizes)), torch.empty(sizes, device="meta")
    length = sizes[dim]
    start = chooser.randrange(-length, length)
    stop, step = chooser.choice((length, (1 << 63) - 1, start % length + 1)), chooser.choice((1, 1, 2))
    sliced = list(aten.slice(x, dim, start, stop, step).shape)
    more = {"input_sizes": sizes, "dim": dim - chooser.choice((0, len(sizes)))}
    spread = chooser.random() < 0.2
    gradient = numbers(chooser, 1, dtype=dtype).expand(sliced) if spread else numbers(chooser, *sliced, dtype=dtype)
    yield (
        aten.slice_backward.default,
        {"grad_output": gradient, **more, "start": start, "end": stop, "step": step},
    )
    gradient = numbers(chooser, *sizes[:dim], *sizes[dim + 1 :], dtype=dtype)
    yield aten.select_backward.default, {"grad_output": gradient, **more, "index": start}


def _by_index(chooser: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    sizes = _sizes(chooser, 2)
    dim = chooser.randrange(1, len(sizes))
    own = [chooser.choice((1, 3, 20)) if place == dim else size for place, size in enumerate(sizes)]
    index = torch.randint(0, sizes[dim], own)
    if chooser.random() < 0.3:
        index = torch.randint(0, sizes[dim], [*own[:-1], 1]).expand(own)
    x, y, more = (
        numbers(chooser, *sizes, dtype=dtype),
        numbers(chooser, *own, dtype=dtype),
        {"dim": dim, "index": index},
    )
    yield aten.gather.default, {"self": x, **more}
    for func in (aten.scatter.src, aten.scatter_.src, aten.scatter_add.default, aten.scatter_add_.default):
        yield func, {"self": x, **more, "src": y}
    yield aten.scatter_.value, {"self": x, **more, "value": 0.5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        *(_max_pool, _avg_pool, _pad, _upsample, _softmax, _layer_norm, _batch_norm, _embedding, _rows, _lists),
        *(_of_views, _by_index),
    ],
    ids=lambda f: f.__name__,
)
def test_others(make: Any, dtype: torch.dtype) -> None:
    chooser = random.Random(make.__name__)
    torch.manual_seed(1)
    cut: dict[Any, int] = {}
    for _ in range(2 * NUM_SHAPES):
        for func, given in make(chooser, dtype):
            cut[func] = cut.get(func, 0) + check(func, given, chooser, must_split=False)
    assert all(cut.values()), {str(func): count for func, count in cut.items()}
