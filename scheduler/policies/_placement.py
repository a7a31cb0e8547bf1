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

from bisect import bisect_right
from collections.abc import Sequence
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
        pending: list[_Move] = []
        for position in range(self.num_ops):
            if position in begin:
                pending = sorted(pending + begin[position], key=lambda move: move.write_done_ns - self._shift_ns(move))
            room = self.machine.num_chunks - self.held[position] - sum(move.gap.num_chunks for move in pending)
            waiting = []
            for move in pending:
                shift = self._shift(move)
                if (
                    room < 0
                    or move.write_done_ns <= self._time(position + shift)
                    or self._limit(move) == position + shift
                ):
                    move.release = position + shift
                    room += move.gap.num_chunks
                else:
                    waiting.append(move)
            pending = waiting
            self.held[position] = self.machine.num_chunks - room
        for move in pending:
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
        pending: list[_Move] = []  # those needed last come first
        for position in range(self.num_ops - 1, -self.num_ops - 1, -1):
            pending += begin.get(position, [])
            zone = position % self.num_ops
            room = self.machine.num_chunks - self.held[zone] - sum(move.gap.num_chunks for move in pending)
            waiting = []
            for move in pending:
                shift = (move.gap.latest_load or 0) - self._need(move)
                is_early = move.load_start_ns >= self._time(position + 1)
                if room < 0 or is_early or move.release - shift > position:
                    move.load = position + 1 + shift
                    room += move.gap.num_chunks
                else:
                    waiting.append(move)
            pending = waiting
            self.held[zone] = self.machine.num_chunks - room
        for move in pending:
            move.load = (move.gap.latest_load or 0) - self._need(move) - self.num_ops

    def _need(self, move: _Move) -> int:
        """The op that uses the bytes next, as a position of one step."""
        return (move.gap.latest_load or 0) % self.num_ops

    def _write_ns(self, gap: Gap) -> float:
        return self.machine.latency_ns + gap.nbytes / self.machine.evict_bytes_per_s * 1e9

    def _load_ns(self, gap: Gap) -> float:
        return self.machine.latency_ns + gap.nbytes / self.machine.load_bytes_per_s * 1e9


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
