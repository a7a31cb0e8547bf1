"""Ops in parts within plans: what is moved for them, and what becomes of a step that differs. Debug mode is on."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ooc
from ooc.dispatch.part_runs import PartRun
from ooc.memory.record import State
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.executor import Executor
from ooc.replay.unserved import Unserved
from ooc.tracing import part_probes
from ooc.tracing.operand_marks import OperandMark
from scheduler.plan import occupied_ticks
from tests.replay.test_elastic import digest, run
from tests.store_speed import SLOW, store_speed
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 9
MIB = 1 << 20
BUDGET = "5632KiB"

Step = Callable[[], contextlib.AbstractContextManager[None]]
Within = Callable[[int, Tensor], Tensor]


def words(step: Step, lengths: list[int], *, within: Within = lambda _, x: x, lr: float = 1e-2) -> list[Any]:
    """A language model whose logits are its largest activation: of their derivative's operands two of three fit."""
    embedding, layer, head = nn.Embedding(1024, 64), nn.Linear(64, 64), nn.Linear(64, 1024)
    parameters = [*embedding.parameters(), *layer.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, foreach=False)
    out: list[Any] = []
    for index, length in enumerate(lengths):
        batch = torch.randint(0, 1024, (length,), generator=torch.Generator().manual_seed(index))
        with step():
            x = within(index, torch.tanh(layer(embedding(batch))))
            loss = F.cross_entropy(head(x), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
    return out + digest(parameters)


def update(step: Step, lengths: list[int]) -> list[Any]:
    """An update in place of one large parameter by one large gradient, which do not fit together."""
    weight, small = torch.randn(1 << 20).requires_grad_(), torch.randn(1 << 14).requires_grad_()
    out: list[Any] = []
    for index, _ in enumerate(lengths):
        with step():
            weight.grad = small.grad = None
            (weight[: 1 << 14] * small).sum().backward()
            with torch.no_grad():
                for parameter in (weight, small):
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-1e-2 * (index + 1))
            out.append(float(small[0]))
    return out + digest([*weight.detach().split(1 << 18), small])


def run_words(lengths: list[int] | None = None, **options: Any) -> tuple[ooc.Session, list[str]]:
    within = options.pop("within", lambda _, x: x)
    program = lambda step, lengths: words(step, lengths, within=within)  # noqa: E731
    return run(program, lengths or [512] * NUM_STEPS, budget=BUDGET, chunk_nbytes="64KiB", **options)


def rows(session: ooc.Session) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = session.report()["steps"]
    return found


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[ExecutablePlan]:
    """The plans that were entered."""
    found: list[ExecutablePlan] = []
    enter = Executor.enter

    def noting(self: Executor, executable: ExecutablePlan, *args: Any, **kwargs: Any) -> bool:
        found.append(executable)
        return enter(self, executable, *args, **kwargs)

    monkeypatch.setattr(Executor, "enter", noting)
    return found


@thinned("program,debug", [words, update], [True, False])
def test_planned(program: Any, debug: bool) -> None:
    budget = BUDGET if program is words else "5MiB"
    session, modes = run(program, [512] * NUM_STEPS, budget=budget, chunk_nbytes="64KiB", debug=debug)
    assert modes[0] == "learning" and modes[3:] == ["planned"] * (NUM_STEPS - 3)
    assert [row["num_in_parts"] for row in rows(session)] == [1] * NUM_STEPS
    assert session.report()["peak_nbytes"] <= session.report()["budget_nbytes"]


def test_a_mark_stands_after_the_op_and_nobody_moves_for_it(plans: list[ExecutablePlan]) -> None:
    """For what is read; what is changed in place the op uses as a whole."""
    run(update, [512] * NUM_STEPS, budget="5MiB", chunk_nbytes="64KiB")
    plan = plans[-1]
    (op,) = plan.parts.ops()
    assert str(plan.funcs[op]) == "aten.add_.Tensor"
    assert [i - op for i in range(plan.num_ops) if plan.parts.is_mark(i)] == [1]
    (read,) = plan.parts.sliced[op] or ()
    (weight,) = (use.variable for use in plan.trace.ops[op].uses if use.reads)
    assert plan.residency_at(plan.variables[weight], op) is not None
    assert plan.residency_at(plan.variables[read], op) is None
    assert all(r.is_left_out for r in plan.variables[read].residencies if _covers_mark_alone(plan, r))


def _covers_mark_alone(plan: ExecutablePlan, residency: Any) -> bool:
    used = [i for i, op in enumerate(plan.trace.ops) for u in op.uses if u.variable == residency.variable.index]
    first, last = occupied_ticks(residency.planned, plan.trace)
    mine = [i for i in used if first < plan.trace.ops[i].stop_tick and plan.trace.ops[i].start_tick < last]
    return bool(mine) and all(isinstance(plan.funcs[i], OperandMark) for i in mine)


def test_a_step_without_the_op_leaves_the_plan_and_comes_back() -> None:
    """The plan is left where the step ends, or another op comes."""
    weight = torch.zeros(1)

    def program(step: Step, lengths: list[int]) -> list[Any]:
        nonlocal weight
        weight, other = torch.randn(1 << 20), torch.randn(1 << 20)
        small = torch.randn(1 << 14)
        out: list[Any] = []
        for index, _ in enumerate(lengths):
            with step():
                small.mul_(1.01)
                if index != 6:
                    weight.add_(other, alpha=0.5)
                if index != 7:
                    small.add_(1)
                out.append(float(small[0]))
        return out + digest([*weight.split(1 << 18), *other.split(1 << 18), small])

    session, modes = run(program, [0] * 12, budget="5MiB", chunk_nbytes="64KiB")
    assert modes[3:6] == ["planned"] * 3
    assert modes[6] == "off_plan"
    assert modes[-1] == "planned"
    assert [row["num_in_parts"] for row in rows(session)] == [1] * 6 + [0] + [1] * 5


def test_sizes_that_differ() -> None:
    """One plan for all of them; where the op would fit as a whole it runs in parts all the same, in a plan."""
    session, modes = run_words([512, 496, 504, 480, 512, 500, 488, 508, 492, 510, 484, 506])
    assert modes[-4:] == ["planned"] * 4
    assert all(row["num_in_parts"] for row in rows(session))


def test_memory_that_the_program_takes_beside_the_plan() -> None:
    """What is kept from one step on is not in the recording."""
    held: list[Tensor] = []

    def within(index: int, x: Tensor) -> Tensor:
        if index in (5, 6):
            held.append(torch.full((1 << 18,), float(index)))
            x = x + held[-1][0]
        return x

    session, _ = run_words(within=within)
    assert all(row["num_in_parts"] for row in rows(session))


def test_the_memory_that_the_plan_has_for_parts_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller parts ask for less; where the smallest is refused, too, the step leaves its plan in mid-op."""
    make_way, refused = Unserved.make_way, itertools.count()

    def never(self: Unserved, nbytes: int, *, may_refuse: bool, **more: Any) -> None:
        if may_refuse:
            next(refused)
            nbytes = 1 << 40
        make_way(self, nbytes, may_refuse=may_refuse, **more)

    monkeypatch.setattr(Unserved, "make_way", never)
    monkeypatch.setattr(part_probes, "_known", {})  # which takes hundreds of small tensors: none of the session's
    for program, budget in ((words, BUDGET), (update, "5MiB")):
        session, modes = run(program, [512] * 6, budget=budget, chunk_nbytes="64KiB", threshold_nbytes=4)
        assert "off_plan" in modes
        assert [row["num_in_parts"] for row in rows(session)] == [1] * 6
    assert next(refused) > 4


@pytest.mark.parametrize("recompute", [True, None])
def test_what_is_read_in_slices_is_not_made_again(recompute: bool | None, plans: list[ExecutablePlan]) -> None:
    """On a store so slow that everything that can be is recomputed."""
    with store_speed(SLOW):
        session, modes = run_words(recompute=recompute, lengths=[512] * 14)
    assert modes[-2:] == ["planned"] * 2
    assert all(row["num_in_parts"] for row in rows(session))
    for plan in plans:
        apart = {variable for variables in plan.parts.sliced for variable in variables or ()}
        makers = [i for i, op in enumerate(plan.trace.ops) if any(u.writes and u.variable in apart for u in op.uses)]
        assert makers and not any(plan.trace.ops[i].replayable for i in makers)


def test_what_was_discarded_is_not_read() -> None:
    """Should it come to that: an error, not what the store has had of it."""
    with ooc.Session("3MiB", chunk_nbytes="64KiB") as session:
        a, b = torch.ones(1 << 19), torch.ones(1 << 19)
        manager = session.engine.manager
        first = min(manager.records.values(), key=lambda r: r.serial)
        manager.evict([r for r in (first,) if r.state is State.RESIDENT])
        with session.engine.runner.lock:
            first.state = State.DISCARDED
            with pytest.raises(ooc.errors.RerunLost):
                session.engine.runner.parts.memory.slices.read(first, [(0, 8)], 0)
            first.state = State.AWAY
        assert (a + b)[:4].tolist() == [2.0] * 4


@pytest.mark.parametrize("fail_call", range(1, 24, 2))
def test_a_failed_transfer(fail_call: int) -> None:
    """The step that it fails raises, on its plan or off it; what is trained is what it was before, or after."""
    torch.manual_seed(0)
    with ooc.Session("5MiB", chunk_nbytes="64KiB", debug=True) as session:
        weight, other, small = torch.randn(1 << 20), torch.randn(1 << 20), torch.zeros(1 << 14)
        expected = [float(weight[0]), float(weight[-1])]
        num_done = 0
        for index in range(8):
            try:
                with session.step():
                    if index == 5:
                        session.engine.memory.store.wait_all()
                        session.engine.memory.store.engine.inject_faults(fail_call=fail_call)
                    small.add_(1)
                    if num_done == int(small[0]) - 1:
                        weight.add_(other)
                        num_done += 1
            except ooc.StoreFailed:
                break
        session.engine.memory.store.engine.inject_faults(fail_call=0)
        ends = [float(weight[0].clone()), float(weight[-1].clone())]
        steps = [float(other[0].clone()), float(other[-1].clone())]
        for before, now, by in zip(expected, ends, steps, strict=True):
            done = {_added(before, by, count) for count in (num_done, num_done + 1)}
            assert now in done


def _added(start: float, by: float, count: int) -> float:
    value, step = torch.tensor(start), torch.tensor(by)
    for _ in range(count):
        value = value + step
    return float(value)


# -- what comes is not what was recorded


def late(step: Step, lengths: list[int]) -> list[Any]:
    """Batches from a list, each a variable: read by an op in parts, and changed in place by another."""
    batches = [torch.randn(1 << 19) for _ in range(5)]
    w, v, small = torch.randn(1 << 19), torch.randn(1 << 19), torch.randn(1 << 15)
    out: list[Any] = []
    for index, _ in enumerate(lengths):
        x = batches[index % 5]
        with step():
            for _ in range(6):
                small.mul_(1.0001)
            y = torch.mul(x, w)
            for _ in range(6):
                small.mul_(1.0001)
            v.mul_(0.5)
            v.add_(y)
            del y
            w.add_(v, alpha=0.01)
            z = torch.mul(x, v)
            w.add_(z, alpha=0.125)
            del z
            x.add_(w, alpha=1e-3)
            out.append((float(w[5]), float(w[-5]), float(w[1 << 18])))
    return out + digest([*batches, w, v, small])


@thinned("budget,debug", ["4800KiB", "5MiB", "5632KiB", "5952KiB"], [True, False])
def test_operands_that_are_other_storages_in_each_step(budget: str, debug: bool) -> None:
    session, modes = run(late, [0] * 16, budget=budget, chunk_nbytes="64KiB", debug=debug)
    assert modes[-8:] == ["planned"] * 8
    assert all(row["num_in_parts"] for row in rows(session))


def test_a_batch_of_one_row() -> None:
    """The op cannot be cut then, and need not be."""
    session, modes = run_words([512, 496, 504, 480, 512, 500, 488, 508, 1, 510, 3, 506])
    assert modes[-4:] == ["planned"] * 4
    assert [row["num_in_parts"] for row in rows(session)][-4:] == [0, 1, 1, 1]


def test_a_scalars_op_where_the_plan_has_that_of_the_largest() -> None:
    """The same op without any operand in the pool: it runs, and the plan goes on, or is left."""

    def program(step: Step, lengths: list[int]) -> list[Any]:
        weight, scalar = nn.Parameter(torch.randn(1 << 20)), nn.Parameter(torch.tensor(1.5))
        small = nn.Parameter(torch.randn(64))
        out: list[Any] = []
        for index, _ in enumerate(lengths):
            with step():
                weight.grad = scalar.grad = small.grad = None
                loss = scalar * small.sum() + (weight[: 1 << 14] * small[0]).sum()
                loss.backward()
                with torch.no_grad():
                    for parameter in (weight, scalar, small):
                        if parameter is not weight or index not in (8, 11):
                            assert parameter.grad is not None
                            parameter.add_(parameter.grad, alpha=-1e-3)
                out.append(loss.item())
        return out + digest([*weight.detach().split(1 << 18), scalar, small])

    session, _ = run(program, [0] * 14, budget="5MiB", chunk_nbytes="64KiB")
    assert [row["num_in_parts"] for row in rows(session)] == [1] * 8 + [0, 1, 1, 0, 1, 1]


@torch.library.custom_op("ooc_tests::fill_strided", mutates_args=("target",))
def _fill_strided(target: Tensor, source: Tensor, num_beside: int) -> None:
    """Allocates as much as it is told, beside its operands."""
    torch.ones(num_beside)
    target[::3] += source[0]


@pytest.mark.parametrize("debug", [True, False])
def test_an_op_that_has_failed_off_its_plan_is_over(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left the plan in its middle, and the store failed. Another op that does so later is noted as itself."""
    fails = False
    make_way, get, num_failed = Unserved.make_way, PartRun._get, 0

    def refusing(self: Unserved, nbytes: int, *, may_refuse: bool, **more: Any) -> None:
        make_way(self, 1 << 40 if may_refuse and fails else nbytes, may_refuse=may_refuse, **more)

    def failing(self: PartRun, *args: Any) -> None:
        nonlocal num_failed
        if fails and not num_failed and self._memory.lent is not None and not self._memory.lent.is_planned():
            num_failed = 1
            raise ooc.StoreFailed("the device failed", errno=5)
        get(self, *args)

    monkeypatch.setattr(Unserved, "make_way", refusing)
    monkeypatch.setattr(PartRun, "_get", failing)

    def program(step: Step, lengths: list[int]) -> list[Any]:
        nonlocal fails
        large, other = torch.randn(1 << 20), torch.randn(1 << 20)
        small, target = torch.zeros(1 << 14), torch.zeros(1 << 18)
        for index, _ in enumerate(lengths):
            with contextlib.suppress(ooc.StoreFailed), step():
                small.add_(1)
                torch.ops.ooc_tests.fill_strided(target, small, 1 << 19 if index == 9 else 1)
                small.mul_(1.5)
                fails = index == 5
                large.add_(other)
                fails = False
                large.mul_(1.0)
            fails = False
        assert ooc._current.session is None or ooc._current.session.engine.runner.parts._left is None
        return digest([small, target])

    _, modes = run(program, [0] * 12, budget="5MiB", chunk_nbytes="64KiB", threshold_nbytes=4096, debug=debug)
    assert num_failed
    assert modes[5] == modes[9] == "off_plan"


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_budgets_that_change_within_a_step(seed: int) -> None:
    """Also so that the step goes on with another plan, in which other residencies are left out."""

    def program(session: ooc.Session | None) -> list[Any]:
        chooser = random.Random(seed)
        torch.manual_seed(seed)
        embedding, layer, head = nn.Embedding(1024, 64), nn.Linear(64, 64), nn.Linear(64, 1024)
        weight = nn.Parameter(torch.randn(1 << 19))
        parameters = [*embedding.parameters(), *layer.parameters(), *head.parameters(), weight]
        optimizer = torch.optim.SGD(parameters, 1e-2, momentum=0.9 * (seed % 2), foreach=False)
        out: list[Any] = []

        def here() -> None:
            budget = chooser.choice((10, 11, 12, 16, 24)) * MIB // 2
            if chooser.random() < 0.12 and session is not None:
                with contextlib.suppress(ooc.BudgetTooSmall):
                    session.set_budget(budget)

        for _ in range(12):
            batch = torch.randint(0, 1024, (480 if seed % 3 else chooser.choice([448, 480, 512]),))
            with session.step() if session is not None else contextlib.nullcontext():
                here()
                x = torch.tanh(layer(embedding(batch)))
                here()
                logits = head(x)
                here()
                loss = F.cross_entropy(logits, batch) + (weight * weight).mean()
                del logits
                optimizer.zero_grad()
                here()
                loss.backward()
                here()
                optimizer.step()
                here()
                out.append(loss.item())
        return out + digest([part for p in parameters for part in p.detach().split(1 << 17)])

    expected = program(None)
    with ooc.Session("8MiB", chunk_nbytes="64KiB", debug=seed % 2 == 0, plan_cache=False) as session:
        assert program(session) == expected
        assert "planned" in {row["mode"] for row in rows(session)}
        assert not any(record.pins for record in session.engine.manager.records.values())
