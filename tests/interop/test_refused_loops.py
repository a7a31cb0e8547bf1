"""Loops that cannot have their updates inside the backward pass are refused, most of them in their first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from tests.harness import digest
from tests.interop.update_cases import Step, assert_equal, build, loss_of

pytestmark = pytest.mark.usefixtures("one_thread", "ordinary_afterwards")


def _refused(step: Step, words: str, *, at: int = 0) -> None:
    """The step with this index raises; with `at=0` nothing has been updated by then."""
    model = build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ooc.step_in_backward(optimizer)
    before = [digest(p) for p in model.parameters()]
    for index in range(at):
        step(model, optimizer, index)
    with pytest.raises(ooc.Refused, match=words):
        step(model, optimizer, at)
    if not at:
        assert [digest(p) for p in model.parameters()] == before


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    loss_of(model, index).backward()
    optimizer.step()


def test_clipping_is_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        loss_of(model, index).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    _refused(step, r"read between .*clip_grad_norm_ \(.*test_refused_loops.py:\d+\)(.|\n)*Options")


def test_clipping_that_begins_later_is_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        loss_of(model, index).backward()
        if index == 2:
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    _refused(step, "read between", at=2)


def test_clipping_in_a_hook_of_the_step_is_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        hook = optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1.0) and None)
        _plain(model, optimizer, index)
        hook.remove()

    _refused(step, "clip_grad_norm_")


def test_reading_after_the_step_is_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        _plain(model, optimizer, index)
        assert model.last.bias.grad is not None

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ooc.step_in_backward(optimizer)
    with pytest.raises(ooc.Refused, match="read between"):
        step(model, optimizer, 0)


def test_scaler_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        scaler.scale(loss_of(model, index)).backward()
        scaler.step(optimizer)
        scaler.update()

    _refused(step, "GradScaler.scale: .*bfloat16")
    off = torch.amp.GradScaler("cpu", enabled=False)

    def step_unscaled(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        off.scale(loss_of(model, index)).backward()
        off.step(optimizer)
        off.update()
        optimizer.zero_grad()

    assert_equal(step_unscaled)


def test_gradients_that_nobody_clears_are_refused() -> None:
    _refused(_plain, "nothing has cleared the one before", at=1)


def test_zeros_are_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        _plain(model, optimizer, index)

    _refused(step, r"zero_grad\(set_to_none=False\)", at=1)


def test_more_passes_than_before_are_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        for part in range(1 + (index == 2)):
            loss_of(model, 10 * index + part).backward()
        optimizer.step()
        optimizer.zero_grad()

    _refused(step, "micro_batches=N", at=2)


def test_another_loss_through_the_same_parameters_is_refused() -> None:
    """A generator's loss gives the discriminator gradients that are thrown away."""
    generator, discriminator = nn.Linear(5, 5), nn.Linear(5, 1)
    first = torch.optim.Adam(discriminator.parameters())
    second = torch.optim.Adam(generator.parameters())
    ooc.step_in_backward(first)
    ooc.step_in_backward(second)
    before = digest(discriminator.weight)
    second.zero_grad()
    discriminator(generator(torch.ones(3, 5))).mean().backward()
    second.step()
    with pytest.raises(ooc.Refused, match=r"gradient is cleared by .*between the backward pass and step"):
        first.zero_grad()
    assert digest(discriminator.weight) == before


def test_learning_rate_between_backward_and_step_is_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        loss_of(model, index).backward()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()

    _refused(step, r"'lr' of a parameter group was 0.1 in the backward pass, .* is 0.09")


def test_parameters_changed_between_backward_and_step_are_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        loss_of(model, index).backward()
        with torch.no_grad():
            model.last.weight.mul_(1.01)
        optimizer.step()

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ooc.step_in_backward(optimizer)
    with pytest.raises(ooc.Refused, match=r"shape \(7, 33\): it was changed between"):
        step(model, optimizer, 0)


def test_a_second_step_is_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        _plain(model, optimizer, index)
        if index == 2:
            optimizer.step()
        optimizer.zero_grad()

    _refused(step, r"a second step\(\) without", at=2)


def test_graphs_of_gradients_are_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        loss_of(model, index).backward(create_graph=True)
        optimizer.step()

    _refused(step, r"create_graph=True")


def test_states_between_backward_and_step_are_refused() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        loss_of(model, index).backward()
        if index == 1:
            optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()

    _refused(step, "state_dict", at=1)


def test_optimizers_that_cannot_are_refused() -> None:
    own = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ooc.Refused, match="LBFGS: it calls a closure several times"):
        ooc.step_in_backward(torch.optim.LBFGS(own))
    with pytest.raises(ooc.Refused, match="SparseAdam"):
        ooc.step_in_backward(torch.optim.SparseAdam(own))
    with pytest.raises(ooc.Refused, match="differentiable"):
        ooc.step_in_backward(torch.optim.SGD(own, lr=0.1, differentiable=True))
    with pytest.raises(ValueError, match="micro_batches=0"):
        ooc.step_in_backward(torch.optim.SGD(own, lr=0.1), micro_batches=0)


def test_parameters_of_two_optimizers_are_refused() -> None:
    own = [nn.Parameter(torch.ones(3))]
    first, second = torch.optim.SGD(own, lr=0.1), torch.optim.Adam(own)
    handle = ooc.step_in_backward(first)
    with pytest.raises(ooc.Refused, match="belongs to another optimizer"):
        ooc.step_in_backward(second)
    own[0].sum().backward()
    with pytest.raises(ooc.Refused, match="also belongs to a SGD"):
        second.step()
    assert own[0].tolist() == [1, 1, 1]
    first.step()
    first.zero_grad()
    handle.remove()
    ooc.step_in_backward(second)


def test_sparse_gradients_by_list_ops_are_refused() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, foreach=True)
    ooc.step_in_backward(optimizer)
    for index in range(2):
        loss = table(torch.tensor([1, 2])).sum()
        if index:
            with pytest.raises(ooc.Refused, match="sparse"):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_saved_weight_is_not_changed_unseen() -> None:
    """A weight that a later part of the backward pass still needs: autograd raises, also for fused kernels."""
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.Adam([weight], fused=True)
    ooc.step_in_backward(optimizer)

    def loss() -> Tensor:
        x = torch.ones(4, 4, requires_grad=True)
        held = weight.detach()  # shares the memory, and gives no gradient: nothing waits for it
        return (((x * held) @ weight) ** 2).sum()

    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss().backward()


def test_process_groups_are_refused(tmp_path: Path) -> None:
    """Before, and in a backward pass of an optimizer that was made before the group."""
    own = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([own], lr=0.1)
    ooc.step_in_backward(optimizer)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.raises(ooc.Refused, match="with a process group"):
            own.sum().backward()
        with pytest.raises(ooc.Refused, match="with a process group"):
            ooc.step_in_backward(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
    finally:
        torch.distributed.destroy_process_group()
    assert own.tolist() == [1, 1, 1]


def test_a_step_that_fails_is_no_step() -> None:
    """An error between backward pass and step: the next step is refused, instead of going on half-updated."""
    model = build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    handle = ooc.step_in_backward(optimizer)
    for index in range(2):
        optimizer.zero_grad()
        loss_of(model, index).backward()
        optimizer.step()
    optimizer.zero_grad()

    class Failed(Exception):
        pass

    def fail(_: Tensor) -> None:
        raise Failed

    hook = model.conv.weight.register_hook(fail)
    with pytest.raises(Failed):
        loss_of(model, 2).backward()
    hook.remove()
    assert handle.is_ahead
    with pytest.raises(ooc.Refused, match="is cleared by"):
        optimizer.zero_grad()
    with pytest.raises(ooc.Refused, match="micro_batches=N"):
        loss_of(model, 2).backward()


def test_more_passes_than_given_are_refused() -> None:
    """In the first step already, with nothing applied."""
    model = build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ooc.step_in_backward(optimizer, micro_batches=1)
    before = [digest(p) for p in model.parameters()]
    loss_of(model, 0).backward()
    with pytest.raises(ooc.Refused, match=r"a gradient comes after the backward pass that .* micro_batches=N"):
        loss_of(model, 1).backward()
    assert [digest(p) for p in model.parameters()] == before


def test_who_reads_at_a_scripts_top_level_is_its_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from ooc.interop.gradient_access import reader\nfound = reader()\nnested = [reader() for _ in 'a'][0]\n"
    )
    module: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), module)
    assert module["found"] == f"<module> ({script}:2)"
    assert module["nested"] == f"<module> ({script}:3)"
