"""What the throttled benchmark says of its rivals' memory, and of what a step moves at least."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.child import BY_POLICY, CHECKPOINT_IN_BACKWARD, needed_nbytes
from benchmarks.throttled import CASES, gradients_nbytes, joules
from ooc import models
from ooc.cli.trial import TrialOptions
from tests import forked


def _options(store: Path) -> TrialOptions:
    return TrialOptions(
        workload="encoder", preset="small", optimizer="sgd", num_steps=0, num_threads=1, store=str(store)
    )


@pytest.mark.usefixtures("one_thread")
def test_a_rival_in_the_backward_pass_does_without_most_gradients(tmp_path: Path) -> None:
    """Of a model's gradients only few are alive at once, so it needs at least half of their bytes less."""
    gradients = 4 * models.num_parameters(models.get("encoder", "small").build())
    plain, ahead = (needed_nbytes(v, _options(tmp_path)) for v in ("checkpoint", CHECKPOINT_IN_BACKWARD))
    assert plain - ahead >= gradients // 2


def _told_by(variant: str, options: TrialOptions) -> list[dict[str, Any]]:
    """What a child says of four steps."""
    command = [sys.executable, "-m", "benchmarks.child", variant, json.dumps(asdict(options))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as orders,
        tempfile.TemporaryFile("w+") as told,
        tempfile.TemporaryFile("w+") as errors,
    ):
        orders.write("step\n" * 4)
        orders.seek(0)
        status = forked.start(command, env=env, files=(orders, told, errors)).wait(timeout=300)
        for file in (told, errors):
            file.seek(0)
        assert status == 0, errors.read()
        return [json.loads(line) for line in told]


def _losses(events: list[dict[str, Any]]) -> list[str]:
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.fixture(scope="module")
def stock_losses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    losses = _losses(_told_by("stock", _options(tmp_path_factory.mktemp("stock"))))
    assert len(losses) == 4
    return losses


@pytest.mark.slow
def test_a_rival_in_the_backward_pass_has_the_same_losses(tmp_path: Path, stock_losses: list[str]) -> None:
    events = _told_by(CHECKPOINT_IN_BACKWARD, _options(tmp_path))
    assert _losses(events) == stock_losses


def test_gradients_are_as_large_as_parameters() -> None:
    (case,) = (case for case in CASES if case.name == "ResNet-50")
    assert gradients_nbytes(case) == 4 * 25_557_032  # torchvision's count of resnet50's parameters


def test_energy_is_of_what_computes_and_of_what_moves() -> None:
    """By `rpi4`: 3 W while it computes, nothing while it waits, 0.15 W more while bytes move."""
    step = {"stall_s": 1.5, "loaded_nbytes": 10**8, "evicted_nbytes": 3 * 10**8}
    assert joules(2.0, None, 100) == 6.0
    assert joules(2.0, step, 100) == pytest.approx(0.5 * 3.0 + 0.15 + 3 * 0.15)


def test_a_paper_policy_trains_with_the_same_losses(tmp_path: Path, stock_losses: list[str]) -> None:
    events = _told_by(f"{BY_POLICY}melon", replace(_options(tmp_path), budget_nbytes=8 << 20))
    assert events[-1]["report"]["policy"] == "melon"
    assert _losses(events) == stock_losses
