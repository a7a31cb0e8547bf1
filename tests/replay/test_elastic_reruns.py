"""Steps that differ in sizes, on a store so slow that ops run again by default: equal bits, within plan and budget."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.replay import proven_ops
from ooc.replay.executor import Executor
from ooc.replay.planned_trials import PlannedRoom, waits_much
from scheduler.trace import Trace
from tests.store_speed import SLOW, store_speed

Step = Callable[[], contextlib.AbstractContextManager[None]]
ROW = 128


pytestmark = pytest.mark.usefixtures("one_thread")


class Layers(nn.Module):
    """What a transformer's layer has beside attention: dropout draws numbers, gelu and layer norm are cheap to run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(ROW, ROW), nn.LayerNorm(ROW), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _train(step: Step, lengths: list[int]) -> list[float]:
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    out = []
    for index, length in enumerate(lengths):
        batch = torch.randn(length, ROW, generator=torch.Generator().manual_seed(index))
        with step():
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
    return out + [float(p.detach().double().norm()) for p in model.parameters()]


def _lengths(seed: int, count: int = 4) -> list[int]:
    """Two to learn from, then any: some so short that most of what they compute is below the threshold of 64 KiB."""
    r = random.Random(seed)
    return [900, 1000] + [r.choice([r.randint(500, 1100), r.randint(5, 300)]) for _ in range(count)]


def _run(lengths: list[int], budget: str, *, debug: bool, **options: Any) -> list[Any]:
    """The session's rows; the results are those of the in-core run, bit for bit."""
    expected = _train(contextlib.nullcontext, lengths)
    with store_speed(SLOW), ooc.Session(budget, debug=debug, plan_cache=False, **options) as session:
        found = _train(session.step, lengths)
        rows = list(session.steps.rows)
        assert session.report()["peak_nbytes"] <= session.report()["budget_nbytes"]
    assert found == expected
    return rows


@pytest.mark.parametrize(
    ("seed", "debug", "options"),
    [
        (1, True, {}),
        pytest.param(2, True, {}, marks=pytest.mark.slow),
        (3, False, {}),
        pytest.param(1, True, {"recompute": True}, marks=pytest.mark.slow),
        (2, True, {"policy": "capuchin"}),
    ],
)
def test_any_length_runs_again_within_its_plan(seed: int, debug: bool, options: dict[str, Any]) -> None:
    """Debug mode compares each re-run with what was discarded, and unmaps what nobody should touch.

    Where re-runs are asked for, too: ops that were tried in learning had other sizes. Remedy: `have_tried`.
    """
    rows = _run(_lengths(seed), "6MiB", debug=debug, **options)
    again = [row for row in rows if row.num_reruns]
    assert again
    assert {row.mode for row in again} == {"planned"}
    assert {row.loaded_nbytes for row in again} != {0} or {row.recomputed_nbytes for row in again} != {0}


def test_left_in_the_middle_what_was_discarded_is_made_with_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedy: `trim` of what is discarded. Else its reservation is the envelope's, and a remake raises."""
    after, left = Executor.after, []

    def leave_once(self: Executor, index: int) -> None:
        after(self, index)
        if self.active is not None and self.active.is_elastic and self.reruns.any_discarded(self.active):
            left.append(index)
            if len(left) == 30:
                self.bail_out("the test says so")

    monkeypatch.setattr(Executor, "after", leave_once)
    rows = _run(_lengths(1, 6), "6MiB", debug=True)
    assert len(left) >= 30
    assert "off_plan" in {row.mode for row in rows}


def test_a_plan_has_the_room_to_try_new_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedy: `with_room`. Each elastic plan that is entered can try each kind of op when its sizes are new."""
    entered = []
    with_room = proven_ops.ProvenOps.with_room

    def noted(self: proven_ops.ProvenOps, key: str, *args: Any) -> Any:
        executable = with_room(self, key, *args)
        entered.append(proven_ops._num_lacking(executable, self._first_of_each_kind(key, executable)))
        return executable

    monkeypatch.setattr(proven_ops.ProvenOps, "with_room", noted)
    _run(_lengths(1), "4MiB", debug=True)
    assert len(entered) >= 2
    assert not any(entered)


def test_no_room_twice_is_the_end_of_re_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedy: `gives_up`. The program keeps what the plan knows nothing of, so no trial has room; later steps are
    planned all the same, without re-runs."""
    take = PlannedRoom.take

    def no_room(self: PlannedRoom, nbytes: int) -> int:
        if self._executable.reruns.recipes_of:
            self._free = []
        return take(self, nbytes)

    monkeypatch.setattr(PlannedRoom, "take", no_room)
    rows = _run([900, 1000, 800] + [850 + 10 * i for i in range(9)], "6MiB", debug=True)
    modes = [row.mode for row in rows]
    assert "off_plan" in modes
    assert modes[-3:] == ["planned"] * 3, modes
    assert not rows[-1].num_reruns


class Pools(nn.Module):
    """Each op of these returns maxima and, twice as large, their positions: of 200 rows only those are variables."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(ROW // 2, ROW) for _ in range(6))
        self.last = nn.Linear(ROW // 2, ROW)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : ROW // 2]
        for layer in self.layers:
            x = x + nn.functional.max_pool1d(layer(x).unsqueeze(1), 2).squeeze(1)
        return self.last(x)


def test_of_two_results_the_first_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedy: `births_of`. Else the re-run's positions come to lie where the plan has the maxima."""
    monkeypatch.setattr(f"{__name__}.Layers", Pools)
    rows = _run([900, 1000, 800, 910, 920, 930, 200, 700, 180, 240], "5MiB", debug=True)
    assert [row.mode for row in rows[-4:]] == ["planned"] * 4
    assert all(row.num_reruns for row in rows[-4:])


def test_steps_of_any_size_must_wait_longer_for_re_runs_to_pay() -> None:
    trace = cast("Trace", SimpleNamespace(duration_ns=800))
    assert not waits_much(880, trace)
    assert waits_much(900, trace)
    assert not waits_much(1000, trace, is_elastic=True)
    assert waits_much(1100, trace, is_elastic=True)
