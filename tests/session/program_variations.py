"""Kinds of statement that never do the same twice: what a training script varies from step to step.

Episodes and micro-batches in any number, layers skipped, experts chosen by the data, evaluations in between, closures
that are called as often as an optimizer likes, backward passes that raise. Each draws from a generator of its own,
seeded by statement and step. No random program has them but those of `tests.session.program_segments`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.session.program_statements import Kind, State, Statement, size

VARIATIONS: dict[str, Kind] = {}
"""By name."""

_WIDTH = 32


def _variation(function: Kind) -> Kind:
    VARIATIONS[function.__name__.strip("_")] = function
    return function


def _random(state: State, s: Statement) -> random.Random:
    return random.Random(s.p * 1009 + s.q * 31 + state.step)


def _batch(state: State, s: Statement, r: random.Random) -> Tensor:
    rows = max(size(s.p) // _WIDTH, 2)
    return torch.randn(rows, _WIDTH, generator=torch.Generator().manual_seed(r.randrange(1 << 20) + state.step))


def _layer(x: Tensor, weight: Tensor) -> Tensor:
    """Something that keeps its results for the backward pass, and whose sizes are the batch's."""
    flat = weight.reshape(-1)
    return torch.tanh(x * flat[:_WIDTH] + flat[-_WIDTH:]) + x * 0.5


def _forward(state: State, x: Tensor, skips: Callable[[], bool] = lambda: False) -> Tensor:
    for weight in state.parameters:
        if not skips():
            x = _layer(x, weight)
    return x


def _train_on(state: State, loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()
    state.numbers.append(loss.item())


@_variation
def _micro_batches(state: State, s: Statement) -> None:
    r = _random(state, s)
    for _ in range(r.randint(0, 4)):
        _train_on(state, _forward(state, _batch(state, s, r)).square().mean())


@_variation
def _skipped_layers(state: State, s: Statement) -> None:
    r = _random(state, s)
    x = _forward(state, _batch(state, s, r), lambda: r.random() < 0.4)
    _train_on(state, x.square().mean())


@_variation
def _episode(state: State, s: Statement) -> None:
    """Forward passes in any number, and one backward pass over all of them."""
    r = _random(state, s)
    x = _batch(state, s, r)
    losses = []
    for _ in range(r.randint(1, 6)):
        x = _forward(state, x)
        losses.append(x.square().mean())
        x = torch.roll(x, r.randint(0, 3), 0).detach() if s.q % 2 else x
    _train_on(state, torch.stack(losses).sum())


@_variation
def _experts(state: State, s: Statement) -> None:
    """Rows go to the parameter that they choose; so many that nobody knows."""
    r = _random(state, s)
    x = _batch(state, s, r)
    result = x * 0.25
    for index, weight in enumerate(state.parameters):
        rows = (x[:, : len(state.parameters)].argmax(1) == index).nonzero().flatten()
        if rows.numel():
            result = result.index_add(0, rows, _layer(x.index_select(0, rows), weight))
    _train_on(state, result.square().mean())


@_variation
def _evaluation(state: State, s: Statement) -> None:
    r = _random(state, s)
    with torch.no_grad():
        for _ in range(r.choice((0, 0, 1, 2, 5))):
            x = _forward(state, _batch(state, s, r))
            state.numbers.append(x.sum().item())
            if r.random() < 0.2:
                state.put(s.dst, x)


@_variation
def _line_search(state: State, s: Statement) -> None:
    """LBFGS: as many calls of the closure as it likes, and a history that grows."""
    if not state.closures:
        state.closures.append(
            torch.optim.LBFGS(
                state.parameters,
                lr=0.5,
                max_iter=3,
                history_size=3,
                line_search_fn="strong_wolfe" if s.q % 2 else None,
            )
        )
    r = _random(state, s)
    x = _batch(state, s, r)

    def closure() -> float:
        for weight in state.parameters:
            weight.grad = None
        loss = _forward(state, x).square().mean()
        loss.backward()
        return loss.item()

    state.numbers.append(float(state.closures[0].step(closure)))


@_variation
def _broken_backward(state: State, s: Statement) -> None:
    """A backward pass that raises in its middle, or does not."""
    r = _random(state, s)
    raises = r.random() < 0.5

    def hook(_: Tensor) -> None:
        if raises:
            raise ValueError

    x = _layer(_batch(state, s, r), state.parameters[0])
    x.register_hook(hook)
    try:
        _train_on(state, _forward(state, x).square().mean())
    except ValueError:
        state.numbers.append(-2.0)


@_variation
def _update(state: State, s: Statement) -> None:
    """Any of the optimizers, or an update by hand."""
    r = _random(state, s)
    if r.random() < 0.3:
        with torch.no_grad():
            for weight in state.parameters:
                if weight.grad is not None and weight.grad.shape == weight.shape:
                    weight -= 0.01 * weight.grad.tanh()
    else:
        state.step_optimizer(r.choice(state.optimizers))
    if r.random() < 0.7:
        state.optimizers[0].zero_grad(set_to_none=r.random() < 0.8)


@_variation
def _checkpoint(state: State, s: Statement) -> None:
    """What a checkpoint reads: everything, between two other things."""
    if _random(state, s).random() < 0.3:
        copies = [t.detach().clone() for t in state.tensors()]
        state.numbers.append(float(sum(copy.double().sum() for copy in copies if copy.is_floating_point())))
