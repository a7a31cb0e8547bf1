"""Notices backward passes. Their ends are borders within steps, and end steps where no optimizer does.

Scripts that update their parameters themselves have no optimizer whose `step` could be the step boundary. What every
training loop has is a backward pass. `torch.autograd.backward`, through which `Tensor.backward` goes, is replaced while
a session is open whose boundaries are to be found, and so is the constructor of optimizers, to know whether there is
one. A script may ask for its gradients by `torch.autograd.grad`, too: such a call ends a step if it gives up its graph,
in a script that has never called `backward`. So does, there, the outermost `torch.func.grad` or `grad_and_value`, or
the outermost `torch.vmap` over such.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import apis, eager_transforms

from ooc.interop.replacements import Replacements
from ooc.tracing.heap import instances_of


class BackwardPasses:
    """Calls back at the end of each backward pass of a program, on the thread that ran it.

    Args:
        begins: Called before each call of `torch.autograd.backward`.
        left: Called after each, whether it ended well or not.
        ended: Called after each that ended well, and after each call of `torch.autograd.grad`
            and of functions made by `torch.func` that may be one.
    """

    def __init__(
        self, *, begins: Callable[[], None], left: Callable[[], None], ended: Callable[[], None] | None = None
    ) -> None:
        self._begins, self._left = begins, left
        self._ended = ended
        self._replacements = Replacements()
        self._is_open = False
        self._has_looked = False
        self._has_optimizer = False
        self._has_backward = False  # whether the program calls `backward`
        self._has_transformed = False  # whether gradients were taken within the outermost `vmap` that runs

    def __repr__(self) -> str:
        return f"<BackwardPasses, {'noticed' if self._is_open else 'not noticed'}>"

    def open(self) -> None:
        """From now on they are noticed."""
        backward, construct = torch.autograd.backward, torch.optim.Optimizer.__init__

        @functools.wraps(backward)
        def noticed(*args: Any, **kwargs: Any) -> None:
            self._has_backward = True
            self._begins()
            try:
                backward(*args, **kwargs)
            finally:
                self._left()
            if self._ended is not None:
                self._ended()

        grad = torch.autograd.grad

        @functools.wraps(grad)
        def noticed_grad(*args: Any, **kwargs: Any) -> Any:
            gradients = grad(*args, **kwargs)
            if torch.compiler.is_compiling():  # Dynamo traces us, too, and the rest is not for it
                return gradients
            if self._ended is not None and not self._has_backward and _gives_up_its_graph(*args, **kwargs):
                self._ended()
            return gradients

        gradients_of, mapped = eager_transforms.grad_and_value_impl, apis.vmap_impl

        @functools.wraps(gradients_of)
        def noticed_transform(*args: Any, **kwargs: Any) -> Any:
            gradients = gradients_of(*args, **kwargs)
            if not torch.compiler.is_compiling():
                self._has_transformed = True
                self._transform_ended()
            return gradients

        @functools.wraps(mapped)
        def noticed_map(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return mapped(*args, **kwargs)
            if _is_outermost():
                self._has_transformed = False  # else an earlier one has raised
            results = mapped(*args, **kwargs)
            self._transform_ended()
            return results

        @functools.wraps(construct)
        def constructed(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._has_optimizer = True
            construct(optimizer, *args, **kwargs)

        replace = self._replacements.replace
        replace(torch.autograd, "backward", noticed)
        if self._ended is not None:
            replace(torch.autograd, "grad", noticed_grad)
            replace(eager_transforms, "grad_and_value_impl", noticed_transform)
            replace(apis, "vmap_impl", noticed_map)
            replace(torch.optim.Optimizer, "__init__", constructed)
        self._replacements.replace_in_modules()
        self._is_open = True

    def close(self) -> None:
        """They are noticed no more. Idempotent."""
        self._replacements.put_back()
        self._is_open = False
        self._begins = self._left = _ignore
        self._ended = None

    def has_optimizer(self) -> bool:
        """Whether the program has an optimizer of torch's, or had one."""
        if not self._has_optimizer and not self._has_looked:
            self._has_looked = True  # it may have been made before we were opened
            self._has_optimizer = bool(instances_of(torch.optim.Optimizer))
        return self._has_optimizer

    def _transform_ended(self) -> None:
        """After each gradient of `torch.func`'s, and each map, that ended well."""
        if self._has_transformed and _is_outermost():
            self._has_transformed = False
            if self._ended is not None and not self._has_backward and torch._C._current_autograd_node() is None:
                self._ended()


def _is_outermost() -> bool:
    """Whether no function transform of `torch.func`'s is under way."""
    return torch._C._functorch.maybe_current_level() is None


def _gives_up_its_graph(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *_: Any,
    **__: Any,
) -> bool:
    """Whether a call of `torch.autograd.grad` is the last that needs its graph, and no part of a backward pass."""
    del outputs, inputs, grad_outputs
    return not (retain_graph or create_graph) and torch._C._current_autograd_node() is None


def _ignore() -> None:
    pass
