"""Ctrl-C at any moment: it comes between ops, the books stay true, and training goes on from there."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

import ooc
from ooc.dispatch.op_runner import OpRunner
from ooc.memory.residency import ResidencyManager
from ooc.replay.acts import ResidencyActs
from ooc.replay.executor import Executor
from ooc.replay.sequences import Sequences
from ooc.tracing.recorder import StepRecorder
from tests.session.continuation import BUDGET, Trainer, assert_arrays_equal, assert_books_true, in_core

NUM_LEARNING = 4


@pytest.fixture
def session() -> Iterator[ooc.Session]:
    with ooc.Session(BUDGET, debug=True) as opened:
        yield opened


def train(session: ooc.Session, trainer: Trainer, indices: range) -> list[str]:
    """Steps with these batches; their losses."""
    losses = []
    for index in indices:
        with session.step():
            losses.append(trainer.step(index))
    return losses


def assert_goes_on(session: ooc.Session, trainer: Trainer, indices: range) -> None:
    """What is there now is where training goes on, as it would in core."""
    assert_books_true(session)
    snapshot = trainer.snapshot()
    losses = train(session, trainer, indices)
    final = trainer.snapshot()
    assert_books_true(session)
    session.close()
    expected_losses, expected_final = in_core(snapshot, indices)
    assert losses == expected_losses
    assert_arrays_equal(expected_final, final)


@pytest.mark.parametrize(
    ("owner", "name", "num_steps_before"),
    [
        (ResidencyManager, "load", 0),
        (ResidencyManager, "allocate", 0),
        (ResidencyManager, "start_write", 0),
        (ResidencyManager, "free", 0),
        (OpRunner, "_complete", 0),
        (StepRecorder, "finish", 0),
        (Sequences, "learn", 1),
        (Executor, "enter", 1),
        (ResidencyManager, "start_write", NUM_LEARNING + 1),
        (Executor, "before", NUM_LEARNING + 1),
        (Executor, "after", NUM_LEARNING + 1),
        (Executor, "rotate", NUM_LEARNING + 1),
        (ResidencyActs, "release", NUM_LEARNING + 1),
    ],
)
def test_signal_inside_the_bookkeeping_waits_for_its_end(
    session: ooc.Session, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, num_steps_before: int
) -> None:
    trainer = Trainer()
    train(session, trainer, range(num_steps_before))
    inner = getattr(owner, name)
    seen: list[str] = []

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if not seen:
            seen.append("sent")
            signal.raise_signal(signal.SIGINT)  # without the gate: KeyboardInterrupt right here
            seen.append("went on")
        return inner(*arguments, **named)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(session, trainer, range(num_steps_before, num_steps_before + 4))
    monkeypatch.undo()
    assert seen == ["sent", "went on"]
    assert_goes_on(session, trainer, range(4))


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 20))])
def test_signal_at_a_random_moment(session: ooc.Session, seed: int) -> None:
    """From another thread, so at any bytecode of the step; even seeds while learning, odd ones planned."""
    trainer = Trainer()
    done = NUM_LEARNING + 1 if seed % 2 else 0
    train(session, trainer, range(done))
    delay_s = random.Random(seed).uniform(0.0, 0.05)

    def shoot() -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGINT)

    shooter = threading.Thread(target=shoot)
    steps = count(done)

    def train_until_interrupted() -> None:
        shooter.start()
        for step in steps:
            with session.step():
                trainer.step(step)

    with pytest.raises(KeyboardInterrupt):
        train_until_interrupted()
    shooter.join()
    step = next(steps)
    assert_goes_on(session, trainer, range(step, step + 4))


def test_interrupt_while_closing_still_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ooc.Session(BUDGET)
    trainer = Trainer()
    train(session, trainer, range(2))
    expected = trainer.snapshot()
    inner = session.engine.memory.detach_tensors

    def interrupted(manager: ResidencyManager) -> None:
        signal.raise_signal(signal.SIGINT)
        inner(manager)

    monkeypatch.setattr(session.engine.memory, "detach_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert_arrays_equal(expected, trainer.snapshot())
    with ooc.Session(BUDGET):  # the first one is closed, or this would be refused
        pass


def test_handlers_of_the_user_stay_theirs() -> None:
    before = signal.getsignal(signal.SIGINT)
    set_signal, get_signal = signal.signal, signal.getsignal
    calls: list[int] = []

    def earlier(number: int, _: object) -> None:
        calls.append(number)

    def later(number: int, _: object) -> None:
        calls.append(-number)

    signal.signal(signal.SIGUSR1, earlier)
    try:
        with ooc.Session(BUDGET):
            signal.raise_signal(signal.SIGUSR1)
            assert calls == [signal.SIGUSR1]
            assert signal.getsignal(signal.SIGUSR1) is earlier
            assert signal.getsignal(signal.SIGINT) is before
            assert signal.signal(signal.SIGUSR1, later) is earlier
            assert signal.getsignal(signal.SIGUSR1) is later
            signal.raise_signal(signal.SIGUSR1)
            assert calls == [signal.SIGUSR1, -signal.SIGUSR1]
            assert signal.signal(signal.SIGUSR2, signal.SIG_IGN) is signal.SIG_DFL
            signal.raise_signal(signal.SIGUSR2)
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        assert signal.signal is set_signal
        assert signal.getsignal is get_signal
        assert signal.getsignal(signal.SIGUSR1) is later
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_session_on_another_thread_leaves_handlers_alone() -> None:
    """Python runs handlers on the main thread only; they have nothing to wait for."""
    losses: list[str] = []
    ready, go_on = threading.Event(), threading.Event()

    def run() -> None:
        with ooc.Session(BUDGET) as session:
            losses.extend(train(session, Trainer(), range(3)))
            ready.set()
            go_on.wait()
            losses.extend(train(session, Trainer(), range(3)))

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(600)
    handled = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    go_on.set()
    thread.join()
    assert handled is signal.getsignal(signal.SIGINT)
    assert losses[:3] == losses[3:]
