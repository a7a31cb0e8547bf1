"""Arcs of the circle that a cyclic step is: what is coloured, with the residencies that each stands for.

An arc is one residency, or two that are one over the step boundary. Ticks are counted from the cut, where the fewest
chunks are held across.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from scheduler.budget import IntArray
from scheduler.plan import Evicted, Kept, Machine, Residency, occupied_ticks
from scheduler.residency_builder import is_double_buffered
from scheduler.trace import Trace


@dataclass(slots=True, kw_only=True, eq=False)
class Arc:
    """Residencies that must have the same chunks: one, or two joined at the step boundary.

    Attributes:
        start, stop: Ticks counted from the cut; `stop` may lie beyond the step's length.
        written: About when the chunks' bytes are written out and can be overwritten; at least `stop`.
        chunks: None until coloured.
    """

    residencies: tuple[int, ...]
    family: int
    num_chunks: int
    start: int
    stop: int
    written: int
    chunks: IntArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """How a walk has ended.

    Attributes:
        chunks: Of each arc; behind them of what `cut` has made. Empty where some are missing.
        cut: Arcs that were cut at the step boundary, in this order. Each stays the arc that begins the step, and a new
            one, behind all that there are, is what ends it.
        num_late: Chunks that are taken while their last bytes are on the way out.
        missing: How many chunks, and for which arc; None: none are.
    """

    chunks: list[IntArray]
    cut: list[int]
    num_late: int = 0
    missing: tuple[int, int] | None = None


def written_ticks(residencies: tuple[Residency, ...], trace: Trace, machine: Machine) -> dict[int, int]:
    """For each evicted residency, about when its write is done: in unrolled ticks, as if no op ever waited."""
    if not trace.ops:
        return {}
    stops_ns = list(accumulate(op.duration_ns for op in trace.ops))
    evicted = [
        (r.stop.write_op, r.stop.release_op, index)
        for index, r in enumerate(residencies)
        if isinstance(r.stop, Evicted)
    ]
    free_ns = 0.0
    done: dict[int, int] = {}
    for step in (-1, 0) if trace.cyclic else (0,):  # the backlog of the step before delays this one's writes
        for write_op, _, index in sorted(evicted):
            nbytes = trace.variables[residencies[index].variable].nbytes
            earlier, write_op = divmod(write_op, len(trace.ops))  # over the border: -1, else 0
            free_ns = max(free_ns, stops_ns[write_op] + (step + earlier) * stops_ns[-1])
            free_ns += machine.latency_ns + nbytes / machine.evict_bytes_per_s * 1e9
            later, inside_ns = divmod(free_ns, max(stops_ns[-1], 1))
            position = min(bisect_left(stops_ns, inside_ns), len(trace.ops) - 1)
            op = trace.ops[position]
            left = (stops_ns[position] - inside_ns) / max(op.duration_ns, 1)
            inside = int((op.stop_tick - op.start_tick) * (1 - left))
            done[index] = int(later) * trace.num_ticks + op.start_tick + max(inside, 0)
    return done


def arcs_of(residencies: tuple[Residency, ...], written: dict[int, int], trace: Trace, machine: Machine) -> list[Arc]:
    """Residencies as arcs, in ticks of the step; what is kept and its heir's start are one arc."""
    family = families(trace)
    heads = {r.variable: index for index, r in enumerate(residencies) if isinstance(r.start, Kept)}
    arcs = []
    for index, r in enumerate(residencies):
        own: tuple[int, ...] = (index,)
        start, stop = occupied_ticks(r, trace)
        done = written.get(index, 0)
        heir = trace.variables[r.variable].becomes
        if isinstance(r.stop, Kept) and heir is not None and heads[heir] != index:
            own = (index, heads[heir])
            stop = trace.num_ticks + occupied_ticks(residencies[heads[heir]], trace)[1]
            done = trace.num_ticks + written.get(heads[heir], 0)
        elif isinstance(r.start, Kept) and not isinstance(r.stop, Kept):
            continue  # the second half of its predecessor's arc
        size = machine.chunks_of(trace.variables[r.variable].nbytes)
        arcs.append(
            Arc(
                residencies=own,
                family=family[r.variable],
                num_chunks=size,
                start=start,
                stop=stop,
                written=max(stop, min(done, start + trace.num_ticks)),
            )
        )
    return arcs


def from_the_cut(arcs: list[Arc], trace: Trace, *, at_boundary: bool) -> list[Arc]:
    """The arcs in ticks from the cut, in order of start. What is held throughout comes to cross it."""
    num_ticks = trace.num_ticks
    held_over = np.zeros(num_ticks + 1, dtype=np.int64)
    whole = [arc.stop - arc.start >= num_ticks for arc in arcs]
    for arc, is_whole in zip(arcs, whole, strict=True):
        if not is_whole:  # held at both sides of the ticks (start, stop)
            held_over[min(arc.start + 1, num_ticks)] += arc.num_chunks
            held_over[min(arc.stop, num_ticks)] -= arc.num_chunks
            if arc.stop > num_ticks:
                held_over[0] += arc.num_chunks
                held_over[arc.stop - num_ticks] -= arc.num_chunks
    cut = int(np.argmin(np.cumsum(held_over)[:-1])) if trace.cyclic and not at_boundary else 0
    for arc, is_whole in zip(arcs, whole, strict=True):
        length, writing = arc.stop - arc.start, arc.written - arc.stop
        arc.start = 0 if is_whole else (arc.start - cut) % num_ticks
        arc.stop = 2 * num_ticks if is_whole else arc.start + length
        arc.written = arc.stop + writing
    return sorted(arcs, key=lambda arc: (arc.start, arc.residencies))


def families(trace: Trace) -> list[int]:
    """Variables that share a reservation, by the lowest index: a variable and the heir it becomes."""
    family = list(range(len(trace.variables)))
    for index, v in enumerate(trace.variables):
        if v.becomes is not None and not is_double_buffered(trace, index):
            family[index] = family[v.becomes] = min(index, v.becomes)
    return family
