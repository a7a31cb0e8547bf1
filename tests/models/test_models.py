"""The model zoo: sizes as published, batches that repeat, steps that train."""

from __future__ import annotations

import pytest
import torch

from ooc import models
from ooc.models.text import corpus


@pytest.mark.parametrize(
    ("name", "preset", "expected"),
    [
        ("vgg16_cifar", "full", 14_872_228),
        ("vgg16_cifar", "small", 14_872_228),
        ("vgg16", "full", 138_357_544),
        ("resnet18", "full", 11_689_512),
        ("resnet50", "full", 25_557_032),
        ("mobilenet_v2", "full", 3_504_872),
        ("bert", "full", 109_514_298),
        ("gpt", "full", 4_870_144),
        ("densenet121", "full", 7_978_856),
        ("deeplab_v3", "full", 42_004_074 - 2_365_205),  # less the auxiliary head, which ours does not have
        ("pix2pix_hd", "full", 182_546_755),
        ("gpt_1b", "full", 1_313_722_368),
    ],
)
def test_parameter_counts_are_those_published(name: str, preset: models.Preset, expected: int) -> None:
    with torch.device("meta"):
        model = models.get(name, preset).build()
    assert models.num_parameters(model) == expected


@pytest.mark.parametrize("name", models.names())
def test_a_small_workload_trains_and_repeats(name: str) -> None:
    def train() -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(1)
        workload = models.get(name, "small")
        model = workload.build()
        optimizer = workload.make_optimizer(model)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = workload.loss(model, workload.make_batch(0))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, list(model.parameters())

    losses, parameters = train()
    again, parameters_again = train()
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(parameters, parameters_again, strict=True))
    assert losses[2] < losses[0]


@pytest.mark.parametrize("name", models.names())
def test_batches_depend_on_the_step_alone(name: str) -> None:
    workload = models.get(name, "small", batch_size=2)
    state = torch.get_rng_state()
    first, again, other = workload.make_batch(3), workload.make_batch(3), workload.make_batch(4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert first[0].shape[0] == 2


def test_tied_frozen_is_tied_and_frozen() -> None:
    model = models.get("tied_frozen").build()
    assert model.head.weight is model.token.weight
    assert [next(b.parameters()).requires_grad for b in model.blocks] == [True, False, True]


def test_the_corpus_is_python_source_cut_to_size() -> None:
    text = corpus(1000)
    assert len(text) == 1000
    assert not text.flags.writeable
    assert b"import" in corpus().tobytes()


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'alexnet'. Options: .*resnet50"):
        models.get("alexnet")
    with pytest.raises(ValueError, match=r"preset 'huge'. Options: small, full"):
        models.get("gpt", "huge")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'rmsprop'. Options: .*adamw_fused"):
        models.get("gpt").make_optimizer(torch.nn.Linear(1, 1), "rmsprop")


@pytest.mark.parametrize("name", models.OPTIMIZERS)
def test_each_optimizer_moves_each_parameter(name: str) -> None:
    model = torch.nn.Linear(3, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = models.make_optimizer(name, model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
