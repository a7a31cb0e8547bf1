"""Over the step's border in memory, and written already: fewer loads where a store is slow.

Updates come last in a step. What they change is dirty when the next step begins, and must be written before it can go
in that step. The policies know two ways: to write it at once and let it go, so that the forward pass loads it again;
or to keep it and write it in the next step, when activations go out, too. Here it is written at once, stays, and goes
without a wait (`Evicted` with a write in the step before).

What is kept starts the next step in other chunks than those in which it ended this one where memory is full at some
tick; copies at the border bring it there (`BorderCopy`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from scheduler.budget import IntArray
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import Evaluation, estimate, evaluate
from scheduler.plan import Dropped, Evicted, Kept, Loaded, Machine, Residency, occupied_ticks
from scheduler.reruns import reruns_of
from scheduler.residency_builder import ordered
from scheduler.trace import Trace

# Waits below this share of the step are not worth a search.
_NO_STALL = 0.02


def better_over_border(best: Evaluation, trace: Trace) -> Evaluation:
    """The fastest plan so far, with what is dirty at the border written before it and kept if that is faster."""
    machine = best.plan.machine
    if not trace.cyclic or best.simulation.stall_ns <= _NO_STALL * trace.duration_ns:
        return best
    proposal = written_over_border(best.proposal, trace, machine)
    if proposal is None:
        return best
    # An estimate has no remaps, so it is compared with the best one's waits alone.
    if estimate(proposal, trace, machine).duration_ns >= best.simulation.duration_ns:
        return best
    return _faster(best, proposal, trace)


def _faster(best: Evaluation, proposal: tuple[Residency, ...], trace: Trace) -> Evaluation:
    """The proposal if it is faster, both coloured as the finished plan will be."""
    machine = best.plan.machine
    other = evaluate(proposal, trace, machine, is_final=True)
    if isinstance(other, Shortage):
        return best
    final = best if best.is_final else evaluate(best.proposal, trace, machine, is_final=True)
    return final if not isinstance(final, Shortage) and final.rank <= other.rank else other


def written_over_border(
    residencies: Iterable[Residency], trace: Trace, machine: Machine
) -> tuple[Residency, ...] | None:
    """The same, with what fits in memory over the border kept and written before; None if nothing is such.

    What is away over the border for the shortest time comes first, as long as there is room.
    """
    stays = list(residencies)
    border = _Border(stays, trace, machine)
    changed = border.write_before()
    changed |= border.keep()
    return ordered(border.stays, trace) if changed else None


class _Border:
    """Residencies while they change, and the chunks held at each tick."""

    def __init__(self, stays: list[Residency], trace: Trace, machine: Machine) -> None:
        self.stays = stays
        self.trace = trace
        self.machine = machine
        self.spans = [occupied_ticks(stay, trace) for stay in stays]
        self.chunks = [machine.chunks_of(v.nbytes) for v in trace.variables]
        self.writers: dict[int, list[int]] = {}
        for index, op in enumerate(trace.ops):
            for use in op.uses:
                if use.writes:
                    self.writers.setdefault(use.variable, []).append(index)
        own: dict[int, list[int]] = {}
        for index in sorted(range(len(stays)), key=lambda i: self.spans[i]):
            own.setdefault(stays[index].variable, []).append(index)
        self.ends = [
            (indices[0], indices[-1])
            for v, indices in own.items()
            if trace.variables[v].becomes == v and trace.variables[v].evictable and len(indices) > 1
        ]

    def last_write(self, index: int) -> int | None:
        """The last op that writes the variable in one of its residencies; None: none does."""
        start, stop = self.spans[index]
        ops = self.trace.ops
        own = self.writers.get(self.stays[index].variable, ())
        return next((op for op in reversed(own) if ops[op].start_tick < stop and ops[op].stop_tick > start), None)

    def write_before(self) -> bool:
        """Write what is kept, dirty and unchanged until it goes in the step before. Whether there is any."""
        changed = False
        for first, last in self.ends:
            stop = self.stays[first].stop
            is_kept = self.stays[first].start == Kept() and self.stays[last].stop == Kept()
            if is_kept and isinstance(stop, Evicted) and stop.write_op >= 0:
                changed |= self._write_before(first, last, stop.release_op)
        return changed

    def _write_before(self, first: int, last: int, release_op: int) -> bool:
        write_op = self.last_write(last)
        if write_op is None or self.last_write(first) is not None:
            return False
        stop = Evicted(write_op=write_op - len(self.trace.ops), release_op=release_op)
        self.stays[first] = replace(self.stays[first], stop=stop)
        return True

    def keep(self) -> bool:
        """Keep what is written at the step's end and loaded at its start, as far as there is room. Whether any is."""
        apart = []
        for first, last in self.ends:
            is_away = isinstance(self.stays[first].start, Loaded) and isinstance(self.stays[last].stop, Evicted)
            if is_away and isinstance(self.stays[first].stop, Dropped | Evicted):
                length = self.trace.num_ticks - self.spans[last][1] + self.spans[first][0]
                nbytes = self.trace.variables[self.stays[first].variable].nbytes
                apart.append((length, -nbytes, first, last))
        if not apart:
            return False
        held = self._held()
        found = [self._keep(first, last, held) for _, _, first, last in sorted(apart)]
        return any(found)

    def _held(self) -> IntArray:
        held: IntArray = np.zeros(self.trace.num_ticks + 1, dtype=np.int64)
        for stay, (start, stop) in zip(self.stays, self.spans, strict=True):
            held[start] += self.chunks[stay.variable]
            held[stop] -= self.chunks[stay.variable]
        held = np.cumsum(held)
        for rerun in reruns_of(self.stays, self.trace, self.machine):
            held[self.trace.op_starts[rerun.before_op]] += rerun.num_scratch_chunks
        return held[:-1]

    def _keep(self, first: int, last: int, held: IntArray) -> bool:
        """Keep a variable over the border, if there is room."""
        stay, num_chunks = self.stays[first], self.chunks[self.stays[first].variable]
        stop = stay.stop
        parts = [(self.spans[last][1], self.trace.num_ticks), (0, self.spans[first][0])]
        release_op = stop.after_op + 1 if isinstance(stop, Dropped) else 0
        if release_op:
            at = self.trace.op_starts[release_op] if release_op < len(self.trace.ops) else self.trace.num_ticks
            parts.append((self.spans[first][1], at))
        if any(a < b and held[a:b].max() + num_chunks > self.machine.num_chunks for a, b in parts):
            return False
        if release_op and not self._write_before(first, last, release_op):
            return False
        for a, b in parts:
            held[a:b] += num_chunks
        self.stays[first] = replace(self.stays[first], start=Kept())
        self.stays[last] = replace(self.stays[last], stop=Kept())
        return True
