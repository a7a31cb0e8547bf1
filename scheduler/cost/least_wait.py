"""The least time that ops must wait for transfers: a longest path over the moments at which ops start.

A link can be busy while an op runs, but only for what there is room for. So a step whose ops fill memory must
wait although its links have time enough in total; `scheduler.cost.bounds` adds this wait to the ops' own time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.budget import IntArray, Pin, pinned_chunks, pins_of
from scheduler.cost.links import slowdown
from scheduler.plan import Machine
from scheduler.trace import Trace

FloatArray = npt.NDArray[np.float64]

# Moments that windows may begin and end at. With fewer than there are ops the bound still holds, and is seldom lower.
# It takes 50 to 350 ms of a processor for each of the recorded steps.
_MOST_MOMENTS = 400

# Sizes of variables that room is counted in, beside chunks: those that most bytes are in.
_MOST_SIZES = 2


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
    rate, they share it in that window, too: with `k` such that both at once take `1 + k` of the time of the longer
    alone, neither `in + k * out` nor `k * in + out`, in seconds of each link alone, grows faster than time does.

    Whole variables: a variable is in memory at a moment or is not. For any size `u`, those in memory there have
    `sum(floor(chunks / u)) <= floor(room / u)`, since the left side is whole; so have those that are under way while
    an op runs. So all of the above holds with sizes and rooms rounded down to multiples of `u`: with room for 5.9
    variables of one size, one more moves. Taken for chunks themselves, and for the sizes of most bytes.

    Latency: each transfer has its own, in which its link moves nothing, and all of it falls into the window that the
    transfer is counted in. A transfer of at least `u` is charged for it; the room at a moment or beside an op holds
    at most `floor(room / u)` of such. While one link is in its latency the other is not slowed down: in
    `in + k * out` a load's counts `1 - k` of its time and a write's nothing. In `k * in + out` only a write's counts.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A measure of the links' work that grows by no more than a second a second.

    Attributes:
        load, write: What a second of each link, alone, counts.
        load_latency_s, write_latency_s: What a transfer's latency counts.
    """

    load: float = 0.0
    write: float = 0.0
    load_latency_s: float = 0.0
    write_latency_s: float = 0.0


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
        moves = [v not in exempt and variable.evictable for v, variable in enumerate(trace.variables)]
        self.moves = np.array(moves, dtype=np.bool_)
        operands = [(index, u.variable) for index, op in enumerate(trace.ops) for u in op.uses if not u.writes]
        self.operand_op, self.operand = np.array(operands, dtype=np.int64).reshape(-1, 2).T
        self.moments = self._moments()
        self.next_use, self.last_write = self._around_moments(pins)
        if discards:  # what is not used any more, and dies, need not be written
            dies = np.array([v.death_tick is not None for v in trace.variables], dtype=np.bool_)
            unused = self.next_use == len(trace.ops)
            self.last_write[unused & dies] = -1
        self.uses_after = [self._uses_after(index) for index in range(len(self.moments) - 1)]
        self.writes_before = [self._writes_before(index) for index in range(1, len(self.moments))]

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

    def _rooms(self, unit: int, weights: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """While each op runs: the most bytes that can arrive and that can leave, and the most transfers of `unit`."""
        room = np.maximum(self.free, 0) // unit
        operands = np.bincount(self.operand_op, weights[self.operand], len(room)).astype(np.int64)
        num_operands = np.bincount(self.operand_op, self.chunk_nbytes[self.operand] >= unit, len(room)).astype(np.int64)
        return room * unit, room * unit + operands, room, room + num_operands

    def _movable(self, way: _Way, rooms: tuple[IntArray, ...]) -> tuple[FloatArray, FloatArray]:
        """Seconds of work of one kind that each op can cover, as the first op of a window and as another.

        Nothing that a window's first op changes is final while it runs, so that one covers loads only.
        """
        machine = self.machine
        durations_s = np.array([op.duration_ns for op in self.trace.ops], dtype=np.float64) / 1e9
        arriving, leaving, num_in, num_out = rooms
        inwards = way.load * arriving / machine.load_bytes_per_s + way.load_latency_s * num_in
        outwards = way.write * leaving / machine.evict_bytes_per_s + way.write_latency_s * num_out
        inwards, outwards = np.minimum(inwards, way.load * durations_s), np.minimum(outwards, way.write * durations_s)
        return inwards, np.minimum(durations_s, inwards + outwards)

    def _ways(self, *, latency: bool) -> tuple[_Way, ...]:
        latency_s = self.machine.latency_ns / 1e9 if latency else 0.0
        beside = min(2.0, 1.0 / slowdown(self.machine)) - 1.0
        less_s = (1.0 - beside) * latency_s
        return (
            _Way(load=1.0, load_latency_s=latency_s),
            _Way(write=1.0, write_latency_s=latency_s),
            _Way(load=1.0, write=beside, load_latency_s=less_s),
            _Way(load=beside, write=1.0, write_latency_s=less_s),
        )

    def _sizes(self) -> list[int]:
        """Sizes of most bytes among what moves, all of them more than a chunk."""
        sizes, which = np.unique(self.chunk_nbytes[self.moves], return_inverse=True)
        if not len(sizes):
            return []
        total = np.bincount(which.ravel()) * sizes
        order = np.argsort(-total, kind="stable")
        return [int(sizes[i]) for i in order if sizes[i] > self.machine.chunk_nbytes][:_MOST_SIZES]

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
        found = self._waits_by_size(self.machine.chunk_nbytes, self._ways(latency=False))
        for unit in self._sizes():
            found = np.maximum(found, self._waits_by_size(unit, self._ways(latency=True)))
        return found

    def _waits_by_size(self, unit: int, ways: tuple[_Way, ...]) -> FloatArray:
        """The same, with sizes and room in multiples of `unit`, and each transfer of at least that much charged."""
        machine = self.machine
        weights = np.minimum(self.nbytes, self.chunk_nbytes // unit * unit)
        in_nbytes, out_nbytes = self._excess(weights, unit, unit)
        in_counts, out_counts = self._excess((self.chunk_nbytes >= unit).astype(np.int64), unit, 1)
        last = np.array(self.moments, dtype=np.int64)[None, :]
        first = np.clip(self.moments, 0, len(self.trace.ops) - 1)[:, None]
        second = first + 1
        rooms, found = self._rooms(unit, weights), np.zeros_like(in_nbytes)
        for way in ways:
            by_first, by_others = self._movable(way, rooms)
            summed = np.concatenate([[0.0], np.cumsum(by_others)])
            covered = np.where(last > first, by_first[first], 0.0) + summed[np.maximum(last, second)] - summed[second]
            loads = way.load * in_nbytes / machine.load_bytes_per_s + way.load_latency_s * in_counts
            writes = way.write * out_nbytes / machine.evict_bytes_per_s + way.write_latency_s * out_counts
            needed = np.maximum(loads, 0.0) + np.maximum(writes, 0.0)
            found = np.maximum(found, np.floor((needed - covered) * 1e9))
        return found

    def _alive(self, tick: int) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (self.start <= tick) & (tick < self.stop)
        return found

    def _room(self, index: int) -> int:
        """Bytes for what is in memory at a moment beside what its op pins."""
        moment = self.moments[index]
        if 0 <= moment < len(self.trace.ops):
            return max(0, int(self.free[moment]))
        return self.machine.budget_nbytes if self.trace.cyclic else 0

    def _uses_after(self, index: int) -> tuple[IntArray, IntArray]:
        """What must be in memory at a moment or be loaded after it, and before which op."""
        num_ops, moment = len(self.trace.ops), self.moments[index]
        following = self.next_use[index]
        wanted = self.exists.copy() if moment < 0 else self._alive(self.trace.op_starts[moment])
        wanted &= self.moves & (following < num_ops)
        if moment >= 0:
            wanted[self.pinned[moment]] = False  # in memory, beside what is free
        found = np.flatnonzero(wanted)
        return found, following[found]

    def _writes_before(self, index: int) -> tuple[IntArray, IntArray]:
        """What must be in memory at a moment or have been written by then, and after which op."""
        num_ops, moment = len(self.trace.ops), self.moments[index]
        written = self.last_write[index]
        if moment == num_ops:
            wanted = self.stop == self.trace.num_ticks
        else:
            wanted = self._alive(self.trace.op_starts[moment]) & (self.trace.ops[moment].stop_tick <= self.stop)
        wanted &= self.moves & (written >= 0)
        if moment < num_ops:
            wanted[self.pinned[moment]] = False
        found = np.flatnonzero(wanted)
        return found, written[found]

    def _excess(self, weights: IntArray, unit: int, slot: int) -> tuple[FloatArray, FloatArray]:
        """What is loaded and what is written in each window; below 0 where there is room left.

        Args:
            weights: What each variable counts.
            unit, slot: Each `unit` bytes of room at a moment hold what counts `slot`.
        """
        num_ops, moments = len(self.trace.ops), np.array(self.moments, dtype=np.int64)
        loaded, written = np.zeros((2, len(moments), len(moments)))
        for index, (found, use) in enumerate(self.uses_after):
            summed = np.cumsum(np.bincount(use, weights[found], num_ops + 1))
            loaded[index, index + 1 :] = summed[moments[index + 1 :]] - self._room(index) // unit * slot
        for index, (found, write) in enumerate(self.writes_before, 1):
            since = np.cumsum(np.bincount(write, weights[found], num_ops + 1)[::-1])[::-1]
            written[:index, index] = since[np.maximum(moments[:index], 0)] - self._room(index) // unit * slot
        return loaded, written
