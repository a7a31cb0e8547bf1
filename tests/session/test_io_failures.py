"""Fail the k-th read or write of a training run, for every k: the step raises, the session goes on."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator

import pytest

import ooc
from tests.session.continuation import BUDGET, Trainer, assert_arrays_equal, assert_books_true, in_core
from vmm.store import StoreSpeed

NUM_STEPS = 6
"""Three on demand, then planned ones."""

FIXED_SPEED = StoreSpeed(
    write_bytes_per_s=1e9, read_bytes_per_s=1e9, write_together_bytes_per_s=5e8, read_together_bytes_per_s=5e8
)


@pytest.fixture
def session() -> Iterator[ooc.Session]:
    with ooc.Session(BUDGET, debug=True) as opened:
        opened.steps._speed = FIXED_SPEED  # measuring makes calls, too, and takes 0.3 s
        yield opened


def num_calls(session: ooc.Session) -> int:
    """System calls of the store so far."""
    return sum(session.engine.memory.store.statistics(way).num_calls for way in ("write", "read"))


def calls_by_step() -> list[int]:
    """How many calls each step of an undisturbed run makes, and that it gets to planned steps."""
    with ooc.Session(BUDGET, debug=True) as session:
        session.steps._speed = FIXED_SPEED
        trainer = Trainer()
        counts = [num_calls(session)]
        for index in range(NUM_STEPS):
            with session.step():
                trainer.step(index)
            counts.append(num_calls(session))
        modes = [row.mode for row in session.steps.rows]
    assert modes[0] == "learning"
    assert modes[-2:] == ["planned", "planned"]
    made = [after - before for before, after in itertools.pairwise(counts)]
    assert made[0] > 5
    assert made[-1] > 5
    return made


def train_until_failure(
    session: ooc.Session, trainer: Trainer, fail_step: int, fail_call: int
) -> tuple[int, ooc.StoreFailed]:
    """Train; the k-th call from the start of `fail_step` on fails. The index of the step that raised, and what."""
    for index in range(NUM_STEPS + 1):
        try:
            with session.step():
                if index == fail_step:
                    session.engine.memory.store.engine.inject_faults(fail_call=fail_call)
                trainer.step(index)
        except ooc.StoreFailed as error:
            return index, error
    pytest.fail(f"call {fail_call} of step {fail_step} failed and nothing was raised")


@pytest.mark.parametrize(
    ("fail_step", "plans_anew"), [(0, False), (1, False), (NUM_STEPS - 1, False), (NUM_STEPS - 1, True)]
)
def test_every_call_of_a_step(fail_step: int, plans_anew: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the step is followed by itself, or by another plan made from what it measured."""
    monkeypatch.setattr("ooc.replay.sequences._WORTHWHILE", 1e9 if plans_anew else 0)
    for fail_call in range(1, calls_by_step()[fail_step] + 1):
        with ooc.Session(BUDGET, debug=True) as session:
            session.steps._speed = FIXED_SPEED
            trainer = Trainer()
            failed, error = train_until_failure(session, trainer, fail_step, fail_call)
            assert isinstance(error, OSError)
            assert error.errno == errno.EIO
            assert isinstance(error.__cause__, OSError)
            assert "Input/output error" in str(error)
            assert failed in (fail_step, fail_step + 1)  # a write that nobody waited for is found out later
            assert_books_true(session)
            snapshot = trainer.snapshot()
            losses = []
            indices = range(failed, failed + 4)  # the failed step again, and on
            for index in indices:
                with session.step():
                    losses.append(trainer.step(index))
            final = trainer.snapshot()
            assert_books_true(session)
        expected_losses, expected_final = in_core(snapshot, indices)
        assert losses == expected_losses, f"after a failure of call {fail_call}"
        assert_arrays_equal(expected_final, final)
