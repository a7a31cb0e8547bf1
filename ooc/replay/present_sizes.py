"""Sizes of an elastic plan's variables in the present step: at most what the plan holds for them.

A plan that is made for the largest sizes seen (`ooc.replay.elastic`) gives each variable born in the step a
reservation, chunks and a place in the store for its largest size. The storage that is allocated there may be smaller.
What moves, and what a record says of itself outside the plan, is the storage's own size.
"""

from __future__ import annotations

from typing import Any

from ooc.memory.record import Runs, State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from vmm.addresses import first_chunks
from vmm.driver import MemoryFault

_MOST_SIZES = 32
"""So many sizes of a residency are kept ready: lengths of batches come again."""


def note_present_nbytes(executable: ExecutablePlan, variable: PlanVariable) -> None:
    """Let the record of a live variable have the size of the allocation that its addresses were last given to."""
    if variable.is_elastic and variable.is_born and variable.record is not None:
        variable.record.nbytes = int(executable.variable_nbytes[variable.index])


def present_nbytes(executable: ExecutablePlan, record: VariableRecord) -> int:
    """The bytes of a live variable of the plan: its record may still have those of an earlier step."""
    if executable.is_elastic:
        for variable in executable.variables:
            if variable.record is record and variable.is_elastic and variable.is_born:
                return int(executable.variable_nbytes[variable.index])
    return record.nbytes


def forget_births(executable: ExecutablePlan, index: int) -> None:
    """Before an op of which a recipe is noted: so that `births_of` tells this step's sizes, not an earlier one's."""
    for variable in executable.reruns.graph.births[index]:
        if not executable.variable_alive[variable]:
            executable.variable_nbytes[variable] = 0


def births_of(executable: ExecutablePlan, index: int) -> dict[int, int]:
    """Bytes that the plan has served to an op that has just run; 0: it asked for less than the threshold, or not."""
    return {v: int(executable.variable_nbytes[v]) for v in executable.reruns.graph.births[index]}


def fitting(manager: ResidencyManager, residency: ExecutableResidency, record: VariableRecord) -> tuple[Runs, Any]:
    """Chunks and bytes of a residency as far as the record needs them; the bytes are ready for the store.

    All of the chunks where its reservation is the plan's, so that the mapping stays in place. A record that came from
    outside of the plan has a reservation of its own size.
    """
    nbytes, spanned = size = record.nbytes, record.reservation.num_chunks
    found = residency.fitted.get(size)
    if found is None:
        runs, segments, variable = residency.runs, residency.segments, residency.variable
        if nbytes != variable.nbytes:
            runs = runs if spanned == manager.chunks_of(variable.nbytes) else first_chunks(runs, spanned)
            segments = manager.segments(runs, nbytes)
        if len(residency.fitted) >= _MOST_SIZES:
            residency.fitted.clear()
        found = residency.fitted[size] = runs, manager.store.segments(segments)
    return found


def spans(manager: ResidencyManager, record: VariableRecord, variable: PlanVariable) -> bool:
    """Whether the record's reservation, and so its place in the store, has the size that the plan may need."""
    reservation = record.reservation
    return reservation.num_chunks == manager.chunks_of(variable.nbytes) and reservation.nbytes >= variable.nbytes


def trim(manager: ResidencyManager, record: VariableRecord) -> None:
    """Give up what a plan held for a record beyond its own size. It has left the plan, and is not loading.

    If the kernel refuses (too many mappings), the record counts as large as what it holds: that is always right.
    """
    if record.reservation.nbytes == record.nbytes:
        return
    try:
        manager.space.shrink(record.reservation, record.nbytes)
    except MemoryFault:
        record.nbytes = record.reservation.nbytes
        return
    if record.state is State.RESIDENT:
        record.trimmed(first_chunks(record.runs, record.reservation.num_chunks))
