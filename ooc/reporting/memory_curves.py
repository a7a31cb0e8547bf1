"""Memory over a step, from its trace and its plan: what lives in core, what is resident out of core."""

from __future__ import annotations

from scheduler.plan import Plan, occupied_ticks
from scheduler.trace import Trace

Curve = list[tuple[float, int]]
"""`(seconds from the step's start, bytes from then on)`, in order."""


def live_curve(trace: Trace) -> Curve:
    """Bytes alive: what the step holds in core."""
    seconds = _seconds_at_ticks(trace)
    return [(seconds[tick], nbytes) for tick, nbytes in trace.live_nbytes()]


def resident_curve(trace: Trace, plan: Plan) -> Curve:
    """Bytes in the pool, in whole chunks: what the plan holds at each moment."""
    change: dict[int, int] = {0: 0}
    for residency in plan.residencies:
        start, stop = occupied_ticks(residency, trace)
        nbytes = plan.machine.chunks_of(trace.variables[residency.variable].nbytes) * plan.machine.chunk_nbytes
        change[start] = change.get(start, 0) + nbytes
        if stop < trace.num_ticks:
            change[stop] = change.get(stop, 0) - nbytes
    seconds = _seconds_at_ticks(trace)
    curve: Curve = []
    total = 0
    for tick in sorted(change):
        total += change[tick]
        curve.append((seconds[tick], total))
    return curve


def _seconds_at_ticks(trace: Trace) -> list[float]:
    """When each tick is: an op's ticks share its duration evenly, those between ops take no time."""
    seconds = [0.0] * (trace.num_ticks + 1)
    now = 0.0
    previous_stop = 0
    for op in trace.ops:
        seconds[previous_stop : op.start_tick] = [now] * (op.start_tick - previous_stop)
        num_ticks = op.stop_tick - op.start_tick
        duration_s = op.duration_ns / 1e9
        for k in range(num_ticks):
            seconds[op.start_tick + k] = now + duration_s * k / num_ticks
        now += duration_s
        previous_stop = op.stop_tick
    seconds[previous_stop:] = [now] * (len(seconds) - previous_stop)
    return seconds
