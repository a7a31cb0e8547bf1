"""A snapshot of a model's or an optimizer's state, taken every few steps and kept, leaves the steps planned.

Each program runs in core and under a session with debug checks, compared to the last bit; once a pattern was seen
twice, nearly all of its ops come from plans.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.session.test_segments import digest, evaluate, model, planned_share, run, train_step
from tests.thinned import thinned

NUM_STEPS = 18

Snapshot = Callable[..., Any]
"""Given model, optimizer, and the last one or None, returns the next."""


def _saved(state: Any, file: Any = None) -> Any:
    """The state after a round trip through `torch.save`."""
    file = io.BytesIO() if file is None else file
    torch.save(state, file)
    if isinstance(file, io.BytesIO):
        file.seek(0)
    return torch.load(file)


def _weights(net: nn.Module, *_: Any) -> Any:
    return _saved(net.state_dict())


def _all_state(net: nn.Module, optimizer: torch.optim.Optimizer, *_: Any) -> Any:
    return _saved({"model": net.state_dict(), "optimizer": optimizer.state_dict()})


def _legacy(net: nn.Module, *_: Any) -> Any:
    file = io.BytesIO()
    torch.save(net.state_dict(), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    return torch.load(file)


def _saved_only(net: nn.Module, *_: Any) -> bytes:
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    return file.getvalue()


def _after_evaluation(net: nn.Module, *_: Any) -> Any:
    evaluate(net, 2)
    return _saved(net.state_dict())


def _deep_copy(net: nn.Module, *_: Any) -> Any:
    return copy.deepcopy(net.state_dict())


def _average(net: nn.Module, _: torch.optim.Optimizer, last: Any) -> Any:
    if last is None:
        return {name: value.clone() for name, value in net.state_dict().items()}
    for name, value in net.state_dict().items():
        last[name].mul_(0.9).add_(value, alpha=0.1)
    return last


def _back_to_the_last(net: nn.Module, *_: Any) -> Any:
    """As `ReduceLROnPlateau` users do: the best weights are kept, and come back."""
    state = _saved(net.state_dict())
    net.load_state_dict(state)
    return state


@thinned(
    "snapshot,every",
    [_weights, _all_state, _legacy, _saved_only, _after_evaluation, _deep_copy, _average, _back_to_the_last],
    [1, 3],
)
def test_a_snapshot_that_is_kept_does_not_leave_the_plan(snapshot: Snapshot, every: int) -> None:
    """Remedies: `Exports.saving`, which leaves no plan; `is_compared`, since `torch.load` asks for addresses."""

    def program() -> list[Any]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        kept: Any = None
        out: list[Any] = []
        for index in range(NUM_STEPS):
            out.append(train_step(net, optimizer, index))
            if index % every == 0:
                kept = snapshot(net, optimizer, kept)
                if isinstance(kept, bytes):
                    out.append(kept)
        return out + digest(net) + [_sum_of(kept)]

    rows = run(program)
    assert planned_share(rows[10:]) >= 0.95, [(row.mode, row.why) for row in rows]


def test_copies_of_small_tensors_before_that_of_a_large_one_are_not_taken_for_it() -> None:
    """An optimizer's state has a counter of steps before the moments. Remedy: `kTouches`.

    The copy of a counter was taken for the first op of the snapshot's plan, which was left at the next one.
    """

    def program() -> list[Any]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        kept: Any = None
        for index in range(24):
            train_step(net, optimizer, index)
            if index % 3 == 0:
                kept = copy.deepcopy(optimizer.state_dict())
        return digest(net) + [_sum_of(kept)]

    rows = run(program)
    assert planned_share(rows[10:]) >= 0.95, [(row.mode, row.why) for row in rows]


def test_a_snapshot_in_a_file_is_what_the_weights_were(tmp_path: Path) -> None:
    def program() -> list[Any]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        out: list[Any] = []
        for index in range(12):
            out.append(train_step(net, optimizer, index))
            kept = _saved(net.state_dict(), tmp_path / "weights.pt")
            out.append(_sum_of(kept))
        return out

    rows = run(program)
    assert rows[-1].mode == "planned"


def _sum_of(state: Any) -> float:
    if isinstance(state, dict):
        return sum(_sum_of(value) for value in state.values())
    if isinstance(state, list):
        return sum(map(_sum_of, state))
    return float(state.double().sum()) if isinstance(state, torch.Tensor) else 0.0
