"""Finds the names of parameters, gradients, buffers and optimizer state.

A session sees storages, not modules. So when a step is shown to a person, the modules and optimizers of
the process are looked up among all objects that the cycle collector tracks. That takes some tens of
milliseconds, and is done when a plan is first replayed or on request, never per step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ooc.tracing.gradients import raw_gradient
from ooc.tracing.heap import modules_and_optimizers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorName:
    """The name of a tensor, and what kind of tensor it is.

    Attributes:
        kind: As in `scheduler.trace.Variable.kind`.
        label: Such as "blocks.0.attention.weight", "gradient of head.bias", "exp_avg of head.bias".
    """

    kind: str
    label: str


def named_tensors(address_of: Callable[[torch.Tensor], int]) -> Iterator[tuple[TensorName, torch.Tensor]]:
    """All tensors of modules and optimizers with managed storages, with their names.

    With several models, names begin with the model's class, from the second of a class on with its number.

    Args:
        address_of: Gives the address of a tensor's storage if it is the session's, else 0.
    """
    modules, optimizers = modules_and_optimizers()
    children = {id(child) for module in modules for child in module._modules.values()}
    roots = [module for module in modules if id(module) not in children and _is_ours(module, address_of)]
    labels: dict[int, str] = {}
    for root, prefix in zip(roots, _prefixes(roots), strict=True):
        for name, parameter in root.named_parameters():
            labels.setdefault(id(parameter), prefix + name)
            yield TensorName(kind="parameter", label=prefix + name), parameter
            if (gradient := raw_gradient(parameter)) is not None:
                yield TensorName(kind="gradient", label=f"gradient of {prefix}{name}"), gradient
        for name, buffer in root.named_buffers():
            yield TensorName(kind="buffer", label=prefix + name), buffer
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            label = labels.get(id(parameter), "a parameter")
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield TensorName(kind="optimizer_state", label=f"{key} of {label}"), value


def names_by_address(address_of: Callable[[torch.Tensor], int]) -> dict[int, TensorName]:
    """Names by storage address, for the storages for which `address_of` gives one (0: not the session's)."""
    found: dict[int, TensorName] = {}
    try:
        for name, tensor in named_tensors(address_of):
            address = address_of(tensor)
            if address:
                found.setdefault(address, name)
    except Exception:  # noqa: BLE001 - modules are users' code; names are for people, and nothing rests on them
        _log.exception("cannot find out the names of all tensors")
    return found


def _is_ours(module: torch.nn.Module, address_of: Callable[[torch.Tensor], int]) -> bool:
    tensors = (t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()))
    return any(address_of(tensor) for tensor in tensors if tensor is not None)


def _prefixes(roots: Sequence[torch.nn.Module]) -> list[str]:
    if len(roots) < 2:
        return [""] * len(roots)
    seen: Counter[str] = Counter()
    found = []
    for root in roots:
        name = type(root).__name__
        seen[name] += 1
        found.append(f"{name}." if seen[name] == 1 else f"{name}#{seen[name]}.")
    return found
