"""What an op runs with beside its arguments: a re-run has all of it, and leaves all as it found it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from ooc.replay.recipes import Settings

CHANGES: dict[str, Callable[[], Any]] = {
    "grad": lambda: torch._C._set_grad_enabled(False),
    "num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic_warns": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fills_uninitialized": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "onednn": lambda: torch._C._set_mkldnn_enabled(False),
}
"""Something that changes each of them; inference mode has a test of its own, CUDA's are in tests/cuda and tests/gpu."""


def test_each_setting_has_a_test() -> None:
    assert {field.name for field in fields(Settings)} - set(CHANGES) == {"inference", "cuda"}


@pytest.mark.parametrize("name", CHANGES)
def test_applied(name: str) -> None:
    """Fails if the setting is not noted, not made, or not put back."""
    ours = Settings.now()
    try:
        CHANGES[name]()
        theirs = Settings.now()
        assert getattr(theirs, name) != getattr(ours, name)
        ours._set()
        assert Settings.now() == ours
        with theirs.applied():
            assert Settings.now() == theirs
        assert Settings.now() == ours
        with pytest.raises(ZeroDivisionError), theirs.applied():
            raise ZeroDivisionError
        assert Settings.now() == ours
    finally:
        ours._set()


def test_inference_mode() -> None:
    with torch.inference_mode():
        theirs = Settings.now()
    ours = Settings.now()
    with theirs.applied():
        assert torch.is_inference_mode_enabled()
        with ours.applied():
            assert Settings.now() == ours
        assert Settings.now() == theirs
    assert Settings.now() == ours
