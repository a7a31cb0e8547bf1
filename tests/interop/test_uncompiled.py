"""torch.compile under a session: one warning, then nothing is compiled and nothing is traced."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ooc

BUDGET = "8MiB"
ROOT = Path(__file__).parents[2]


class Counting:
    """A backend that compiles nothing, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.num_graphs += 1
        return graph.forward


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + x.cos()


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "torch.compile does nothing" in str(w.message)]


def test_what_is_compiled_under_a_session_is_itself() -> None:
    module = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as caught, ooc.Session(BUDGET):
        warnings.simplefilter("always")
        assert torch.compile(wave) is wave
        assert torch.compile(module, mode="max-autotune", fullgraph=True) is module

        @torch.compile
        def plain(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @torch.compile(dynamic=True)
        def with_options(x: torch.Tensor) -> torch.Tensor:
            return x + 2

        module.compile()
        x = torch.ones(4)
        assert torch.equal(plain(x), x + 1)
        assert torch.equal(with_options(x), x + 2)
        module(x)
    assert len(said(caught)) == 1
    assert torch.compile is not wave
    assert torch.compile.__module__ == "torch"


def test_what_was_compiled_before_runs_eagerly_and_is_compiled_again_after(backend: Counting) -> None:
    """Functions, wrapped modules and modules compiled in place, optimizers' steps."""
    function = torch.compile(wave, backend=backend)
    wrapped = torch.compile(nn.Linear(8, 8), backend=backend)
    in_place = Doubling()
    in_place.compile(backend=backend)
    large = torch.randn(256, 256)
    x = torch.randn(8)
    expected = wave(large), wrapped._orig_mod(x), in_place.forward(x)
    with warnings.catch_warnings(record=True) as caught, ooc.Session(BUDGET):
        warnings.simplefilter("always")
        for _ in range(3):
            results = function(large), wrapped(x), in_place(x)
            assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    assert backend.num_graphs == 0
    assert len(said(caught)) == 1
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert caught[0].filename == __file__  # the line that used it, not ours or torch's
    function(large)
    wrapped(x)
    in_place(x)
    assert backend.num_graphs == 3


def test_without_a_session_dynamo_would_trace(backend: Counting) -> None:
    """The control: the same calls do compile."""
    torch.compile(wave, backend=backend)(torch.ones(4))
    assert backend.num_graphs == 1


def test_a_stance_that_the_user_sets_in_a_session_stays(backend: Counting) -> None:
    function = torch.compile(wave, backend=backend)
    with ooc.Session(BUDGET):
        torch.compiler.set_stance("eager_on_recompile")
    try:
        function(torch.ones(4))
        assert backend.num_graphs == 0
    finally:
        torch.compiler.set_stance("default")


def test_optimizer_steps_say_nothing(backend: Counting) -> None:
    """torch disables Dynamo around optimizers, which is no use of torch.compile."""
    torch.compile(wave, backend=backend)
    with warnings.catch_warnings(record=True) as caught, ooc.Session(BUDGET) as session:
        warnings.simplefilter("always")
        model = nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            with session.step():
                optimizer.zero_grad()
                model(torch.ones(4, 256)).sum().backward()
                optimizer.step()
    assert said(caught) == []


def test_dynamo_is_not_even_imported() -> None:
    code = (
        "import sys, torch, ooc\n"
        "with ooc.Session('8MiB'):\n"
        "    f = torch.compile(lambda x: x + 1)\n"
        "    assert f(torch.ones(3)).sum() == 6\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch.compile does nothing") == 1
