"""What the throttled benchmark says of its rivals' memory, and of what a step moves at least."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.child import CHECKPOINT_IN_BACKWARD, needed_nbytes
from benchmarks.throttled import CASES, gradients_nbytes
from ooc import models
from ooc.cli.trial import TrialOptions


def _options(store: Path) -> TrialOptions:
    return TrialOptions(
        workload="encoder", preset="small", optimizer="sgd", num_steps=0, num_threads=1, store=str(store)
    )


def test_a_rival_in_the_backward_pass_does_without_most_gradients(tmp_path: Path) -> None:
    """Of a model's gradients only few are alive at once, so it needs at least half of their bytes less."""
    gradients = 4 * models.num_parameters(models.get("encoder", "small").build())
    plain, ahead = (needed_nbytes(v, _options(tmp_path)) for v in ("checkpoint", CHECKPOINT_IN_BACKWARD))
    assert plain - ahead >= gradients // 2


def test_a_rival_in_the_backward_pass_has_the_same_losses(tmp_path: Path) -> None:
    losses = []
    for variant in ("stock", CHECKPOINT_IN_BACKWARD):
        command = [sys.executable, "-m", "benchmarks.child", variant, json.dumps(asdict(_options(tmp_path)))]
        told = subprocess.run(command, input="step\n" * 4, capture_output=True, text=True, check=True, timeout=300)
        events = [json.loads(line) for line in told.stdout.splitlines()]
        losses.append([event["loss"] for event in events if event["event"] == "step"])
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


def test_gradients_are_as_large_as_parameters() -> None:
    (case,) = (case for case in CASES if case.name == "ResNet-50")
    assert gradients_nbytes(case) == 4 * 25_557_032  # torchvision's count of resnet50's parameters
