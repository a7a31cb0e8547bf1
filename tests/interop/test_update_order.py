"""Updates inside the backward pass have the bits of the ordinary order: every optimizer, by each of its routes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.interop import step_in_backward as module
from ooc.interop.update_rules import INDEPENDENT
from tests.interop.update_cases import NUM_STEPS, Matrices, Net, assert_equal, bits_of, build, loss_of

pytestmark = pytest.mark.usefixtures("one_thread", "ordinary_afterwards")

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def train(kind: type[nn.Module], make: Make, *, in_backward: bool) -> dict[str, Any]:
    model = build(kind)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    if in_backward:
        ooc.step_in_backward(optimizer)
    losses = []
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, index)
        loss.backward()
        if in_backward and index:
            assert all(torch._C.TensorBase.grad.__get__(p) is None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item().hex())
    return {"losses": losses, **bits_of(model, optimizer)}


_ROUTES = {
    "default": {},
    "loop": {"foreach": False},
    "lists": {"foreach": True},
    "fused": {"fused": True},
}
_VARIANTS: dict[type, list[dict[str, Any]]] = {
    torch.optim.SGD: [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True},
    ],
    torch.optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.01}],
    torch.optim.AdamW: [{}, {"amsgrad": True, "maximize": True}],
    torch.optim.RMSprop: [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.01}],
    torch.optim.Adagrad: [{}, {"lr_decay": 0.1, "weight_decay": 0.01}],
}
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_NO_LISTS = (getattr(torch.optim, "Muon", None),)


def _cases() -> Iterator[Any]:
    for kind in INDEPENDENT:
        for number, variant in enumerate(_VARIANTS.get(kind, [{}])):
            for route, flags in _ROUTES.items():
                if (route == "fused" and kind not in _FUSED) or (route != "default" and kind in _NO_LISTS):
                    continue
                marks = [] if _is_quick(kind, number, route) else [pytest.mark.slow]
                yield pytest.param(kind, {**variant, **flags}, id=f"{kind.__name__}{number}-{route}", marks=marks)


def _is_quick(kind: type, number: int, route: str) -> bool:
    """Whether it is run by default: of the first variant each route, of the others one. On a CPU an optimizer's default
    is the loop, so that once is enough.
    """
    if number:
        return route == ("fused" if number % 2 and kind in _FUSED else "lists")
    return route != "loop" or kind is torch.optim.SGD


@pytest.mark.parametrize(("kind", "arguments"), list(_cases()))
def test_every_optimizer_by_every_route(kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> None:
    model = Matrices if kind.__name__ == "Muon" else Net
    expected, actual = (
        train(model, lambda own: kind(own, **arguments), in_backward=in_backward) for in_backward in (False, True)
    )
    assert actual == expected


def test_the_comparison_sees_another_order() -> None:
    """An optimizer that couples parameters, applied one by one, has other bits: so the tests above can fail."""

    class Coupled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            del closure
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else 1
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.sub_(0.1 * p.grad / norm)

    with pytest.raises(ooc.Refused, match="step_in_backward of Coupled: it is not known that its update"):
        train(Net, lambda own: Coupled(own, lr=0.1), in_backward=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "require_independent", lambda _: None)
        expected, actual = (
            train(Net, lambda own: Coupled(own, lr=0.1), in_backward=in_backward) for in_backward in (False, True)
        )
    assert actual != expected


@pytest.mark.parametrize("how", [{}, {"micro_batches": 3}], ids=["learned", "given"])
def test_accumulation(how: dict[str, Any]) -> None:
    """Applied in the last pass, as the first step has had it, or as was said; a step of fewer passes works, too."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        for part in range(3 if index != 4 else 2):
            (loss_of(model, 10 * index + part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_equal(step, **how)


def test_accumulating_by_name() -> None:
    """Any number of passes, where all but the last are marked; gradients may be looked at meanwhile."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        with ooc.accumulating():
            for part in range(index):
                loss_of(model, 10 * index + part).backward()
        if index > 2:
            assert model.last.bias.grad.abs().sum() > 0
        loss_of(model, 10 * index + 9).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_equal(step)


def test_learning_rates_groups_state_and_hooks() -> None:
    """A scheduler, warm-up by hand, a group that comes later, a thawed parameter, a state that is loaded, hooks."""

    def run(*, in_backward: bool) -> tuple[Any, list[str]]:
        model = build()
        late = [model.last.weight, model.last.bias]
        early = [p for p in model.parameters() if p.requires_grad and not any(p is own for own in late)]
        optimizer = torch.optim.SGD(early, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if in_backward:
            ooc.step_in_backward(optimizer)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for index in range(12):
            if index == 3:
                optimizer.add_param_group({"params": late, "lr": 0.05})
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            if index == 5:
                model.frozen.requires_grad_(True)
                optimizer.add_param_group({"params": [model.frozen]})
            if index == 6:
                model.conv.requires_grad_(False)
            if index == 8:
                model.conv.requires_grad_(True)
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.param_groups[0]["lr"] *= 1.1
            loss_of(model, index).backward()
            optimizer.step()
            scheduler.step()
            model.zero_grad()
        return bits_of(model, optimizer), calls

    expected, actual = run(in_backward=False), run(in_backward=True)
    assert actual == expected


def test_what_step_finds_besides() -> None:
    """A closure; gradients that the program computes itself; a step without any; autocast around the backward pass."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index % 3 == 1:
            own = [p for p in model.parameters() if p.requires_grad and p is not model.unused]
            for p, grad in zip(own, torch.autograd.grad(loss_of(model, index), own), strict=True):
                p.grad = grad
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            return

        def closure() -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, index)
                loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()

    assert_equal(step)


def test_remove() -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    handle = ooc.step_in_backward(optimizer)
    for index in range(4):
        if index == 2:
            handle.remove()
            handle.remove()
        loss_of(model, index).backward()
        if index >= 2:
            assert model.last.bias.grad is not None
        optimizer.step()
        optimizer.zero_grad()
    reference = build()
    plain = torch.optim.Adam(reference.parameters())
    for index in range(4):
        loss_of(reference, index).backward()
        plain.step()
        plain.zero_grad()
    assert bits_of(model, optimizer) == bits_of(reference, plain)


def test_every_optimizer_of_a_program() -> None:
    """An optimizer that is made anew takes its parameters over; the older one is refused when it is used after all."""

    def run(*, in_backward: bool) -> Any:
        model = build()
        with module.every_optimizer_in_backward() if in_backward else contextlib.nullcontext():
            first = optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
            for index in range(6):
                if index == 3:
                    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
                loss_of(model, index).backward()
                if in_backward and index in (2, 5):
                    assert torch._C.TensorBase.grad.__get__(model.last.weight) is None
                optimizer.step()
                optimizer.zero_grad()
            found = bits_of(model, optimizer)
            if in_backward:
                with pytest.raises(ooc.Refused, match="also belongs to a SGD"):
                    first.step()
        return found

    expected, actual = run(in_backward=False), run(in_backward=True)
    assert actual == expected
    own = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    assert not own._optimizer_step_pre_hooks, "torch.optim is as it was"
