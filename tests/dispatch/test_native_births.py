"""Births on demand into memory that lies ready, without Python (native/births.h)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ooc
from ooc.dispatch import op_runner
from ooc.memory.record import VariableRecord
from tests.dispatch.test_boxed_demand import PROGRAMS, Program, squares

pytestmark = pytest.mark.usefixtures("one_thread")

_OPTIONS = {"chunk_nbytes": "64KiB", "threshold_nbytes": "4KiB", "plan_cache": False, "recompute": False}


def num_births(session: ooc.Session) -> int:
    number: int = session.engine.runner.dispatcher.num_births  # type: ignore[attr-defined]
    return number


def only_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_runner, "bear_natively", lambda *_, **__: None)


class _Numbers:
    """Addresses by the order in which they first come; small numbers as they are."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, value: object) -> object:
        is_address = isinstance(value, int) and value > 1 << 32
        return self._known.setdefault(value, len(self._known)) if is_address else value  # type: ignore[arg-type]


def books(session: ooc.Session, numbers: _Numbers) -> list[Any]:
    """All that is known of variables and of memory, but for times."""
    manager = session.engine.manager
    births, resident, ready = manager.books_of_births()
    slots = [
        name for name in VariableRecord.__slots__ if name not in ("reservation", "used_ns", "birthplace", "origin")
    ]
    records = [
        [(name, numbers.of(getattr(record, name))) for name in slots]
        + [numbers.of(record.reservation.address), record.reservation.nbytes, record.reservation.runs == record.runs]
        for record in manager.records.values()
    ]
    return [
        records,
        [numbers.of(address) for address in resident],
        {size: [(numbers.of(place.address), runs) for place, runs, _ in some] for size, some in ready.items() if some},
        (births.num_ready, manager.num_free, manager.peak_chunks, manager.num_serials),
    ]


def played(program: Program, budget: str, *, is_all: bool) -> tuple[list[Any], list[bytes], int]:
    """The books after each of a few steps that are never alike, with what was recorded; bits; births without Python."""
    torch.manual_seed(0)
    found: list[Any] = []
    bits: list[bytes] = []
    with ooc.Session(budget, **_OPTIONS) as session:
        runner = session.engine.runner
        for index in range(5):
            with session.step():
                for _ in range(index + 1):
                    torch.ones(128, 128).sin_()
                results = program()
                runner.absorb()
                numbers = _Numbers()
                recorder = runner.recording.recorder
                assert recorder is not None
                found.append([(numbers.of(e.address) if is_all else 0, *e[1:]) for e in recorder.events])
                found.append(books(session, numbers) if is_all else None)
                bits += [
                    x.detach().reshape(-1).clone().view(torch.uint8).numpy().tobytes()
                    for x in results
                    if x.is_contiguous()
                ]
                del results
        return found, bits, num_births(session)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_all_books_are_as_python_keeps_them(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    natively = played(program, "32MiB", is_all=True)
    only_python(monkeypatch)
    by_python = played(program, "32MiB", is_all=True)
    assert natively[:2] == by_python[:2]
    assert natively[2] > 3
    assert by_python[2] == 0


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_recorded_with_little_memory_is_the_same(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """So little that nothing lies ready at times. Which chunks are whose depends on when writes end."""
    natively = played(program, "1536KiB", is_all=False)
    only_python(monkeypatch)
    assert natively[:2] == played(program, "1536KiB", is_all=False)[:2]


def test_a_loop_needs_python_for_no_birth_once_each_size_was_there() -> None:
    with ooc.Session("32MiB", **_OPTIONS) as session, session.step():
        x, y = squares(2)
        for _ in range(3):
            z = x * y + 1
        state = session.engine.runner._allocator.state
        before, num_cold = num_births(session), state.num_cold
        for _ in range(20):
            z = x * y + 1
        assert state.num_cold - num_cold == num_births(session) - before == 40
        assert torch.equal(z, x * y + 1)


def free_exported(_: ooc.Session) -> None:
    """What was given out may be written by whoever holds it: its chunks are not the next variable's."""
    x = torch.ones(128, 128)
    kept = x.numpy()
    del x
    y = torch.zeros(128, 128)
    kept[:] = 7
    assert y.sum().item() == 0


def free_stored(session: ooc.Session) -> None:
    """What has a slot in the store gives it back."""
    manager = session.engine.manager
    x = torch.ones(128, 128)
    (record,) = manager.records_at([x.untyped_storage().data_ptr()])
    with session.engine.lock:
        manager.evict([record])
    assert x.sum().item() == 128 * 128
    assert record.slot is not None
    num_used = manager.store.used_nbytes
    del x, record
    torch.zeros(128, 128)
    assert manager.store.used_nbytes < num_used


def on_another_thread(_: ooc.Session) -> None:
    found: list[Tensor] = []

    def work() -> None:
        for _ in range(4):
            found.append(torch.full((128, 128), 3.0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert all(x.sum().item() == 3 * 128 * 128 for x in found)


def with_another_budget(session: ooc.Session) -> None:
    """What lies ready is of the pool that was, whose chunks may be gone."""
    kept = torch.full((128, 128), 5.0)
    for nbytes in (16 << 20, 24 << 20):
        for _ in range(3):
            torch.ones(128, 128).mul_(2)
        session.set_budget(nbytes)
        assert (torch.ones(128, 128) * 3).sum().item() == 3 * 128 * 128
    assert kept.sum().item() == 5 * 128 * 128


@pytest.mark.parametrize("use", [free_exported, free_stored, on_another_thread, with_another_budget])
def test_what_is_not_plain_is_pythons(use: Callable[[ooc.Session], None]) -> None:
    with ooc.Session("32MiB", **_OPTIONS) as session:
        for _ in range(3):
            torch.ones(128, 128).sin_()
        use(session)
        before = num_births(session)
        for _ in range(3):
            torch.ones(128, 128).sin_()
        assert num_births(session) > before
        free, held = session.engine.manager.num_free, session.engine.manager.resident_chunks()
        session.engine.runner.absorb()
        assert session.engine.manager.num_free + session.engine.manager.resident_chunks() == free + held


def test_nobody_is_asked_after_the_session() -> None:
    with ooc.Session("32MiB", **_OPTIONS) as session:
        kept = torch.ones(128, 128) * 2
        state = session.engine.runner._allocator.state
        assert state.quick_allocate
    assert not state.quick_allocate
    assert kept.sum().item() == 2 * 128 * 128
    with ooc.Session("32MiB", **_OPTIONS) as session:  # what outlived the other is nobody's here
        for _ in range(3):
            torch.ones(128, 128).sin_()
        before = num_births(session)
        assert before > 0
        address = kept.untyped_storage().data_ptr()
        assert address in session.engine.memory.allocator.detached
        del kept
        for _ in range(3):
            torch.ones(128, 128).sin_()
        assert address not in session.engine.memory.allocator.detached
        assert num_births(session) > before


def test_what_is_freed_lies_ready_for_nobody_in_debug_mode() -> None:
    """There its addresses show nothing, so that a touch of it faults."""
    for debug in (False, True):
        with ooc.Session("8MiB", debug=debug, **_OPTIONS) as session:
            for _ in range(4):
                torch.ones(64, 64).sin_()
            session.engine.runner.absorb()
            reservations = [each for each in session.engine.memory.space.reservations if each.runs is not None]
            assert bool(num_births(session)) != debug
            assert bool(reservations) != debug
