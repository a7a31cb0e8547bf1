"""A budget that changes while training goes on: same bits, memory given back at once, nothing lost on a refusal."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import ooc
from ooc.replay.plan_cache import PlanCache
from ooc.testing.fake_device import FakeCudaDevice
from tests.harness import Recipe, assert_equal, num_steps_by_mode, run_in_core, run_out_of_core
from tests.html_report.cases import net
from tests.quick_plans import QUICK_PLANS
from tests.session.test_bitwise import CHUNK_NBYTES, budget_nbytes_of
from vmm.store import StoreFull

MIB = 1 << 20
NUM_STEPS = 12


class Changing:
    """A session whose budget changes at random moments: between steps, in the forward and in the backward pass.

    Args:
        sizes: What it may become. It starts with the first.
        every: About one change in so many moments.
    """

    def __init__(self, sizes: list[int], *, seed: int, every: int) -> None:
        self._sizes = sizes
        self._every = every
        self._random = random.Random(seed)
        self._hooked: set[nn.Parameter] = set()
        self.session = ooc.Session(budget=sizes[0], chunk_nbytes=CHUNK_NBYTES, debug=True, plan_cache=False)
        self.places: list[str] = []

    def __enter__(self) -> Self:
        self._hook = register_module_forward_hook(self._forward)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        self.session.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.maybe_change("between steps")
        with self.session.step():
            yield
        self.maybe_change("after a step")

    def report(self) -> dict[str, Any]:
        return self.session.report()

    def _forward(self, module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(lambda _: self.maybe_change("backward"))
        self.maybe_change("forward")

    def maybe_change(self, place: str) -> None:
        if self._random.randrange(self._every):
            return
        self.places.append(place)
        self.session.set_budget(self._random.choice(self._sizes))
        check_pool(self.session)


def check_pool(session: ooc.Session) -> None:
    """The pool's file has as many pages as the budget has whole chunks, and no variable lies beyond."""
    num_chunks = session.budget_nbytes // session.chunk_nbytes
    status = os.fstat(session.engine.memory.driver._file.descriptor)
    assert status.st_size == status.st_blocks * 512 == num_chunks * session.chunk_nbytes
    assert session.memory_stats()["resident_bytes.all.current"] <= session.budget_nbytes


@pytest.mark.parametrize(
    ("model", "every"),
    [
        pytest.param("gpt", 12, marks=pytest.mark.slow),
        ("gpt", 60),
        pytest.param("conv_stack", 12, marks=pytest.mark.slow),
        ("conv_stack", 60),
        pytest.param("resnet18", 60, marks=pytest.mark.slow),
        ("lstm", 12),
        pytest.param("tied_frozen", 60, marks=pytest.mark.slow),
    ],
)
def test_any_moment_and_any_size(model: str, every: int) -> None:
    recipe = Recipe(workload=model, num_steps=NUM_STEPS)
    sizes = [budget_nbytes_of(recipe, name) for name in ("half", "smallest", "quarter", "peak")]
    made: list[Changing] = []

    def open_session(_: int) -> Changing:
        made.append(Changing(sizes, seed=every, every=every))
        return made[0]

    run = run_out_of_core(recipe, sizes[0], open_session)
    assert_equal(run_in_core(recipe), run)
    assert len(made[0].places) > 2
    assert all(row["peak_nbytes"] <= row["budget_nbytes"] for row in run.report["past_budgets"])
    assert run.report["peak_nbytes"] <= run.report["budget_nbytes"]


def test_every_kind_of_moment_was_met() -> None:
    """Of the test above: its moments do reach into both passes."""
    recipe = Recipe(workload="conv_stack", num_steps=12)
    sizes = [budget_nbytes_of(recipe, "half"), budget_nbytes_of(recipe, "quarter")]
    made = [Changing(sizes, seed=1, every=4)]
    run_out_of_core(recipe, sizes[0], lambda _: made[0])
    assert set(made[0].places) == {"between steps", "after a step", "forward", "backward"}


def train(session: ooc.Session, num_steps: int, model: nn.Module | None = None) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(1)
    model = model if model is not None else net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(num_steps):
        with session.step():
            loss = model(torch.randn(256, 256)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    return model, losses


def test_it_is_planned_again_after_one_step() -> None:
    """The step in which the budget changed is recorded whole, so the next one is planned already."""
    with ooc.Session("8MiB", plan_cache=False) as session:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for index in range(14):
            with session.step():
                loss = model(torch.randn(256, 256)).square().mean()
                if index in (6, 10):
                    session.set_budget("5MiB" if index == 6 else "7MiB")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
            if index in (7, 8, 9):
                plan = session.plan()
                assert plan is not None
                assert plan.machine.budget_nbytes == 5 * MIB
        report = session.report()
    modes = [row["mode"] for row in report["steps"]]
    assert modes[5:] == ["planned", "learning"] + 3 * ["planned"] + ["learning"] + 3 * ["planned"], modes
    assert [row["budget_nbytes"] for row in report["past_budgets"]] == [8 * MIB, 5 * MIB]
    assert [row["num_steps"] for row in report["past_budgets"]] == [6, 10]
    assert report["budget_nbytes"] == 7 * MIB


def test_plans_of_budgets_come_from_the_cache(tmp_path: Path) -> None:
    """Going to and fro between two budgets plans each once."""
    with ooc.Session("8MiB") as session:
        cache = session.engine.sequences.maker.cache = PlanCache(tmp_path)
        model, _ = train(session, 5)
        planned = []
        for budget in ("5MiB", "8MiB", "5MiB", "8MiB"):
            session.set_budget(budget)
            train(session, 4, model)
            plan = session.plan()
            assert plan is not None
            planned.append(plan.machine.budget_nbytes)
        assert planned == [5 * MIB, 8 * MIB, 5 * MIB, 8 * MIB]
        # All but the first at each size; at the first size once more, if by then ops are known to run again.
        assert cache.num_hits >= 2


def test_memory_stats_and_report_are_of_the_present_budget() -> None:
    with ooc.Session("16MiB", plan_cache=False) as session:
        train(session, 4)
        session.set_budget(6 * MIB + 5)
        stats = session.memory_stats()
        assert stats["reserved_bytes.all.current"] == session.budget_nbytes == 6 * MIB + 5
        assert stats["resident_bytes.all.peak"] <= 6 * MIB
        assert session.report()["budget_nbytes"] == 6 * MIB + 5


# -- refusals: the budget is as it was, and training goes on with the same bits


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return train_in_core(12)


def train_in_core(num_steps: int) -> list[float]:
    class NoSession:
        step = staticmethod(contextlib.nullcontext)

    return train(NoSession(), num_steps)[1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        ("1KiB", ValueError, "less than one of this session's chunks.*at least 64.0 KiB"),
        (-5, ValueError, "budget"),
        ("many", ValueError, "many"),
        (1 << 60, ooc.SessionError, "the memory of the machine"),
    ],
)
def test_sizes_that_cannot_be(budget: Any, error: type[Exception], message: str, expected: list[float]) -> None:
    def refused(session: ooc.Session) -> None:
        with pytest.raises(error, match=message):
            session.set_budget(budget)

    train_and_check(refused, expected)


def train_and_check(disturb: Callable[[ooc.Session], None], expected: list[float]) -> None:
    """`disturb`, at the end of the eighth of twelve steps, changes neither budget nor bits."""
    with ooc.Session("6MiB", plan_cache=False, **QUICK_PLANS) as session:
        count = 0

        def step() -> Any:
            nonlocal count
            count += 1
            if count == 9:
                disturb(session)
            return original()

        original, session.step = session.step, step  # type: ignore[method-assign]
        _, losses = train(session, 12)
        assert losses == expected
        assert session.budget_nbytes == 6 * MIB
        check_pool(session)
        assert num_planned(session) >= 4


def num_planned(session: ooc.Session) -> int:
    return sum(row["mode"] == "planned" for row in session.report()["steps"])


def test_what_is_held_resident_stays(expected: list[float]) -> None:
    def refused(session: ooc.Session) -> None:
        held = torch.ones(3 * MIB // 4)
        with session.resident(held), pytest.raises(ooc.SessionError, match=r"resident\(\)"):
            session.set_budget("2MiB")
        assert bool((held == 1).all())

    train_and_check(refused, expected)


def test_a_full_disk_refuses_a_smaller_budget(expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(session: ooc.Session) -> None:
        new = torch.full((MIB,), 3.0)  # 4 MiB that the store has no copy of, nor any place
        with monkeypatch.context() as patch:
            patch.setattr(session.engine.memory.store, "allocate", full)
            with pytest.raises(StoreFull, match="says the test"):
                session.set_budget("1MiB")
        assert bool((new == 3).all())

    def full(nbytes: int) -> Any:
        raise StoreFull("says the test", needed_nbytes=nbytes, free_nbytes=0)

    train_and_check(refused, expected)


def test_another_thread_may_not(expected: list[float]) -> None:
    def refused(session: ooc.Session) -> None:
        found: list[BaseException] = []

        def change() -> None:
            try:
                session.set_budget("5MiB")
            except ooc.SessionError as error:
                found.append(error)

        thread = threading.Thread(target=change)
        thread.start()
        thread.join()
        assert "thread" in str(found[0])

    train_and_check(refused, expected)


def test_within_an_op_it_may_not(expected: list[float]) -> None:
    def refused(session: ooc.Session) -> None:
        @ooc.opaque
        def op(x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ooc.SessionError, match="within an op"):
                session.set_budget("5MiB")
            return x + 1

        assert bool((op(torch.zeros(MIB // 4)) == 1).all())

    train_and_check(refused, expected)


def test_a_device_has_no_more_than_it_has() -> None:
    with ooc.Session("8MiB", device=FakeCudaDevice(), plan_cache=False) as session:
        with pytest.raises(ooc.SessionError, match=r"the device's memory is 8.0 MiB in all"):
            session.set_budget("9MiB")
        assert session.budget_nbytes == 8 * MIB


def test_given_out_memory_follows() -> None:
    """A NumPy array over a tensor sees the same bytes before and after, and what it writes is kept."""
    with ooc.Session("8MiB", plan_cache=False) as session:
        tensor = torch.arange(MIB, dtype=torch.float32)
        array = tensor.numpy()
        session.set_budget("3MiB")
        assert array[MIB - 1] == MIB - 1
        array[7] = -1
        session.set_budget("8MiB")
        assert tensor[7].item() == -1


def test_a_script_changes_the_open_sessions_budget() -> None:
    """`ooc.set_budget`, for scripts under `ooc run`, which do not see the session."""
    with pytest.raises(ooc.SessionError, match="no session is open"):
        ooc.set_budget("5MiB")
    with ooc.Session("6MiB", plan_cache=False) as session:
        ooc.set_budget("5MiB")
        assert session.budget_nbytes == 5 * MIB
        check_pool(session)


def test_a_closed_session_has_no_budget() -> None:
    with ooc.Session("8MiB") as session:
        pass
    with pytest.raises(ooc.SessionError, match="closed"):
        session.set_budget("4MiB")


def test_modes_are_counted_by_the_harness() -> None:
    """A change in each step keeps training on demand, and nothing else."""
    recipe = Recipe(workload="conv_stack", num_steps=6)
    sizes = [budget_nbytes_of(recipe, "half"), budget_nbytes_of(recipe, "quarter")]
    run = run_out_of_core(recipe, sizes[0], lambda _: Changing(sizes, seed=0, every=1))
    assert_equal(run_in_core(recipe), run)
    assert num_steps_by_mode(run).get("planned", 0) == 0
