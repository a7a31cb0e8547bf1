"""Updates inside the backward pass, within a budget: the bits of plain PyTorch, in planned steps, with less moved."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ooc
from tests.cli.test_run import assert_same, ours, plain
from tests.harness import digest

WIDTH, NUM_LAYERS, BATCH = 256, 12, 16
PARAMETERS_NBYTES = 4 * (WIDTH * WIDTH * NUM_LAYERS)
"""3 MiB; with gradients and Adam's state four times as much."""
BUDGET = PARAMETERS_NBYTES // 65536 * 65536
NUM_STEPS = 7


pytestmark = pytest.mark.usefixtures("one_thread")


def build() -> nn.Module:
    torch.manual_seed(5)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, index: int, size: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    x, y = (torch.randn(size, WIDTH, generator=generator) for _ in range(2))
    return functional.mse_loss(model(x), y)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {}),
    "adamw_foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}),
}


def train(optimizer: str, *, in_backward: bool, num_parts: int = 1, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Train, and hash parameters and optimizer state after the last step, and each loss."""
    kind, arguments = OPTIMIZERS[optimizer]
    model = build()
    own = kind(model.parameters(), **arguments)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.9)
    if in_backward:
        ooc.step_in_backward(own)
    losses = []
    for index in range(num_steps):
        for part in range(num_parts):
            loss = loss_of(model, num_parts * index + part) / num_parts
            loss.backward()
            losses.append(loss.item().hex())
        own.step()
        scheduler.step()
        own.zero_grad()
    state = {f"{n} {key}": value for n, entry in enumerate(own.state.values()) for key, value in entry.items()}
    tensors = {**dict(model.named_parameters()), **{k: v for k, v in state.items() if isinstance(v, Tensor)}}
    return {"losses": losses, **{name: digest(tensor) for name, tensor in tensors.items()}}


def within(budget: int, optimizer: str, **how: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with ooc.Session(budget, step_boundary="optimizer", chunk_nbytes=65536, debug=True) as session:
        found = train(optimizer, **how)
        return found, session.report()["steps"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits(optimizer: str) -> None:
    """Equal to plain PyTorch, and planned as soon as in the ordinary order."""
    actual, steps = within(BUDGET, optimizer, in_backward=True)
    assert actual == train(optimizer, in_backward=False)
    assert [step["mode"] for step in steps] == ["learning"] * 3 + ["planned"] * (NUM_STEPS - 3)


def test_less_is_moved() -> None:
    """No gradients, and parameters once less each way. Counted: 5.9 times the parameters instead of 8.5."""
    (_, usual), (_, in_backward) = (within(BUDGET, "adam", in_backward=choice) for choice in (False, True))
    usual_nbytes, nbytes = (steps[-1]["loaded_nbytes"] + steps[-1]["evicted_nbytes"] for steps in (usual, in_backward))
    assert nbytes + PARAMETERS_NBYTES < usual_nbytes


def test_accumulation() -> None:
    expected = train("adam", in_backward=False, num_parts=3)
    actual, steps = within(2 * BUDGET, "adam", in_backward=True, num_parts=3)
    assert actual == expected
    assert steps[-1]["mode"] == "planned"


def test_unmodified_script(tmp_path: Path) -> None:
    """`ooc run --step-in-backward`: what the script prints is as without us; what cannot be is an error of ours."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import torch
            from torch.nn.utils import clip_grad_norm_

            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: 1 / (1 + index))
            for index in range(8):
                optimizer.zero_grad()
                loss = model(torch.randn(64, 256)).square().mean()
                loss.backward()
                if "clip" in sys.argv:
                    clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                print(index, loss.item().hex())
            print([p.double().sum().item().hex() for p in model.parameters()])
            """
        )
    )
    expected = plain(str(script))
    assert expected.returncode == 0, expected.stderr
    # A flag without a value: `ours` writes options with values.
    assert_same(expected, ours("--step-in-backward", str(script), budget="1MiB"))
    refused = ours("--step-in-backward", str(script), "clip", budget="1MiB")
    assert refused.returncode == 1
    assert "its gradient is read between the backward pass and zero_grad(), by clip_grad_norm_" in refused.stderr
    assert f"{script}:15" in refused.stderr


def test_a_script_whose_accumulation_varies_needs_the_most_passes(tmp_path: Path) -> None:
    """`ooc run --step-in-backward=N`, as the refusal says. Steps that have fewer end in the ordinary order."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch

            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for index, passes in enumerate((2, 2, 3, 3, 1, 3, 2, 3)):
                optimizer.zero_grad()
                for _ in range(passes):
                    loss = model(torch.randn(64, 256)).square().mean() / passes
                    loss.backward()
                optimizer.step()
                print(index, loss.item().hex())
            print([p.double().sum().item().hex() for p in model.parameters()])
            """
        )
    )
    refused = ours("--step-in-backward", str(script), budget="1MiB")
    assert refused.returncode == 1
    assert "after the 2 backward passes that a step was to have" in refused.stderr
    assert "ooc run --step-in-backward=N" in refused.stderr
    assert_same(plain(str(script)), ours("--step-in-backward=3", str(script), budget="1MiB", progress="never"))
