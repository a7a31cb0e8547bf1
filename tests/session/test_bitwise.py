"""Out of core equals in core, to the last bit: losses, gradients, parameters, state, buffers, RNG.

Every case trains the same recipe twice, runs in debug mode (a touch of an evicted variable
faults), and must have planned at least three of its steps. CI runs a thinned grid in which each
model but the largest meets one to three budgets, each budget at least two models, and each
optimizer and each feature a tight one; the full grid carries the mark `slow`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from unittest import mock

import pytest

import ooc
from tests.harness import Recipe, Run, assert_equal, num_steps_by_mode, run_in_core, run_out_of_core
from tests.session.features import FEATURES
from tests.thinned import thinned

CHUNK_NBYTES = 64 * 1024

MODELS = ("conv_stack", "vgg16_cifar", "resnet50", "unet", "lstm", "gpt", "bert", "encoder", "tied_frozen")
OPTIMIZERS = ("sgd_momentum", "adam", "adamw", "adamw_foreach", "adamw_fused")
BUDGETS = ("peak", "half", "quarter", "smallest")
_AMPLE_NBYTES = 24 << 20
_SHARES = {"peak": 1.0, "half": 0.5, "quarter": 0.25, "smallest": 0.125}
"""Of what a step needs in core; the search for the smallest begins there, where that is too little."""

_BRIEF = {
    "conv_stack": ("peak", "half", "smallest"),
    "resnet50": ("quarter",),
    "unet": ("half", "smallest"),
    "lstm": ("quarter", "smallest"),
    "gpt": ("peak", "quarter"),
    "bert": ("half",),
    "encoder": ("quarter",),
    "tied_frozen": ("peak",),
}
_MORE = {("conv_stack", "half"), ("unet", "smallest"), ("lstm", "quarter"), ("gpt", "peak")}
"""Of these, the ones that are slow: their models meet another budget, and their budgets two other models."""

_NUM_STEPS = 6
"""Of what is run by default: two or three to learn from, and at least three planned ones."""

# Features that a model cannot have: no double backward through fused attention or through in-place
# ReLU6; a reentrant checkpoint needs an input with a gradient; ragged shapes in the in-place step.
_NOT_POSSIBLE = {
    ("encoder", "gradient_penalty"),
    ("unet", "inplace_and_views"),
    ("lstm", "checkpointing"),
    ("conv_stack", "checkpointing_reentrant"),
    ("vgg16_cifar", "checkpointing_reentrant"),
    ("unet", "checkpointing_reentrant"),
    ("lstm", "checkpointing_reentrant"),
    ("encoder", "checkpointing_reentrant"),
}


def _session(budget_nbytes: int) -> ooc.Session:
    return ooc.Session(budget=budget_nbytes, chunk_nbytes=CHUNK_NBYTES, debug=True)


def test_the_comparison_sees_one_flipped_bit() -> None:
    """The harness itself can fail: two seeds differ, and so does one altered gradient."""
    expected = run_in_core(Recipe(workload="conv_stack", num_steps=1))
    other = run_in_core(Recipe(workload="conv_stack", num_steps=1, seed=99))
    with pytest.raises(AssertionError, match=r"step 0 \(in core\): loss is .* instead of"):
        assert_equal(expected, other)
    (step,) = expected.steps
    name = next(iter(step.gradients))
    altered = {**step.gradients, name: "(1,) torch.float32 0"}
    forged = type(step)(**{**{f: getattr(step, f) for f in step.__slots__}, "gradients": altered})
    with pytest.raises(AssertionError, match=rf"gradients: 1 of \d+ differ, first {name}"):
        assert_equal(expected, Run(steps=(forged,)))


@pytest.mark.parametrize(
    ("model", "budget"),
    [
        pytest.param(model, budget, marks=[pytest.mark.slow] if (model, budget) in _MORE else [])
        for model, budgets in _BRIEF.items()
        for budget in budgets
    ],
)
def test_models(model: str, budget: str) -> None:
    _check(Recipe(workload=model, num_steps=_NUM_STEPS), budget)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("gpt", "adamw_foreach"),
        ("conv_stack", "adamw_fused"),
        *(
            pytest.param("gpt", name, marks=pytest.mark.slow)
            for name in ("sgd_momentum", "adam", "adamw", "adamw_fused")
        ),
        *(pytest.param("resnet18", name, marks=pytest.mark.slow) for name in ("adamw_foreach", "adamw_fused")),
    ],
)
def test_optimizers(model: str, optimizer: str) -> None:
    """The others are what models of `test_models` are trained with: resnet50, lstm and gpt, each at a tight budget."""
    _check(Recipe(workload=model, optimizer=optimizer, num_steps=_NUM_STEPS), "quarter")


@pytest.mark.parametrize("model", ["bert", "encoder"])
def test_below_the_largest_ops_need(model: str) -> None:
    """A sixteenth less than the smallest budget with which each op runs as a whole: one runs in parts, planned, too."""
    recipe = Recipe(workload=model, num_steps=_NUM_STEPS)
    budget_nbytes = budget_nbytes_of(recipe, "smallest") * 15 // 16 // CHUNK_NBYTES * CHUNK_NBYTES
    run = run_out_of_core(recipe, budget_nbytes, _session)
    assert_equal(run_in_core(recipe), run)
    assert all(step["num_in_parts"] for step in run.report["steps"])
    assert num_steps_by_mode(run)["planned"] >= 3
    assert run.report["peak_nbytes"] <= budget_nbytes


@thinned("model,feature", ["conv_stack", "gpt"], [f for f in FEATURES if f != "plain"])
def test_features(model: str, feature: str) -> None:
    if (model, feature) in _NOT_POSSIBLE:
        model = "resnet18"
    _check(Recipe(workload=model, feature=feature, num_steps=_NUM_STEPS), "half")


@pytest.mark.parametrize(
    "model", ["conv_stack", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "resnet18"))]
)
def test_two_threads(model: str) -> None:
    _check(Recipe(workload=model, num_threads=2, num_steps=_NUM_STEPS), "quarter")


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("model", "feature"), [pair for pair in itertools.product(MODELS, FEATURES) if pair not in _NOT_POSSIBLE]
)
def test_full_grid(model: str, feature: str, optimizer: str, num_threads: int, budget: str) -> None:
    _check(Recipe(workload=model, feature=feature, optimizer=optimizer, num_threads=num_threads), budget)


def _check(recipe: Recipe, budget: str) -> None:
    budget_nbytes = budget_nbytes_of(recipe, budget)
    run = run_out_of_core(recipe, budget_nbytes, _session)
    assert_equal(run_in_core(recipe), run)
    modes = num_steps_by_mode(run)
    assert modes.get("planned", 0) >= 3, f"steps by mode: {modes}; {run.report['unplannable']}"
    assert run.report["peak_nbytes"] <= budget_nbytes


def budget_nbytes_of(recipe: Recipe, budget: str) -> int:
    """Bytes of a budget by name; the smallest that works, where a share is less than that."""
    probe = replace(recipe, num_steps=2)
    _, in_core_peak_nbytes = _accepted(probe, _AMPLE_NBYTES)
    share_nbytes = int(in_core_peak_nbytes * _SHARES[budget])
    runs, _ = _tried(probe, share_nbytes)
    if runs and budget != "smallest":
        return share_nbytes
    return _accepted(probe, CHUNK_NBYTES if runs else share_nbytes)[0]


@lru_cache(maxsize=256)
def _tried(probe: Recipe, budget_nbytes: int) -> tuple[bool, int]:
    """Whether a recipe runs, each op as a whole: what runs in parts is not planned.

    With it, what a step needs in core; or, where it does not, the larger budget that the refusal names.
    """
    try:
        with mock.patch("ooc.dispatch.ops_in_parts.split_of", return_value=None):
            run = run_out_of_core(probe, budget_nbytes, _session)
    except ooc.BudgetTooSmall as refusal:
        return False, refusal.needed_nbytes
    return True, run.report["in_core_peak_nbytes"]


def _accepted(probe: Recipe, budget_nbytes: int) -> tuple[int, int]:
    """The first budget from this one on under which a recipe of two steps runs, and what a step needs in core.

    Each refusal names a larger budget, so the search ends; from one that is refused on, it ends at the smallest that
    works.
    """
    while True:
        runs, nbytes = _tried(probe, budget_nbytes)
        if runs:
            return budget_nbytes, nbytes
        assert nbytes > budget_nbytes, f"refused {budget_nbytes} bytes, and asked for no more"
        budget_nbytes = nbytes
