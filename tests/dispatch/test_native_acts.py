"""What goes before and after planned ops and needs no Python (native/acts.h, moves.h): done like Python does it, or
left to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ooc
import ooc.engine
from ooc.dispatch.op_runner import OpRunner
from ooc.errors import StoreFailed
from ooc.memory.guards import Guards
from ooc.memory.record import NO_GUARD, State, VariableRecord
from ooc.replay.acts import ResidencyActs
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.executor import Executor
from tests.dispatch.test_boxed import train
from tests.store_speed import USUAL, store_speed
from vmm.driver import MemoryFault

BUDGET = "900KiB"
NUM_STEPS = 9


@contextlib.contextmanager
def open_session(
    *, debug: bool = False, policy: str = "capuchin", step_boundary: Any = "explicit"
) -> Iterator[ooc.Session]:
    with (
        store_speed(USUAL),
        ooc.Session(
            BUDGET,
            chunk_nbytes="64KiB",
            threshold_nbytes="64KiB",
            policy=policy,
            recompute=False,
            debug=debug,
            step_boundary=step_boundary,
            plan_cache=False,
        ) as session,
    ):
        yield session


def compare(within: Callable[[int, Tensor], Tensor] | None = None, *, debug: bool = False) -> ooc.Session:
    expected = train(contextlib.nullcontext, num_steps=NUM_STEPS, within=within)
    with open_session(debug=debug) as session:
        assert train(session.step, num_steps=NUM_STEPS, within=within) == expected
    return session


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> list[Any]:
    """The first argument of each call of these methods from here on, in order."""
    found: list[Any] = []
    for name in names:
        function = getattr(owner, name)

        def noted(own: Any, *arguments: Any, function: Callable[..., Any] = function) -> Any:
            found.append(arguments[0])
            return function(own, *arguments)

        monkeypatch.setattr(owner, name, noted)
    return found


@pytest.mark.parametrize("debug", [True, False])
def test_python_is_asked_less(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plans, bits and bytes moved; and what Python did around ops, native code does now."""
    asked, asked_after = calls_of(monkeypatch, Executor, "before"), calls_of(monkeypatch, Executor, "after")
    begun = calls_of(monkeypatch, ResidencyActs, "_start_load", "_write")
    session = compare(debug=debug)
    dispatcher = session.engine.runner.dispatcher
    num_done, natively, num_after, num_begun = dispatcher.num_acts, len(asked), len(asked_after), len(begun)
    for noted in asked, asked_after, begun:
        noted.clear()
    monkeypatch.setattr(ooc.engine, "act_natively", lambda *_, **__: None)
    other = compare(debug=debug)
    assert other.engine.runner.dispatcher.num_acts == 0
    assert num_done > 0
    assert natively + num_done == len(asked)
    assert num_after + dispatcher.num_acts_after == len(asked_after)
    assert num_begun + dispatcher.num_moves == len(begun)
    if not debug:
        assert dispatcher.num_acts_after > num_after
        assert dispatcher.num_moves > num_begun
    rows, other_rows = session.steps.rows, other.steps.rows
    assert [row.mode for row in rows] == [row.mode for row in other_rows]
    assert rows[-1].mode == "planned"
    first = 1 + next(index for index, row in enumerate(rows) if row.mode == "planned")
    for name in ("loaded_nbytes", "evicted_nbytes", "dropped_nbytes", "num_remapped_chunks"):
        # Before that, what is read ahead depends on what has been written by then.
        assert [getattr(row, name) for row in rows[first:]] == [getattr(row, name) for row in other_rows[first:]], name
    assert rows[-1].loaded_nbytes > 0


@pytest.mark.parametrize("debug", [True, False])
def test_what_is_still_on_its_way_is_waited_for(debug: bool) -> None:
    """Reads and writes that take long: no op begins before its operands are there."""
    expected = train(contextlib.nullcontext, num_steps=NUM_STEPS)

    with open_session(debug=debug) as session:

        def within(index: int, x: Tensor) -> Tensor:
            session.engine.manager.store.engine.inject_faults(delay_ns=3_000_000 if index > 4 else 0)
            return x

        assert train(session.step, num_steps=NUM_STEPS, within=within) == expected
        assert session.steps.rows[-1].mode == "planned"
        assert session.steps.rows[-1].stall_s > 0


def loops(
    step: Callable[[], contextlib.AbstractContextManager[object]], sizes: Sequence[int] = (160, 128, 96, 144)
) -> list[float]:
    """Products on batches of other sizes in each step, going back and updated."""
    torch.manual_seed(0)
    weights = [(torch.randn(160, 160) / 13).requires_grad_() for _ in range(8)]
    out = []
    for index in range(3 * NUM_STEPS):
        with step():
            h = torch.full((sizes[index % len(sizes)], 160), 0.1 * (index % 7))
            for weight in weights:
                h = (h @ weight).sin()
            loss = h.square().mean()
            loss.backward()
            with torch.no_grad():
                for weight in weights:
                    weight.sub_(weight.grad, alpha=0.1)
                    weight.grad = None
            out.append(float(loss.detach()))
    return out


def test_what_moves_has_the_size_of_the_present_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan for batches of any size: as many bytes go each way, natively, as by Python, and the bits are equal."""
    expected = loops(contextlib.nullcontext)
    moved = []
    for is_native in True, False:
        if not is_native:
            monkeypatch.setattr(ooc.engine, "act_natively", lambda *_, **__: None)
        with open_session() as session:
            assert loops(session.step) == expected
        rows = session.steps.rows[-8:]
        assert {row.mode for row in rows} == {"planned"}
        assert len({row.evicted_nbytes for row in rows}) > 1
        moved.append([(row.loaded_nbytes, row.evicted_nbytes, row.dropped_nbytes) for row in rows])
        assert (session.engine.runner.dispatcher.num_moves > 0) == is_native
    assert moved[0] == moved[1]


def test_a_transfer_that_is_refused_is_an_error() -> None:
    """Where the engine takes nothing any more, the step fails by its words, whoever asks."""

    def within(index: int, x: Tensor) -> Tensor:
        if index == 6:
            assert session.engine.runner.executor.active is not None
            session.engine.manager.store.engine.close()
        return x

    with (
        pytest.raises(RuntimeError, match="a planned transfer: the transfer engine is closed"),
        open_session() as session,
    ):
        train(session.step, num_steps=NUM_STEPS, within=within)


def chain(
    step: Callable[[], contextlib.AbstractContextManager[object]], *, within: Callable[[int, int], None] | None = None
) -> list[float]:
    """Products, then small ops that each give birth once. In one step something is held that should be dead."""
    torch.manual_seed(0)
    weights = [torch.randn(160, 160) / 13 for _ in range(10)]
    out = []
    for index in range(NUM_STEPS):
        held = None
        with step():
            h = torch.full((160, 160), 0.1 * index)
            for number, weight in enumerate(weights):
                h = (h @ weight).sin()
                if within is not None:
                    within(index, number)
            for number in range(12):
                h = torch.sin(h)
                if number == 5 and index == 6:
                    held = h
            out += [float(h.sum()), float(held.sum()) if held is not None else 0.0]
            del h, held
    return out


def updates(look: Callable[[int, list[Tensor]], None]) -> list[float]:
    """Steps that end with the optimizer's; `look` comes in the middle of each, in its backward pass."""
    torch.manual_seed(0)
    weights = [(torch.randn(160, 160) / 13).requires_grad_() for _ in range(8)]
    optimizer = torch.optim.SGD(weights, lr=1e-2, momentum=0.9, foreach=False)
    for index in range(NUM_STEPS):
        h = torch.full((160, 160), 0.1 * index)
        for weight in weights:
            h = (h @ weight).sin()
            h.register_hook(lambda _, index=index: look(index, weights))
        h.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(w.detach().double().sum()) for w in weights]


@pytest.mark.parametrize("fail_call", [1, 3, 8])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_transfer_that_fails_is_not_taken_for_ended(direction: Any, fail_call: int) -> None:
    """It has ended by the time that its op comes. The step fails by name, or nothing was lost; and so on after it."""
    expected = updates(lambda _index, _weights: None)
    num_looks = 0

    def look(index: int, _weights: list[Tensor]) -> None:
        nonlocal num_looks
        num_looks += index == 6
        if num_looks == 1:
            engine.inject_faults(fail_call=fail_call, direction=direction)
        if index >= 6:
            engine.wait_all()

    with open_session(step_boundary="optimizer") as session:
        engine = session.engine.manager.store.engine
        found: list[float] = []
        with contextlib.suppress(StoreFailed):
            found = updates(look)
        assert found in (expected, [])
        engine.inject_faults()
        assert updates(lambda _index, _weights: None) == expected


def test_what_is_held_too_long_is_not_written_over() -> None:
    """A variable that should be dead is moved out of the way of what is born in its chunks, before an op that only
    gives birth.
    """

    expected = chain(contextlib.nullcontext)
    with open_session() as session:
        assert chain(session.step) == expected
        assert session.steps.rows[5].mode == "planned"
        assert session.engine.runner.dispatcher.num_acts > 0


def test_what_is_given_out_is_not_let_go() -> None:
    """A numpy array over an activation that the plan evicts: its bytes are there when it is read."""

    def within(index: int, x: Tensor) -> Tensor:
        if index >= 6:
            array = x.detach().numpy()
            copy = array.copy()
            y = torch.relu(x * 1.25 + torch.ones_like(x)).exp().log()
            assert (array == copy).all()
            return y
        return torch.relu(x * 1.25 + torch.ones_like(x)).exp().log()

    compare(within)


def _exported(record: VariableRecord) -> None:
    record.export()


def _written(record: VariableRecord) -> None:
    record.written()


@pytest.mark.parametrize("change", [_exported, _written])
def test_what_may_not_be_let_go_is_pythons(
    change: Callable[[VariableRecord], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store does not have, or somebody outside may write, leaves its plan instead of its chunks."""
    asked = calls_of(monkeypatch, Executor, "before")
    expected = train(contextlib.nullcontext, num_steps=NUM_STEPS)
    found: list[tuple[int, VariableRecord]] = []

    with open_session() as session:

        def within(index: int, x: Tensor) -> Tensor:
            executor = session.engine.runner.executor
            if index == 6 and executor.active is not None:
                found.append(_next_release(executor.active, session.engine.runner.dispatcher.cursor))
                change(found[0][1])
                asked.clear()
            return x

        assert train(session.step, num_steps=NUM_STEPS, within=within) == expected
        op, record = found[0]
        assert op in asked
        if record.exports:
            record.end_export()


def _next_release(executable: ExecutablePlan, cursor: int) -> tuple[int, VariableRecord]:
    """The next op that lets go of something which the store has by now, and its record."""
    for op in range(cursor, executable.num_ops):
        acts = executable.before[op]
        for residency in acts.releases if acts is not None and not acts.loads else ():
            record = residency.variable.record
            if record is not None and record.state is State.RESIDENT and record.stored:
                return op, record
    raise AssertionError("nothing is let go of")


@pytest.mark.parametrize("policy", ["capuchin", "window"])
def test_what_native_code_lets_go_of_can_still_be_touched(policy: str) -> None:
    """Where a step ends with the optimizer's, any code may touch a variable at any time: C code by its address, here.

    Remedy: `Acts::kGuarded`. What exists throughout is guarded when it is let go of.
    """
    expected: list[list[int]] = []
    updates(lambda _index, weights: expected.append([hash(w.detach().numpy().tobytes()) for w in weights]))
    looks = iter(expected)
    num_away = 0

    def look(index: int, weights: list[Tensor]) -> None:
        nonlocal num_away
        hashes, executor = next(looks), session.engine.executor
        if index < 6 or executor.active is None:
            return
        records = {record.address: record for record in executor.live_records()}
        for weight, expected_hash in zip(weights, hashes, strict=True):
            record = records.get(address_of(weight))
            if record is not None and record.state is State.AWAY:
                num_away += 1
                assert hash(ctypes.string_at(record.address, record.nbytes)) == expected_hash

    with open_session(policy=policy, step_boundary="optimizer") as session:
        address_of = session.engine.runner.dispatcher.address
        updates(look)
        assert num_away > 0
        assert session.engine.runner.dispatcher.num_acts > 0


@pytest.mark.parametrize("policy", ["capuchin", "window"])
def test_what_is_touched_on_its_way_in_is_read_again(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C code writes to a variable that is away, or has just been read: the next op sees what it wrote.

    Remedies, without Python's `Executor.before`: that what is let go of is guarded, and read again if it was touched.
    """
    natively = {"guard": 0, "reread": 0}
    in_python = 0
    before = Executor.before

    def in_before(executor: Executor, index: int) -> bool:
        nonlocal in_python
        in_python += 1
        try:
            return before(executor, index)
        finally:
            in_python -= 1

    def count(name: str) -> None:
        function = getattr(ResidencyActs, name)

        def counted(*arguments: Any) -> Any:
            natively[name] += in_python == 0
            return function(*arguments)

        monkeypatch.setattr(ResidencyActs, name, counted)

    monkeypatch.setattr(Executor, "before", in_before)
    count("guard")
    count("reread")
    noted: list[tuple[int, int]] = []  # the look, and the weight that is written there
    num_looks = 0

    def write(address: int, value: int) -> None:
        ctypes.c_float.from_address(address + 4 * 160).value = value / 1000

    def look(index: int, weights: list[Tensor]) -> None:
        nonlocal num_looks
        num_looks += 1
        executor = session.engine.executor
        if index < 6 or executor.active is None:
            return
        records = {record.address: record for record in executor.live_records()}
        for number, weight in enumerate(weights):
            record = records.get(address_of(weight))
            if record is not None and record.state is not State.RESIDENT and record.guard != NO_GUARD:
                session.engine.manager.store.engine.wait_all()
                noted.append((num_looks, number))
                write(record.address, num_looks)

    with open_session(policy=policy, step_boundary="optimizer") as session:
        address_of = session.engine.runner.dispatcher.address
        found = updates(look)
        assert session.steps.rows[-1].mode == "planned"
    num_looks = 0

    def write_again(_index: int, weights: list[Tensor]) -> None:
        nonlocal num_looks
        num_looks += 1
        for at, number in noted:
            if at == num_looks:
                write(weights[number].data_ptr(), num_looks)

    assert updates(write_again) == found
    assert noted
    assert natively["guard"] > 0
    if policy == "capuchin":  # a window's plan has few such loads, and how ops were timed decides who finds them
        assert natively["reread"] > 0


def test_what_cannot_be_guarded_leaves_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses (too many mappings): the step goes on on demand, with the op that was about to begin.

    Remedies: `ResidencyActs.guard`'s `except`, and `Acts::Outcome::kLeft`: else the op runs, its operands not pinned.
    """
    within: list[int] = []  # ops that had begun when their plan was left
    finish = OpRunner.finish

    def note_finish(runner: OpRunner, index: int, *op: Any) -> None:
        within.append(index)
        finish(runner, index, *op)

    monkeypatch.setattr(OpRunner, "finish", note_finish)
    expected = updates(lambda _index, _weights: None)
    guard_away = Guards.guard_away
    release = ResidencyActs.release.__code__
    is_armed = False
    num_refused = 0

    def refuse(guards: Guards, records: Iterable[VariableRecord]) -> None:
        nonlocal is_armed, num_refused
        asks = sys._getframe(1)
        is_native = asks.f_code is ResidencyActs.guard.__code__ and asks.f_back.f_code is not release
        if is_armed and is_native:
            is_armed, num_refused = False, num_refused + 1
            raise MemoryFault("too many mappings")
        guard_away(guards, records)

    def look(index: int, _weights: list[Tensor]) -> None:
        nonlocal is_armed
        is_armed = index == 6 and num_refused == 0 and session.engine.executor.active is not None

    monkeypatch.setattr(Guards, "guard_away", refuse)
    with open_session(step_boundary="optimizer") as session:
        assert updates(look) == expected
        assert num_refused == 1
        assert not within
        rows = session.steps.rows
        assert "too many mappings" in [row.why for row in rows if row.mode != "planned"][-1]
