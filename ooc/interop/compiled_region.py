"""Compiled regions: graphs compiled by inductor, each of which is one op under a session.

Inductor's code calls kernels by address, past the dispatcher. With `wrap_inductor_compiled_regions` each compiled graph
is one call of a higher-order operator, to which a dispatch mode can give a handler: then its operands are known, and
what it allocates comes from the session's allocator like any op's memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ooc.interop.exports import within_op
from ooc.tracing.op_semantics import REGION_NAMESPACE, UnknownSchema, written_arguments

_ATTRIBUTE = "_ooc_region"


class CompiledRegion:
    """One compiled graph, with the interface of an operator overload as far as recorder and dispatcher use it.

    Args:
        compiled: Inductor's callable; it takes its inputs as one list, which it empties.

    Attributes:
        need_nbytes: What it uses and makes, without what it takes for itself; None until it has run.
    """

    namespace = REGION_NAMESPACE

    def __init__(self, compiled: Any) -> None:
        self._run: Callable[[list[Any]], Any] = compiled.compiled_callable
        self.name = f"{REGION_NAMESPACE}.{compiled.compile_region_name or 'region'}{compiled.idx}"
        self._schema = UnknownSchema(f"{REGION_NAMESPACE}::{self.name}")
        self._written = written_inputs(compiled.original_gm)
        self.need_nbytes: int | None = None

    def __str__(self) -> str:
        return self.name

    def __call__(self, inputs: list[Any]) -> Any:
        with _disable_current_modes(), within_op():
            return self._run(inputs)

    @property
    def num_written(self) -> int | None:
        """How many of its inputs the graph writes; None: all of them, as far as is known."""
        return None if self._written is None else len(self._written)

    def written_values(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs that the graph writes."""
        inputs = args[0]
        return tuple(inputs) if self._written is None else tuple(inputs[index] for index in self._written)


def region_of(compiled: Any) -> CompiledRegion:
    """The region of an `InductorCompiledCallable`: always the same one."""
    region = getattr(compiled, _ATTRIBUTE, None)
    if region is None:
        region = CompiledRegion(compiled)
        setattr(compiled, _ATTRIBUTE, region)
    return region


def written_inputs(graph_module: Any) -> tuple[int, ...] | None:
    """Positions of the inputs that a graph writes; None if that is not known: perhaps all.

    A write of a view is one of its base. An op that is not known to the dispatcher writes whatever it is given.
    """
    if graph_module is None:
        return None
    roots: dict[Any, set[int]] = {}  # of which inputs a node's storage may be
    written: set[int] = set()
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            roots[node] = {len([other for other in roots if other.op == "placeholder"])}
            continue
        given = {n: roots.get(n, set()) for n in node.all_input_nodes}
        everything = set().union(*given.values()) if given else set()
        if node.op != "call_function":
            roots[node] = everything
        elif isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            positions = written_arguments(node.target)
            if positions is None:
                written |= everything
            else:
                for position, name in positions:
                    value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
                    for other in _nodes(value):
                        written |= roots.get(other, set())
            roots[node] = everything if any(value.alias_info is not None for value in schema.returns) else set()
        elif node.target is operator.getitem:
            roots[node] = everything
        elif not str(getattr(node.target, "__module__", "")).startswith(("operator", "_operator", "math")):
            written |= everything
            roots[node] = everything
    return tuple(sorted(written))


def nbytes_by_storage(values: Sequence[Any]) -> dict[int, int]:
    """Sizes of the storages of all tensors among these values."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _nodes(value: Any) -> Iterator[torch.fx.Node]:
    if isinstance(value, torch.fx.Node):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _nodes(item)
