"""Ops whose kernels take another way on other sizes, and ask for memory in another order: the plan's serves them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ooc.replay.unserved import Unserved
from tests.replay.test_elastic import ROW, digest, run

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [128, 126, 60, 127, 62, 128, 61, 125, 60, 126, 62, 128]


@torch.library.custom_op("ooc_tests::squares", mutates_args=())
def squares(x: Tensor) -> Tensor:
    """The squares of a batch, by way of a small and a large temporary; a short batch has the large one first."""
    nbytes = [x.numel() * x.element_size(), 6 * x.numel() * x.element_size()]
    temporaries = [torch.empty(n, dtype=torch.uint8) for n in (nbytes if len(x) > 100 else nbytes[::-1])]
    for each in temporaries:
        each.fill_(7)
    result = x * x
    assert all(int(each.min()) == int(each.max()) == 7 for each in temporaries)
    return result


def train(step: Callable[[], contextlib.AbstractContextManager[None]], lengths: list[int]) -> list[Any]:
    model = nn.Sequential(nn.Linear(ROW, 2 * ROW), nn.ReLU(), nn.Linear(2 * ROW, ROW))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    out: list[Any] = []
    for index, length in enumerate(lengths):
        batch = torch.randn(length, ROW, generator=torch.Generator().manual_seed(index))
        with step():
            logits = model(batch)
            out.append(squares(logits.detach()).mean().item())
            optimizer.zero_grad()
            (logits - batch).square().mean().backward()
            optimizer.step()
    return out + digest(list(model.parameters()))


@pytest.mark.parametrize("debug", [True, False])
def test_temporaries_in_another_order_stay_on_the_plan(debug: bool) -> None:
    """Remedy: `Unserved._within`. Of two temporaries each comes where the other one was planned."""
    _, modes = run(train, LENGTHS, budget="1280KiB", debug=debug)
    assert modes[5:] == ["planned"] * len(modes[5:]), modes


def test_without_the_remedy_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unserved, "_within", lambda *_: 0)
    session, modes = run(train, LENGTHS, budget="1280KiB")
    assert "off_plan" in modes[5:], modes
    assert any("that the plan does not have" in (row.why or "") for row in session.steps.rows)
