"""Rules for updates inside the backward pass: which optimizers, kernels and settings allow them; others are refused."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ooc.errors import Refused

INDEPENDENT = tuple(
    getattr(torch.optim, name)
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax",
        "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip
"""Optimizers whose update of one parameter looks at no other: compared bit for bit in
tests/interop/test_update_order.py, by their loops, their list ops and their fused kernels."""

ORDINARY_ORDER = "the ordinary order (no step_in_backward)"


def require_independent(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update of one parameter may look at others."""
    kind = type(optimizer)
    if not any(_has_update_of(kind, base) for base in INDEPENDENT):
        reason = (
            "it calls a closure several times, and couples all parameters"
            if isinstance(optimizer, torch.optim.LBFGS)
            else "it is not known that its update of one parameter looks at no other"
        )
        names = ", ".join(base.__name__ for base in INDEPENDENT)
        raise Refused(f"step_in_backward of {kind.__name__}: {reason}. Options: {names}; {ORDINARY_ORDER}.")
    if optimizer.defaults.get("differentiable"):
        raise Refused(
            f"step_in_backward of {kind.__name__} with differentiable=True: its updates are part of a graph. Options: "
            f"differentiable=False; {ORDINARY_ORDER}."
        )


def _has_update_of(kind: type, base: type) -> bool:
    """Whether instances of `kind` update as those of `base` do: not if a subclass has a step of its own."""
    return issubclass(kind, base) and all(
        unhooked(getattr(kind, name, None)) is unhooked(getattr(base, name, None)) for name in ("step", "_init_group")
    )


def unhooked(step: Any) -> Any:
    """An optimizer's `step` below the wrapper that calls its hooks."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def require_one_process() -> None:
    """Refuse a process group: its gradients are not complete when the backward pass has made them."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        raise Refused(
            "step_in_backward with a process group: gradients of several processes are averaged after the backward "
            f"pass has made them, and would be applied before that. Options: one process; {ORDINARY_ORDER}."
        )


def require_same_kernel(group: dict[str, Any], tensor: Tensor, gradient: Tensor, *, is_mixed: bool) -> None:
    """Refuse a gradient for which a list op over all parameters could take another kernel than over this one.

    On a GPU one tensor of other strides sends a whole list through a loop, and a group of several devices has no list
    ops (see `ooc.tracing.list_routes`).
    """
    is_listed = group.get("foreach") or (group.get("foreach") is None and tensor.device.type != "cpu")
    if not is_listed or group.get("fused"):
        return
    is_alike = gradient.layout is torch.strided and (
        tensor.device.type == "cpu"
        or (gradient.stride() == tensor.stride() and gradient.dtype == tensor.dtype and not is_mixed)
    )
    if not is_alike:
        raise Refused(
            f"step_in_backward, parameter of shape {tuple(tensor.shape)}: its gradient is sparse, or has another "
            "layout, type or device than its group, so that the optimizer's list ops would take another kernel for "
            f"the whole list than for this one. Options: foreach=False; {ORDINARY_ORDER}."
        )


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of what a group says besides its parameters."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def require_same_settings(optimizer_name: str, used: dict[str, Any], group: dict[str, Any]) -> None:
    """Refuse a learning rate, or other setting, that changed since the backward pass applied it."""
    for name, before in used.items():
        now = group.get(name)
        if before is now:
            continue
        is_tensor = isinstance(before, Tensor) or isinstance(now, Tensor)
        is_same = torch.equal(torch.as_tensor(before), torch.as_tensor(now)) if is_tensor else before == now
        if not is_same:
            raise Refused(
                f"{optimizer_name}.step: {name!r} of a parameter group was {before} in the backward pass, which "
                f"applies the gradients, and is {now} now. Options: scheduler.step() after optimizer.step(); a change "
                f"before backward(); {ORDINARY_ORDER}."
            )


def is_under_autocast(optimizer: Optimizer) -> bool:
    """Whether autocast is on now, for the device of the optimizer's parameters."""
    tensor = next((p for group in optimizer.param_groups for p in group["params"]), None)
    return tensor is not None and torch.is_autocast_enabled(tensor.device.type)


def as_at_step(tensor: Tensor, is_under_autocast: bool | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast as `step()` has it: a backward pass may be called under it, and a step outside."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) is bool(is_under_autocast):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.autocast(kind, enabled=bool(is_under_autocast))
    return context
