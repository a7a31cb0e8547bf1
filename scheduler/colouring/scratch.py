"""Chunks for residencies and for re-runs together, and a schedule that they suffice for.

A re-run's scratch room is held at one tick, like a variable that is allocated when its op starts
and freed at once. So it is coloured as one: the trace is extended by such variables, and what they
got is taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.budget import BudgetTooSmall
from scheduler.colouring.colouring import Colouring, Shortage, colour
from scheduler.plan import Born, Dies, Machine, Residency, Scratch
from scheduler.reruns import Rerun, reruns_of
from scheduler.residency_builder import ordered
from scheduler.trace import Trace, Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchColouring:
    """A colouring, and the scratch room of its re-runs in order of op; `other` as in `Colouring`."""

    colouring: Colouring
    scratch: tuple[Scratch, ...]
    other: ScratchColouring | None = None


def colour_with_scratch(
    residencies: tuple[Residency, ...],
    trace: Trace,
    machine: Machine,
    *,
    quick: bool = False,
    exchanges: bool = True,
) -> ScratchColouring | Shortage:
    """Assign chunks to `residencies` and to the re-runs among them (options as in `colouring.colour`)."""
    reruns = [rerun for rerun in reruns_of(residencies, trace, machine) if rerun.num_scratch_chunks]
    if not reruns:
        outcome = colour(residencies, trace, machine, quick=quick, exchanges=exchanges)
        return outcome if isinstance(outcome, Shortage) else _with_scratch(outcome, [], len(trace.variables))
    num_variables = len(trace.variables)
    rooms = tuple(_room(rerun, trace, machine) for rerun in reruns)
    extended = replace(trace, variables=(*trace.variables, *rooms))
    stays = [Residency(variable=num_variables + i, start=Born(), stop=Dies()) for i in range(len(rooms))]
    outcome = colour(ordered([*residencies, *stays], extended), extended, machine, quick=quick, exchanges=exchanges)
    if isinstance(outcome, Shortage):
        return outcome
    return _with_scratch(outcome, reruns, num_variables)


def _with_scratch(colouring: Colouring, reruns: Sequence[Rerun], num_variables: int) -> ScratchColouring:
    """Take the rooms of `reruns`, coloured as variables from `num_variables` on, out of a colouring again."""
    scratch = tuple(
        Scratch(before_op=reruns[r.variable - num_variables].before_op, chunks=r.chunks)
        for r in sorted((r for r in colouring.residencies if r.variable >= num_variables), key=lambda r: r.variable)
    )
    coloured = tuple(r for r in colouring.residencies if r.variable < num_variables)
    other = None if colouring.other is None else _with_scratch(colouring.other, reruns, num_variables)
    return ScratchColouring(
        colouring=replace(colouring, residencies=coloured, other=None), scratch=scratch, other=other
    )


def schedule_that_colours(
    schedule: Callable[[Machine], tuple[Residency, ...]],
    trace: Trace,
    machine: Machine,
    known: Mapping[tuple[Residency, ...], ScratchColouring] | None = None,
) -> tuple[tuple[Residency, ...], ScratchColouring] | None:
    """What `schedule` proposes for `machine` or, where that falls short of chunks, for smaller and smaller pools.

    Args:
        schedule: Called with `machine` first.
        trace, machine: As of `colour_with_scratch`.
        known: Colourings, by proposal, that need not be made again; `schedule` may fill it.

    Returns:
        The first proposal that colours, and its colouring; None: before one did, the pool became too small.

    Raises:
        BudgetTooSmall: The pool is too small as it is.
    """
    logical, step = machine, 1
    while True:
        try:
            residencies = schedule(logical)
        except BudgetTooSmall:
            if logical is machine:
                raise
            return None
        outcome = (known or {}).get(residencies) or colour_with_scratch(residencies, trace, machine)
        if isinstance(outcome, ScratchColouring):
            return residencies, outcome
        logical = replace(logical, num_chunks=max(logical.num_chunks - outcome.num_chunks * step, 0))
        step *= 2


def _room(rerun: Rerun, trace: Trace, machine: Machine) -> Variable:
    tick = trace.ops[rerun.before_op].start_tick
    nbytes = rerun.num_scratch_chunks * machine.chunk_nbytes
    return Variable(nbytes=nbytes, birth_tick=tick, death_tick=tick + 1, kind="temporary", label="scratch")
