"""Watches a program's access to gradients that are applied, and freed, inside the backward pass.

Where the optimizer runs inside the backward pass (`ooc.interop.step_in_backward`), `.grad` is None by the time the
program could look. Code that clips, unscales, logs or accumulates gradients would go on with nothing, and train
wrongly. So while there is such an optimizer, `Tensor.grad`, `zero_grad` and `GradScaler.scale` are replaced, and every
step of an optimizer is announced. Tensors of other optimizers cost a look into a dictionary.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ooc.errors import Refused
from ooc.tracing.gradients import raw_gradient, set_raw_gradient

__all__ = ["GradientOwner", "find_owner", "note_owner", "release_owner", "reader"]


class GradientOwner(Protocol):
    """Says what becomes of the program's access to one parameter's gradient."""

    tensor: Tensor

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that updates it inside the backward pass; None if it is gone."""

    @property
    def is_waiting_for_zero_grad(self) -> bool:
        """Whether a step has come, and no `zero_grad` since."""

    def release(self) -> None:
        """Take no more part in the backward pass. Idempotent."""

    def before_read(self) -> None:
        """The program reads `.grad`. Raises `Refused` where it would find something else than without us."""

    def before_write(self, *, clears: bool) -> None:
        """The program sets `.grad`, to None if `clears`. Raises `Refused` likewise."""

    def before_zero_grad(self, *, set_to_none: bool) -> None:
        """A `zero_grad` comes to this parameter. Raises `Refused` likewise."""

    def before_step(self) -> None:
        """A `step` of its optimizer begins. Asked of one of its parameters only."""


_owners: dict[int, GradientOwner] = {}
"""By `id` of the parameter, which its owner keeps alive."""

_undo = ExitStack()


def note_owner(owner: GradientOwner) -> None:
    """Let this owner be asked from now on."""
    if not _owners:
        _install()
    _owners[id(owner.tensor)] = owner


def release_owner(owner: GradientOwner) -> None:
    """Ask this owner no more. Idempotent."""
    if _owners.get(id(owner.tensor)) is owner:
        del _owners[id(owner.tensor)]
        if not _owners:
            _undo.close()


def find_owner(tensor: Any) -> GradientOwner | None:
    """The owner of a tensor's gradient, if it has one."""
    return _owners.get(id(tensor))


def reader() -> str:
    """Who is about to touch a gradient, for a message: the function, and the line of the program that called it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (_is_ours(frame.f_code.co_filename) or _is_anonymous(frame.f_code.co_name)):
        frame = frame.f_back
    name = frame.f_code.co_name
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _is_anonymous(name: str) -> bool:
    """Whether a function has no name that would tell a reader anything; a script's own lines are its "<module>"."""
    return name.startswith("<") and name != "<module>"


def _is_ours(filename: str) -> bool:
    return filename == __file__ or filename.endswith("step_in_backward.py")


_TORCH = torch.__path__[0]


def _is_library(filename: str) -> bool:
    return filename.startswith((_TORCH, "<"))


# -- what is replaced


def _install() -> None:
    _replace(Tensor, "grad", property(_get, _set, _delete, "The gradient (see `torch.Tensor.grad`)."))
    _replace(Optimizer, "zero_grad", _zero_grad(Optimizer.zero_grad, _of_optimizer))
    _replace(nn.Module, "zero_grad", _zero_grad(nn.Module.zero_grad, nn.Module.parameters))
    _replace(torch.amp.GradScaler, "scale", _scale(torch.amp.GradScaler.scale))
    _undo.callback(register_optimizer_step_pre_hook(_before_step).remove)


def _replace(owner: Any, name: str, ours: Any) -> None:
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, ours)

    def put_back() -> None:
        if vars(owner).get(name) is not ours:
            return  # somebody has replaced ours, which from now on only passes on
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    _undo.callback(put_back)


def _get(tensor: Tensor) -> Tensor | None:
    owner = find_owner(tensor)
    if owner is not None and sys._getframe(1).f_code is not _APPLY:
        owner.before_read()
    return raw_gradient(tensor)


_APPLY = nn.Module._apply.__code__
"""`Module.to` and its kin move gradients along: of those that are gone, nothing."""


def _set(tensor: Tensor, gradient: Tensor | None) -> None:
    owner = find_owner(tensor)
    if owner is not None:
        owner.before_write(clears=gradient is None)
    set_raw_gradient(tensor, gradient)


def _delete(tensor: Tensor) -> None:
    _set(tensor, None)


def _zero_grad(before: Any, parameters_of: Any) -> Any:
    @functools.wraps(before)
    def ours(self: Any, set_to_none: bool = True) -> None:
        for owner in _owners_of(parameters_of(self)):
            owner.before_zero_grad(set_to_none=set_to_none)
        before(self, set_to_none)

    return ours


def _scale(before: Any) -> Any:
    @functools.wraps(before)
    def ours(self: Any, outputs: Any) -> Any:
        if self.is_enabled() and _owners:
            raise Refused(
                "GradScaler.scale: scaled gradients would be applied inside the backward pass, before the scaler can "
                "unscale them or skip the step. Options: bfloat16 instead of float16, which needs no scaler "
                "(GradScaler(enabled=False)); the ordinary order (no step_in_backward)."
            )
        return before(self, outputs)

    return ours


def _of_optimizer(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _owners_of(parameters: Iterable[Tensor]) -> list[GradientOwner]:
    return [owner for owner in map(find_owner, parameters) if owner is not None]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
    """Before any optimizer's `step`, and before the hooks of its own."""
    owners = _owners_of(_of_optimizer(optimizer)) if hasattr(optimizer, "param_groups") else []
    for owner in owners:
        if owner.optimizer is not optimizer:
            raise Refused(
                f"{type(optimizer).__name__}.step: its parameter of shape {tuple(owner.tensor.shape)} also belongs to "
                f"a {type(owner.optimizer).__name__} that is applied inside the backward pass, so the gradient went "
                "there. Options: each parameter in one optimizer; the ordinary order (no step_in_backward)."
            )
    if owners:
        owners[0].before_step()
