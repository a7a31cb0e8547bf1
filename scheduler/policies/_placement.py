"""When chosen gaps begin and end: the timing half of `auto`.

Two sweeps over the ops, each the mirror image of the other.

The release sweep goes forward. A chosen gap holds its chunks until its write is done, as long as
every op on the way fits the budget; where one does not, the oldest pending write is released, and
whoever takes the chunks waits for it.

The load sweep goes backward. A chosen gap takes its chunks back early enough for its load to be
done in time, as long as every op on the way fits the budget; where one does not, the load
that is needed last starts later.

Both sweeps take the times of ops from outside: first as if nothing ever waited, then as simulated.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.budget import IntArray, zone_maxima
from scheduler.chains import Away, Chain, Gap, PositionTicks
from scheduler.plan import Machine
from scheduler.trace import Trace


@dataclass(slots=True, kw_only=True, eq=False)
class _Move:
    """One chosen gap on its way to a decision.

    Attributes:
        is_dirty: Whether the bytes must be written out first.
        ready: Position from whose start the write can run: after the last change.
        release, load: Decided positions, unrolled like the gap's own.
        write_done_ns, load_start_ns: When the write would be done, and when the load must start, if memory
            were free; on the time axis of `ready` and of the folded deadline.
    """

    gap: Gap
    is_dirty: bool
    ready: int
    release: int
    load: int | None
    write_done_ns: float = 0.0
    load_start_ns: float = 0.0


class Placement:
    """Places the chosen gaps of one schedule.

    Args:
        trace, machine: What is planned, and for what.
        chains: The trace's chains.
        chosen: The gaps that are away; together they fit the budget at full length.
        held: Chunks held at each tick with all of them away at full length.
        op_start_ns: Start of each op within the step, and the step's end.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        chains: tuple[Chain, ...],
        chosen: Sequence[Gap],
        held: IntArray,
        op_start_ns: Sequence[int],
    ) -> None:
        self.machine = machine
        self.num_ops = len(trace.ops)
        self.ticks = PositionTicks(trace)
        self.held = zone_maxima(trace, held)  # chunks held around each op
        self.start_ns = list(op_start_ns)
        self.moves = [move for chain, own in _by_chain(chains, chosen) for move in _moves(chain, own)]

    def place(self) -> list[Away]:
        """Decisions for the chosen gaps. One that is left without length is not away after all."""
        self._wish_writes()
        self._sweep_releases()
        self._wish_loads()
        self._sweep_loads()
        return [
            Away(gap=move.gap, release=move.release, load=move.load)
            for move in self.moves
            if move.gap.forced or move.load is None or move.load > move.release
        ]

    def _time(self, position: int) -> int:
        """Start of a position of any step, on an axis that starts with this one."""
        step, op = divmod(position, self.num_ops)
        return self.start_ns[op] + step * self.start_ns[-1]

    # -- releases ----------------------------------------------------------------------------

    def _wish_writes(self) -> None:
        """When each write would be done if the out-link alone decided; writes go in order of readiness."""
        dirty = [move for move in self.moves if move.is_dirty]
        dirty.sort(key=lambda move: (move.ready % self.num_ops, move.gap.earliest_release))
        free_ns = 0.0
        for step in (-1, 0):  # the backlog of the step before delays this one's
            for move in dirty:
                folded = move.ready % self.num_ops
                free_ns = max(free_ns, self._time(folded + step * self.num_ops)) + self._write_ns(move.gap)
                move.write_done_ns = free_ns + (self._time(move.ready) - self._time(folded))

    def _sweep_releases(self) -> None:
        begin: dict[int, list[_Move]] = {}
        for move in self.moves:
            folded = move.gap.earliest_release % self.num_ops
            if move.is_dirty and folded:  # after the last op, the boundary is near enough
                begin.setdefault(folded, []).append(move)
        pending = _Pending()
        for position in range(self.num_ops):
            for move in begin.get(position, ()):
                done_ns = move.write_done_ns - self._shift_ns(move)
                wish = bisect_left(self.start_ns, done_ns, hi=self.num_ops)
                pending.add(move, order=done_ns, until=min(wish, self._limit(move) - self._shift(move)))
            room = self.machine.num_chunks - self.held[position]
            for move in pending.take(position, room):
                move.release = position + self._shift(move)
            self.held[position] += pending.num_chunks
        for move in pending.rest():
            move.release = min(self.num_ops + self._shift(move), self._limit(move))

    def _shift(self, move: _Move) -> int:
        return move.gap.earliest_release // self.num_ops * self.num_ops

    def _shift_ns(self, move: _Move) -> int:
        return move.gap.earliest_release // self.num_ops * self.start_ns[-1]

    def _limit(self, move: _Move) -> int:
        """The last position at which the gap may begin."""
        if move.gap.latest_load is not None:
            return move.gap.latest_load
        return self.ticks.last_release_before(move.gap.stop_tick)

    # -- loads -------------------------------------------------------------------------------

    def _wish_loads(self) -> None:
        """When each load must start if the in-link alone decided; loads go in order of need."""
        loads = [move for move in self.moves if move.load is not None]
        loads.sort(key=lambda move: (-self._need(move), -move.gap.earliest_release))
        limit_ns = float("inf")
        for step in (1, 0):  # what the next step needs early is loaded late in this one
            for move in loads:
                need_ns = self._time(self._need(move) + step * self.num_ops)
                limit_ns = min(limit_ns, need_ns) - self._load_ns(move.gap)
                move.load_start_ns = limit_ns

    def _sweep_loads(self) -> None:
        begin: dict[int, list[_Move]] = {}
        for move in self.moves:
            if move.load is not None:
                begin.setdefault(self._need(move) - 1, []).append(move)
        pending = _Pending()
        for position in range(self.num_ops - 1, -self.num_ops - 1, -1):
            for move in begin.get(position, ()):
                shift = (move.gap.latest_load or 0) - self._need(move)
                wish = self._position_at(move.load_start_ns)
                pending.add(move, order=-self._need(move), until=1 - max(wish, move.release - shift))
            zone = position % self.num_ops
            room = self.machine.num_chunks - self.held[zone]
            for move in pending.take(-position, room):
                move.load = position + 1 + (move.gap.latest_load or 0) - self._need(move)
            self.held[zone] += pending.num_chunks
        for move in pending.rest():
            move.load = (move.gap.latest_load or 0) - self._need(move) - self.num_ops

    def _position_at(self, time_ns: float) -> int:
        """The last position that starts by `time_ns`, in this step or the one before."""
        step = -1 if time_ns < 0 else 0
        offset_ns = max(time_ns - step * self.start_ns[-1], 0)
        return step * self.num_ops + max(bisect_right(self.start_ns, offset_ns, hi=self.num_ops) - 1, 0)

    def _need(self, move: _Move) -> int:
        """The op that uses the bytes next, as a position of one step."""
        return (move.gap.latest_load or 0) % self.num_ops

    def _write_ns(self, gap: Gap) -> float:
        return self.machine.latency_ns + gap.nbytes / self.machine.evict_bytes_per_s * 1e9

    def _load_ns(self, gap: Gap) -> float:
        return self.machine.latency_ns + gap.nbytes / self.machine.load_bytes_per_s * 1e9


class _Pending:
    """Moves that hold chunks beyond what they must, during a sweep.

    Attributes:
        num_chunks: What they hold together.
    """

    def __init__(self) -> None:
        self.num_chunks = 0
        self._by_order: list[tuple[float, int, _Move]] = []
        self._by_until: list[tuple[int, int, _Move]] = []
        self._gone: set[int] = set()
        self._count = 0

    def add(self, move: _Move, *, order: float, until: int) -> None:
        """Hold the move's chunks until sweep position `until`; give them up in `order` if there is no room."""
        heapq.heappush(self._by_order, (order, self._count, move))
        heapq.heappush(self._by_until, (until, self._count, move))
        self._count += 1
        self.num_chunks += move.gap.num_chunks

    def take(self, position: int, room: int) -> Iterator[_Move]:
        """Remove and yield the moves that are due at `position`, then those for which there is no room."""
        while self._by_until and self._by_until[0][0] <= position:
            _, number, move = heapq.heappop(self._by_until)
            if number not in self._gone:
                yield self._remove(number, move)
        while self.num_chunks > room and self._by_order:
            _, number, move = heapq.heappop(self._by_order)
            if number not in self._gone:
                yield self._remove(number, move)

    def rest(self) -> Iterator[_Move]:
        """Remove and yield what is left."""
        yield from self.take(0, -1)

    def _remove(self, number: int, move: _Move) -> _Move:
        self._gone.add(number)
        self.num_chunks -= move.gap.num_chunks
        return move


def _by_chain(chains: tuple[Chain, ...], chosen: Sequence[Gap]) -> list[tuple[Chain, list[Gap]]]:
    own: dict[int, list[Gap]] = {}
    for gap in chosen:
        own.setdefault(gap.chain, []).append(gap)
    return [(chains[index], gaps) for index, gaps in sorted(own.items())]


def _moves(chain: Chain, gaps: list[Gap]) -> list[_Move]:
    """One chain's chosen gaps, in order, with what must be written and from when it can be."""
    moves = []
    writes = [pin.op_index for pin in chain.pins if pin.writes]
    for index, gap in enumerate(gaps):
        if not chain.pins or (chain.starts_away and index == 0):
            is_dirty = False
        elif chain.is_cycle and index == 0:
            is_dirty = gap.num_writes + chain.num_writes > gaps[-1].num_writes
        else:
            is_dirty = index == 0 or gap.num_writes > gaps[index - 1].num_writes
        last = bisect_right(writes, gap.earliest_release - 1) - 1
        ready = writes[last] + 1 if is_dirty and last >= 0 else 1
        moves.append(_Move(gap=gap, is_dirty=is_dirty, ready=ready, release=gap.earliest_release, load=gap.latest_load))
    return moves
