"""Bitwise comparison of training runs: in core against out of core.

A `Recipe` says what to train; `run_in_core` and `run_out_of_core` train it and hash, at each step,
everything that training can change; `assert_equal` names the first difference. Gradients are
hashed right after the step (recipes clear them at the start of the next one), so that hashing adds
no op to the step itself.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from ooc import models
from tests.session.features import FEATURES

SEED = 1234
NUM_STEPS = 7
"""Enough for two or three learning steps (the optimizer creates its state in the first, and two
equal steps must be seen) and at least three planned ones after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to train and how. Hashable, so that one reference run serves every budget.

    Attributes:
        workload: A name of `ooc.models`.
        optimizer: A key of `ooc.models.OPTIMIZERS`; empty for the workload's own.
        feature: A key of `tests.session.features.FEATURES`: how a step is taken.
        sizes: `(name, value)` pairs for `ooc.models.get`.
    """

    workload: str
    optimizer: str = ""
    feature: str = "plain"
    sizes: tuple[tuple[str, Any], ...] = ()
    num_steps: int = NUM_STEPS
    num_threads: int = 1
    seed: int = SEED

    def __str__(self) -> str:
        parts = [self.workload, self.optimizer, self.feature, f"threads{self.num_threads}"]
        return "-".join(p for p in parts if p)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step's hashes, each a mapping from a name to a digest of the tensor's bytes."""

    loss: str
    rng: str
    gradients: Mapping[str, str]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    optimizer_state: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished training run. `report` is the session's own; empty in core."""

    steps: tuple[StepRecord, ...]
    report: Mapping[str, Any] = field(default_factory=dict)


class SessionLike(Protocol):
    """What the harness needs of `ooc.Session`."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> Any: ...

    def step(self) -> contextlib.AbstractContextManager[Any]: ...

    def report(self) -> Mapping[str, Any]: ...


class InCore:
    """No session at all, behind a session's methods."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def report(self) -> Mapping[str, Any]:
        return {}


@lru_cache(maxsize=64)
def run_in_core(recipe: Recipe) -> Run:
    """The reference run, made once for each recipe."""
    return _run(recipe, InCore())


def run_out_of_core(recipe: Recipe, budget_nbytes: int, session_factory: Callable[[int], SessionLike]) -> Run:
    """The same run inside `session_factory(budget_nbytes)`."""
    return _run(recipe, session_factory(budget_nbytes))


def assert_equal(expected: Run, actual: Run) -> None:
    """Raise `AssertionError` naming the first step and the first tensor that differ, if any."""
    assert len(actual.steps) == len(expected.steps), f"{len(actual.steps)} steps instead of {len(expected.steps)}"
    for index, (a, b) in enumerate(zip(expected.steps, actual.steps, strict=True)):
        mode = _mode(actual, index)
        # In the order in which a step makes them: the first difference is the nearest to its cause.
        assert a.loss == b.loss, f"step {index} ({mode}): loss is {b.loss} instead of {a.loss}"
        for kind in ("gradients", "parameters", "optimizer_state", "buffers"):
            _assert_same(getattr(a, kind), getattr(b, kind), f"step {index} ({mode}): {kind}")
        assert a.rng == b.rng, f"step {index} ({mode}): the state of the random generator differs"


def num_steps_by_mode(run: Run) -> dict[str, int]:
    """How many steps ran in each mode, by the session's report."""
    counts: dict[str, int] = {}
    for step in run.report["steps"]:
        counts[step["mode"]] = counts.get(step["mode"], 0) + 1
    return counts


def digest(tensor: Tensor) -> str:
    """A hash of the tensor's shape, type and bytes.

    The bytes are copied by an op into memory that no session owns. So hashing is an ordinary use
    of the tensor, takes nothing from the budget, and leaves no pointer behind.
    """
    copied = np.empty(tensor.numel() * tensor.element_size(), dtype=np.uint8)
    if copied.size:
        torch.from_numpy(copied).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(copied).hexdigest()[:24]}"


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run with `count` threads inside ops, and put the old number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(recipe: Recipe, session: SessionLike) -> Run:
    workload = models.get(recipe.workload, "small", **dict(recipe.sizes))
    feature = FEATURES[recipe.feature]
    records: list[StepRecord] = []
    with num_threads(recipe.num_threads), session:
        torch.manual_seed(recipe.seed)
        model = feature.prepare(workload.build())
        optimizer = workload.make_optimizer(model, recipe.optimizer or None)
        for index in range(recipe.num_steps):
            with session.step():
                optimizer.zero_grad(set_to_none=True)
                loss = feature.step(workload, model, index)
                optimizer.step()
                loss_bits = loss.item().hex()
            del loss
            records.append(_record(loss_bits, model, optimizer))
        report = session.report()
    return Run(steps=tuple(records), report=report)


def _record(loss: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> StepRecord:
    names = {id(p): name for name, p in model.named_parameters()}
    state = {
        f"{names[id(p)]}/{key}": digest(value) if isinstance(value, Tensor) else repr(value)
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    return StepRecord(
        loss=loss,
        rng=digest(torch.get_rng_state()),
        gradients={name: digest(p.grad) for name, p in model.named_parameters() if p.grad is not None},
        parameters={name: digest(p) for name, p in model.named_parameters()},
        buffers={name: digest(b) for name, b in model.named_buffers()},
        optimizer_state=state,
    )


def _mode(run: Run, step_index: int) -> str:
    steps = run.report.get("steps", ())
    return steps[step_index]["mode"] if step_index < len(steps) else "in core"


def _assert_same(expected: Mapping[str, str], actual: Mapping[str, str], what: str) -> None:
    assert list(expected) == list(actual), f"{what}: {sorted(set(expected) ^ set(actual))} exist in one run only"
    wrong = [name for name in expected if expected[name] != actual[name]]
    assert not wrong, f"{what}: {len(wrong)} of {len(expected)} differ, first {wrong[0]}"
