"""Ops that keep what they allocate when they are run again: that stays theirs, and other ops run again all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.tracing.replayability import declare_pure
from tests.session.program_reruns import slow_store
from tests.session.recomputed import CHUNK_NBYTES
from tests.store_speed import SLOW, store_speed

_NAME = "ooc_tests.keeping.default"
_kept: list[Tensor] = []
_steps: list[int] = []


@torch.library.custom_op("ooc_tests::keeping", mutates_args=())
def keeping(x: Tensor) -> Tensor:
    """Twice its argument. When it is called for the second time in a step, it keeps a tensor, as a library might."""
    tensor = torch.full_like(x, 3.0)
    if len(_steps) > 1 and _steps[-1] == _steps[-2]:
        _kept.append(tensor)
    _steps.append(_steps[-1])
    return x * 2


keeping.register_fake(torch.empty_like)
keeping.register_autograd(lambda _, grad: grad * 2)
declare_pure(torch.ops.ooc_tests.keeping.default)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    _kept.clear()
    _steps.clear()
    yield
    _kept.clear()


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_what_an_op_keeps_of_a_trial_stays(is_asked_for: bool) -> None:
    """In learning, where trials are made if recomputation is asked for, and within a plan."""
    torch.manual_seed(2)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers)
    images = torch.randn(8, 8, 32, 32)
    with (
        slow_store() if is_asked_for else store_speed(SLOW),
        ooc.Session(36 * CHUNK_NBYTES, chunk_nbytes=CHUNK_NBYTES, plan_cache=False, debug=True) as session,
    ):
        for index in range(7):
            _steps.append(index)
            with session.step():
                x = images.clone().requires_grad_()
                y = model(torch.ops.ooc_tests.keeping(x))
                loss = y.square().mean()
                loss.backward()
            del x, y, loss
        report = session.report()
        assert _kept
        assert all(bool((each == 3).all()) for each in _kept)
        assert session.engine.memory.allocator.state.num_rerun_alive == 0
    assert report["not_replayable"] == {_NAME: "it keeps memory that it allocates"}
    if is_asked_for:  # else what is kept may have grown into the plan's memory, which the report says, too
        assert sum(row["num_reruns"] for row in report["steps"]) > 0
    assert all(bool((each == 3).all()) for each in _kept)  # the session is over
