"""`on_demand`: what the learning steps do, as a plan.

Each op's variables are loaded right before it; when memory is short, the least recently used
variables are written out and waited for at once. The slowest sensible plan and the simplest: it
is the baseline for the others, and the model of DESIGN.md section 6's learning steps.
"""

from __future__ import annotations

from bisect import bisect_right

from scheduler.budget import Pin, pinned_chunks, pins_of, require_budget, zone_maxima
from scheduler.plan import Machine, Residency
from scheduler.residency_builder import ResidencyBuilder, may_wrap, ordered
from scheduler.trace import Trace

# Rounds of the search for a step that ends as it starts. Each round only removes variables from the
# start; random traces need 1 to 4. After that the step starts and ends with everything away.
_MAX_ROUNDS = 8


def schedule(trace: Trace, machine: Machine, *, wrap: bool = True) -> tuple[Residency, ...]:
    """Least-recently-used paging without foresight.

    Args:
        trace: The step.
        machine: The budget; rates do not matter here.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.

    Raises:
        BudgetTooSmall: An op needs more at once than the budget.
    """
    pins = pins_of(trace)
    require_budget(trace, machine, pins)
    walk = _Walk(trace, machine, pins)
    forced = {v for v in walk.heirs.values() if not trace.variables[v].evictable}
    start = walk.fitting_start() | forced if wrap else forced
    for _ in range(_MAX_ROUNDS):
        end = walk.run(start)
        if start <= end:
            break
        start = (start & end) | forced
    else:
        start = forced
        walk.run(start)
    return ordered(walk.close(start), trace)


class _Walk:
    """One pass over the ops after another, from given start states."""

    def __init__(self, trace: Trace, machine: Machine, pins: tuple[tuple[Pin, ...], ...]) -> None:
        self.trace = trace
        self.num_chunks = machine.num_chunks
        self.pins = pins
        self.chunks = [machine.chunks_of(v.nbytes) for v in trace.variables]
        self.peaks = zone_maxima(trace, pinned_chunks(trace, machine, pins))
        self.heirs = {i: v.becomes for i, v in enumerate(trace.variables) if v.becomes is not None}
        self.heirs = {i: heir for i, heir in self.heirs.items() if may_wrap(trace, i)}
        self.zones = pins_by_zone(trace, pins)
        self.deaths = deaths_by_zone(trace)
        self.book = ResidencyBuilder(trace)
        self.recent: dict[int, None] = {}  # resident variables, least recently used first

    def fitting_start(self) -> set[int]:
        """Variables that may start in memory, as many as fit beside op 0, the first to be used first."""
        never = len(self.trace.ops)
        room = self.num_chunks - (self.peaks[0] if self.peaks else 0)
        start = set()
        for v in sorted(self.heirs.values(), key=lambda v: (self.pins[v][0].op_index if self.pins[v] else never, v)):
            if v not in self.zones[0] and self.trace.variables[v].evictable:
                room -= self.chunks[v]
            if room < 0:
                break
            start.add(v)
        return start

    def run(self, start: set[int]) -> set[int]:
        """Walk the step. Returns what could start the next step in memory: heirs of what is left."""
        self.book = ResidencyBuilder(self.trace)
        self.recent = {}
        last = {self.heirs[v]: self.pins[v][-1].op_index for v in self.heirs if self.pins[v]}
        for v in sorted(start, key=lambda v: (last.get(v, -1), v)):
            self.book.keep_from_last_step(v, dirty=True)
            self.recent[v] = None
        for zone, pinned in enumerate(self.zones):
            self._make_room(zone, pinned)
            for v, pin in pinned.items():
                self._touch(v, pin, zone)
            for v in self.deaths[zone]:
                if v in self.recent:
                    self.book.die(v)
                    del self.recent[v]
        return {self.heirs[v] for v in self.recent if v in self.heirs}

    def close(self, start: set[int]) -> list[Residency]:
        """End the step as it began: keep what becomes `start`, evict the rest."""
        for v in list(self.recent):
            if self.heirs.get(v) in start:
                self.book.keep_for_next_step(v)
            else:
                self.book.release(v, len(self.trace.ops))
        return self.book.residencies

    def _make_room(self, zone: int, pinned: dict[int, Pin]) -> None:
        evictable = [v for v in self.recent if v not in pinned and self.trace.variables[v].evictable]
        excess = sum(self.chunks[v] for v in evictable) + self.peaks[zone] - self.num_chunks
        for v in evictable:
            if excess <= 0:
                break
            self.book.release(v, zone)
            del self.recent[v]
            excess -= self.chunks[v]

    def _touch(self, v: int, pin: Pin, zone: int) -> None:
        is_birth = pin is self.pins[v][0] and self.trace.variables[v].birth_tick is not None
        if v not in self.recent and not is_birth:
            self.book.load(v, zone)
        self.book.use(v, pin)
        self.recent.pop(v, None)
        self.recent[v] = None


def pins_by_zone(trace: Trace, pins: tuple[tuple[Pin, ...], ...]) -> list[dict[int, Pin]]:
    """For each op, the pins that touch the time from its start to the next op's (op 0: from the step's start)."""
    starts = trace.op_starts
    zones: list[dict[int, Pin]] = [{} for _ in trace.ops]
    for v, own in enumerate(pins):
        for pin in own:
            zones[max(bisect_right(starts, pin.start_tick) - 1, 0)][v] = pin
            if starts[pin.op_index] < pin.stop_tick:
                zones[pin.op_index][v] = pin
    return zones


def deaths_by_zone(trace: Trace) -> list[list[int]]:
    """For each op, the variables freed in the time from its start to the next op's."""
    starts = trace.op_starts
    zones: list[list[int]] = [[] for _ in trace.ops]
    for v, variable in enumerate(trace.variables):
        if variable.death_tick is not None:
            zones[max(bisect_right(starts, variable.death_tick) - 1, 0)].append(v)
    return zones
