"""Steps that are not the same twice are planned piece by piece, and their bits are those of ordinary training.

Evaluations in between, micro-batches in any number, optimizers in any order, closures: each in core and under a session
with debug checks, compared to the last bit; and how much of it was planned once each segment was seen.
"""

from __future__ import annotations

import gc
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.replay import segmentation, unions
from tests.quick_plans import QUICK_PLANS

SIZE = 192
BUDGET = "1280KiB"  # parameters, gradients and state of the model: 1.7 to 2.4 MiB

Program = Callable[[], list[Any]]


def model(seed: int = 0, num_layers: int = 4, *, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(SIZE, SIZE), nn.Tanh()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def batch(seed: int, length: int = 160) -> Tensor:
    return torch.randn(length, SIZE, generator=torch.Generator().manual_seed(seed))


def evaluate(net: nn.Module, num_batches: int, length: int = 160) -> float:
    net.eval()
    total = 0.0
    with torch.no_grad():
        for index in range(num_batches):
            total += net(batch(1000 + index, length)).square().mean().item()
    net.train()
    return total


def digest(*nets: nn.Module) -> list[int]:
    """A number for each parameter and gradient, which any other bit changes."""
    tensors = [t for net in nets for p in net.parameters() for t in (p.detach(), p.grad) if t is not None]
    bits = [t.contiguous().view(torch.int32).flatten().to(torch.int64) for t in tensors]
    return [int((each * torch.arange(1, 2 * each.numel(), 2)).sum()) for each in bits]


def run(
    program: Program, *, budget: str = BUDGET, debug: bool = True, begin: Callable[[ooc.Session], object] = id
) -> list[Any]:
    """Rows of the steps that were found in the program; its results must be those of the run in core.

    `begin` is called once the session is open.
    """
    torch.manual_seed(0)
    expected = program()
    torch.manual_seed(0)
    gc.collect()  # optimizers of other tests are none of this program's
    with ooc.Session(
        budget,
        debug=debug,
        plan_cache=False,
        step_boundary="optimizer",
        chunk_nbytes="64KiB",
        threshold_nbytes="16KiB",
        **QUICK_PLANS,
    ) as session:
        begin(session)
        found = program()
    assert found == expected
    return list(session.steps.rows)


def planned_share(rows: list[Any]) -> float:
    planned = sum(row.num_planned_ops for row in rows)
    return planned / (planned + sum(row.num_demand_ops for row in rows))


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    optimizer.zero_grad()
    loss = net(batch(seed)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_evaluations_of_any_number_of_batches_are_planned_in_between(dropout: float) -> None:
    def program() -> list[Any]:
        rng = random.Random(1)
        net = model(dropout=dropout)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        out: list[Any] = []
        for index in range(24):
            out.append(train_step(net, optimizer, index))
            if index % 3 == 2:
                out.append(evaluate(net, rng.randint(2, 6)))
                if index % 2:
                    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
        return out + digest(net)

    rows = run(program)
    assert planned_share(rows[12:]) > 0.9
    assert [row.mode for row in rows[12:]].count("planned") >= 9


def loaded(seed: int) -> Tensor:
    """A batch of tokens as a loader makes it, sample by sample: many ops that touch no variable."""
    return torch.cat([torch.tensor([(seed + i) % 64]) for i in range(30)]).repeat(5)


@pytest.mark.parametrize("zeroes_first", [False, True])
def test_evaluations_between_steps_that_begin_with_a_loader_are_planned(zeroes_first: bool) -> None:
    """Remedy: `MOST_HEAD_OPS`. With 16 the step's plan is left for good when the evaluation's first layer comes.

    Where gradients are freed before the loader's ops, they are still there when the evaluation's loader runs, and the
    step's plan is left among those ops. That is its head all the same: what comes next is known by its first op.
    """

    def program() -> list[Any]:
        rng = random.Random(3)
        net = model(num_layers=3)
        net.insert(0, nn.Embedding(64, SIZE))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        out: list[Any] = []
        for index in range(21):
            if zeroes_first:
                optimizer.zero_grad()
            loss = net(loaded(index)).square().mean()
            loss.backward()
            optimizer.step()
            if not zeroes_first:
                optimizer.zero_grad()
            out.append(loss.item())
            if index % 3 == 2:
                for part in range(rng.randint(1, 6)):
                    tokens = loaded(1000 + part)
                    with torch.no_grad():
                        out.append(net(tokens).square().mean().item())
        return out + digest(net)

    rows = run(program)
    assert planned_share(rows[9:]) > 0.9


def test_a_loader_whose_batch_is_the_first_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stacks samples that are none, after many ops without a variable: that op says what begins, all the same."""
    for name in ("_NUM_UNLIKE", "_NUM_MIXED"):  # steps are planned piece by piece
        monkeypatch.setattr(unions, name, 99)

    def program() -> list[Any]:
        rng = random.Random(3)
        net = model(num_layers=3)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        out: list[Any] = []
        for index in range(40):
            generator = torch.Generator().manual_seed(index)
            for _ in range(rng.randint(0, 6)):
                out.append(torch.randn(3, generator=generator).mean().item())
            samples = [torch.randn(SIZE, generator=generator) for _ in range(60)]
            net(torch.stack(samples)).square().mean().backward()
            with torch.no_grad():
                for parameter in rng.sample(list(net.parameters()), rng.randint(1, 5)):
                    out.append(parameter.norm().item())
            optimizer.step()
            optimizer.zero_grad()
        return out + digest(net)

    rows = run(program)
    assert planned_share(rows[20:]) > 0.7, [row.why for row in rows]


def test_micro_batches_in_any_number_are_planned() -> None:
    def program() -> list[Any]:
        rng = random.Random(2)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        out: list[Any] = []
        for index in range(24):
            optimizer.zero_grad()
            for part in range(rng.randint(1, 5)):
                loss = net(batch(10 * index + part)).square().mean()
                loss.backward()
                out.append(loss.item())
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        return out + digest(net)

    rows = run(program)
    assert planned_share(rows[14:]) > 0.9


def test_outputs_that_outlive_other_segments_and_are_as_large_as_gradients() -> None:
    """They were taken for gradients, since in the segment before nothing had made them: each step left its plan."""

    def program() -> list[Any]:
        torch.manual_seed(0)
        words, cells, last = nn.Embedding(600, 128), nn.LSTM(128, 128, batch_first=True), nn.Linear(128, 600)
        modules, out = [words, cells, last], []
        optimizer = torch.optim.Adagrad([p for m in modules for p in m.parameters()], lr=0.05)
        for index in range(24):
            if index == 12:  # more words: from here on steps are planned by segments
                words, last = nn.Embedding(900, 128), nn.Linear(128, 900)
                modules = [words, cells, last]
                optimizer = torch.optim.Adagrad([p for m in modules for p in m.parameters()], lr=0.05)
            text = torch.randint(0, words.num_embeddings, (16, 33))
            states, _ = cells(words(text[:, :-1]))  # as large as its weights; alive until the next ones are there
            loss = nn.functional.cross_entropy(last(states).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=index % 5 != 0)
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out + digest(*modules)

    rows = run(program, budget="10752KiB")
    assert planned_share([*rows[18:20], *rows[21:]]) > 0.9, [
        (row.mode, row.num_planned_ops, row.num_demand_ops, row.why) for row in rows
    ]


def test_what_is_there_tells_which_of_two_plans_begins() -> None:
    """Gradients that are kept or not, at random: a backward pass that adds to them, or makes them.

    Both begin alike, and no history tells which comes.
    """

    def program() -> list[Any]:
        rng = random.Random(4)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        out: list[Any] = []
        for index in range(40):
            loss = net(batch(index)).square().mean()
            loss.backward()
            optimizer.step()
            if rng.random() < 0.5:
                optimizer.zero_grad()
            out.append(loss.item())
        return out + digest(net)

    rows = run(program)

    assert planned_share(rows[28:]) > 0.9


def test_training_that_goes_on_with_another_model_is_planned_again_soon() -> None:
    """As after a resume: the plans wait for parameters that are gone, and are given up at their first refusal."""

    def program() -> list[Any]:
        net, out = model(), []
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for index in range(30):
            out.append(train_step(net, optimizer, index))
            if index % 5 == 4:
                out.append(evaluate(net, 2))
            if index == 14:
                weights = {name: value.clone() for name, value in net.state_dict().items()}
                net = model(seed=1)
                net.load_state_dict(weights)
                state = optimizer.state_dict()
                optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
                optimizer.load_state_dict(state)
                del state, weights
        return out + digest(net)

    rows = run(program)
    assert planned_share(rows[19:]) > 0.95
    assert sum("is gone" in row.why for row in rows) <= 2


def test_two_optimizers_in_any_alternation_are_planned() -> None:
    def program() -> list[Any]:
        rng = random.Random(3)
        nets = [model(seed, 3) for seed in range(2)]
        batches = [batch(seed) for seed in range(4)]
        optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in nets]
        out = []
        for index in range(44):  # the first twelve take turns, by chance, and are taken for rounds
            which = rng.randint(0, 1)
            optimizers[which].zero_grad()
            loss = nets[which](batches[index % 4]).square().mean()
            loss.backward()
            optimizers[which].step()
            out.append(loss.item())
        return out + digest(*nets)

    rows = run(program)
    assert planned_share(rows[28:]) > 0.8


def test_a_critic_and_its_generator_are_planned() -> None:
    """Several steps of one network, then one of the other: each is on its plan again right after the other's.

    Remedy: `VariableRecord.birthplace`. By size and age alone the critic's plan takes the generator's gradients for its
    own, which are as large, and younger; and each first critic step after a generator's leaves it.
    """

    def program() -> list[Any]:
        generator, critic = model(0, 2), model(1, 2)
        ours, theirs = (torch.optim.AdamW(net.parameters(), lr=1e-3) for net in (generator, critic))
        out = []
        for index in range(24):
            theirs.zero_grad()
            mixed = (0.5 * generator(batch(index)) + batch(100 + index)).detach().requires_grad_()
            value = critic(mixed)
            (slope,) = torch.autograd.grad(value.mean(), mixed, create_graph=True)
            loss = value.mean() + (slope.norm(2, dim=1) - 1).square().mean()
            loss.backward()
            theirs.step()
            out.append(loss.item())
            if index % 3 == 2:
                ours.zero_grad()
                score = -critic(generator(batch(200 + index))).mean()
                score.backward()
                ours.step()
                out.append(score.item())
        return out + digest(generator, critic)

    rows = run(program)
    assert [row.mode for row in rows[20:]] == ["planned"] * 12


def test_closures_of_any_number_are_planned() -> None:
    def program() -> list[Any]:
        net = model(0, 3)
        optimizer = torch.optim.LBFGS(
            net.parameters(), lr=0.3, max_iter=5, history_size=3, line_search_fn="strong_wolfe"
        )
        out: list[Any] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (net(batch(len(out) // 2)) - 0.1).abs().mean()
            loss.backward()
            out.append(loss.item())
            return loss

        for _ in range(12):
            optimizer.step(closure)
        return out + digest(net)

    rows = run(program, budget="2560KiB")
    assert planned_share(rows[8:]) > 0.5


def test_what_follows_a_segment_that_has_left_its_plan_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins where the grad mode changes, which nobody looked for after a plan."""
    monkeypatch.setattr(segmentation, "_MOST_NEW", 0)  # steps are planned by their segments from the first
    monkeypatch.setattr(segmentation, "_NUM_EQUAL", 99)
    monkeypatch.setattr(unions, "_NUM_UNLIKE", 99)

    def program() -> list[Any]:
        net = model(0, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        unlike = {10: torch.exp, 11: torch.sin, 12: torch.cos, 13: torch.neg}
        out: list[Any] = []
        for index in range(14):
            with torch.no_grad():
                scale = batch(index).tanh()
                for _ in range(3):
                    scale = scale.mul(2.0).tanh()
                scale = unlike.get(index, torch.sigmoid)(scale)
            optimizer.zero_grad()
            loss = net(scale).square().mean()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out + digest(net)

    rows = run(program, budget="16MiB", debug=False)  # native code runs what is on demand, where nothing is away
    assert all(row.mode == "planned" for row in rows[6:10])
    for row in rows[10:]:
        assert row.mode == "off_plan"
        assert row.num_planned_ops > row.num_demand_ops


class Interrupted(Exception):
    """Raised in the middle of what is planned."""


class Interrupting(nn.Module):
    """Passes its input on; raises in the backward pass or the forward pass when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise Interrupted
        if self.when == "backward" and x.requires_grad:
            x = x.clone()
            x.register_hook(self._raise)
        return x

    def _raise(self, _: Tensor) -> None:
        raise Interrupted


def test_an_exception_in_the_middle_of_any_segment_costs_no_bit() -> None:
    def program() -> list[Any]:
        rng = random.Random(4)
        interrupting = Interrupting()
        net = nn.Sequential(model(0, 2), interrupting, model(1, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        out: list[Any] = []
        for index in range(30):
            interrupting.when = "" if index < 8 else rng.choice(["", "", "forward", "backward"])
            optimizer.zero_grad()
            for part in range(rng.randint(1, 3)):
                try:
                    loss = net(batch(10 * index + part)).square().mean()
                    loss.backward()
                    out.append(loss.item())
                except Interrupted:
                    out.append("interrupted")
            if rng.random() < 0.3:
                try:
                    out.append(evaluate(net, rng.randint(1, 3)))
                except Interrupted:
                    net.train()
            optimizer.step()
        return out + digest(net)

    rows = run(program)
    assert planned_share(rows[12:]) > 0.3


def test_an_evaluation_in_the_middle_of_accumulation() -> None:
    def program() -> list[Any]:
        rng = random.Random(5)
        net = model()
        average = model(7)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        out: list[Any] = []
        for index in range(20):
            optimizer.zero_grad()
            for part in range(rng.randint(1, 4)):
                net(batch(10 * index + part)).square().mean().backward()
                if rng.random() < 0.3:
                    with torch.inference_mode():
                        out += [net(batch(part)).sum().item() for _ in range(rng.randint(1, 3))]
            optimizer.step()
            with torch.no_grad():
                for theirs, ours in zip(average.parameters(), net.parameters(), strict=True):
                    theirs.lerp_(ours, 0.1)
        return out + digest(net, average)

    rows = run(program, budget="1792KiB")
    assert planned_share(rows[13:]) > 0.7
