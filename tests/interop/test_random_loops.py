"""Random training loops under `step_in_backward`: the bits of plain PyTorch, or a refusal; never anything else."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ooc
from tests.harness import digest

NUM_SEEDS = 250 * int(os.environ.get("OOC_TEST_TIMES", "1"))
WIDTH = 4
OPTIMIZERS: tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], ...] = (
    lambda own: torch.optim.SGD(own, lr=0.1),
    lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda own: torch.optim.Adam(own, lr=0.1),
    lambda own: torch.optim.AdamW(own, lr=0.1, fused=True),
    lambda own: torch.optim.RMSprop(own, lr=0.1, foreach=True),
)


class Loop:
    """A program: each iteration takes the same turns, but for a few that come at random."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.two = choose.random() < 0.4
        self.kinds = [choose.choice(OPTIMIZERS) for _ in range(2)]
        usual = [*self._passes(choose), "step"]
        if choose.random() < 0.5:
            usual.insert(
                choose.choice([0, len(usual)]), choose.choice(["zero_grad", "zero_grad", "zero_grad of model"])
            )
        else:
            usual.append("zero_grad")
        self.turns: list[str] = []
        for _ in range(choose.randint(2, 6)):
            turns = list(usual)
            for _ in range(choose.choice([0, 0, 0, 1, 2])):
                turns.insert(choose.randrange(len(turns) + 1), choose.choice(_RARE))
            self.turns += turns
        if choose.random() < 0.5:
            rare = choose.choice(_RARE)
            self.turns = [own for turn in self.turns for own in ([rare, turn] if turn == "step" else [turn])]

    @staticmethod
    def _passes(choose: random.Random) -> list[str]:
        count = choose.choice([1, 1, 1, 2, 3])
        kind = choose.choice(["backward", "backward", "backward of a part"])
        return [kind] * count

    def run(self, *, in_backward: bool) -> list[str]:
        """The bits of everything at the end, and at each look in between."""
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        optimizers = [kind(list(model.parameters())) for kind, model in zip(self.kinds, models, strict=True)]
        if not self.two:
            del optimizers[1:]
        handles = [ooc.step_in_backward(optimizer) for optimizer in optimizers] if in_backward else []
        found: list[str] = []
        generator = torch.Generator().manual_seed(1)
        for turn in self.turns:
            x = torch.randn(3, WIDTH, generator=generator)
            _TURNS[turn](models, optimizers, x, found)
        if any(handle.is_ahead for handle in handles):
            raise ooc.Refused("the loop ends between a backward pass and its step(): a warning says so")
        state = [value for own in optimizers for entry in own.state.values() for value in entry.values()]
        tensors = [*(p for model in models for p in model.parameters()), *(v for v in state if isinstance(v, Tensor))]
        return found + [digest(tensor) for tensor in tensors]


def _loss(models: list[nn.Module], x: Tensor) -> Tensor:
    return models[1](models[0](x)).square().mean()


def _backward(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], x: Tensor, found: list[str]) -> None:
    del optimizers
    loss = _loss(models, x)
    loss.backward()
    found.append(loss.item().hex())


def _backward_of_a_part(models: list[nn.Module], _: object, x: Tensor, __: object) -> None:
    models[0](x).square().mean().backward()


def _backward_while_accumulating(models: list[nn.Module], _: object, x: Tensor, __: object) -> None:
    with ooc.accumulating():
        _loss(models, x).backward()


def _step(_: object, optimizers: list[torch.optim.Optimizer], __: object, ___: object) -> None:
    for optimizer in optimizers:
        optimizer.step()


def _step_of_one(_: object, optimizers: list[torch.optim.Optimizer], __: object, ___: object) -> None:
    optimizers[-1].step()


def _zero_grad(_: object, optimizers: list[torch.optim.Optimizer], __: object, ___: object) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def _zero_grad_of_one(_: object, optimizers: list[torch.optim.Optimizer], __: object, ___: object) -> None:
    optimizers[0].zero_grad()


def _zeros(_: object, optimizers: list[torch.optim.Optimizer], __: object, ___: object) -> None:
    optimizers[0].zero_grad(set_to_none=False)


def _zero_grad_of_model(models: list[nn.Module], *_: object) -> None:
    for model in models:
        model.zero_grad()


def _clip(models: list[nn.Module], *_: object) -> None:
    nn.utils.clip_grad_norm_(models[0].parameters(), 0.01)


def _log(models: list[nn.Module], _: object, __: object, found: list[str]) -> None:
    grad = models[0][0].weight.grad  # type: ignore[index]
    found.append("none" if grad is None else digest(grad))


def _halve(_: object, optimizers: list[torch.optim.Optimizer], __: object, ___: object) -> None:
    optimizers[0].param_groups[0]["lr"] *= 0.5


def _shrink(models: list[nn.Module], *_: object) -> None:
    with torch.no_grad():
        models[0][0].weight.mul_(0.9)  # type: ignore[index]


def _set(models: list[nn.Module], _: object, x: Tensor, __: object) -> None:
    models[0][0].weight.grad = x[0].repeat(WIDTH, 1)  # type: ignore[index]


def _forget(models: list[nn.Module], *_: object) -> None:
    models[0][2].bias.grad = None  # type: ignore[index]


def _freeze(models: list[nn.Module], *_: object) -> None:
    weight = models[0][0].weight  # type: ignore[index]
    weight.requires_grad_(not weight.requires_grad)


def _reload(_: object, optimizers: list[torch.optim.Optimizer], __: object, ___: object) -> None:
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))


def _closure(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], x: Tensor, found: list[str]) -> None:
    def closure() -> Tensor:
        optimizers[0].zero_grad()
        loss = models[0](x).square().mean()
        loss.backward()
        return loss

    found.append(optimizers[0].step(closure).item().hex())


_TURNS = {
    "backward": _backward,
    "backward of a part": _backward_of_a_part,
    "backward while accumulating": _backward_while_accumulating,
    "step": _step,
    "step of one": _step_of_one,
    "zero_grad": _zero_grad,
    "zero_grad of one": _zero_grad_of_one,
    "zero_grad of model": _zero_grad_of_model,
    "zeros": _zeros,
    "clip": _clip,
    "log": _log,
    "halve": _halve,
    "shrink": _shrink,
    "set": _set,
    "forget": _forget,
    "freeze": _freeze,
    "reload": _reload,
    "closure": _closure,
}
_RARE = tuple(_TURNS)


def outcome(seed: int) -> str:
    """`equal` or `refused`; anything else is an `AssertionError`."""
    loop = Loop(seed)
    expected = loop.run(in_backward=False)
    try:
        actual = loop.run(in_backward=True)
    except ooc.Refused:
        return "refused"
    assert actual == expected, f"seed {seed}: {', '.join(loop.turns)}"
    return "equal"


@pytest.mark.parametrize("start", range(0, NUM_SEEDS, 50))
def test_random_loops(start: int) -> None:
    counts = Counter(outcome(seed) for seed in range(start, start + 50))
    assert min(counts["equal"], counts["refused"]) >= 5, counts
