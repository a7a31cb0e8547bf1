"""The copies of a plan at the step's border, made executable: what they move, and which transfers they wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from scheduler.plan import BorderCopy, Plan, PlanError
from scheduler.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBorder:
    """All that is copied at the border of two steps.

    Attributes:
        copies: In order.
        moved: For each variable that moves: its last residency of a step, and the first one of the next, its own or its
            successor's.
        waits: Residencies whose transfers use chunks that are filled: they must be over.
    """

    copies: tuple[BorderCopy, ...]
    moved: tuple[tuple[ExecutableResidency, ExecutableResidency], ...]
    waits: tuple[ExecutableResidency, ...]

    @property
    def num_chunks(self) -> int:
        """One past the last chunk that is copied, or filled."""
        return max(max(copy.source, copy.target) + copy.num_chunks for copy in self.copies)

    def written_early(self) -> list[tuple[ExecutableResidency, ExecutableResidency]]:
        """Of what moves, what is written in the step before it is released: out of the chunks that it leaves."""
        return [(ends, starts) for ends, starts in self.moved if starts.is_written_before]


def planned_border(
    plan: Plan,
    trace: Trace,
    variables: Sequence[PlanVariable],
    residencies: Sequence[ExecutableResidency],
    has_transfer: Callable[[ExecutableResidency], bool],
) -> PlannedBorder | None:
    """What a plan copies at the border; None: nothing.

    Args:
        plan: The plan, and the trace that it was made for.
        variables: With their residencies in order.
        residencies: All.
        has_transfer: Whether a load or write of a residency may be under way when its chunks are passed on.

    Raises:
        PlanError: Something is copied that is not there.
    """
    if not plan.border_copies:
        return None
    moved = []
    for variable in variables:
        heir = trace.variables[variable.index].becomes
        if heir is None or not variable.residencies or not variables[heir].residencies:
            continue
        ends, starts = variable.residencies[-1], variables[heir].residencies[0]
        if ends.is_kept_at_end and starts.is_kept_at_start and ends.runs != starts.runs:
            moved.append((ends, starts))
    held = {chunk for ends, _ in moved for chunk in ends.planned.chunk_indices()}
    for copy in plan.border_copies:
        sources = range(copy.source, copy.source + copy.num_chunks)
        if not held.issuperset(sources):
            raise PlanError(f"{copy} copies what no variable of the plan has there at the step's end")
        held.difference_update(sources)
        held.update(range(copy.target, copy.target + copy.num_chunks))
    targets = {chunk for c in plan.border_copies for chunk in range(c.target, c.target + c.num_chunks)}
    origin = {id(starts): ends for ends, starts in moved if starts.is_written_before}
    waits = (
        residency
        for residency in residencies
        if has_transfer(residency)
        and not targets.isdisjoint(origin.get(id(residency), residency).planned.chunk_indices())
    )
    return PlannedBorder(copies=plan.border_copies, moved=tuple(moved), waits=tuple(waits))
