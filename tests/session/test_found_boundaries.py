"""Step boundaries that are found in unmodified programs (`step_boundary="optimizer"`): what counts as one step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import ooc

NUM_STEPS = 10
SIZE = 192


def run(program: Callable[[], list[Any]], *, budget: str = "1MiB") -> list[str]:
    """How each step ran that was found in the program; its results must be those of the run in core."""
    torch.manual_seed(0)
    expected = program()
    torch.manual_seed(0)
    gc.collect()  # optimizers of other tests are none of this program's
    backward, construct = torch.autograd.backward, torch.optim.Optimizer.__init__
    with ooc.Session(budget, debug=True, plan_cache=False, step_boundary="optimizer") as session:
        found = program()
    assert found == expected
    assert torch.autograd.backward is backward
    assert torch.optim.Optimizer.__init__ is construct
    return [row.mode for row in session.steps.rows]


def weights(number: int = 4) -> list[Tensor]:
    return [torch.randn(SIZE, SIZE).mul_(0.05).requires_grad_() for _ in range(number)]


def loss_of(parameters: list[Tensor], index: int, length: int = SIZE) -> Tensor:
    hidden = torch.randn(length, SIZE, generator=torch.Generator().manual_seed(index))
    for weight in parameters:
        hidden = (hidden @ weight).tanh()
    return hidden.square().mean()


def digest(tensors: list[Tensor]) -> list[float]:
    return [float(t.detach().double().sum()) for t in tensors]


def test_without_an_optimizer_a_backward_pass_ends_the_step() -> None:
    def program() -> list[Any]:
        parameters, out = weights(), []
        for index in range(NUM_STEPS):
            loss = loss_of(parameters, index, SIZE - index)
            loss.backward()
            for p in parameters:
                assert p.grad is not None
                p.data -= 0.1 * p.grad.data
                p.grad = None
            out.append(loss.item())
        return out + digest(parameters)

    modes = run(program)
    assert len(modes) == NUM_STEPS
    assert modes[4:] == ["planned"] * (NUM_STEPS - 4), modes


def test_without_a_backward_pass_a_call_of_grad_ends_the_step() -> None:
    """Remedies: `_gives_up_its_graph`, for the penalty on the gradients; `_has_backward`, in the last two steps."""

    def program(number: int = NUM_STEPS) -> list[Any]:
        parameters, out = weights(), []
        for index in range(number):
            loss = loss_of(parameters, index)
            first = torch.autograd.grad(loss, parameters[:1], create_graph=True)
            loss = loss + first[0].square().sum()
            torch.autograd.grad(loss, parameters[1:2], None, True)
            with torch.no_grad():
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p -= 0.1 * g
            out.append(loss.item())
        return out + digest(parameters)

    grad = torch.autograd.grad
    modes = run(program)
    assert torch.autograd.grad is grad
    assert len(modes) == NUM_STEPS
    assert modes[4:] == ["planned"] * (NUM_STEPS - 4), modes

    def mixed() -> list[Any]:
        parameters, out = weights(), []
        for index in range(2):
            loss_of(parameters, index).backward()
            out += program(1)
        return out + digest(parameters)

    assert len(run(mixed)) == 2


def _functional(gradients_of: Callable[[dict[str, Tensor], int], dict[str, Tensor]]) -> Callable[[], list[Any]]:
    """A program whose parameters are new tensors after each step: gradients and parameters outlive two steps' ends."""

    def program() -> list[Any]:
        parameters = {str(number): weight.detach() for number, weight in enumerate(weights())}
        out: list[Any] = []
        for index in range(NUM_STEPS):
            gradients = gradients_of(parameters, index)
            parameters = {name: parameters[name] - 0.1 * gradients[name] for name in parameters}
            out += digest([parameters["0"]])
        return out + digest(list(parameters.values()))

    return program


def _loss(parameters: dict[str, Tensor], index: int, length: int = SIZE) -> Tensor:
    return loss_of(list(parameters.values()), index, length)


def _with_penalty(parameters: dict[str, Tensor], index: int) -> Tensor:
    first = torch.func.grad(_loss)(parameters, index)["0"]
    return _loss(parameters, index) + first.square().sum()


def _rows_loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
    for weight in parameters.values():
        row = (row @ weight).tanh()
    return row.square().mean()


def _clipped_rows(parameters: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    rows = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(index))
    found = torch.vmap(torch.func.grad(_rows_loss), in_dims=(None, 0))(parameters, rows)
    return {name: (g / (1.0 + g.flatten(1).norm(dim=1))[:, None, None]).mean(0) for name, g in found.items()}


@pytest.mark.parametrize(
    ("gradients_of", "budget"),
    [
        (torch.func.grad(_loss), "1MiB"),
        (lambda parameters, index: torch.func.grad(_loss)(parameters, index, SIZE - 2 * index), "1MiB"),
        (lambda parameters, index: torch.func.grad_and_value(_with_penalty)(parameters, index)[0], "2MiB"),
        (_clipped_rows, "4MiB"),
    ],
    ids=["grad", "other sizes", "a gradient of a gradient", "each row's own"],
)
def test_without_a_backward_pass_functional_gradients_end_the_step(gradients_of: Any, budget: str) -> None:
    """Remedies: `_transform_ended`, at the outermost level only; what outlives two steps' ends in `close_cycle`."""
    transform = torch._functorch.eager_transforms.grad_and_value_impl
    modes = run(_functional(gradients_of), budget=budget)
    assert torch._functorch.eager_transforms.grad_and_value_impl is transform
    assert len(modes) == NUM_STEPS
    assert modes[5:] == ["planned"] * (NUM_STEPS - 5), modes


def test_functional_gradients_are_no_ends_beside_others() -> None:
    """Of a program that calls `backward`, or has an optimizer, they are a part of a step."""

    def program() -> list[Any]:
        parameters, out = weights(), []
        for index in range(3):
            detached = {str(number): weight.detach() for number, weight in enumerate(parameters)}
            penalty = torch.func.grad(_loss)(detached, index)["0"].square().sum()
            (loss_of(parameters, index) + penalty).backward()
            out.append(penalty.item())
        return out

    assert len(run(program)) == 4  # the first call of all is taken for an end: nobody has called `backward` by then


def test_a_call_of_grad_that_was_imported_by_name_ends_the_step() -> None:
    def program() -> list[Any]:
        parameters, out = weights(), []
        for index in range(NUM_STEPS):
            found = grad(loss_of(parameters, index), parameters)
            parameters = [(p - 0.1 * g).detach().requires_grad_() for p, g in zip(parameters, found, strict=True)]
            out += digest(parameters[:1])
        return out + digest(parameters)

    modes = run(program)
    assert grad is torch.autograd.grad
    assert len(modes) == NUM_STEPS
    assert modes[5:] == ["planned"] * (NUM_STEPS - 5), modes


def test_accumulation_is_one_step_of_its_optimizer() -> None:
    """Remedy: `BackwardPasses.has_optimizer`, also before the optimizer has stepped for the first time."""

    def program() -> list[Any]:
        parameters, out = weights(), []
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for index in range(NUM_STEPS):
            for part in range(3):
                loss = loss_of(parameters, 3 * index + part)
                loss.backward()
            out.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return out + digest(parameters)

    modes = run(program)
    assert len(modes) == NUM_STEPS
    assert modes[4:] == ["planned"] * (NUM_STEPS - 4), modes


def test_an_optimizer_made_before_the_session_counts() -> None:
    parameters = weights()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with ooc.Session("1MiB", plan_cache=False, step_boundary="optimizer") as session:
        for index in range(3):
            loss_of(parameters, 2 * index).backward()
            loss_of(parameters, 2 * index + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.steps.num_steps == 3


class _Proxy:
    """Stands in for a thing that it makes when it is asked for, as lazy modules and remote objects do."""

    asked = 0

    @property
    def __class__(self) -> Any:
        _Proxy.asked += 1
        raise ReferenceError("what it stood in for is gone")


def test_looking_for_an_optimizer_runs_no_code_of_others() -> None:
    gc.collect()  # of an earlier test's optimizer, which would be found
    proxy, parameters = _Proxy(), weights()
    with ooc.Session("1MiB", plan_cache=False, step_boundary="optimizer") as session:
        for index in range(2):
            loss_of(parameters, index).backward()
        assert session.steps.num_steps == 2
    assert proxy.asked == 0


def test_two_optimizers_in_a_row_are_one_step() -> None:
    """Remedy: `in_a_row`. The same one twice, or with a backward pass in between, are two."""

    def program() -> list[Any]:
        parameters, out = weights(), []
        first = torch.optim.SGD(parameters[:2], lr=0.1)
        second = torch.optim.Adam(parameters[2:], lr=0.001)
        for index in range(NUM_STEPS):
            loss = loss_of(parameters, index)
            loss.backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
            out.append(loss.item())
        return out + digest(parameters)

    modes = run(program)
    assert len(modes) == NUM_STEPS
    assert modes[5:] == ["planned"] * (NUM_STEPS - 5), modes


def test_an_optimizer_without_backward_passes_ends_steps() -> None:
    def program() -> list[Any]:
        parameters, out = weights(2), []
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for index in range(NUM_STEPS):
            for p in parameters:
                p.grad = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(index))
            optimizer.step()
            out += digest(parameters)
        return out

    assert len(run(program)) == NUM_STEPS


def test_a_backward_pass_that_fails_ends_no_step() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(_: Any, *__: Tensor) -> Tensor:
            raise RuntimeError("as intended")

    def program() -> list[Any]:
        parameters = weights(2)
        for index in range(3):
            with contextlib.suppress(RuntimeError):
                Fails.apply(loss_of(parameters, index)).backward()
            loss_of(parameters, index).backward()
        return digest([p.grad for p in parameters if p.grad is not None])

    assert len(run(program)) == 3
