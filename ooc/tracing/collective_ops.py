"""What is known of torch.distributed's ops: which launch a collective, which end one, what they write.

The ops of c10d return a `Work`; those of `_c10d_functional` leave it in a registry of torch's, and end in
`wait_tensor`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_WORK = "torch.classes.c10d.Work"

_POINT_TO_POINT = frozenset(
    {
        "c10d::send",
        "c10d::recv_",
        "c10d::recv_any_source_",
        "_c10d_functional::isend",
        "_c10d_functional::irecv",
        "_c10d_functional::batch_p2p_ops",
    }
)

_WRITTEN: dict[str, tuple[int, ...]] = {
    # Positions of what is written; of an op that is not listed, everything. (Gloo reduces in its operands.)
    "c10d::allgather_": (0,),
    "c10d::_allgather_base_": (0,),
    "c10d::allgather_coalesced_": (0,),
    "c10d::allgather_into_tensor_coalesced_": (0,),
    "c10d::alltoall_": (0,),
    "c10d::alltoall_base_": (0,),
    "c10d::gather_": (0,),
    "c10d::scatter_": (0,),
    "c10d::send": (),
}


@functools.cache
def is_collective(func: Any) -> bool:
    """Whether an op launches a collective, or waits for one."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    if schema.name.startswith("_c10d_functional::"):
        return bool(schema.name != "_c10d_functional::_wrap_tensor_autograd")
    return any(_WORK in str(value.type) for value in getattr(schema, "returns", ()))


def is_functional(func: Any) -> bool:
    """Whether it gives its `Work` to torch's registry, not to the caller."""
    return bool(func.namespace == "_c10d_functional")


def is_wait(func: Any) -> bool:
    """Whether this is `wait_tensor`, which ends functional collectives."""
    return bool(func._schema.name == "_c10d_functional::wait_tensor")


def is_point_to_point(func: Any) -> bool:
    """Whether this is a send or a receive, which ends when the program waits for it and not before."""
    return func._schema.name in _POINT_TO_POINT


def has_hidden_followers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether C++ may have chained something to what `func` launches, to run on the backend's threads.

    DDP's built-in fp16 hook does: it writes the bucket, which is no operand.
    """
    return (
        func._schema.name == "c10d::allreduce_"
        and torch._C._current_graph_task_id() != -1
        and any(tensor.dtype is torch.float16 for tensor in args[0])
    )


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[Any, ...]:
    """The values that a collective writes."""
    positions = _WRITTEN.get(func._schema.name)
    if positions is None:
        return (*args, *kwargs.values(), result)
    return tuple(args[position] for position in positions if position < len(args))
