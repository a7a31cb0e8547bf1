"""What the benchmarks compare us with must train right, too; and their figures must be well made."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.cpu import SCENARIOS, count_ops
from benchmarks.gpu.offload_hooks import OffloadHooks
from benchmarks.rivals import checkpointed, saved_tensors_on_disk
from benchmarks.rows import markdown, row, write
from ooc import models
from ooc.cli.trial import train


@pytest.mark.parametrize(
    "name", ["conv_stack", "resnet50", "encoder", pytest.param("vgg16_cifar", marks=pytest.mark.slow)]
)
def test_rivals_have_the_losses_of_plain_training(name: str, tmp_path: Path) -> None:
    workload = models.get(name, "small")
    run = partial(train, workload, num_steps=3, optimizer="sgd")
    plain = [step.loss for step in run()]
    assert [step.loss for step in run(transform=checkpointed)] == plain
    assert [step.loss for step in run(step_context=partial(saved_tensors_on_disk, str(tmp_path)))] == plain
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["conv_stack", "encoder"])
def test_offload_hooks_keep_the_losses(name: str) -> None:
    workload = models.get(name, "small")
    hooks = OffloadHooks(torch.device("cpu"), least_nbytes=1 << 10)
    plain = [step.loss for step in train(workload, num_steps=3, optimizer="sgd")]
    assert [s.loss for s in train(workload, num_steps=3, optimizer="sgd", step_context=hooks.forward)] == plain
    assert hooks.num_offloaded > 30


def test_offload_hooks_give_back_what_was_saved() -> None:
    """Views with strides of their own, and a tensor that changes after it was saved."""
    hooks = OffloadHooks(torch.device("cpu"), least_nbytes=1)
    x = torch.randn(64, 32, requires_grad=True)
    with hooks.forward():
        y = (x.t() * 2.0).exp()
        z = (y[::2] * y[::2]).sum()
    expected = torch.zeros_like(x)
    with torch.no_grad():
        kept = (x.t() * 2.0).exp()[::2]
        expected.t()[::2] = 4 * kept * kept
        y.zero_()
    z.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
    assert hooks.num_offloaded == 3


def test_saved_tensors_really_are_on_disk(tmp_path: Path) -> None:
    x = torch.randn(256, 256, requires_grad=True)
    with saved_tensors_on_disk(str(tmp_path)):
        y = (x * 1.0).exp()
        assert [f.stat().st_size for f in tmp_path.glob("*/*")] == [y.nbytes]
        y.sum().backward()
        assert list(tmp_path.glob("*/*")) == []
    assert torch.equal(x.grad, y.detach())


def test_checkpointing_refuses_a_model_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="Linear has none of blocks"):
        checkpointed(torch.nn.Linear(1, 1))


def test_the_tiny_model_has_about_two_thousand_ops() -> None:
    tiny = next(s for s in SCENARIOS if s.workload == "tiny_ops")
    assert 1800 <= count_ops(tiny) <= 2400


def test_a_row_is_a_median_with_quantiles(tmp_path: Path) -> None:
    found = row("s", "v", "time", "s", [float(i) for i in range(11)])
    assert (found.value, found.quantiles, found.n) == (5.0, (1.0, 9.0), 11)
    empty = row("s", "v", "time", "s", [], note="not here")
    assert (empty.value, empty.quantiles, empty.note) == (None, None, "not here")
    write([found, empty], tmp_path / "rows.jsonl")
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2
    assert markdown(["a", "b"], [[1, 2]]) == "| a | b |\n|---|---:|\n| 1 | 2 |"
