"""Written in one step, in memory over its border, released in the next: whatever comes between, bits are stock's."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import ooc
from ooc.memory.record import VariableRecord
from scheduler.plan import Evicted, Plan
from tests.session.continuation import BUDGET, Trainer, assert_arrays_equal, assert_books_true, in_core
from tests.session.program_border import forced_over_border
from tests.session.program_relocation import forced_relocation

NUM_STEPS = 9
DISTURBED = 6
"""A step in the middle of the planned ones."""

SLOW_NS = 3_000_000
"""Each write takes so long at least: those of the updates are under way when the next step begins."""

Hook = Callable[[Trainer, int], object]


@pytest.fixture(params=["in place", "copied"])
def plans(request: pytest.FixtureRequest) -> Iterator[list[Plan]]:
    """Plans that write over the border; of those that copy there, too, what is written is about to leave its chunks."""
    with forced_over_border() if request.param == "in place" else forced_relocation() as made:
        yield made
        assert request.param == "in place" or any(plan.border_copies for plan in made)


@contextmanager
def slow_session() -> Iterator[ooc.Session]:
    with ooc.Session(BUDGET, debug=True) as opened:
        opened.engine.memory.store.engine.inject_faults(delay_ns=SLOW_NS, direction="write")
        yield opened


def nothing(_trainer: Trainer, _index: int) -> None:
    """No hook."""


def stock(in_step: Hook = nothing, between: Hook = nothing) -> tuple[list[str], Trainer]:
    trainer = Trainer()
    losses = []
    for index in range(NUM_STEPS):
        losses.append(trainer.step(index))
        in_step(trainer, index)
        between(trainer, index)
    return losses, trainer


def ours(session: ooc.Session, in_step: Hook = nothing, between: Hook = nothing) -> tuple[list[str], Trainer]:
    trainer = Trainer()
    losses = []
    for index in range(NUM_STEPS):
        with session.step():
            losses.append(trainer.step(index))
            in_step(trainer, index)
        between(trainer, index)
    return losses, trainer


def assert_same(
    plans: list[Plan], in_step: Hook = nothing, between: Hook = nothing, look: Callable[[ooc.Session], object] = id
) -> None:
    """Ours does what stock does, by a plan that writes over the border, and ends by it. `look`: after the last step."""
    expected, reference = stock(in_step, between)
    final = reference.snapshot()
    with slow_session() as session:
        losses, trainer = ours(session, in_step, between)
        assert any(plan.writes_over_border for plan in plans)
        assert losses == expected
        assert session.steps.rows[-1].mode == "planned"
        look(session)
        assert_arrays_equal(final, trainer.snapshot())
        assert_books_true(session)


def written_before(session: ooc.Session) -> list[VariableRecord]:
    """What the plan being replayed releases in a step after having written it in the one before, as records."""
    executable = session.engine.executor.active
    assert executable is not None
    return [
        variable.record
        for variable in executable.variables
        for residency in variable.residencies
        if residency.is_written_before and variable.record is not None
    ]


def test_undisturbed_steps_write_what_the_plan_says(plans: list[Plan]) -> None:
    def look(session: ooc.Session) -> None:
        records = written_before(session)
        assert records and all(record.stored for record in records)
        executable = session.engine.executor.active
        assert executable is not None
        written = [stay.variable for stay in executable.plan.residencies if isinstance(stay.stop, Evicted)]
        present = (executable.variables[variable].record for variable in written)  # of an elastic plan maybe smaller
        nbytes = sum(record.nbytes for record in present if record is not None)
        assert session.steps.rows[-1].evicted_nbytes == nbytes, "something was written twice, or not early"

    assert_same(plans, look=look)


def _halve(trainer: Trainer) -> None:
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(0.5)


def test_parameters_changed_between_two_steps(plans: list[Plan]) -> None:
    """The copy that was written early is stale, and so is the one that is still on its way."""
    assert_same(plans, between=lambda trainer, index: _halve(trainer) if index == DISTURBED else None)


def test_parameters_changed_by_ops_off_plan_in_the_same_step(plans: list[Plan]) -> None:
    assert_same(plans, in_step=lambda trainer, index: _halve(trainer) if index == DISTURBED else None)


def test_parameters_changed_through_numpy_between_two_steps(plans: list[Plan]) -> None:
    """No op tells of it; the pointer that was given out is gone before the next step."""

    def between(trainer: Trainer, index: int) -> None:
        if index >= DISTURBED:
            for parameter in trainer.model.parameters():
                parameter.detach().numpy()[...] *= 0.75

    assert_same(plans, between=between)


def test_parameters_changed_through_a_pointer_between_two_steps(plans: list[Plan]) -> None:
    def between(trainer: Trainer, index: int) -> None:
        if index == DISTURBED:
            for parameter in trainer.model.parameters():
                values = (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())
                values[0] = 0.5

    assert_same(plans, between=between)


def test_the_plan_is_left_with_the_writes_under_way(plans: list[Plan]) -> None:
    def in_step(trainer: Trainer, index: int) -> None:
        if index == DISTURBED:
            trainer.model[0].weight.detach().exp().sum()

    assert_same(plans, in_step=in_step)


def test_the_plan_is_left_in_the_next_forward_pass(plans: list[Plan]) -> None:
    def between(trainer: Trainer, index: int) -> None:
        if index == DISTURBED:
            trainer.model[0].weight.detach().exp().sum()

    assert_same(plans, between=between)


@pytest.mark.parametrize("in_step", [False, True])
def test_another_budget_with_the_writes_under_way(plans: list[Plan], in_step: bool) -> None:
    expected, reference = stock()
    final = reference.snapshot()
    with slow_session() as session:

        def change(_trainer: Trainer, index: int) -> None:
            if index in (DISTURBED - 2, DISTURBED):
                session.set_budget("1408KiB" if index < DISTURBED else BUDGET)

        losses, trainer = ours(session, **{"in_step" if in_step else "between": change})
        assert any(plan.writes_over_border for plan in plans)
        assert losses == expected
        assert_arrays_equal(final, trainer.snapshot())
        assert_books_true(session)


@pytest.mark.usefixtures("plans")
def test_a_write_that_failed_over_the_border() -> None:
    """It is found out when the variable is to go: the step fails, nothing is lost, and training goes on."""
    num_raised = 0
    for fail_call in (1, 5, 9, 14, 19):
        with ooc.Session(BUDGET, debug=True) as session:
            trainer = Trainer()
            for index in range(DISTURBED):
                with session.step():
                    trainer.step(index)
            records = written_before(session)
            engine = session.engine.memory.store.engine
            engine.inject_faults(fail_call=fail_call, direction="write")
            failed, number = -1, errno.EIO
            for index in range(DISTURBED, NUM_STEPS):
                try:
                    with session.step():
                        trainer.step(index)
                except ooc.StoreFailed as error:
                    failed, number = index, error.errno
                    break
            engine.inject_faults()
            assert records and number == errno.EIO
            num_raised += failed >= 0
            assert_books_true(session)
            snapshot = trainer.snapshot()
            indices = range(max(failed, DISTURBED), max(failed, DISTURBED) + 3)
            losses = []
            for index in indices:
                with session.step():
                    losses.append(trainer.step(index))
            final = trainer.snapshot()
            assert_books_true(session)
        expected_losses, expected_final = in_core(snapshot, indices)
        assert losses == expected_losses, f"after a failure of write {fail_call}"
        assert_arrays_equal(expected_final, final)
    assert num_raised
