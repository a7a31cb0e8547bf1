"""A program that comes to Python's recursion limit: the session's own frames do not count towards it.

Else a `RecursionError` would arise half way through a change of the session's state: in an eviction, in an allocation.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ooc

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LEVELS = 40
"""More than the frames that an allocation with evictions takes."""


def num_frames() -> int:
    frame, number = sys._getframe(), 0
    while frame is not None:
        frame, number = frame.f_back, number + 1  # type: ignore[assignment]
    return number


def up_to_the_limit(act: Callable[[], Any]) -> None:
    """Call `act` with no frame left, then with one, and so on."""

    def descend() -> None:
        with contextlib.suppress(RecursionError):
            descend()
        with contextlib.suppress(RecursionError):
            act()

    limit = sys.getrecursionlimit()
    frames = num_frames()
    for more in range(NUM_LEVELS, 400, 20):  # calls from C count, too, so the least limit is not known
        with contextlib.suppress(RecursionError):
            sys.setrecursionlimit(frames + more)
            break
    try:
        descend()
    finally:
        sys.setrecursionlimit(limit)


def train(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[Any]:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(6):
        with step():
            x = torch.randn(128, 256)
            loss = model(x).square().mean()
            loss.backward()
            for parameter in model.parameters():
                up_to_the_limit(lambda p=parameter: p.detach() * 2)  # type: ignore[misc]
            optimizer.step()
            for state in optimizer.state.values():
                up_to_the_limit(lambda s=state: s["exp_avg"] + s["exp_avg_sq"])  # type: ignore[misc]
            optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("debug", [False, True])
def test_bits(debug: bool) -> None:
    torch.manual_seed(0)
    expected = train(contextlib.nullcontext)
    torch.manual_seed(0)
    with ooc.Session("1280KiB", plan_cache=False, debug=debug) as session:
        found = train(session.step)
        assert session.report()["peak_nbytes"] <= 1280 << 10
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, found, strict=True))


def test_an_endless_recursion_through_ops_still_ends() -> None:
    """Each level is an op within an op: were each given frames of its own, the stack would end the process."""
    with ooc.Session("2MiB", plan_cache=False):

        @torch.library.custom_op("ooc_tests::endless", mutates_args=())
        def endless(x: torch.Tensor) -> torch.Tensor:
            return endless(x * 1.0)

        with pytest.raises(RecursionError):
            endless(torch.ones(4))
        assert torch.ones(300, 300).sum().item() == 90_000


def test_the_limit_holds_again_after_each_section() -> None:
    def depth() -> int:
        try:
            return 1 + depth()
        except RecursionError:
            return 0

    def on_a_thread(found: list[int]) -> None:
        weight.detach().clone()
        found.append(depth())

    before = depth()
    alone: list[int] = []
    thread = threading.Thread(target=lambda: alone.append(depth()))
    thread.start()
    thread.join()
    with ooc.Session("1MiB", plan_cache=False) as session:
        weight = torch.ones(256, 256)
        for _ in range(4):
            with session.step():
                x = torch.ones(256, 256)
                (x @ weight).relu_().add_(weight)
        assert depth() == before
        found: list[int] = []
        guest = threading.Thread(target=on_a_thread, args=(found,))
        guest.start()
        guest.join()
    assert abs(found[0] - alone[0]) <= 2  # the frames below differ
    assert depth() == before
