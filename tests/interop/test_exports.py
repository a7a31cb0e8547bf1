"""Access from outside the dispatcher: exports, stray touches, and other threads.

Each program trains a small model whose parameters are partly away between steps, and does something
from outside in mid-training; results equal those of the same program without a session, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ooc
from ooc.memory.record import State
from tests.interop.cases import (
    BUDGET,
    NUM_STEPS,
    PLANNED_STEP,
    WIDTH,
    InCore,
    build,
    contents,
    pointers_of,
    read_all,
    train,
)
from tests.quick_plans import QUICK_PLANS
from tests.thinned import thinned

Act = Callable[[nn.Module, torch.optim.Optimizer], Any]

pytestmark = pytest.mark.usefixtures("one_thread")


def run(session: Any, act: Act, *, at: int, inside: bool) -> tuple[list[Any], list[bytes]]:
    """Train; in or after step `at` call `act`. Losses with what it returned, and the model at the end."""
    model, optimizer = build()
    results: list[Any] = []
    for index in range(NUM_STEPS):
        with session.step():
            results.append(train(model, optimizer, index))
            if inside and index == at:
                results.append(act(model, optimizer))
        if not inside and index == at:
            results.append(act(model, optimizer))
    return results, contents(model)


def compare(act: Act, *, at: int, inside: bool = False, debug: bool = False) -> ooc.Session:
    """The same in core and out of core. Returns the session, closed."""
    expected = run(InCore(), act, at=at, inside=inside)
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, **QUICK_PLANS) as session:
        found = run(session, act, at=at, inside=inside)
        modes = [row.mode for row in session.steps.rows]
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert modes[PLANNED_STEP - 1] == "planned"
    assert modes[-1] == "planned" or act is _saved  # which gives the optimizer another state: a new sequence
    return session


# -- exports


def _numpy(model: nn.Module, _: Any) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def _asarray(model: nn.Module, _: Any) -> list[bytes]:
    return [np.asarray(p.detach()).tobytes() for p in model.parameters()]


def _all_at_once(model: nn.Module, _: Any) -> list[bytes]:
    """More memory given out at the same time than the budget has."""
    arrays = [p.detach().numpy() for p in model.parameters()]
    return [array.tobytes() for array in arrays]


def _tolist(model: nn.Module, _: Any) -> list[Any]:
    return [p.tolist() for p in list(model.parameters())[:2]]


def _dlpack(model: nn.Module, _: Any) -> list[bytes]:
    found = [np.from_dlpack(p.detach()[1:, ::2]).tobytes() for p in model.parameters() if p.dim() == 2]
    bfloat = next(model.parameters()).detach().bfloat16()
    again = torch.from_dlpack(torch.utils.dlpack.to_dlpack(bfloat))
    return [*found, again.float().numpy().tobytes()]


def _written_through_numpy(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.detach().numpy()[...] *= 0.5


def _data_ptr(model: nn.Module, _: Any) -> list[bytes]:
    return [ctypes.string_at(p.data_ptr(), 4 * p.numel()) for p in model.parameters()]


def _written_through_data_ptr(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        ctypes.memset(parameter.data_ptr(), 0, 2 * parameter.numel())


def _storages(model: nn.Module, _: Any) -> list[Any]:
    parameters = list(model.parameters())
    untyped = parameters[0].untyped_storage()
    typed = parameters[2].storage()  # type: ignore[no-untyped-call]
    return [untyped[3], untyped[77], typed[5], untyped.nbytes(), [typed[i] for i in range(9)]]


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """A round trip of model and optimizer through torch.save."""
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    found = [t.numpy().tobytes() for t in loaded["model"].values()]
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return found


def _pickled(model: nn.Module, _: Any) -> list[bytes]:
    return contents(pickle.loads(pickle.dumps(model)))


def _copied(model: nn.Module, _: Any) -> list[bytes]:
    return contents(copy.deepcopy(model))


def _to_file(model: nn.Module, _: Any) -> bytes:
    path = f"/var/tmp/ooc-test-{os.getpid()}"
    try:
        for parameter in model.parameters():
            with open(path, "ab") as file:
                parameter.detach().numpy().tofile(file)
        return Path(path).read_bytes()
    finally:
        os.unlink(path)


def _shared(model: nn.Module, _: Any) -> list[bytes]:
    """The storage moves to shared memory, under a tensor that keeps its identity."""
    copies = [p.detach().clone() for p in model.parameters()]
    for tensor in copies:
        tensor.share_memory_()
        assert tensor.is_shared()
    return [tensor.numpy().tobytes() for tensor in copies]


ACTS = [
    _numpy,
    _asarray,
    _all_at_once,
    _tolist,
    _dlpack,
    _written_through_numpy,
    _data_ptr,
    _written_through_data_ptr,
    _storages,
    _saved,
    _pickled,
    _copied,
    _to_file,
    _shared,
]


@thinned(
    "act,when",
    ACTS,
    [(1, False), (PLANNED_STEP, False), (PLANNED_STEP, True)],
)
def test_exports(act: Act, when: tuple[int, bool]) -> None:
    at, inside = when
    compare(act, at=at, inside=inside)


@pytest.mark.parametrize("act", [_numpy, _all_at_once, _written_through_numpy, _saved, _copied])
def test_exports_in_debug_mode(act: Act) -> None:
    compare(act, at=PLANNED_STEP, debug=True)


@thinned("is_zip,debug", [False, True], [False, True])
def test_a_plan_goes_on_while_what_it_has_away_is_saved(is_zip: bool, debug: bool) -> None:
    """Remedy: `Exports.storage_to_read`. Other bytes are at these addresses in mid-step."""

    def saved(_: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
        states = [state for parameter in optimizer.state.values() for state in parameter.values()]
        buffer = io.BytesIO()
        torch.save(states, buffer, _use_new_zipfile_serialization=is_zip)
        buffer.seek(0)
        with torch.no_grad():
            return [t.detach().numpy().tobytes() for t in torch.load(buffer)]

    expected = run(InCore(), saved, at=PLANNED_STEP, inside=True)
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, **QUICK_PLANS) as session:
        found = run(session, saved, at=PLANNED_STEP, inside=True)
        rows, copied = list(session.steps.rows), session.engine.runner.guests.copied_nbytes
    assert found == expected
    assert copied > 0  # of what was away
    assert "many variables" not in rows[PLANNED_STEP].why
    assert rows[PLANNED_STEP].num_planned_ops > 0


def _hold(session: Any) -> tuple[list[Any], list[bytes]]:
    """A numpy view taken early sees every later update, and what is written there counts."""
    model, optimizer = build()
    weight = model[4].weight
    seen = []
    view = None
    for index in range(NUM_STEPS + 4):
        with session.step():
            seen.append(train(model, optimizer, index))
        if index == 5:
            view = weight.detach().numpy()
        if view is not None:
            seen.append(view.tobytes())
            view[index] = index / 100
            seen.append(weight.detach().clone().numpy().tobytes())
        if index == 8:
            view = None
    return seen, contents(model)


@pytest.mark.parametrize("debug", [False, True])
def test_a_view_held_over_steps(debug: bool) -> None:
    expected = _hold(InCore())
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, **QUICK_PLANS) as session:
        found = _hold(session)
        modes = [row.mode for row in session.steps.rows]
    assert found == expected
    assert set(modes[5:]) == {"planned"}


def test_functions_are_put_back() -> None:
    names = [(torch.Tensor, "numpy"), (torch.Tensor, "data_ptr"), (torch, "save"), (torch.UntypedStorage, "data_ptr")]
    before = [getattr(owner, name) for owner, name in names]
    kept = [owner.__dict__.get(name) for owner, name in names]
    with ooc.Session(BUDGET):
        assert [getattr(owner, name) for owner, name in names] != before
    assert [getattr(owner, name) for owner, name in names] == before
    assert [owner.__dict__.get(name) for owner, name in names] == kept


def test_an_export_outlives_its_session() -> None:
    with ooc.Session(BUDGET):
        tensor = torch.arange(WIDTH * WIDTH, dtype=torch.float32)
        array = tensor.numpy()
        others = [torch.randn(WIDTH, WIDTH) for _ in range(8)]
        del others
    array[7] = 5
    assert tensor[7] == 5
    del tensor
    gc.collect()
    assert array[8] == 8


def test_resident_keeps_and_says_when_it_cannot() -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        tensors = [torch.full((WIDTH, WIDTH), float(i)) for i in range(12)]
        with session.resident(*tensors[:3]):
            pointers = [session.engine.runner.dispatcher.address(t) for t in tensors[:3]]
            for other in tensors[3:]:
                other.add_(0)
            records = [session.engine.manager.records[p] for p in pointers]
            assert all(r.state is State.RESIDENT for r in records)
            ctypes.memset(pointers[0], 0, 4)
        for other in tensors[3:]:
            other.add_(0)
        assert any(r.state is State.AWAY for r in records)
        assert tensors[0][0, 0] == 0
        assert tensors[2].sum() == 2 * WIDTH * WIDTH
        with pytest.raises(TypeError, match=r"a list\. Options: tensors"), session.resident(tensors):  # type: ignore[arg-type]
            pass
        with pytest.raises(ooc.BudgetTooSmall, match="resident"), session.resident(*tensors):
            pass
        assert tensors[11].sum() == 11 * WIDTH * WIDTH


# -- stray touches


@thinned("boundary,debug,delay_ns", ["explicit", "optimizer"], [False, True], [3_000_000, 0])
def test_raw_pointers_between_steps(boundary: Any, debug: bool, delay_ns: int) -> None:
    """Read through addresses alone: after planned steps that needs the fault handler.

    Ops that follow a step (here `loss.item()` and a norm) are played by the plan: loads and evictions
    go on meanwhile, and with a slow store they are still under way when the addresses are read.
    """
    model, optimizer = build()
    expected = []
    for index in range(NUM_STEPS + 3):
        train(model, optimizer, index)
        expected.append(read_all(pointers_of(model)))
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, step_boundary=boundary, **QUICK_PLANS) as session:
        model, optimizer = build()
        pointers = pointers_of(model)
        session.engine.memory.store.engine.inject_faults(delay_ns=delay_ns)
        for index in range(NUM_STEPS + 3):
            with session.step() if boundary == "explicit" else contextlib.nullcontext():
                train(model, optimizer, index)
            model[0].weight.norm()
            assert read_all(pointers) == expected[index]
        assert [row.mode for row in session.steps.rows].count("planned") >= 3
        assert session.steps.rows[-1].num_faults > 0
        assert session.report()["steps"][-1]["num_faults"] == session.steps.rows[-1].num_faults


def test_a_stray_write_to_an_away_variable_is_kept() -> None:
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        model, optimizer = build()
        pointers = pointers_of(model)
        for index in range(PLANNED_STEP):
            with session.step():
                train(model, optimizer, index)
        records = {r.address: r for r in session.engine.executor.live_records()}
        away = next(i for i, (a, _) in enumerate(pointers) if a in records and records[a].state is State.AWAY)
        ctypes.memset(pointers[away][0] + 8, 0, 4)
        assert list(model.parameters())[away].flatten()[2] == 0
        assert session.engine.executor.active is None or session.steps.rows[-1].mode == "planned"


def test_threads_read_parameters_between_steps() -> None:
    """Four threads by raw pointers and by torch's own ops, which they run without the dispatch mode."""
    model, optimizer = build()
    expected = []
    for index in range(NUM_STEPS):
        train(model, optimizer, index)
        expected.append(read_all(pointers_of(model)))
    wrong: list[int] = []
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", **QUICK_PLANS) as session:
        model, optimizer = build()
        pointers = pointers_of(model)

        def check(index: int) -> None:
            for _ in range(3):
                if read_all(pointers) != expected[index]:
                    wrong.append(index)
                if [(p.detach() + 0).numpy().tobytes() for p in model.parameters()] != expected[index]:
                    wrong.append(-index)

        for index in range(NUM_STEPS):
            with session.step():
                train(model, optimizer, index)
            threads = [threading.Thread(target=check, args=(index,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not wrong


def test_threads_read_on_demand_while_training_goes_on() -> None:
    """On demand a variable may be read at any time; what is frozen reads the same throughout."""
    with ooc.Session(BUDGET, chunk_nbytes="64KiB") as session:
        frozen = [torch.full((WIDTH, WIDTH), float(i)) for i in range(8)]
        pointers = [(t.data_ptr(), 4 * t.numel()) for t in frozen]
        expected = [np.full(WIDTH * WIDTH, i, dtype=np.float32).tobytes() for i in range(8)]
        stop = threading.Event()
        wrong: list[int] = []
        rounds = [0]

        def read() -> None:
            while not stop.is_set():
                if read_all(pointers) != expected:
                    wrong.append(1)
                rounds[0] += 1

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            turn = 0
            while turn < 12 or not rounds[0]:
                total = sum((t + turn % 12).sum().item() for t in frozen)
                assert total == WIDTH * WIDTH * (28 + 8 * (turn % 12))
                turn += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong
        assert rounds[0] > 0
        assert session.engine.manager.counters.loaded_nbytes > 0


def test_another_thread_allocates_during_planned_steps() -> None:
    """It is served beside the plan, or the step leaves the plan; neither is ever corrupted."""
    model, optimizer = build()
    expected = [train(model, optimizer, index) for index in range(14)]
    final = contents(model)
    with ooc.Session("2MiB", chunk_nbytes="64KiB") as session:
        model, optimizer = build()
        stop = threading.Event()
        wrong: list[Any] = []
        rounds = [0]

        def work() -> None:
            while not stop.is_set():
                tensor = torch.full((128, 256), float(rounds[0] % 7))
                time.sleep(0.001)
                if tensor.sum().item() != 128 * 256 * (rounds[0] % 7):
                    wrong.append(rounds[0])
                del tensor
                rounds[0] += 1

        losses = []
        thread = threading.Thread(target=work)
        for index in range(14):
            if index == 5:
                thread.start()
            with session.step():
                losses.append(train(model, optimizer, index))
        while not rounds[0] and thread.is_alive():
            time.sleep(0.001)
        stop.set()
        thread.join()
        assert losses == expected
        assert contents(model) == final
    assert not wrong
    assert rounds[0] > 0


def _checkpoints() -> list[Any]:
    """Train, with a checkpoint between two steps that reads through addresses."""
    model, optimizer = build()
    results: list[Any] = []
    for index in range(NUM_STEPS):
        results.append(train(model, optimizer, index))
        if index in (NUM_STEPS - 4, NUM_STEPS - 2):
            results.append(read_all(pointers_of(model)))
    return [results, contents(model)]


@pytest.mark.parametrize("debug", [False, True])
def test_a_step_goes_on_with_its_plan_after_a_checkpoint_that_reads_through_addresses(debug: bool) -> None:
    expected = _checkpoints()
    with ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, step_boundary="optimizer", **QUICK_PLANS) as session:
        found = _checkpoints()
        modes = [row.mode for row in session.steps.rows]
    assert found == expected
    assert set(modes[-4:]) == {"planned"}, modes
