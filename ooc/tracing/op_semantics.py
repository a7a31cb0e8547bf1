"""Semantics of ops that the dispatcher does not tell: what they write, and which can run in parts.

* **Writes** come from the op's schema. Some ops write what their schema hides; those are listed.
  Custom ops are taken to write every operand.
* **List ops** (`_foreach_*`, `_fused_*`) name every parameter of a model at once. Each tensor's
  result is independent of the others', so they are run as sub-lists that fit, bit for bit equal.
* **convolution_backward** computes the weight's gradient and the input's derivative in one call;
  run as two calls by its output mask it needs less at once (NNTrainer's fine-grained
  procedures, ICSE'24 section 4).

On the CPU list ops have one route (a loop over the tensors), so parts take the same route as the
whole; on CUDA `list_routes` sees to that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ooc.tracing.list_routes import same_route

_HIDDEN_WRITES: dict[str, tuple[str, ...]] = {
    # Running statistics, updated without an alias mark or a version bump (seen with torch 2.13).
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    # cuDNN keeps the states of its random-number generators in an operand, and writes its reserve in backward passes.
    "aten::_cudnn_rnn": ("dropout_state",),
    "aten::_cudnn_rnn_backward": ("dropout_state", "reserve"),
    "aten::miopen_rnn": ("dropout_state",),
    "aten::miopen_rnn_backward": ("dropout_state", "reserve"),
    # oneDNN's backward pass of a layer leaves the gradients of its gates in what the forward pass has kept.
    "aten::mkldnn_rnn_layer_backward": ("workspace",),
}
REGION_NAMESPACE = "inductor"
"""Of compiled regions, which say themselves what they write (`ooc.interop.compiled_region`)."""

_VETTED_NAMESPACES = frozenset({"aten", "prims", "prim", "mkldnn", "mkl", "onednn"})


@dataclass(frozen=True, slots=True)
class UnknownSchema:
    """Stands for the schema of an op that is not torch's: it does not tell what the op takes, changes and returns."""

    name: str
    overload_name: str = ""
    is_mutable: bool = True
    arguments: tuple[Any, ...] = ()
    returns: tuple[Any, ...] = ()


@functools.cache
def joins_list(func: Any) -> bool:
    """Whether an op makes one tensor of a list of them, and changes none: `cat`, `stack`."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or not schema.arguments or len(schema.returns) != 1:
        return False
    return str(schema.arguments[0].type) == "List[Tensor]" and str(schema.returns[0].type) == "Tensor"


def op_name(func: Any) -> str:
    """What to call an op before people: an optimizer's step begins with one of the profiler's, which nobody called."""
    name = str(func)
    return f"{name}, as an optimizer's step begins with" if name.startswith("profiler._record_function_enter") else name


@functools.cache
def makes_tensors(func: Any) -> bool:
    """Whether an op returns tensors; where nobody can tell, it may."""
    schema = getattr(func, "_schema", None)
    if schema is None or isinstance(schema, UnknownSchema):
        return True
    return any("Tensor" in str(result.type) for result in schema.returns)


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...] | None:
    """`(position, name)` of the arguments that an op writes; None: take it to write all of them."""
    schema = func._schema
    if func.namespace not in _VETTED_NAMESPACES:
        return None
    hidden = _HIDDEN_WRITES.get(schema.name, ())
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in hidden
    )


@functools.cache
def order_tells_changes(func: Any, num_changed: int) -> bool:
    """Whether calls with the same large operands, in the same order, change the same ones, or fewer of them.

    Of `aminmax(A, out=(B, small))` and `aminmax(small, out=(A, B))` the operands are A and B, and it is another that is
    changed. Not so where all arguments that an op changes come before all its other tensors, or after them, and none of
    them is small: `num_changed` is how many large ones the first call has changed.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True
    if func.namespace == REGION_NAMESPACE:
        return func.num_written in (None, 0)
    written = written_arguments(func)
    if not written:
        return True  # None: each operand counts as changed
    positions = {position for position, _ in written}
    tensors = [i for i, each in enumerate(schema.arguments) if i in positions or _is_of_tensors(each.type)]
    is_together = positions in (set(tensors[: len(positions)]), set(tensors[-len(positions) :]))
    has_lists = any(schema.arguments[position].type.kind() == "ListType" for position in positions)
    return is_together and not has_lists and len(positions) == num_changed


def _is_of_tensors(kind: Any) -> bool:
    return kind.kind() == "TensorType" or any(map(_is_of_tensors, kind.containedTypes()))


def written_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The argument values that the op writes."""
    if func.namespace == REGION_NAMESPACE:
        return func.written_values(args)  # type: ignore[no-any-return]
    written = written_arguments(func)
    if written is None:
        return (*args, *kwargs.values())
    return tuple(
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in written
        if position < len(args) or name in kwargs
    )


Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def is_list_op(func: Any) -> bool:
    """Whether an op works on lists of tensors index by index."""
    name: str = func._schema.name
    return name.startswith(("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")) or (
        name == "aten::_amp_foreach_non_finite_check_and_unscale_"
    )


def is_convolution_backward(func: Any) -> bool:
    """Whether this is `convolution_backward`."""
    return bool(func is torch.ops.aten.convolution_backward.default)


@functools.cache
def _list_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if isinstance(argument.type, torch.ListType)
    )


def run_list_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, limit_nbytes: int, run: Run) -> Any:
    """Run a list op as sub-lists whose tensors take at most `limit_nbytes` (or hold one index).

    Every list argument as long as the first is cut at the same places. The parts' results are
    returned as one list, in order.
    """
    with versions_counted(func, args, kwargs):
        return _run_in_parts(func, args, kwargs, limit_nbytes, run)


@contextlib.contextmanager
def versions_counted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Count up the versions of what a list op changes in place, as torch does without a dispatch mode.

    Such an op has no kernel for autograd: what counts, on the CPU, is the op on one tensor that it calls, and below a
    dispatch mode that goes uncounted. A backward pass through what was changed since would go on, where it is to raise.
    """
    schema = getattr(func, "_schema", None)
    is_counted = schema is not None and schema.name.startswith("aten::_foreach_")
    found = written_values(func, args, kwargs) if is_counted else ()
    tensors = [t for value in found if isinstance(value, list | tuple) for t in value if not t.is_inference()]
    before = [t._version for t in tensors]
    yield
    for tensor, version in zip(tensors, before, strict=True):
        if tensor._version == version:
            torch.autograd.graph.increment_version(tensor)


def _run_in_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], limit_nbytes: int, run: Run) -> Any:
    lists = {
        name: value
        for position, name in _list_arguments(func)
        if (value := args[position] if position < len(args) else kwargs.get(name))
    }
    length = next((len(v) for v in lists.values()), 0)
    tensors = [v for v in lists.values() if len(v) == length and isinstance(v[0], torch.Tensor)]
    cuts = list(_cuts([sum(_nbytes(v[i]) for v in tensors) for i in range(length)], limit_nbytes))
    if len(cuts) <= 1:
        return run(func, args, kwargs)
    if func._schema.name.startswith("aten::_foreach_"):
        func = same_route(func, tensors)
    names = [argument.name for argument in func._schema.arguments]
    results: list[Any] = []
    returns_list = False
    for start, stop in cuts:

        def part(name: str, value: Any, start: int = start, stop: int = stop) -> Any:
            if name in lists and len(value) == length:
                return value[start:stop]
            if name == "scalars" and isinstance(value, torch.Tensor):
                return value[start:stop]  # one number an index, packed in a tensor
            return value

        result = run(
            func,
            tuple(part(names[i], value) for i, value in enumerate(args)),
            {name: part(name, value) for name, value in kwargs.items()},
        )
        if isinstance(result, list | tuple):
            returns_list = True
            results.extend(result)
    return results if returns_list else None


def _cuts(sizes: list[int], limit: int) -> Iterator[tuple[int, int]]:
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield start, index
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def _nbytes(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


def run_convolution_backward(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, limit_nbytes: int, run: Run
) -> Any:
    """Run `convolution_backward` as gradient (weight and bias) and derivative (input) if it is large."""
    mask = args[10] if len(args) > 10 else None
    if mask is None or not (mask[0] and (mask[1] or mask[2])):
        return run(func, args, kwargs)
    operands = sum(_nbytes(value) for value in args[:3])
    if operands + _nbytes(args[1]) + _nbytes(args[2]) <= limit_nbytes:
        return run(func, args, kwargs)
    _, weight, bias = run(func, (*args[:10], [False, mask[1], mask[2]], *args[11:]), kwargs)
    derivative, _, _ = run(func, (*args[:10], [True, False, False], *args[11:]), kwargs)
    return derivative, weight, bias


def way_in_parts(func: Any) -> Callable[..., Any] | None:
    """What runs an op in parts where it is large: `run_list_op`, `run_convolution_backward`, or nothing."""
    if is_list_op(func):
        return run_list_op
    return run_convolution_backward if is_convolution_backward(func) else None
