"""NNTrainer's view of a training step: layers, execution orders, and tensors that share memory.

ICSE'24 (and arXiv 2022), section 4.1. Each layer has four procedures: forward (F), compute gradient (CG),
compute derivative (CD), apply gradient (AG). Each gets an execution order (EO), a place in the step; a tensor is
requested with the procedures that use it and with a create mode that says whose memory it may take over.
`merged` is Algorithm 1's second half; the result's lifetimes go to a placement planner, and the most bytes alive
at any order is the paper's theoretical memory (its table 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from scheduler.placement.problem import Buffer, Problem, lower_bound


class Procedure(Enum):
    """A tensor's temporal relation to a layer (table 2)."""

    FORWARD = "F"
    GRADIENT = "CG"
    DERIVATIVE = "CD"
    APPLY = "AG"
    BACKWARD = "B"
    """All of CG, CD and AG."""
    ITERATION = "I"
    """Alive throughout the step, then let go."""
    MAX = "M"
    """Always alive."""


class CreateMode(Enum):
    """A tensor's spatial relation (table 3)."""

    PLACEHOLDER = "P"
    CREATE = "C"
    MODIFY_VIEW = "MV"
    READ_ONLY_VIEW = "RV"
    EXTEND = "E"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer, as far as orders depend on it."""

    name: str
    is_trainable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """A tensor as layers ask for it.

    Attributes:
        uses: `(layer index, procedure)` for each use.
        mode, target: How it comes by its memory; views and extensions name the tensor whose memory they share.
    """

    name: str
    nbytes: int
    uses: tuple[tuple[int, Procedure], ...]
    mode: CreateMode = CreateMode.CREATE
    target: str | None = None

    def __post_init__(self) -> None:
        if (self.target is None) != (self.mode in (CreateMode.PLACEHOLDER, CreateMode.CREATE)):
            raise ValueError(f"tensor {self.name!r}: create mode {self.mode.value} with target {self.target!r}")
        if not self.uses or self.nbytes <= 0:
            raise ValueError(f"tensor {self.name!r}: {self.nbytes} bytes, {len(self.uses)} uses; both must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """One piece of memory after merging.

    Attributes:
        tensors: Names of those that share it, the one that made it first.
        first_order, last_order: Alive from the first to the last of these execution orders, both included.
    """

    tensors: tuple[str, ...]
    nbytes: int
    first_order: int
    last_order: int


def execution_orders(layers: Sequence[Layer], *, clips_gradients: bool = False) -> tuple[dict[Procedure, int], ...]:
    """Algorithm 1's orders. The backward pass runs from the last layer, which its listing leaves to the figures.

    With `clips_gradients` all gradients are computed before the first is applied. A layer that is not
    trainable computes its derivative only: its three backward procedures share one order.
    """
    count = len(layers)
    found = []
    for index, layer in enumerate(layers):
        back = count - 1 - index
        gradient = count + (2 if clips_gradients else 3) * back
        orders = {Procedure.FORWARD: index, Procedure.GRADIENT: gradient}
        if layer.is_trainable:
            orders[Procedure.DERIVATIVE] = gradient + 1
            orders[Procedure.APPLY] = 3 * count + index if clips_gradients else gradient + 2
        else:
            orders[Procedure.DERIVATIVE] = orders[Procedure.APPLY] = gradient
        found.append(orders)
    return tuple(found)


def merged(
    requests: Sequence[TensorRequest], layers: Sequence[Layer], *, clips_gradients: bool = False
) -> tuple[LayerMemory, ...]:
    """Algorithm 1, lines 21 to 31: views and extensions take over their target's memory.

    A modifying view may only if its target is not used after the view's first use; a read-only view and an
    extension always. The order is that of first use, so a target has taken over its own target before.

    Raises:
        ValueError: A target that nobody requests, or two tensors of one name.
    """
    by_name = {request.name: request for request in requests}
    if len(by_name) != len(requests):
        raise ValueError("two tensors have the same name")
    orders = execution_orders(layers, clips_gradients=clips_gradients)
    last = 4 * len(layers) - 1
    span = {request.name: _span(request, orders, last) for request in requests}
    root = {name: name for name in by_name}
    members: dict[str, list[str]] = {name: [name] for name in by_name}
    for request in sorted(requests, key=lambda r: (span[r.name], requests.index(r))):
        if request.target is None:
            continue
        if request.target not in by_name:
            raise ValueError(f"tensor {request.name!r} is a view of {request.target!r}, which nobody requests")
        target, own = root[request.target], request.name
        if request.mode is CreateMode.MODIFY_VIEW and span[own][0] < span[target][1]:
            continue  # the target is still read after this one would overwrite it
        span[target] = min(span[target][0], span[own][0]), max(span[target][1], span[own][1])
        for name in members.pop(own):
            root[name] = target
            members[target].append(name)
    return tuple(
        LayerMemory(
            tensors=tuple(own),
            nbytes=max(by_name[n].nbytes for n in own),
            first_order=span[name][0],
            last_order=span[name][1],
        )
        for name, own in members.items()
    )


def placement_problem(memories: Sequence[LayerMemory]) -> Problem:
    """The merged tensors as buffers for `scheduler.placement` (its planner `nntrainer` is Algorithm 2)."""
    return Problem(
        buffers=tuple(
            Buffer(nbytes=m.nbytes, start=m.first_order, stop=m.last_order + 1, name="+".join(m.tensors))
            for m in memories
        )
    )


def theoretical_nbytes(memories: Sequence[LayerMemory]) -> int:
    """Most bytes alive at any execution order: what no planner of these orders can go below."""
    return lower_bound(placement_problem(memories))


def _span(request: TensorRequest, orders: Sequence[dict[Procedure, int]], last: int) -> tuple[int, int]:
    found: list[int] = []
    for layer, procedure in request.uses:
        match procedure:
            case Procedure.ITERATION | Procedure.MAX:
                found += [0, last]
            case Procedure.BACKWARD:
                found += [orders[layer][p] for p in (Procedure.GRADIENT, Procedure.DERIVATIVE, Procedure.APPLY)]
            case _:
                found.append(orders[layer][procedure])
    return min(found), max(found)
