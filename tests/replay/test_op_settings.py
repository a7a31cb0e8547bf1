"""What an op runs with beside its arguments: a re-run has all of it, and leaves all as it found it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.replay.inner_keys import InnerKeys
from ooc.replay.precisions import precision, precisions_unset, set_precision
from ooc.replay.recipes import NoRecipe, Recipe, Settings
from tests.session.program_reruns import forced_reruns, slow_store

CHANGES: dict[str, Callable[[], Any]] = {
    "grad": lambda: torch._C._set_grad_enabled(False),
    "num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic_warns": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fills_uninitialized": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "flushes_denormals": lambda: torch.set_flush_denormal(True),
    "nnpack": lambda: torch._C._set_nnpack_enabled(not torch._C._get_nnpack_enabled()),
    "onednn": lambda: torch._C._set_mkldnn_enabled(False),
    "onednn_deterministic": lambda: torch._C._set_mkldnn_deterministic(True),
    "onednn_precisions": lambda: set_precision("mkldnn", "conv", "bf16"),
    "matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
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


def _settings_of_all_levels() -> list[str]:
    levels = (("generic", "all"), *((b, op) for b in ("mkldnn", "cuda") for op in ("all", "conv", "matmul", "rnn")))
    return [precision(*level) for level in levels]


@pytest.mark.parametrize(
    "level", [("generic", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("cuda", "matmul")]
)
def test_precisions_by_level(level: tuple[str, str]) -> None:
    """A setting for all kinds of op stays one: else what is set for all later would not reach those kinds."""
    value = "tf32" if level[0] == "cuda" else "bf16"
    ours = Settings.now()
    with precisions_unset():
        set_precision(*level, value)
        theirs, told = Settings.now(), _settings_of_all_levels()
        with ours.applied():
            assert Settings.now() == ours
        assert _settings_of_all_levels() == told
        set_precision("generic", "all", "ieee")
        changed = _settings_of_all_levels()
        set_precision("generic", "all", value if level[0] == "generic" else "none")
        with ours.applied():
            pass
        set_precision("generic", "all", "ieee")
        assert _settings_of_all_levels() == changed
    assert Settings.now() == ours
    with theirs.applied():
        assert Settings.now().onednn_precisions == theirs.onednn_precisions
    assert Settings.now() == ours


def test_precisions_that_contradict_each_other() -> None:
    """Torch raises then if it is asked for the older one: never out of an op whose settings are noted."""
    with precisions_unset():
        set_precision("mkldnn", "matmul", "bf16")
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        theirs = Settings.now()
        assert theirs.matmul_precision is None
    with theirs.applied():
        assert precision("mkldnn", "matmul") == "bf16"


def test_whatever_fails_while_noting_is_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise RuntimeError("torch does not tell")

    monkeypatch.setattr(torch, "get_default_dtype", fails)
    with pytest.raises(NoRecipe, match="torch does not tell"):
        Recipe(
            torch.ops.aten.ones.default,
            ([2],),
            {},
            variable_of=lambda _: None,
            small_nbytes=1024,
            apart=contextlib.nullcontext,
        )


def _div_of_range() -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.arange(32768) / 70000
    finally:
        torch.set_default_dtype(torch.float32)


def _rand_of_bfloat16() -> Tensor:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return torch.rand(1024, 128)
    finally:
        torch.set_default_dtype(torch.float32)


def _flushed() -> Tensor:
    torch.set_flush_denormal(True)
    try:
        return torch.mul(torch.randn(512, 128), 1e-42).mul_(1e30)
    finally:
        torch.set_flush_denormal(False)


def _less_precise() -> Tensor:
    with precisions_unset():
        set_precision("mkldnn", "matmul", "bf16")
        return torch.randn(512, 128) @ torch.full((128, 128), 0.37)


def _cast_within() -> Tensor:
    """The op comes below autocast, and multiplies within it."""
    with torch.autocast("cpu"):
        return nn.functional.bilinear(torch.randn(512, 12), torch.randn(512, 12), torch.full((128, 12, 12), 0.37))


def test_what_an_op_calls_is_cast_again() -> None:
    x, weight = torch.randn(8, 12), torch.randn(16, 12, 12)

    op, arguments = torch.ops.aten._trilinear.default, (x, weight, x, [1, 3], [0], [1, 2], [2, 3])

    def make() -> Recipe:
        return Recipe(
            op,
            arguments,
            {},
            variable_of=lambda _: None,
            small_nbytes=1 << 20,
            apart=contextlib.nullcontext,
        )

    def run(recipe: Recipe) -> Tensor:
        result: Tensor = recipe.run(lambda _: torch.UntypedStorage(0))
        return result

    whole, expected = make(), op(*arguments)
    with torch.autocast("cpu"):
        cast, expected_cast = make(), op(*arguments)
    assert not torch.equal(expected, expected_cast)
    dtype = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        outside = InnerKeys.now()
        assert torch.equal(run(cast), expected_cast)
        with torch.autocast("cpu"):
            assert torch.equal(run(whole), expected)
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert InnerKeys.now() == outside == InnerKeys()
        assert torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_dtype("cpu", dtype)


@pytest.mark.parametrize("make", [_div_of_range, _rand_of_bfloat16, _flushed, _less_precise, _cast_within])
def test_run_again_as_it_was(make: Callable[[], Tensor]) -> None:
    """What was made under settings that the program has taken back is made again under the same ones."""

    def train() -> list[float]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(128, 128) * 0.05)
        optimizer = torch.optim.SGD([weight], lr=1e-2)
        found = []
        for _ in range(12):
            made = [make().float() for _ in range(3)]
            loss = torch.stack([(each.reshape(-1, 128).mean(0) @ weight).square().mean() for each in made]).sum()
            room = torch.full((2048, 64), 1.0)
            room = (room * 2 + 1).sum()
            sums = [each.reshape(-1, 128).mul(1e3).square().mean() for each in made]
            (loss + torch.stack(sums).sum()).backward()
            found += [loss.item(), room.item(), *(each.item() for each in sums)]
            del made, room, sums, loss
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected = train()
    options = {"chunk_nbytes": "64KiB", "threshold_nbytes": "16KiB", "plan_cache": False, "recompute": True}
    with slow_store(), forced_reruns(3), ooc.Session("1280KiB", step_boundary="optimizer", **options) as session:
        found = train()
        assert session.engine.manager.counters.num_reruns > 0
    assert found == expected
