"""Problems from a trace's variables and from a plan's residencies.

A cyclic step is a circle, and a line of addresses is not: what is alive over the step's end must have one
offset on both sides. So the circle is cut where that costs the fewest bytes; what then still crosses the
cut, and is not alive all the time, is taken to be alive all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.placement.problem import Buffer, Problem
from scheduler.plan import Kept, Plan, occupied_ticks
from scheduler.residency_builder import is_double_buffered
from scheduler.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProblem:
    """A step as a placement problem.

    Attributes:
        problem: Times are ticks counted from `cut_tick`.
        buffer_of: For each variable of the trace, or each residency of the plan, its buffer's index. What
            is kept over the step's end and what it is in the next step share a buffer.
        cut_tick: Where the circle was cut; 0 for a step taken alone.
        num_widened: Buffers that count as alive all the time because they cross the cut.
    """

    problem: Problem
    buffer_of: tuple[int, ...]
    cut_tick: int
    num_widened: int


@dataclass(slots=True, kw_only=True)
class _Arc:
    """One stay on the circle: `[start, stop)` in ticks; `stop` may lie beyond the step's end."""

    nbytes: int
    start: int
    stop: int
    name: str


def problem_from_trace(trace: Trace, *, alignment: int = 1, capacity: int | None = None) -> StepProblem:
    """All of a step's variables in core, each for its whole lifetime.

    A variable that another one of the next step continues shares its buffer, unless both are alive at
    once (double buffering): then each has its own, and the step's end must copy one to the other.
    """
    arcs: list[_Arc] = []
    arc_of = [-1] * len(trace.variables)
    for index, v in enumerate(trace.variables):
        start, stop = trace.lifetime(index)
        arc_of[index] = len(arcs)
        arcs.append(_Arc(nbytes=v.nbytes, start=start, stop=stop, name=v.label or f"variable {index}"))
    links = [
        (index, v.becomes)
        for index, v in enumerate(trace.variables)
        if v.becomes is not None and v.becomes != index and not is_double_buffered(trace, index)
    ]
    return _problem(arcs, links, trace, alignment, capacity)


def problem_from_plan(plan: Plan, trace: Trace, *, alignment: int = 1, capacity: int | None = None) -> StepProblem:
    """A plan's residencies: out-of-core training in one arena without virtual addressing.

    Residencies begin when their load is issued, so the lifetimes are already widened by the prefetch lead.
    Each residency may lie elsewhere than the variable's last one, but for those kept over the step's end.
    """
    arcs = []
    for index, r in enumerate(plan.residencies):
        start, stop = occupied_ticks(r, trace)
        v = trace.variables[r.variable]
        arcs.append(_Arc(nbytes=v.nbytes, start=start, stop=stop, name=f"residency {index} of variable {r.variable}"))
    heads = {r.variable: index for index, r in enumerate(plan.residencies) if isinstance(r.start, Kept)}
    links = []
    for index, r in enumerate(plan.residencies):
        heir = trace.variables[r.variable].becomes
        if isinstance(r.stop, Kept) and heir is not None and heads[heir] != index:
            links.append((index, heads[heir]))
    return _problem(arcs, links, trace, alignment, capacity)


def _problem(
    arcs: list[_Arc], links: Sequence[tuple[int, int]], trace: Trace, alignment: int, capacity: int | None
) -> StepProblem:
    """Join what is linked over the step's end, cut the circle, and number the buffers."""
    owner = list(range(len(arcs)))
    for last, head in links:
        arcs[last].stop = trace.num_ticks + arcs[head].stop
        owner[head] = last
    kept = [index for index in range(len(arcs)) if owner[index] == index]
    number = {index: position for position, index in enumerate(kept)}
    cut = _cheapest_cut([arcs[index] for index in kept], trace.num_ticks) if trace.cyclic else 0
    buffers, num_widened = [], 0
    for index in kept:
        arc = arcs[index]
        start = (arc.start - cut) % trace.num_ticks
        stop = start + arc.stop - arc.start
        if stop > trace.num_ticks:
            start, stop = 0, trace.num_ticks
            num_widened += arc.stop - arc.start < trace.num_ticks
        buffers.append(Buffer(nbytes=arc.nbytes, start=start, stop=stop, name=arc.name))
    return StepProblem(
        problem=Problem(buffers=tuple(buffers), alignment=alignment, capacity=capacity),
        buffer_of=tuple(number[owner[index]] for index in range(len(arcs))),
        cut_tick=cut,
        num_widened=num_widened,
    )


def _cheapest_cut(arcs: Sequence[_Arc], num_ticks: int) -> int:
    """The first tick with the fewest bytes of arcs that begin before it and go on after it."""
    change = [0] * (num_ticks + 1)
    for arc in arcs:
        if arc.stop - arc.start >= num_ticks:
            continue
        change[min(arc.start + 1, num_ticks)] += arc.nbytes  # a cut at its start costs nothing
        change[min(arc.stop, num_ticks)] -= arc.nbytes
        if arc.stop > num_ticks:
            change[0] += arc.nbytes
            change[arc.stop - num_ticks] -= arc.nbytes
    best = crossing = change[0]
    cut = 0
    for tick in range(1, num_ticks):
        crossing += change[tick]
        if crossing < best:
            best, cut = crossing, tick
    return cut
