"""Giving up residencies at the step boundary.

What is kept over the step boundary must end in the chunks in which it starts, and that can make
the pool too small although each tick fits (`scheduler.colouring.colouring`). A few variables are then
written out at the step's end and loaded again at its start instead, unless copies bring it there
(`scheduler.colouring.border_copies`).
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.budget import first_op_to_end_after
from scheduler.plan import Born, Dropped, Evicted, Kept, Loaded, Recomputed, Residency, occupied_ticks
from scheduler.residency_builder import ordered
from scheduler.trace import Trace


def not_kept(residencies: tuple[Residency, ...], variables: set[int], trace: Trace) -> tuple[Residency, ...]:
    """The same residencies, but `variables` are evicted at the step's end and their heirs loaded at its start."""
    heirs = {trace.variables[v].becomes for v in variables}
    writes: dict[int, list[int]] = {v: [] for v in range(len(trace.variables)) if v in variables or v in heirs}
    for index, op in enumerate(trace.ops):
        for use in op.uses:
            if use.writes and use.variable in writes:
                writes[use.variable].append(index)
    found = []
    for residency in residencies:
        r: Residency | None = residency
        if residency.variable in heirs and isinstance(residency.start, Kept):
            r = _loaded_at_start(residency, trace, writes[residency.variable])
        if r is not None and r.variable in variables and isinstance(r.stop, Kept):
            r = _evicted_at_end(r, trace, writes[r.variable])
        if r is not None:
            found.append(r)
    return ordered(found, trace)


def _loaded_at_start(residency: Residency, trace: Trace, writes: list[int]) -> Residency | None:
    """Loaded before op 0 instead of kept; None if it is gone before that."""
    stop = residency.stop
    if occupied_ticks(residency, trace)[1] <= trace.ops[0].start_tick:
        return None
    if isinstance(stop, Evicted) and not any(op < stop.release_op for op in writes):
        stop = Dropped(after_op=stop.release_op - 1)
    return replace(residency, start=Loaded(0), stop=stop)


def _evicted_at_end(residency: Residency, trace: Trace, writes: list[int]) -> Residency:
    """Written out and released at the step's end instead of kept; dropped if it is clean."""
    num_ops = len(trace.ops)
    start_tick = occupied_ticks(residency, trace)[0]
    own = [op for op in writes if trace.ops[op].stop_tick > start_tick]
    if isinstance(residency.start, Loaded) and not own:
        return replace(residency, stop=Dropped(after_op=num_ops - 1))
    comes_late = isinstance(residency.start, Born | Recomputed)
    first = first_op_to_end_after(trace, start_tick) if comes_late else 0
    return replace(residency, stop=Evicted(write_op=max([first, *own]), release_op=num_ops))
