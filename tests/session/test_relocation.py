"""Copied within memory at the step's border: bits are stock's, whatever comes between, and whatever call fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import ooc
from ooc.errors import InconsistentRecord
from ooc.memory.record import VariableRecord
from ooc.replay.border_relocation import BorderRelocation
from scheduler.plan import Plan, occupied_ticks
from tests.session.continuation import Trainer, assert_arrays_equal, assert_books_true
from tests.session.program_relocation import forced_relocation
from tests.session.program_runs import run_many
from tests.session.test_over_border import DISTURBED, NUM_STEPS, ours, slow_session, stock
from vmm.addresses import AddressSpace, Reservation
from vmm.driver import MemoryFault


@pytest.fixture
def plans() -> Iterator[list[Plan]]:
    with forced_relocation(spare=0.2) as made:
        yield made
        assert any(plan.border_copies for plan in made)


def moved(session: ooc.Session) -> list[VariableRecord]:
    """What the plan being replayed moves at the border, as records."""
    executable = session.engine.executor.active
    assert executable is not None and executable.border is not None
    records = [ends.variable.record for ends, _ in executable.border.moved]
    return [record for record in records if record is not None]


@pytest.mark.usefixtures("plans")
def test_each_step_says_how_much_was_moved_within_memory_before_it() -> None:
    expected, _ = stock()
    with slow_session() as session:
        losses, _ = ours(session)
        nbytes = sum(record.nbytes for record in moved(session))
        last = session.steps.rows[-1]
        # Of an elastic plan, what is not looked at yet counts as large as it may be.
        assert last.mode == "planned" and 0 < last.relocated_nbytes <= nbytes and last.relocate_s > 0
        assert session.report()["steps"][-1]["relocated_nbytes"] == last.relocated_nbytes
        stats = session.memory_stats()
        assert stats["relocated_bytes.all.total"] >= sum(row.relocated_nbytes for row in session.steps.rows) > 0
        assert losses == expected


def _keeping(session: ooc.Session | None) -> list[bytes]:
    """What one step's activations and gradients hold a step later, and the parameters at the end."""
    trainer, kept, found = Trainer(), [], []
    for layer in trainer.model[1:]:
        layer.register_forward_hook(lambda _layer, _inputs, output: kept.append(output.detach()))
        layer.register_full_backward_hook(
            lambda _layer, inputs, _outputs: kept.extend(g for g in inputs if g is not None)
        )
    for index in range(NUM_STEPS):
        with session.step() if session is not None else contextlib.nullcontext():
            trainer.step(index)
        if index == DISTURBED + 1:
            found = [tensor.clone().numpy().tobytes() for tensor in kept]
        if index != DISTURBED:
            kept.clear()
    return [*found, *(parameter.detach().clone().numpy().tobytes() for parameter in trainer.model.parameters())]


@pytest.mark.usefixtures("plans")
def test_what_is_freed_late_is_not_overwritten() -> None:
    """Activations and gradients that outlive their step lie where something may be copied to."""
    expected = _keeping(None)
    with slow_session() as session:
        assert _keeping(session) == expected
        assert_books_true(session)


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("fail_call", [0, 2])
@pytest.mark.parametrize("what", ["copy", "map"])
def test_a_call_that_fails_at_the_border_costs_the_plan_and_nothing_else(
    what: str, fail_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, reference = stock()
    final = reference.snapshot()
    cross, copy, show = BorderRelocation.cross, AddressSpace.copy_chunks, AddressSpace.map
    calls: list[str] = []
    is_at_border = False

    def crossing(self: BorderRelocation, executable: Any) -> bool:
        nonlocal is_at_border
        is_at_border = True
        try:
            return cross(self, executable)
        finally:
            is_at_border = False

    def may_fail(kind: str) -> None:
        if is_at_border and kind == what:
            calls.append(kind)
            if len(calls) == fail_call + 1:
                raise MemoryFault(f"{kind} refused by the test")

    def copying(self: AddressSpace, source: int, target: int, num_chunks: int) -> None:
        may_fail("copy")
        copy(self, source, target, num_chunks)

    def showing(self: AddressSpace, reservation: Reservation, runs: Sequence[tuple[int, int]]) -> int:
        may_fail("map")
        return show(self, reservation, runs)

    monkeypatch.setattr(BorderRelocation, "cross", crossing)
    monkeypatch.setattr(AddressSpace, "copy_chunks", copying)
    monkeypatch.setattr(AddressSpace, "map", showing)
    with slow_session() as session:
        losses, trainer = ours(session)
        assert len(calls) > fail_call, "nothing failed"
        assert losses == expected
        assert_arrays_equal(final, trainer.snapshot())
        assert_books_true(session)


@pytest.mark.usefixtures("plans")
def test_what_was_given_out_is_not_moved() -> None:
    """A view of numpy is held over a border and written through: no op tells of it."""

    def between(held: list[Any]) -> Callable[[Trainer, int], None]:
        def hook(trainer: Trainer, index: int) -> None:
            if index == DISTURBED:
                held.extend(parameter.detach().numpy() for parameter in trainer.model.parameters())
            if index == DISTURBED + 1:
                for array in held:
                    array[...] *= 0.5
                held.clear()

        return hook

    expected, reference = stock(between=between([]))
    final = reference.snapshot()
    with slow_session() as session:
        losses, trainer = ours(session, between=between([]))
        assert losses == expected
        assert_arrays_equal(final, trainer.snapshot())
        assert_books_true(session)


@pytest.mark.usefixtures("plans")
def test_debug_mode_finds_a_copy_that_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = AddressSpace.copy_chunks
    monkeypatch.setattr(
        AddressSpace, "copy_chunks", lambda self, source, target, count: copy(self, target, source, count)
    )
    with pytest.raises(InconsistentRecord, match="relocated"), slow_session() as session:
        ours(session)


@pytest.mark.usefixtures("plans")
def test_chunks_are_not_filled_while_they_are_written_out() -> None:
    """Each write takes so long that those of the updates are under way when their variables are moved."""
    expected, reference = stock()
    final = reference.snapshot()
    with slow_session() as session:
        session.engine.memory.store.engine.inject_faults(delay_ns=20_000_000, direction="write")
        losses, trainer = ours(session)
        executable = session.engine.executor.active
        assert executable is not None and executable.border is not None and executable.border.waits
        assert losses == expected
        assert_arrays_equal(final, trainer.snapshot())


@pytest.mark.usefixtures("plans")
def test_who_takes_chunks_that_are_still_written_out_of_waits() -> None:
    """What was written early has been copied elsewhere meanwhile, but its write goes on out of the chunks it left."""
    num_after_copy = num_in_step = 0
    with slow_session() as session:
        ours(session)
        executable = session.engine.executor.active
        assert executable is not None and executable.border is not None
        residencies = sorted(
            (residency for variable in executable.variables for residency in variable.residencies),
            key=lambda residency: occupied_ticks(residency.planned, executable.trace),
        )
        for ends, starts in executable.border.written_early():
            own = zip(ends.planned.chunk_indices(), starts.planned.chunk_indices(), strict=True)
            for chunk in (chunk for chunk, there in own if chunk != there):
                holder = next(r for r in residencies if chunk in r.planned.chunk_indices())
                if holder.is_kept_at_start:
                    num_after_copy += 1
                    assert starts in executable.border.waits
                elif holder is not ends:  # it is loaded again itself: a load waits for its own variable's write
                    num_in_step += 1
                    assert starts in holder.waits
    assert num_after_copy + num_in_step


def test_random_programs_whose_plans_copy_at_the_border() -> None:
    tally = run_many(range(8), runner="tests.session.program_relocation:run_seed")
    tally.check(8)
    assert tally.modes["relocating"]
