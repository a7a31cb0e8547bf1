"""Steps that end where an optimizer's `step` returns: unmodified training loops of every sort, bit for bit."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ooc

WIDTH = 192
BATCH = 256
BUDGET = "2MiB"

Numbers = list[str]


def make_model(seed: int, num_outputs: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, num_outputs)
    )


def batch(index: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def loss_of(model: nn.Module, index: int, size: int = BATCH) -> torch.Tensor:
    inputs, targets = batch(index, size)
    return functional.cross_entropy(model(inputs), targets)


def final(*models: nn.Module) -> Numbers:
    return [p.detach().double().sum().item().hex() for model in models for p in model.parameters()]


def accumulation() -> Numbers:
    """Four backward passes to an update."""
    model = make_model(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    numbers = []
    for index in range(24):
        loss = loss_of(model, index) / 4
        loss.backward()
        numbers.append(loss.item().hex())
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return numbers + final(model)


def two_optimizers() -> Numbers:
    """A GAN: the discriminator's step and the generator's take turns."""
    generator, discriminator = make_model(0, WIDTH), make_model(1, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
    discriminator_optimizer = torch.optim.RMSprop(discriminator.parameters(), lr=1e-4)
    numbers = []
    for index in range(12):
        real, _ = batch(index)
        noise, _ = batch(1000 + index)
        discriminator_optimizer.zero_grad()
        loss = discriminator(generator(noise).detach()).mean() - discriminator(real).mean()
        loss.backward()
        discriminator_optimizer.step()
        numbers.append(loss.item().hex())
        generator_optimizer.zero_grad()
        loss = -discriminator(generator(noise)).mean()
        loss.backward()
        generator_optimizer.step()
        numbers.append(loss.item().hex())
    return numbers + final(generator, discriminator)


def skipped_by_the_scaler() -> Numbers:
    """A loss that overflows in two of twelve iterations: the scaler does not call the optimizer there."""
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    numbers = []
    for index in range(12):
        optimizer.zero_grad()
        loss = loss_of(model, index) * (float("inf") if index in (4, 9) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        numbers += [loss.item().hex(), float(scaler.get_scale()).hex()]
    return numbers + final(model)


def evaluation_between_epochs() -> Numbers:
    """Four epochs of four steps, each followed by an evaluation pass over batches of another size."""
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers = []
    for epoch in range(4):
        model.train()
        for index in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, 4 * epoch + index)
            loss.backward()
            optimizer.step()
            numbers.append(loss.item().hex())
        model.eval()
        with torch.no_grad():
            numbers += [loss_of(model, index, 300).item().hex() for index in range(3)]
    return numbers + final(model)


def closures() -> Numbers:
    """LBFGS evaluates the model several times within one `step`."""
    model = make_model(0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)
    numbers = []
    for _ in range(5):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        numbers.append(optimizer.step(closure).item().hex())
    return numbers + final(model)


def inference_only() -> Numbers:
    """No optimizer at all."""
    model = make_model(0)
    with torch.no_grad():
        return [model(batch(index)[0]).sum().item().hex() for index in range(12)]


def scheduler_and_clipping() -> Numbers:
    """A learning-rate scheduler wraps `optimizer.step` and clipping runs over all gradients."""
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    numbers = []
    for index in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, index)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        numbers += [loss.item().hex(), norm.item().hex()]
    return numbers + final(model)


@pytest.mark.parametrize(
    ("train", "num_steps", "least_planned"),
    [
        (accumulation, 6, 2),
        (two_optimizers, 24, 8),
        (skipped_by_the_scaler, 10, 3),
        (evaluation_between_epochs, 16, 6),
        (closures, 5, 0),
        (inference_only, 0, 0),
        (scheduler_and_clipping, 10, 5),
    ],
)
def test_equal_to_in_core(train: Callable[[], Numbers], num_steps: int, least_planned: int) -> None:
    expected = train()
    with ooc.Session(BUDGET, step_boundary="optimizer", debug=True) as session:
        actual = train()
        rows = session.steps.rows
        report: dict[str, Any] = session.report()
    assert actual == expected
    modes = Counter(row.mode for row in rows)
    assert len(rows) == num_steps  # one for each `optimizer.step` that was really called
    assert modes["planned"] >= least_planned, modes
    assert report["peak_nbytes"] <= report["budget_nbytes"]
    assert report["in_core_peak_nbytes"] > 0


def test_optimizer_on_another_thread_is_no_boundary() -> None:
    """A step belongs to the thread that opened the session; others' optimizers are theirs."""
    import threading

    with ooc.Session(BUDGET, step_boundary="optimizer") as session:

        def train() -> None:
            weight = torch.ones(4, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.1)
            weight.sum().backward()
            optimizer.step()

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        assert session.steps.rows == []


def test_what_is_freed_while_a_step_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected at any time. It comes before the next step's first op, and steps are planned."""
    with ooc.Session("1MiB", chunk_nbytes=1 << 16, debug=True, plan_cache=False) as session:
        note = session.engine.sequences.note

        def note_after_collecting(*arguments: Any) -> Any:
            gc.collect()
            return note(*arguments)

        monkeypatch.setattr(session.engine.sequences, "note", note_after_collecting)
        weights = [torch.full((160, 160), float(index)) for index in range(10)]
        gc.disable()
        try:
            for _ in range(7):
                with session.step():
                    made = torch.ones(160, 160)
                    cycle: list[Any] = [made + 1]
                    cycle.append(cycle)
                    for weight in weights:
                        weight.add_(cycle[0])
                    del cycle, made
        finally:
            gc.enable()
        assert session.steps.rows[-1].mode == "planned", [row.why for row in session.steps.rows]
    assert [weight[0, 0].item() for weight in weights] == [14.0 + index for index in range(10)]
