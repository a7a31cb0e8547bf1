"""The session's lock: reentrant, of one thread at a time, in native code's hands and in Python's."""

from __future__ import annotations

import threading

import pytest
import torch

import ooc
from ooc.replay.dispatcher import SessionLock


@pytest.fixture
def lock() -> SessionLock:
    with ooc.Session("4MiB") as session:
        return session.engine.runner.dispatcher.new_lock()


def _on_another_thread(act: object) -> threading.Thread:
    thread = threading.Thread(target=act)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_a_thread_that_has_it_takes_it_again(lock: SessionLock) -> None:
    for _ in range(3):
        assert lock.acquire()
    for _ in range(3):
        lock.release()
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.release()


def test_another_thread_waits_until_it_is_given_back_as_often_as_it_was_taken(lock: SessionLock) -> None:
    lock.acquire()
    lock.acquire()
    order: list[str] = []
    waits = threading.Event()

    def other() -> None:
        with pytest.raises(RuntimeError, match="un-acquired"):
            lock.release()  # it is not this thread's
        waits.set()
        lock.acquire()
        order.append("other")
        lock.release()

    thread = _on_another_thread(other)
    assert waits.wait(60)
    lock.release()
    order.append("still mine")
    lock.release()
    thread.join(60)
    assert order == ["still mine", "other"]
    lock.acquire()
    lock.release()


def test_many_threads_never_have_it_at_once(lock: SessionLock) -> None:
    count = 0

    def add() -> None:
        nonlocal count
        for _ in range(2000):
            lock.acquire()
            before = count
            if before % 64 == 0:
                threading.Event().wait(0)  # others run
            count = before + 1
            lock.release()

    threads = [_on_another_thread(add) for _ in range(4)]
    for thread in threads:
        thread.join(60)
    assert count == 8000


def test_ops_wait_for_a_thread_that_has_the_sessions_lock() -> None:
    """Native code takes the lock that Python has: an op on the session's thread changes nothing meanwhile."""
    with ooc.Session("4MiB") as session:
        x = torch.ones(1 << 16)
        has_it, may_end = threading.Event(), threading.Event()
        records = session.engine.manager.records
        seen: list[int] = []

        def hold() -> None:
            with session.engine.lock:
                has_it.set()
                may_end.wait(0.2)
                seen.append(len(records))

        thread = _on_another_thread(hold)
        assert has_it.wait(60)
        num_before = len(records)
        y = x + 1
        thread.join(60)
        assert seen == [num_before]
        assert y.sum().item() == 2 << 16
