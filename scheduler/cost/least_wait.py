"""The least time that ops must wait for transfers: a longest path over the moments at which ops start.

A link can be busy while an op runs, but only for what there is room for. So a step whose ops fill memory must
wait although its links have time enough in total; `scheduler.cost.bounds` adds this wait to the ops' own time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.budget import IntArray, Pin, pinned_chunks, pins_of
from scheduler.cost.links import most_bytes_per_s
from scheduler.plan import Machine
from scheduler.trace import Trace

FloatArray = npt.NDArray[np.float64]

# Moments that windows may begin and end at. With fewer than there are ops the bound still holds, and is seldom lower.
# It takes 10 to 70 ms of a processor for each of the recorded steps.
_MOST_MOMENTS = 400


def least_wait_ns(trace: Trace, machine: Machine, exempt: frozenset[int], *, discards: bool) -> int:
    """Nanoseconds that ops wait, at least, in one step of any legal plan.

    Take two moments, the starts of op `a` and of a later op `b`.

    In: of the variables alive at the first moment and used by an op in `(a, b]`, those that are not in memory then are
    loaded between the two. Each that is in memory holds its chunks for all of op `a`, beside what op `a` pins at
    its worst tick. So at least the excess of their bytes over what the budget leaves is loaded in the window.

    Out: of the variables changed by an op in `[a, b)` and alive throughout op `b`, those that are not in memory at the
    second moment were written between the two, since the bytes were not final before; nor while op `a` ran. What is in
    memory then holds chunks beside what op `b` pins. (An op waits for every write whose chunks it takes, so it
    does not matter whether a plan has released them already.)

    While an op runs, what is loaded for a later one has chunks throughout the op, beside what the op pins: no more
    bytes arrive in its time than its pins leave room for, nor than the link moves. Bytes leave from that
    same room, or are operands that the op does not write. Whatever the ops of a window cannot cover
    so, is moved while none of them runs: in the waits before the ops after `a` up to `b` (re-runs count as waits).

    Both: what must be loaded and what must be written in one window are different transfers. Where the links share a
    rate, they share it in that window, too.

    The bound is the least sum of waits that gives every window its own: a linear program whose rows are intervals.
    Windows that follow one another share no wait, so the waits of any chain of them add up; and the largest such sum,
    found from moment to moment, is the program's optimum, since matrices of intervals are totally unimodular. The
    first moment is the step's start, the last its end; in a step taken alone nothing is in memory then, and all that
    is alive was written.

    Args:
        exempt: Variables whose bytes need not be moved, because a re-run may bring them back.
        discards: Whether a plan may give up, without a write, what is not used any more.
    """
    if not trace.ops:
        return 0
    return _Windows(trace, machine, exempt, discards=discards).longest_ns()


class _Windows:
    """The step as arrays. A moment is an op, for its start; -1 is the step's start, the number of ops its end."""

    def __init__(self, trace: Trace, machine: Machine, exempt: frozenset[int], *, discards: bool) -> None:
        self.trace = trace
        self.machine = machine
        pins = pins_of(trace)
        chunks = [machine.chunks_of(v.nbytes) for v in trace.variables]
        self.nbytes = np.array([v.nbytes for v in trace.variables], dtype=np.int64)
        self.chunk_nbytes = np.array(chunks, dtype=np.int64) * machine.chunk_nbytes
        spans = [trace.lifetime(v) for v in range(len(chunks))]
        self.start, self.stop = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        self.exists = np.array([v.birth_tick is None for v in trace.variables], dtype=np.bool_)  # at the step's start
        self.pinned = self._pinned_variables(pins)
        self.free = machine.budget_nbytes - np.array(
            [int(self.chunk_nbytes[own].sum()) for own in self.pinned], dtype=np.int64
        )
        self.moved_in, self.moved_out, self.moved_both = self._movable()
        moves = [v not in exempt and variable.evictable for v, variable in enumerate(trace.variables)]
        self.moves = np.array(moves, dtype=np.bool_)
        self.moments = self._moments()
        self.next_use, self.last_write = self._around_moments(pins)
        if discards:  # what is not used any more, and dies, need not be written
            dies = np.array([v.death_tick is not None for v in trace.variables], dtype=np.bool_)
            unused = self.next_use == len(trace.ops)
            self.last_write[unused & dies] = -1

    def _pinned_variables(self, pins: tuple[tuple[Pin, ...], ...]) -> list[list[int]]:
        """For each op what it pins at its worst tick; what can never be away is pinned by the last op, at all ticks."""
        trace = self.trace
        per_tick = pinned_chunks(trace, self.machine, pins)
        worst = [op.start_tick + int(per_tick[op.start_tick : op.stop_tick].argmax()) for op in trace.ops]
        found: list[list[int]] = [[] for _ in trace.ops]
        for v, own in enumerate(pins):
            always = not trace.variables[v].evictable
            for pin in own:
                for op in range(len(trace.ops)) if always else (pin.op_index,):
                    if pin.start_tick <= worst[op] < pin.stop_tick:
                        found[op].append(v)
        return found

    def _movable(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Bytes that can move in, out, and both ways together while the ops before each op run.

        The last entry: while all of them do.
        """
        trace, machine = self.trace, self.machine
        durations_s = np.array([op.duration_ns for op in trace.ops], dtype=np.float64) / 1e9
        operands = [sum(trace.variables[u.variable].nbytes for u in op.uses if not u.writes) for op in trace.ops]
        room = np.maximum(self.free, 0).astype(np.float64)
        inwards = np.minimum(durations_s * machine.load_bytes_per_s, room)
        outwards = np.minimum(durations_s * machine.evict_bytes_per_s, room + np.array(operands, dtype=np.float64))
        both = np.minimum(durations_s * most_bytes_per_s(machine), inwards + outwards)
        in_sum, out_sum, both_sum = (np.concatenate([[0.0], np.cumsum(own)]) for own in (inwards, outwards, both))
        return in_sum, out_sum, both_sum

    def _moments(self) -> list[int]:
        num_ops = len(self.trace.ops)
        picked = set(range(-1, num_ops + 1))
        if num_ops > _MOST_MOMENTS:
            half = _MOST_MOMENTS // 2
            fullest = np.argsort(self.free, kind="stable")[:half].tolist()
            picked = {-1, num_ops, *(num_ops * i // half for i in range(half)), *fullest}
        return sorted(picked)

    def _around_moments(self, pins: tuple[tuple[Pin, ...], ...]) -> tuple[IntArray, IntArray]:
        """Moment by variable: the first op after the moment's that uses it (else the number of ops); the last op before
        the moment's that changes or makes it (else -1).
        """
        num_ops, shape = len(self.trace.ops), (len(self.moments), len(pins))
        used: list[list[int]] = [[] for _ in range(num_ops)]
        changed: list[list[int]] = [[] for _ in range(num_ops)]
        for v, own in enumerate(pins):
            for pin in own:
                used[pin.op_index].append(v)
                if pin.writes:
                    changed[pin.op_index].append(v)
        next_use, last_write = np.full(shape, num_ops, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        now, position = np.full(len(pins), num_ops, dtype=np.int64), len(self.moments) - 2
        for op in range(num_ops - 1, -2, -1):
            if position >= 0 and self.moments[position] == op:
                next_use[position] = now
                position -= 1
            if op >= 0:
                now[used[op]] = op
        now, position = np.full(len(pins), -1, dtype=np.int64), 0
        for op in range(num_ops + 1):
            while position < len(self.moments) and self.moments[position] <= op:
                last_write[position] = now
                position += 1
            if op < num_ops:
                now[changed[op]] = op
        return next_use, last_write

    def longest_ns(self) -> int:
        """The largest sum over chains of windows. `best[m]`: over those that end at moment `m` or before."""
        waits = self._waits_ns()
        best = np.zeros(len(self.moments))
        for index in range(1, len(best)):
            best[index] = max(best[index - 1], float((best[:index] + waits[:index, index]).max()))
        return int(best[-1])

    def _waits_ns(self) -> FloatArray:
        """The wait in the window from each moment to each later one: for one way alone, or for both together."""
        num_moments, machine = len(self.moments), self.machine
        inwards, outwards = np.zeros((num_moments, num_moments)), np.zeros((num_moments, num_moments))
        for index in range(num_moments - 1):
            inwards[index, index + 1 :] = self._in_nbytes(index)
            outwards[: index + 1, index + 1] = self._out_nbytes(index + 1)
        last = np.array(self.moments, dtype=np.int64)[None, :]
        first = np.maximum(np.array(self.moments, dtype=np.int64), 0)[:, None]
        second = np.minimum(first + 1, len(self.trace.ops))
        end = np.maximum(np.maximum(second, last), 0)  # nothing that a window's first op changes is final while it runs
        end_of_both = np.maximum(last, first)
        ways = (
            (inwards, self.moved_in[end_of_both] - self.moved_in[first], machine.load_bytes_per_s),
            (outwards, self.moved_out[end] - self.moved_out[second], machine.evict_bytes_per_s),
            (
                np.maximum(inwards, 0.0) + np.maximum(outwards, 0.0),
                self.moved_both[end_of_both] - self.moved_both[first],
                most_bytes_per_s(machine),
            ),
        )
        found = np.zeros((num_moments, num_moments))
        for needed, covered, bytes_per_s in ways:
            found = np.maximum(found, np.floor((needed - covered) / bytes_per_s * 1e9))
        return found

    def _alive(self, tick: int) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (self.start <= tick) & (tick < self.stop)
        return found

    def _in_nbytes(self, index: int) -> FloatArray:
        """Bytes to be loaded in the windows from a moment to each later one; below 0 where there is room left."""
        num_ops, moment = len(self.trace.ops), self.moments[index]
        following = self.next_use[index]
        wanted = self.exists if moment < 0 else self._alive(self.trace.op_starts[moment])
        wanted = wanted & self.moves & (following < num_ops)
        needed = np.bincount(following[wanted], self.nbytes[wanted], num_ops + 1)
        if moment < 0:
            free = self.machine.budget_nbytes if self.trace.cyclic else 0
        else:
            free = int(self.free[moment])
            there = [v for v in self.pinned[moment] if wanted[v]]  # in memory, beside what is free
            needed -= np.bincount(following[there], self.chunk_nbytes[there], num_ops + 1)
        ends = np.array(self.moments[index + 1 :], dtype=np.int64)
        excess: FloatArray = (np.cumsum(needed)[ends] - free).astype(np.float64)
        return excess

    def _out_nbytes(self, index: int) -> FloatArray:
        """Bytes to be written in the windows from each earlier moment to one; below 0 where there is room left."""
        num_ops, moment = len(self.trace.ops), self.moments[index]
        written = self.last_write[index]
        if moment == num_ops:
            wanted = self.stop == self.trace.num_ticks
        else:
            wanted = self._alive(self.trace.op_starts[moment]) & (self.trace.ops[moment].stop_tick <= self.stop)
        wanted &= self.moves & (written >= 0)
        needed = np.bincount(written[wanted], self.nbytes[wanted], num_ops + 1)
        if moment == num_ops:
            free = self.machine.budget_nbytes if self.trace.cyclic else 0
        else:
            free = int(self.free[moment])
            there = [v for v in self.pinned[moment] if wanted[v]]
            needed -= np.bincount(written[there], self.chunk_nbytes[there], num_ops + 1)
        begins = np.array([max(m, 0) for m in self.moments[:index]], dtype=np.int64)
        since = np.cumsum(needed[::-1])[::-1]  # of what was changed by an op from each on
        excess: FloatArray = (since[begins] - free).astype(np.float64)
        return excess
