"""Using free memory to hide transfers: releases put off until written, loads issued ahead.

A walk decides op by op, so it releases at the last moment and loads at the last moment, and ops wait for
both. Where memory is free in between, a release can wait for its write to be done, and a load can be
issued as early as the in-link needs. Neither changes what is away at the ops that need the room.

How long a transfer takes depends on what the other link does meanwhile, and both are planned here at once. So a
schedule is timed in several ways (`retimed`), by the rate of a link alone and by what both get while both are busy,
and a simulation chooses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.budget import IntArray
from scheduler.cost.links import while_both_busy
from scheduler.plan import Evicted, Loaded, Machine, Residency, occupied_ticks
from scheduler.reruns import reruns_of
from scheduler.residency_builder import ordered
from scheduler.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """One way to time a schedule.

    Attributes:
        shared_loads, shared_writes: Whether such transfers are taken to have the rate of a link while both are busy.
        puts_off: Whether releases are put off at all: what is released early makes room for a load, which waits for
            the write in the links and not at an op.
    """

    shared_loads: bool = False
    shared_writes: bool = False
    puts_off: bool = True


# Each is the best of the four on some of the recorded steps at their least budgets (LSTM and ResNet-50, U-Net, GPT and
# BERT at a third of its peak, MobileNetV2).
_TIMINGS = (
    _Timing(),
    _Timing(shared_loads=True),
    _Timing(shared_loads=True, shared_writes=True),
    _Timing(shared_loads=True, puts_off=False),
)


def use_slack(residencies: Iterable[Residency], trace: Trace, machine: Machine) -> tuple[Residency, ...]:
    """The same residencies, each longer where memory allows it and a transfer hides better."""
    return _timed(list(residencies), trace, machine, _TIMINGS[0])


def retimed(
    residencies: Iterable[Residency], trace: Trace, machine: Machine, waits_ns: Sequence[int] = ()
) -> Iterator[tuple[Residency, ...]]:
    """The same stays, between the same uses, timed anew in each of several ways.

    Args:
        residencies: Of any policy; when their loads and releases happen is forgotten.
        waits_ns: What each op waits, by a simulation. If not given, as if nothing ever waited.
    """
    stays = shortest(residencies, trace, machine)
    seen = set()
    for timing in _TIMINGS:
        found = _timed(list(stays), trace, machine, timing, waits_ns)
        if found not in seen:
            seen.add(found)
            yield found


def timed_with_less(
    stays: Sequence[Residency], trace: Trace, machine: Machine, withheld: IntArray, *, puts_off: bool
) -> tuple[Residency, ...]:
    """The shortest stays (`shortest`) timed by the links' shared rate, with so many chunks less around each op."""
    timing = _Timing(shared_loads=True, shared_writes=True, puts_off=puts_off)
    return _timed(list(stays), trace, machine, timing, withheld=withheld)


def _timed(
    stays: list[Residency],
    trace: Trace,
    machine: Machine,
    timing: _Timing,
    waits_ns: Sequence[int] = (),
    *,
    withheld: IntArray | None = None,
) -> tuple[Residency, ...]:
    if not trace.ops:
        return tuple(stays)
    shared = while_both_busy(machine)
    slack = _Slack(stays, trace, machine, waits_ns or [0] * len(trace.ops))
    if withheld is not None:
        slack.held = slack.held + withheld
    if timing.puts_off:
        slack.put_off_releases((shared if timing.shared_writes else machine).evict_bytes_per_s)
    slack.issue_loads_ahead((shared if timing.shared_loads else machine).load_bytes_per_s)
    return ordered(slack.stays, trace)


def shortest(residencies: Iterable[Residency], trace: Trace, machine: Machine) -> tuple[Residency, ...]:
    """Each stay from its first use to its last: loads at the op that needs them, releases right after the last one.

    Schedules that differ in when they move the same bytes between the same uses become one.
    """
    stays = list(residencies)
    used = [{index for index, _ in own} for own in trace.uses_by_variable()]
    for rerun in reruns_of(stays, trace, machine):
        for variable in rerun.sources:
            used[variable].add(rerun.before_op)
    at = [sorted(own) for own in used]
    found = []
    for stay in stays:
        if not trace.variables[stay.variable].evictable:
            found.append(stay)
            continue
        ops, start, stop = at[stay.variable], stay.start, stay.stop
        if isinstance(start, Loaded):
            first = bisect_left(ops, start.before_op)
            if first < len(ops) and trace.op_starts[ops[first]] < occupied_ticks(stay, trace)[1]:
                start = Loaded(ops[first])
        if isinstance(stop, Evicted):
            last = bisect_left(ops, stop.release_op) - 1
            begin = occupied_ticks(stay, trace)[0]
            if last >= 0 and trace.ops[ops[last]].stop_tick > begin:
                stop = Evicted(write_op=stop.write_op, release_op=max(ops[last], stop.write_op) + 1)
        found.append(replace(stay, start=start, stop=stop))
    return ordered(found, trace)


class _Slack:
    """Residencies while they grow, and the chunks held around each op: the most from its start to the next one's."""

    def __init__(self, stays: list[Residency], trace: Trace, machine: Machine, waits_ns: Sequence[int]) -> None:
        self.stays = stays
        self.trace = trace
        self.machine = machine
        self.starts = trace.op_starts
        self.chunks = [machine.chunks_of(v.nbytes) for v in trace.variables]
        held: IntArray = np.zeros(trace.num_ticks + 1, dtype=np.int64)
        for stay in stays:
            start, stop = occupied_ticks(stay, trace)
            held[start] += self.chunks[stay.variable]
            held[stop] -= self.chunks[stay.variable]
        held = np.cumsum(held)
        rerun_ns = dict.fromkeys(range(len(trace.ops)), 0)
        for rerun in reruns_of(stays, trace, machine):
            rerun_ns[rerun.before_op] = rerun.duration_ns
            held[self.starts[rerun.before_op]] += rerun.num_scratch_chunks
        self.held: IntArray = np.maximum.reduceat(held, np.array(self.starts))
        self.start_ns: list[int] = []  # of each op, or of the re-run before it
        self.stop_ns: list[int] = []
        now = 0
        for index, op in enumerate(trace.ops):
            now += waits_ns[index]
            self.start_ns.append(now)
            now += rerun_ns[index] + op.duration_ns
            self.stop_ns.append(now)
        self.neighbours = self._find_neighbours()

    def _find_neighbours(self) -> list[tuple[int | None, int | None]]:
        """For each stay, the indices of the same variable's stay before and after it."""
        found: list[tuple[int | None, int | None]] = [(None, None)] * len(self.stays)
        last: dict[int, int] = {}
        for index in sorted(range(len(self.stays)), key=lambda i: occupied_ticks(self.stays[i], self.trace)):
            before = last.get(self.stays[index].variable)
            found[index] = (before, None)
            if before is not None:
                found[before] = (found[before][0], index)
            last[self.stays[index].variable] = index
        return found

    def put_off_releases(self, bytes_per_s: float) -> None:
        """In order of writing: until the write is done, as far as memory and the next stay allow."""
        free_ns, num_ops = float("-inf"), len(self.trace.ops)
        evicted = [
            (s.stop.write_op, s.stop.release_op, i) for i, s in enumerate(self.stays) if isinstance(s.stop, Evicted)
        ]
        for write_op, release_op, index in sorted(evicted):
            stay = self.stays[index]
            num_chunks = self.chunks[stay.variable]
            nbytes = self.trace.variables[stay.variable].nbytes
            step, op = divmod(write_op, len(self.stop_ns))  # over the border: -1, else 0
            free_ns = max(free_ns, self.stop_ns[op] + step * self.stop_ns[-1])
            free_ns += self.machine.latency_ns + nbytes / bytes_per_s * 1e9
            wish = min(bisect_left(self.start_ns, free_ns), num_ops - 1)
            after = self.neighbours[index][1]
            limit = self.trace.lifetime(stay.variable)[1]
            if after is not None:
                limit = min(limit, occupied_ticks(self.stays[after], self.trace)[0])
            last = min(wish, bisect_right(self.starts, limit) - 1)
            if last > release_op:
                full = np.flatnonzero(self.held[release_op:last] > self.machine.num_chunks - num_chunks)
                last = release_op + int(full[0]) if len(full) else last
                self.held[release_op:last] += num_chunks
                release_op = last
            self.stays[index] = replace(stay, stop=Evicted(write_op=write_op, release_op=release_op))

    def issue_loads_ahead(self, bytes_per_s: float) -> None:
        """As early as the in-link asks for, as far as memory and the stay before allow.

        The link serves loads in order of issue. So what is needed first gets room first: a later one must not be
        issued before it.
        """
        limit_ns = float("inf")
        loads = sorted((s.start.before_op, i) for i, s in enumerate(self.stays) if isinstance(s.start, Loaded))
        wishes = []
        for before_op, index in reversed(loads):
            nbytes = self.trace.variables[self.stays[index].variable].nbytes
            limit_ns = min(limit_ns, self.start_ns[before_op])
            limit_ns -= self.machine.latency_ns + nbytes / bytes_per_s * 1e9
            wishes.append(max(bisect_right(self.start_ns, limit_ns) - 1, 0))
        for (before_op, index), wish in zip(loads, reversed(wishes), strict=True):
            stay = self.stays[index]
            num_chunks = self.chunks[stay.variable]
            before = self.neighbours[index][0]
            earliest = 0 if before is None else occupied_ticks(self.stays[before], self.trace)[1]
            first = max(wish, bisect_left(self.starts, earliest))
            if first < before_op:
                full = np.flatnonzero(self.held[first:before_op] > self.machine.num_chunks - num_chunks)
                first += int(full[-1]) + 1 if len(full) else 0
                self.held[first:before_op] += num_chunks
                self.stays[index] = replace(stay, start=Loaded(first))
