"""Each rule of playing re-runs is needed: with one left out, bits differ or the session says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ooc.errors import RerunDiffers, RerunLost, SessionError
from ooc.replay import recipes
from ooc.replay.random_state import RandomState
from ooc.replay.remakes import Remake
from tests.session.program_reruns import forced_reruns
from tests.session.recomputed import CASES, Case, compare, noted, saved_tensors

Patch = Callable[[pytest.MonkeyPatch], None]


class Switches(nn.Module):
    """Ops under other settings than the backward pass has: sums by two threads, and random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4096, 64))
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("count", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        y = (x.reshape(-1, 64) * self.scale + self.count).exp()
        noise = torch.empty_like(y).normal_(generator=self.generator)
        z = (y * noise).sigmoid() * y
        self.count.add_(1.0)  # small: not a variable, and another value when the ops before it run again
        return (z * z.tanh()).sigmoid()[:, :10]


SWITCHES = Case(
    model=Switches, num_chunks=105, batch=lambda: (torch.randn(4096, 64), torch.randint(0, 10, (4096,))), policy="auto"
)


def _no_random_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RandomState, "again", lambda self: contextlib.nullcontext())


def _random_state_not_put_back(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def again(self: RandomState) -> Iterator[None]:
        self.restore()
        yield

    patch.setattr(RandomState, "again", again)


def _small_operands_shared(patch: pytest.MonkeyPatch) -> None:
    """Small operands by reference: batch norm's statistics move twice, and buffers have later values."""
    note = recipes._Noting._note_tensor

    def shared(self: Any, tensor: Tensor) -> Any:
        found = note(self, tensor)
        if isinstance(found, recipes._OnCopy):
            self._copies[found.number] = _Shared(tensor.untyped_storage())
        return found

    patch.setattr(recipes._Noting, "_note_tensor", shared)


class _Shared:
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def clone(self) -> torch.UntypedStorage:
        return self.storage


def _no_remake(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Remake, "run", lambda *_: None)


def _read_all(training: Any, index: int, output: Tensor) -> None:
    if index == 4:
        training.digests.append(tuple(str(t.double().sum().item()) for t in saved_tensors(output)))


RULES: dict[str, tuple[Patch, Case, Any]] = {
    "the generator's state before a random op": (_no_random_state, CASES["convolutions"], None),
    "the generator's state after a re-run": (_random_state_not_put_back, SWITCHES, None),
    "a generator of the program's own": (_no_random_state, SWITCHES, None),
    "batch norm's statistics": (_small_operands_shared, CASES["convolutions"], None),
    "small operands as they were": (_small_operands_shared, SWITCHES, None),
    "what was discarded is made again off plan": (_no_remake, CASES["convolutions"], _read_all),
}


def run(case: Case, hook: Any = None) -> Any:
    """Whether a plan recomputes depends on how long the ops took: where it would move all, it is made to discard."""
    with forced_reruns(0) if case is SWITCHES else contextlib.nullcontext():
        return compare(case, hook=hook)


def test_with_all_rules() -> None:
    assert noted(run(SWITCHES), "num_reruns") > 0


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_left_out_shows(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, case, hook = RULES[rule]
    patch(monkeypatch)
    # Bits differ, debug mode has found it, or bytes are said to be lost, at the session's end at the latest.
    with pytest.raises((AssertionError, RerunDiffers, RerunLost, SessionError)):
        run(case, hook)
