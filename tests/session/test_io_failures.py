"""Fail the k-th read or write of a training run, for every k: the step raises, the session goes on."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator

import pytest
import torch

import ooc
from ooc.devices import detach
from tests.session.continuation import BUDGET, Trainer, assert_arrays_equal, assert_books_true, in_core

NUM_STEPS = 6
"""Three on demand, then planned ones."""


@pytest.fixture
def session() -> Iterator[ooc.Session]:
    with ooc.Session(BUDGET, debug=True) as opened:
        yield opened


def num_calls(session: ooc.Session) -> int:
    """System calls of the store so far."""
    return sum(session.engine.memory.store.statistics(way).num_calls for way in ("write", "read"))


def calls_by_step() -> list[int]:
    """How many calls each step of an undisturbed run makes, and that it gets to planned steps."""
    with ooc.Session(BUDGET, debug=True) as session:
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
) -> tuple[int, int, ooc.StoreFailed] | None:
    """Train; the k-th call from the start of `fail_step` on fails.

    Returns the index of the step in which it did (how many calls a step makes is a matter of timing: what was written
    behind by then need not be written again), of the step that raised, and what it raised.

    None: nobody had waited for that call, and it was made again when somebody did; or it was a write of the last
    step that nobody came to wait for.
    """
    num_before = failed_in = -1
    for index in range(NUM_STEPS + 1):
        try:
            with session.step():
                if index == fail_step:
                    session.engine.memory.store.wait_all()  # what is under way has been counted
                    num_before = num_calls(session)
                    session.engine.memory.store.engine.inject_faults(fail_call=fail_call)
                trainer.step(index)
        except ooc.StoreFailed as error:
            return (failed_in if failed_in >= 0 else index), index, error
        if failed_in < 0 and num_before >= 0 and num_calls(session) - num_before >= fail_call:
            failed_in = index
    return None


@pytest.mark.parametrize(
    ("fail_step", "plans_anew"),
    [
        (0, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        (NUM_STEPS - 1, False),
        (NUM_STEPS - 1, True),
    ],
)
def test_every_call_of_a_step(fail_step: int, plans_anew: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the step is followed by itself, or by another plan made from what it measured."""
    monkeypatch.setattr("ooc.replay.sequences._WORTHWHILE", 1e9 if plans_anew else 0)
    reference = Trainer()
    for index in range(NUM_STEPS + 1):
        reference.step(index)
    undisturbed = reference.snapshot()
    num_calls_of_step = calls_by_step()[fail_step]
    num_unnoticed = 0
    for fail_call in range(1, num_calls_of_step + 1):
        with ooc.Session(BUDGET, debug=True) as session:
            trainer = Trainer()
            found = train_until_failure(session, trainer, fail_step, fail_call)
            if found is None:
                num_unnoticed += 1
                final = trainer.snapshot()
                assert_books_true(session)
                assert_arrays_equal(undisturbed, final)
                continue
            failed_in, failed, error = found
            assert isinstance(error, OSError)
            assert error.errno == errno.EIO
            assert isinstance(error.__cause__, OSError)
            assert "Input/output error" in str(error)
            assert failed in (failed_in, failed_in + 1)  # a write that nobody waited for is found out later
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
    assert num_unnoticed < num_calls_of_step


@pytest.mark.parametrize("is_planned", [False, True])
def test_closing_after_a_failed_write(is_planned: bool) -> None:
    """Whatever write nobody has waited for fails: closing brings all variables back, and is no error."""
    num_steps = NUM_STEPS if is_planned else 1
    reference = Trainer()
    for index in range(num_steps):
        reference.step(index)
    undisturbed = reference.snapshot()
    for calls_from_end in range(1, 6):
        session = ooc.Session(BUDGET, debug=True)
        trainer = Trainer()
        with session:
            for index in range(num_steps):
                with session.step():
                    trainer.step(index)
            if is_planned:
                assert session.engine.executor.active is not None or session.steps.rows[-1].mode == "planned"
            session.engine.memory.store.engine.inject_faults(fail_call=calls_from_end)
        assert_arrays_equal(undisturbed, trainer.snapshot())


def more_than_the_budget() -> list[torch.Tensor]:
    """Tensors of which some must be in the store."""
    return [torch.full((256, 100), float(index)) for index in range(30)]


def test_closing_when_the_store_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that are lost are named; all others are brought back."""
    inner = detach._read
    failed: list[int] = []

    def fails_once(descriptor: int, offset: int, length: int, nbytes: int, address: int) -> None:
        if not failed:
            failed.append(address)
            raise OSError(errno.EIO, "Input/output error")
        inner(descriptor, offset, length, nbytes, address)

    monkeypatch.setattr(detach, "_read", fails_once)
    session = ooc.Session(BUDGET)
    tensors = more_than_the_budget()
    with pytest.raises(ooc.SessionError, match=r"1 of its variables \(.*\) could not be brought back.*all others"):
        session.close()
    left = [(index, tensor) for index, tensor in enumerate(tensors) if tensor.data_ptr() not in failed]
    assert len(left) == len(tensors) - 1
    for index, tensor in left:
        assert torch.equal(tensor, torch.full((256, 100), float(index)))


def test_closing_when_the_store_was_cut_short() -> None:
    """A file that has lost its end never gives zeros for what was in it."""
    session = ooc.Session(BUDGET)
    tensors = more_than_the_budget()
    session.engine.manager.land()
    os.ftruncate(session.engine.memory.store.descriptor, 0)
    with pytest.raises(ooc.SessionError, match="the file ends at"):
        session.close()
    del tensors
