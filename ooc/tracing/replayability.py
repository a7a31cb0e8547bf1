"""Replayability of ops: which ones may run again later in the step, as far as their schemas and arguments can tell.

An op qualifies if it computes its results from its arguments alone: it comes from a vetted namespace (or was declared
pure), communicates with nobody, and its results' sizes do not depend on data. What it writes must be known. Random
numbers are no obstacle, since a re-run starts from the generator's state at the time of the op. Whether an op's
*bits* repeat, no schema tells: `ooc.replay.rerun_trials` runs each kind of op twice and compares.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ooc.tracing import op_semantics
from ooc.tracing.collective_ops import is_collective

_DECLARED_PURE: set[str] = set()

_EXCLUDED = frozenset(
    {
        # They change what a tensor is, not what it holds.
        "aten::set_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::_resize_output_",
        "aten::swap_",
        # They ask for a value, or move it to another place.
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::record_stream",
        "aten::_pin_memory",
        "aten::pin_memory",
        # Reference semantics of their own.
        "aten::_to_sparse",
        "aten::sparse_resize_",
        "aten::_cudnn_init_dropout_state",
        "aten::from_file",
    }
)
_EXCLUDED_TAGS = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.nondeterministic_bitwise,
        torch.Tag.inplace_view,
    }
)
_ALLOCATORS = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)

_UNSTEADY_ON_CUDA = frozenset(
    {
        "bincount",
        "cumsum",
        "gather_backward",
        "grid_sampler_2d_backward",
        "grid_sampler_3d_backward",
        "histc",
        "index_add",
        "index_copy",
        "index_put",
        "_index_put_impl",
        "_unsafe_index_put",
        "kthvalue",
        "median",
        "nanmedian",
        "put",
        "repeat_interleave",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "nll_loss2d_forward",
        "_embedding_bag",
        "_thnn_fused_lstm_cell",
        "_cudnn_rnn",
        "cudnn_grid_sampler_backward",
    }
)
"""By torch's documentation of `use_deterministic_algorithms`; all backward ops count as well, since many sum by atomic
additions (of convolutions, pooling, padding, interpolation, embeddings), and re-runs rarely want one."""


def declare_pure(op: Any) -> None:
    """Declare that a custom op computes its results from its arguments alone, and writes nothing else.

    Args:
        op: An `OpOverload` or `OpOverloadPacket`. Its schema must say which arguments it changes, if any.
    """
    name = op._schema.name if hasattr(op, "_schema") else getattr(op, op.overloads()[0])._schema.name
    _DECLARED_PURE.add(name)
    may_run_again.cache_clear()


@functools.cache
def may_run_again(func: Any) -> bool:
    """Whether the op may be run again, as far as its schema tells."""
    schema = getattr(func, "_schema", None)
    if (
        schema is None
        or is_collective(func)
        or schema.name in _EXCLUDED
        or _EXCLUDED_TAGS & set(getattr(func, "tags", ()))
    ):
        return False
    if any(argument.kwarg_only and argument.alias_info is not None for argument in schema.arguments):
        return False  # `out=` may give its operand another size, and so another memory
    if schema.name in _DECLARED_PURE:
        return True
    return op_semantics.written_arguments(func) is not None


@functools.cache
def makes_undefined_bytes(func: Any) -> bool:
    """Whether the op only allocates: its result's bytes are whatever was there before."""
    return func._schema.name in _ALLOCATORS


@functools.cache
def is_random(func: Any) -> bool:
    """Whether the op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def is_unsteady_on_cuda(func: Any) -> bool:
    """Whether the op's bits may change from run to run on a GPU unless torch is held to deterministic algorithms.

    A trial cannot tell: atomic additions may happen in the same order twice.
    """
    name: str = func._schema.name.rpartition("::")[2].rstrip("_")
    return name in _UNSTEADY_ON_CUDA or name.endswith("backward")
