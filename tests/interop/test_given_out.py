"""Memory that was given out (`.numpy()`, `data_ptr`) and is held while steps are planned: bits, and plans that stay."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ooc
from ooc.memory.record import State
from ooc.replay.acts import ResidencyActs
from tests.interop.cases import BUDGET, NUM_STEPS, PLANNED_STEP, WIDTH, InCore, build, contents, train
from tests.quick_plans import QUICK_PLANS
from tests.session.program_reruns import counted_reruns, forced_reruns, slow_store
from tests.thinned import thinned
from vmm.addresses import AddressSpace
from vmm.driver import MemoryFault

pytestmark = pytest.mark.usefixtures("one_thread")

Program = Callable[[Any], list[Any]]


def _predictions_kept(session: Any) -> list[Any]:
    """What an evaluation after every third step predicted is kept as arrays until the next one."""
    model, optimizer = build()
    found: list[Any] = []
    kept: list[Any] = []
    for index in range(NUM_STEPS + 6):
        with session.step():
            found.append(train(model, optimizer, index))
        if index % 3 == 2:
            with torch.no_grad():
                kept = [model[:9](torch.full((WIDTH, WIDTH), float(i))).numpy() for i in range(2)]
        found.append([array.tobytes() for array in kept])
    return [*found, contents(model)]


def _output_kept(session: Any) -> list[Any]:
    """The last hidden states of each step are kept as an array until the next step has some."""
    model, optimizer = build()
    found: list[Any] = []
    last = np.zeros(1)
    for index in range(NUM_STEPS):
        with session.step():
            hidden = model[:8](torch.full((WIDTH, WIDTH), float(index)))
            model[8:](hidden).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(last.tobytes())
            last = hidden.detach().numpy()
    return [*found, last.tobytes(), contents(model)]


def _weights_held(session: Any) -> list[Any]:
    """Views of all weights are held from the beginning, read and written between the layers and between steps."""
    model, optimizer = build()
    views = [p.detach().numpy() for p in model.parameters()]
    found: list[Any] = []

    def touch(place: int, *_: Any) -> None:
        for number, view in enumerate(views):
            found.append(view.tobytes())
            view.reshape(-1)[place] = number / 1000

    for place in (0, 4, 8):
        model[place].register_forward_hook(lambda *_, place=place: touch(place))
        model[place].register_full_backward_hook(lambda *_, place=place: touch(place + 1))
    for index in range(NUM_STEPS):
        with session.step():
            found.append(train(model, optimizer, index))
        touch(9)
    return [*found, contents(model)]


def _held_for_a_while(session: Any) -> list[Any]:
    """A view is taken and dropped within a step, between the layers, and written in between."""
    model, optimizer = build()
    found: list[Any] = []
    views: list[Any] = []

    def take(*_: Any) -> None:
        views[:] = [p.detach().numpy() for p in model.parameters()]
        views[0][3, 3] += 1

    def drop(*_: Any) -> None:
        for view in views:
            view.reshape(-1)[5] *= 2
        found.append([view.tobytes() for view in views])
        views.clear()

    model[2].register_forward_hook(take)
    model[8].register_forward_hook(drop)
    model[8].register_full_backward_hook(take)
    model[0].register_full_backward_hook(drop)
    for index in range(NUM_STEPS):
        with session.step():
            found.append(train(model, optimizer, index))
    return [*found, contents(model)]


def _pointers_asked_for(session: Any) -> list[Any]:
    """Each step asks for all addresses, reads through them, and writes through some, later in the step, too."""
    model, optimizer = build()
    found: list[Any] = []
    pointers: list[tuple[int, int]] = []

    def clear(*_: Any) -> None:
        ctypes.memset(pointers[-2][0], 0, 8)

    model[4].register_forward_hook(clear)
    for index in range(NUM_STEPS):
        with session.step():
            pointers[:] = [(p.data_ptr(), 4 * p.numel()) for p in model.parameters()]
            found.append([ctypes.string_at(*each) for each in pointers])
            ctypes.memset(pointers[0][0] + 16, 0, 4)
            found.append(train(model, optimizer, index))
            found.append([ctypes.string_at(*each) for each in pointers])
    return [*found, contents(model)]


PROGRAMS = [_predictions_kept, _output_kept, _weights_held, _held_for_a_while, _pointers_asked_for]


@thinned(
    "program,how,boundary",
    PROGRAMS,
    [(False, 0), (False, 2_000_000), (True, 0)],
    ["explicit", "optimizer"],
)
def test_steps_are_planned_while_memory_is_given_out(program: Program, how: tuple[bool, int], boundary: Any) -> None:
    debug, delay_ns = how
    expected = program(InCore())
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, step_boundary=boundary, **QUICK_PLANS) as session:
        session.engine.memory.store.engine.inject_faults(delay_ns=delay_ns)
        found = program(session if boundary == "explicit" else InCore())
        rows = list(session.steps.rows)
    assert found == expected
    assert sum(row.mode == "planned" for row in rows[len(rows) // 2 :]) >= len(rows) // 4, [r.why for r in rows]


@pytest.mark.parametrize("debug", [False, True])
def test_another_thread_reads_a_view_of_what_a_plan_moves(debug: bool) -> None:
    """A frozen layer's weight is evicted and loaded in each planned step, and a thread always finds its bytes."""
    wrong: list[int] = []
    rounds = [0]
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, **QUICK_PLANS) as session:
        model, optimizer = build()
        frozen = model[4].weight.requires_grad_(False)
        frozen.fill_(2.0)
        view, stop = frozen.numpy(), threading.Event()

        def read() -> None:
            while not stop.is_set():
                wrong.extend([rounds[0]] if (view != 2.0).any() else [])
                rounds[0] += 1

        thread = threading.Thread(target=read)
        thread.start()
        with contextlib.ExitStack() as stack:
            stack.callback(thread.join)
            stack.callback(stop.set)
            for index in range(NUM_STEPS):
                with session.step():
                    train(model, optimizer, index)
        modes = [row.mode for row in session.steps.rows]
    assert not wrong
    assert rounds[0] > 0
    assert modes[-1] == "planned", modes


@pytest.mark.parametrize("is_write", [True, False])
def test_a_store_that_fails_while_memory_is_given_out(is_write: bool) -> None:
    """A write of what was given out that fails leaves the plan, and loses nothing; a load fails its step."""
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS) as session:
        model, optimizer = build()
        view = model[2].weight.detach().numpy()
        for index in range(NUM_STEPS - 2):
            with session.step():
                train(model, optimizer, index)
        assert session.steps.rows[-1].mode == "planned"
        engine = session.engine.memory.store.engine
        engine.inject_faults(fail_call=3, direction="write" if is_write else "read")
        before = contents(model) if is_write else []
        with contextlib.suppress(ooc.StoreFailed), session.step():
            train(model, optimizer, NUM_STEPS)
        engine.inject_faults()
        for index in range(3):
            with session.step():
                train(model, optimizer, index)
        assert view.tobytes() == model[2].weight.detach().clone().numpy().tobytes()
        assert contents(model) != before


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("program", [_weights_held, _held_for_a_while, _predictions_kept])
def test_no_op_runs_again_from_what_may_have_been_written_meanwhile(
    program: Callable[[Any], list[Any]], seed: int
) -> None:
    """Remedy: `Reruns.read_given_out`. Without it a re-run makes other bytes than the op made, and nobody notices."""
    expected = program(InCore())
    with (
        slow_store(),
        forced_reruns(seed),
        counted_reruns() as counts,
        ooc.Session("1536KiB", chunk_nbytes="64KiB", policy="capuchin", recompute=True) as session,
    ):
        found = program(session)
        reasons = {row.why for row in session.steps.rows if "run again" in row.why}
    assert found == expected
    assert counts[0] if program is _predictions_kept else reasons  # nothing runs again from what was predicted


@pytest.mark.parametrize("when", ["before", "in a step"])
def test_what_is_kept_resident_is_not_evicted_by_a_plan(when: str) -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS) as session, contextlib.ExitStack() as stack:
        model, optimizer = build()
        weight, address_of = model[8].weight, session.engine.runner.dispatcher.address
        states: list[State] = []
        wants, has = [False], [False]

        def look(*_: Any) -> None:
            if has[0]:
                address = address_of(weight)
                found = session.engine.executor.record_at(address) or session.engine.manager.records[address]
                states.append(found.state)

        def keep(*_: Any) -> None:
            if wants[0] and not has[0]:
                stack.enter_context(session.resident(weight))
                has[0] = True

        model[8].register_forward_hook(keep)  # just after its use: it is in memory
        for layer in model:
            layer.register_forward_hook(look)
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        for index in range(PLANNED_STEP + 3):
            with session.step():
                train(model, optimizer, index)
            look()
            if index == PLANNED_STEP:
                assert session.steps.rows[-1].mode == "planned"
                wants[0] = True
                if when == "before":
                    keep()
    assert set(states) == {State.RESIDENT}, states


def test_a_mapping_that_fails_leaves_the_plan_and_what_is_written_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the kernel's limit of mappings. Until the next load the addresses show the store's file, which counts."""
    map_, load_late, failed, is_late = AddressSpace.map, ResidencyActs.load_late, [], []

    def loading(self: ResidencyActs, *arguments: Any) -> None:
        is_late.append(True)
        load_late(self, *arguments)
        is_late.clear()

    def failing(self: AddressSpace, reservation: Any, *arguments: Any, **options: Any) -> Any:
        if is_late and len(failed) < 2:  # the still move, and the plain one that is tried after it
            failed.append(reservation)
            raise MemoryFault("too many mappings")
        return map_(self, reservation, *arguments, **options)

    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        model, optimizer = build()
        views = {id(p): p.detach().numpy() for p in model.parameters()}
        for index in range(PLANNED_STEP):
            with session.step():
                train(model, optimizer, index)
        assert session.steps.rows[-1].mode == "planned"
        monkeypatch.setattr(AddressSpace, "map", failing)
        monkeypatch.setattr(ResidencyActs, "load_late", loading)

        def go_on() -> None:
            for index in range(PLANNED_STEP):
                train(model, optimizer, index)

        with pytest.raises(MemoryFault, match="too many"), session.step():
            go_on()
        assert session.engine.executor.active is None
        record = next(r for r in session.engine.manager.records.values() if r.reservation is failed[0])
        assert record.state is State.AWAY
        for parameter in model.parameters():
            views[id(parameter)][...] = 5.0
        assert all(bool((p.detach() == 5.0).all()) for p in model.parameters())
        for index in range(PLANNED_STEP):
            with session.step():
                train(model, optimizer, index)
        assert session.steps.rows[-1].mode == "planned"
        for parameter in model.parameters():
            assert views[id(parameter)].tobytes() == parameter.detach().clone().numpy().tobytes()


@thinned("start,recompute", [0, 8], [False, True])
def test_arrays_are_operands_again(start: int, recompute: bool) -> None:
    """A tensor over a held array, whole or in part, is another storage over the same memory; ops read and write it."""

    def program(session: Any) -> list[Any]:
        model, optimizer = build()
        alias, found = torch.from_numpy(model[0].weight.detach().numpy()[start:]), []

        def use(*_: Any) -> None:
            found.append((alias * 2).sum().item())
            with torch.no_grad():
                torch.add(alias.mul_(0.999), 0.001, out=alias)

        for place in (2, 8):
            model[place].register_forward_hook(use)
        for index in range(NUM_STEPS):
            with session.step():
                found.append(train(model, optimizer, index))
        return [*found, contents(model)]

    expected = program(InCore())
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", policy="capuchin", recompute=recompute) as session:
        assert program(session) == expected
        assert session.report()["steps"][-1]["mode"] in ("planned", "off_plan")  # a plan was entered


def test_an_address_is_found_without_looking_at_all_variables() -> None:
    """`data_ptr()` of each parameter in each step asks for the record at its address."""
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        model, optimizer = build()
        for index in range(PLANNED_STEP):
            with session.step():
                train(model, optimizer, index)
        executor, address_of = session.engine.executor, session.engine.runner.dispatcher.address
        assert executor.active is not None
        live = {record.address: record for record in executor.live_records()}
        assert all(executor.record_at(address) is record for address, record in live.items())
        assert {address_of(p) for p in model.parameters() if p.numel() > WIDTH * 10} <= live.keys()
        assert executor.record_at(1) is None
