"""`session.yielded()` on the CPU: all memory is given back for a while, and nothing else changes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ooc
from vmm.driver import MemoryFault

MIB = 1 << 20


def pool_nbytes(session: ooc.Session) -> int:
    """Bytes of the pool's file that have pages, by the kernel."""
    return os.fstat(session.engine.memory.driver._file.descriptor).st_blocks * 512


def train(session: Any, num_steps: int) -> tuple[list[float], list[list[float]]]:
    torch.manual_seed(1)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())])
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(num_steps):
        with session.step():
            loss = model(torch.randn(256, 256)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    return losses, [p.detach().flatten().tolist() for p in model.parameters()]


class NoSession:
    step = staticmethod(contextlib.nullcontext)


class YieldingSession(ooc.Session):
    """Gives all memory back before each step, within it, or after it."""

    where = "before"

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.give_back("before")
        with super().step():
            self.give_back("within")
            yield
        self.give_back("after")

    def give_back(self, where: str) -> None:
        if where == self.where:
            with self.yielded():
                assert pool_nbytes(self) == 0
            assert pool_nbytes(self) == self.budget_nbytes // self.chunk_nbytes * self.chunk_nbytes


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("where", ["before", "within", "after"])
def test_bits_and_plans(where: str, debug: bool) -> None:
    with YieldingSession("4MiB", plan_cache=False, debug=debug) as session:
        session.where = where
        found = train(session, 6)
        modes = [row["mode"] for row in session.report()["steps"]]
    assert found == train(NoSession(), 6)
    if where != "within":  # there the plan is left in each step
        assert modes[-3:] == ["planned"] * 3, modes


def test_arrays_and_other_threads_are_served_from_the_file() -> None:
    """What was given out stays valid, as for any evicted variable; what is written meanwhile is kept."""
    with ooc.Session("4MiB", plan_cache=False) as session:
        tensor = torch.arange(MIB // 2, dtype=torch.float32)
        array = tensor.numpy()
        found: list[float] = []
        with session.yielded():
            assert pool_nbytes(session) == 0
            assert array[5] == 5
            array[7] = -1
            thread = threading.Thread(target=lambda: found.append(tensor.sum().item()))
            thread.start()
            thread.join()
        assert tensor[7].item() == -1
        assert found == [tensor.sum().item()]


def test_what_may_not_be() -> None:
    with ooc.Session("4MiB", plan_cache=False) as session:
        weight = torch.ones(256, 256)
        with session.yielded():
            own = torch.ones(MIB)  # torch's, as without a session
            assert own.sum().item() == MIB
            with pytest.raises(ooc.SessionError, match=r"aten.add.*while session\.yielded"):
                weight + 1
            with pytest.raises(ooc.SessionError, match="while session"):
                own[: weight.numel()].copy_(weight.flatten())
            with pytest.raises(ooc.SessionError, match="step within yielded"), session.step():
                pass
            with pytest.raises(ooc.SessionError, match="set_budget within yielded"):
                session.set_budget("3MiB")
        with session.resident(weight), pytest.raises(ooc.SessionError, match="holds it"), session.yielded():
            pass
        assert bool((weight + 1 == 2).all())
        assert session.engine.live_nbytes() == weight.numel() * 4


def test_a_script_yields_the_open_sessions_memory() -> None:
    """`ooc.yielded`, for scripts under `ooc run`, which do not see the session."""
    with pytest.raises(ooc.SessionError, match="no session is open"), ooc.yielded():
        pass
    with ooc.Session("4MiB", plan_cache=False) as session, ooc.yielded():
        assert pool_nbytes(session) == 0


def test_an_error_in_the_block_comes_through() -> None:
    with ooc.Session("4MiB", plan_cache=False) as session:
        weight = torch.full((256, 256), 2.0)
        with pytest.raises(ZeroDivisionError), session.yielded():
            weight = 1 // 0
        assert weight.sum().item() == 2 * 256 * 256


def test_without_memory_at_the_end_it_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with ooc.Session("4MiB", plan_cache=False) as session:
        weight = torch.full((256, 256), 2.0)
        driver = session.engine.memory.driver

        def full(num_chunks: int) -> None:
            raise MemoryFault(f"no {num_chunks} chunks, says the test")

        with pytest.raises(MemoryFault, match="no 64 chunks") as caught, session.yielded():
            monkeypatch.setattr(driver._file, "resize", full)
        monkeypatch.undo()
        assert "set_budget" in caught.value.__notes__[0]
        with pytest.raises(ooc.SessionError, match="could not get its memory back"), session.step():
            pass
        with pytest.raises(ooc.SessionError, match="while session"):
            weight + 1
        session.set_budget("3MiB")
        assert pool_nbytes(session) == 3 * MIB
        assert bool((weight == 2).all())


def test_a_session_may_close_within_the_block() -> None:
    session = ooc.Session("4MiB", plan_cache=False)
    weight = torch.full((256, 256), 2.0)
    with session.yielded():
        session.close()
    assert bool((weight == 2).all())
