"""Builds a plan's residencies while a planner goes through the ops: decisions become loads, evictions and drops.

A `ResidencyBuilder` keeps the residencies that are open ("variable v, from its birth on"), knows which of them are
dirty, and closes each with the cheapest legal act: a drop if the store's copy is current, an eviction if not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from scheduler.budget import Pin
from scheduler.plan import (
    Born,
    Dies,
    Discarded,
    Dropped,
    Evicted,
    Kept,
    Loaded,
    Residency,
    Start,
    Stop,
    occupied_ticks,
)
from scheduler.trace import Trace


def ordered(residencies: Iterable[Residency], trace: Trace) -> tuple[Residency, ...]:
    """`residencies` in a plan's order: by start, then variable."""
    return tuple(sorted(residencies, key=lambda r: (occupied_ticks(r, trace)[0], r.variable)))


def is_double_buffered(trace: Trace, variable: int) -> bool:
    """Is the variable alive together with the heir that it becomes at the step boundary?

    Then the executor keeps two reservations for the pair, and both must be away at the boundary.
    """
    v = trace.variables[variable]
    if v.becomes is None or v.becomes == variable:
        return False
    return trace.lifetime(v.becomes)[1] > trace.lifetime(variable)[0]


def may_wrap(trace: Trace, variable: int) -> bool:
    """May the variable be kept in memory over the step's end?"""
    return trace.variables[variable].becomes is not None and not is_double_buffered(trace, variable)


class ResidencyBuilder:
    """The open residencies of a planner that goes through the ops in order.

    Attributes:
        open: Start of each variable's present residency.
        dirty: Variables whose present residency holds bytes that the store lacks.
        residencies: The closed ones.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.open: dict[int, Start] = {}
        self.dirty: set[int] = set()
        self.last_write: dict[int, int] = {}
        self.residencies: list[Residency] = []

    def keep_from_last_step(self, variable: int, *, dirty: bool) -> None:
        """Begin with the variable in memory."""
        self._begin(variable, Kept(), dirty=dirty)

    def load(self, variable: int, before_op: int) -> None:
        """Begin with a load."""
        self._begin(variable, Loaded(before_op), dirty=False)

    def use(self, variable: int, pin: Pin) -> None:
        """Note a pin; begins a stay where the variable is born with it."""
        if variable not in self.open:
            self._begin(variable, Born(), dirty=True)
        if pin.writes:
            self.dirty.add(variable)
            self.last_write[variable] = pin.op_index

    def release(self, variable: int, release_op: int) -> None:
        """Away from `release_op` on: a drop if clean, else an eviction written after the last change."""
        if variable in self.dirty:
            write_op = min(self.last_write.get(variable, 0), release_op - 1)
            self._end(variable, Evicted(write_op=write_op, release_op=release_op))
        else:
            self._end(variable, Dropped(after_op=release_op - 1))

    def die(self, variable: int) -> None:
        """Freed by the program."""
        self._end(variable, Dies())

    def keep_for_next_step(self, variable: int) -> None:
        """Stays in memory over the boundary."""
        self._end(variable, Kept())

    def _begin(self, variable: int, start: Start, *, dirty: bool) -> None:
        assert variable not in self.open, f"variable {variable} is resident already"
        self.open[variable] = start
        self.last_write.pop(variable, None)
        if dirty:
            self.dirty.add(variable)

    def _end(self, variable: int, stop: Stop) -> None:
        self.residencies.append(Residency(variable=variable, start=self.open.pop(variable), stop=stop))
        self.dirty.discard(variable)


def with_last_copies(residencies: Iterable[Residency], trace: Trace) -> tuple[Residency, ...]:
    """The same, with a write where a variable is discarded for good while the program still holds it.

    The program may ask for its bytes if the step leaves its plan, and no re-run to come says how to make them: so an
    executor writes it out. What is not written here is written at the last moment, and whoever takes its chunks waits.
    """
    stays = ordered(residencies, trace)
    last: dict[int, int] = {}
    for index, stay in enumerate(stays):
        dead = trace.variables[stay.variable].death_tick
        if dead is None or occupied_ticks(stay, trace)[0] < dead:  # else a ghost
            last[stay.variable] = index
    found = list(stays)
    for index in last.values():
        stay = stays[index]
        start, stop = occupied_ticks(stay, trace)
        dead = trace.variables[stay.variable].death_tick
        if not isinstance(stay.stop, Discarded) or (dead is not None and dead <= stop):
            continue
        release_op = stay.stop.after_op + 1
        first = max(bisect_right(trace.op_starts, start) - 1, 0)
        writes = (
            op
            for op in range(stay.stop.after_op, first - 1, -1)
            if any(use.writes and use.variable == stay.variable for use in trace.ops[op].uses)
        )
        found[index] = replace(stay, stop=Evicted(write_op=next(writes, first), release_op=release_op))
    return tuple(found)
