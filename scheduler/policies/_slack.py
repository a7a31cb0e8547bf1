"""Using free memory to hide transfers: releases put off until written, loads issued ahead.

A walk decides op by op, so it releases at the last moment and loads at the last moment, and ops wait for
both. Where memory is free in between, a release can wait for its write to be done, and a load can be
issued as early as the in-link needs. Neither changes what is away at the ops that need the room.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from scheduler.budget import IntArray
from scheduler.plan import Evicted, Loaded, Machine, Recomputed, Residency, occupied_ticks
from scheduler.reruns import reruns_of
from scheduler.residency_builder import ordered
from scheduler.trace import Trace


def use_slack(residencies: Iterable[Residency], trace: Trace, machine: Machine) -> tuple[Residency, ...]:
    """The same residencies, each longer where memory allows it and a transfer hides better."""
    stays = list(residencies)
    if not trace.ops:
        return tuple(stays)
    slack = _Slack(stays, trace, machine)
    slack.put_off_releases()
    slack.issue_loads_ahead()
    return ordered(slack.stays, trace)


class _Slack:
    """Residencies while they grow, and the chunks held around each op: the most from its start to the next one's."""

    def __init__(self, stays: list[Residency], trace: Trace, machine: Machine) -> None:
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

    def put_off_releases(self) -> None:
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
            free_ns += self.machine.latency_ns + nbytes / self.machine.evict_bytes_per_s * 1e9
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

    def issue_loads_ahead(self) -> None:
        """In reverse order of need: as early as the in-link asks for, as far as memory and the stay before allow."""
        limit_ns = float("inf")
        loads = [(s.start.before_op, i) for i, s in enumerate(self.stays) if isinstance(s.start, Loaded)]
        for before_op, index in sorted(loads, reverse=True):
            stay = self.stays[index]
            num_chunks = self.chunks[stay.variable]
            nbytes = self.trace.variables[stay.variable].nbytes
            limit_ns = min(limit_ns, self.start_ns[self._need(stay)])
            limit_ns -= self.machine.latency_ns + nbytes / self.machine.load_bytes_per_s * 1e9
            wish = max(bisect_right(self.start_ns, limit_ns) - 1, 0)
            before = self.neighbours[index][0]
            earliest = 0 if before is None else occupied_ticks(self.stays[before], self.trace)[1]
            first = max(wish, bisect_left(self.starts, earliest))
            if first < before_op:
                full = np.flatnonzero(self.held[first:before_op] > self.machine.num_chunks - num_chunks)
                first += int(full[-1]) + 1 if len(full) else 0
                self.held[first:before_op] += num_chunks
                before_op = first
            self.stays[index] = replace(stay, start=Loaded(before_op))

    def _need(self, stay: Residency) -> int:
        """The op before which the load is issued now: a walk issues it where it is needed."""
        assert isinstance(stay.start, Loaded | Recomputed)
        return stay.start.before_op
