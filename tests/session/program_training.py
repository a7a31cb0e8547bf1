"""Kinds of statement of training and of tensors' lives: autograd, storages that change, what keeps and what frees."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
from torch import Tensor

from tests.session.program_statements import State, Statement, fit, kind, matrix, size

# -- autograd


@kind(1.5)
def _parameter(state: State, s: Statement) -> None:
    """A parameter, as an operand."""
    if state.parameters:
        p = state.parameters[s.q % len(state.parameters)]
        state.put(s.dst, p * 1.0 if s.p % 2 else p.tanh())


@kind(1.5)
def _module(state: State, s: Statement) -> None:
    if state.modules:
        module = state.modules[s.q % len(state.modules)]
        if not isinstance(module, torch.nn.LSTM):
            state.put(s.dst, module(matrix(state.get(s.a), 12, 80)))


@kind(2)
def _backward(state: State, s: Statement) -> None:
    x = state.get(s.a)
    if x.requires_grad:
        x.float().square().mean().backward(retain_graph=bool(s.q % 3 == 0))


@kind(0.7)
def _double_backward(state: State, s: Statement) -> None:
    x = state.get(s.a)
    leaves = [p for p in state.parameters if p.requires_grad]
    if x.requires_grad and leaves:
        grads = torch.autograd.grad(x.float().sin().sum(), leaves, create_graph=True, allow_unused=True)
        total = sum((g.square().sum() for g in grads if g is not None), torch.zeros(()))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()


@kind(0.5)
def _leaf(state: State, s: Statement) -> None:
    state.put(s.dst, fit(state.get(s.a), size(s.p)).detach().clone().requires_grad_())


@kind(0.5)
def _take_grad(state: State, s: Statement) -> None:
    """A gradient that outlives the step's zero_grad."""
    if state.parameters:
        grad = state.parameters[s.q % len(state.parameters)].grad
        if grad is not None:
            state.put(s.dst, grad)


@kind(1.5)
def _optimizer_step(state: State, s: Statement) -> None:
    if state.optimizers:
        state.step_optimizer(state.optimizers[s.q % len(state.optimizers)])


@kind(1.5)
def _zero_grad(state: State, s: Statement) -> None:
    if state.optimizers:
        state.optimizers[s.q % len(state.optimizers)].zero_grad(set_to_none=bool(s.p % 4))


@kind(0.5)
def _clip(state: State, s: Statement) -> None:
    if state.parameters:
        torch.nn.utils.clip_grad_norm_(state.parameters, 0.5, foreach=bool(s.q % 2))


@kind(0.7)
def _foreach(state: State, s: Statement) -> None:
    with torch.no_grad():
        xs = list(state.parameters) or [state.get(s.a).detach().float()]
        match s.q % 4:
            case 0:
                torch._foreach_mul_(xs, 0.75)
            case 1:
                state.put(s.dst, torch._foreach_add(xs, 0.5)[s.p % len(xs)])
            case 2:
                state.put(s.dst, torch.stack(torch._foreach_norm(xs)))
            case _:
                torch._foreach_lerp_(xs, [x.clone() for x in xs], 0.5)


# -- storages that change


@kind(0.7)
def _resize(state: State, s: Statement) -> None:
    x = state.get(s.dst)
    if not x.requires_grad and x._base is None and x.is_contiguous():
        n = size(s.p)
        is_outside = bool(state.outside) and x.data_ptr() in state.outside
        x.resize_(n)
        if is_outside:
            state.outside.add(x.data_ptr())
        x.fill_(0.5)


@kind(0.7)
def _set(state: State, s: Statement) -> None:
    x, y = state.get(s.dst), state.get(s.a)
    if not x.requires_grad and not y.requires_grad and x.dtype == y.dtype and x._base is None:
        x.set_(y)


@kind(0.7)
def _data(state: State, s: Statement) -> None:
    x = state.get(s.dst)
    if x.dtype == torch.float32:
        x.data = fit(state.get(s.a), size(s.p)).detach().clone()


@kind(0.3)
def _swap_tensors(state: State, s: Statement) -> None:
    a, b = fit(state.get(s.a), size(s.p)).detach() + 1, torch.zeros(size(s.q))
    torch.utils.swap_tensors(a, b)
    state.put(s.dst, a)
    state.put(s.b, b)


# -- lives


@kind(4, retryable=True)
def _delete(state: State, s: Statement) -> None:
    state.registers[s.dst % len(state.registers)] = None


@kind(1.5, retryable=True)
def _move(state: State, s: Statement) -> None:
    value = state.registers[s.a % len(state.registers)]
    state.registers[s.dst % len(state.registers)] = value


@kind(0.7)
def _keep(state: State, s: Statement) -> None:
    """Keep a tensor for some steps."""
    state.kept.append(state.get(s.a).detach())
    del state.kept[: max(len(state.kept) - 1 - s.p % 4, 0)]


@kind(0.3)
def _keep_for_ever(state: State, s: Statement) -> None:
    if len(state.for_ever) < 4:
        state.for_ever.append(state.get(s.a).detach().clone())


@kind(0.4)
def _cycle(state: State, s: Statement) -> None:
    """A tensor that only the cycle collector can free."""
    box: list[Any] = [state.get(s.a).detach().clone()]
    box.append(box)
    state.put(s.dst, torch.zeros(64))
    if s.q % 3 == 0:
        gc.collect()


@kind(0.5)
def _item(state: State, s: Statement) -> None:
    state.numbers.append(state.get(s.a).detach().float().sum().item())


@kind(0.5)
def _thread(state: State, s: Statement) -> None:
    """Another thread allocates and fills, outside the budget; this one uses it."""
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.full((size(s.p),), s.q / 4)))
    thread.start()
    thread.join()
    state.outside.add(made[0].data_ptr())
    state.put(s.dst, made[0])


@kind(0.3)
def _op_error(state: State, s: Statement) -> None:
    """An op that raises, and a user who goes on."""
    try:
        torch.add(fit(state.get(s.a), 1025), fit(state.get(s.b), 1024))
    except RuntimeError:
        state.numbers.append(-1.0)
