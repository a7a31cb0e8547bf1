"""Lives and gaps: what a planner may decide, separated from what it may not.

A **chain** is one life of some bytes: from a birth (or the store) through uses to a death (or the
store), or, for what lives across steps, round and round. A variable and the heir that it becomes
at the boundary are one chain, unless both are alive at once. Between two uses lies a **gap**, the
only time in which the bytes may be away. A plan is nothing but an answer for each gap: away or
not, and from which op to which.

Positions count ops on an unrolled axis: position `p < n` is op `p` of this step, `n + p` is op `p`
of the next one. An away interval `[release, load)` means: the chunks are free from the start of op
`release`, and a load is issued right before op `load`. Position `n` as a release is the step's
end; as a load it is the next step's op 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from scheduler.budget import Pin, pins_of
from scheduler.plan import Born, Dies, Dropped, Evicted, Kept, Loaded, Machine, Residency, Start, Stop
from scheduler.residency_builder import may_wrap, ordered
from scheduler.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which a chain's bytes may be away.

    Attributes:
        earliest_release: First position at which the chunks can be free.
        latest_load: Position of the next use; None if there is none (`stop_tick` ends it).
        start_tick, stop_tick: The longest away time, in unrolled ticks.
        num_writes: Pins of the chain before the gap that write (a birth is one), to tell clean from dirty.
        forced: The trace demands that the bytes are away here: at the start or end of a step taken
            alone, or at the boundary between a double-buffered variable and its heir.
    """

    chain: int
    num_chunks: int
    nbytes: int
    earliest_release: int
    latest_load: int | None
    start_tick: int
    stop_tick: int
    num_writes: int
    forced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """A decision for one gap: away from position `release` to `load` (None: until the gap's end)."""

    gap: Gap
    release: int
    load: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One life of some bytes.

    Attributes:
        variable, heir: Index before and after the step boundary (equal for a parameter).
        pins: In unrolled positions and ticks, in order.
        gaps: In order; the last one of a cycle leads from its last pin to its first.
        start_tick, stop_tick: The life, in unrolled ticks.
        starts_away, ends_away: Whether life begins, or must end, in the store.
        is_cycle: Whether the chain goes on into itself.
        is_movable: False for what can never be away.
    """

    variable: int
    heir: int
    num_chunks: int
    pins: tuple[Pin, ...]
    gaps: tuple[Gap, ...]
    start_tick: int
    stop_tick: int
    starts_away: bool
    ends_away: bool
    is_cycle: bool
    is_movable: bool

    @property
    def num_writes(self) -> int:
        """Pins that write, in the whole chain."""
        return sum(pin.writes for pin in self.pins)


class PositionTicks:
    """Unrolled positions as ticks."""

    def __init__(self, trace: Trace) -> None:
        self.num_ops = len(trace.ops)
        self.num_ticks = trace.num_ticks
        self._starts = trace.op_starts

    def load(self, position: int) -> int:
        """Tick from which a load at `position` holds chunks."""
        step, op = divmod(position, self.num_ops)
        return step * self.num_ticks + self._starts[op]

    def release(self, position: int) -> int:
        """Tick at which a release at `position` frees chunks."""
        if position and position % self.num_ops == 0:
            return position // self.num_ops * self.num_ticks
        return self.load(position)

    def last_release_before(self, tick: int) -> int:
        """The last position at which a release frees chunks before `tick`."""
        step, offset = divmod(tick - 1, self.num_ticks)
        return step * self.num_ops + max(bisect_right(self._starts, offset) - 1, 0)


def chains_of(trace: Trace, machine: Machine, *, wrap: bool = True) -> tuple[Chain, ...]:
    """The chains of a trace. With `wrap` false, everything movable is away at the step boundary."""
    return trace.once(("chains", machine.chunk_nbytes, wrap), lambda: _chains_of(trace, machine, wrap))


def _chains_of(trace: Trace, machine: Machine, wrap: bool) -> tuple[Chain, ...]:
    pins = pins_of(trace)
    heirs = {v.becomes for i, v in enumerate(trace.variables) if v.becomes is not None and _wraps(trace, i, wrap)}
    chains: list[Chain] = []
    builder = _ChainBuilder(trace, machine, pins, PositionTicks(trace), wrap)
    for index in range(len(trace.variables)):
        if index in heirs and not _wraps(trace, index, wrap):
            continue  # the later half of another variable's chain
        chains.append(builder.build(index, len(chains)))
    return tuple(chains)


def _wraps(trace: Trace, variable: int, wrap: bool) -> bool:
    return may_wrap(trace, variable) and (wrap or not trace.variables[variable].evictable)


class _ChainBuilder:
    """Builds the chain that begins with a variable."""

    def __init__(
        self, trace: Trace, machine: Machine, pins: tuple[tuple[Pin, ...], ...], ticks: PositionTicks, wrap: bool
    ) -> None:
        self.trace = trace
        self.machine = machine
        self.pins = pins
        self.ticks = ticks
        self.wrap = wrap

    def build(self, variable: int, chain: int) -> Chain:
        v = self.trace.variables[variable]
        wraps = _wraps(self.trace, variable, self.wrap)
        heir = v.becomes if wraps and v.becomes is not None else variable
        is_cycle = wraps and heir == variable
        pins = self.pins[variable]
        start_tick, stop_tick = self.trace.lifetime(variable)
        if wraps and not is_cycle:
            pins += tuple(_next_step(pin, self.ticks) for pin in self.pins[heir])
            stop_tick = self.ticks.num_ticks + self.trace.lifetime(heir)[1]
        starts_away = v.birth_tick is None and not is_cycle
        ends_away = v.death_tick is None and not wraps
        shape = Chain(
            variable=variable,
            heir=heir,
            num_chunks=self.machine.chunks_of(v.nbytes),
            pins=pins,
            gaps=(),
            start_tick=start_tick,
            stop_tick=stop_tick,
            starts_away=starts_away,
            ends_away=ends_away,
            is_cycle=is_cycle,
            is_movable=v.evictable,
        )
        return replace(shape, gaps=tuple(self._gaps(shape, chain, v.nbytes)))

    def _gaps(self, c: Chain, chain: int, nbytes: int) -> Iterator[Gap]:
        """The chain's gaps in order: before, between and after its pins."""
        num_ops, whole = self.ticks.num_ops, (chain, c.num_chunks, nbytes)
        if not c.pins:
            if c.is_cycle:  # never used: may be away for good
                yield _gap(whole, 0, None, (0, self.ticks.num_ticks), 0)
            return
        first, last = c.pins[0], c.pins[-1]
        if c.starts_away:
            load = first.op_index if c.is_movable else 0
            yield _gap(whole, 0, load, (0, self.ticks.load(load)), 0, forced=True)
        num_writes = 0
        following = [*c.pins[1:], _next_step(first, self.ticks)] if c.is_cycle else list(c.pins[1:])
        for before, after in zip(c.pins, following, strict=False):
            num_writes += before.writes
            release, load = before.op_index + 1, after.op_index
            start, stop = self.ticks.release(release), self.ticks.load(load)
            if start < stop and c.is_movable:
                yield _gap(whole, release, load, (start, stop), num_writes)
        if c.ends_away:
            ticks = (min(last.stop_tick, self.ticks.num_ticks), self.ticks.num_ticks)
            release = last.op_index + 1 if c.is_movable else num_ops
            yield _gap(whole, release, None, ticks, c.num_writes, forced=True)
        elif not c.is_cycle and last.stop_tick < c.stop_tick and c.is_movable:
            yield _gap(whole, last.op_index + 1, None, (last.stop_tick, c.stop_tick), c.num_writes)


def _gap(
    whole: tuple[int, int, int],
    release: int,
    load: int | None,
    ticks: tuple[int, int],
    num_writes: int,
    *,
    forced: bool = False,
) -> Gap:
    chain, num_chunks, nbytes = whole
    return Gap(
        chain=chain,
        num_chunks=num_chunks,
        nbytes=nbytes,
        earliest_release=release,
        latest_load=load,
        start_tick=ticks[0],
        stop_tick=ticks[1],
        num_writes=num_writes,
        forced=forced,
    )


def _next_step(pin: Pin, ticks: PositionTicks) -> Pin:
    return Pin(
        op_index=pin.op_index + ticks.num_ops,
        start_tick=pin.start_tick + ticks.num_ticks,
        stop_tick=pin.stop_tick + ticks.num_ticks,
        writes=pin.writes,
    )


def residencies_of(chains: tuple[Chain, ...], aways: Iterable[Away], trace: Trace) -> tuple[Residency, ...]:
    """The residencies that follow from the decisions: each chain is in memory except where it is away."""
    by_chain: dict[int, list[Away]] = {}
    for away in aways:
        by_chain.setdefault(away.gap.chain, []).append(away)
    found: list[Residency] = []
    for index, chain in enumerate(chains):
        own = sorted(by_chain.get(index, ()), key=lambda away: (away.gap.stop_tick, away.gap.start_tick))
        found.extend(_Emitter(chain, trace).emit(own))
    return ordered(found, trace)


class _Emitter:
    """Turns one chain's decisions into residencies."""

    def __init__(self, chain: Chain, trace: Trace) -> None:
        self.chain = chain
        self.num_ops = len(trace.ops)
        self.num_ticks = trace.num_ticks
        writes = [pin.op_index for pin in chain.pins if pin.writes]
        self.writes = writes
        if chain.is_cycle:
            self.writes = [step * self.num_ops + op for step in range(3) for op in writes]

    def emit(self, aways: list[Away]) -> Iterator[Residency]:
        """`aways` in order; those that the trace forces are among them."""
        chain = self.chain
        if not chain.pins:
            if not aways and not chain.starts_away:
                yield Residency(variable=chain.variable, start=Kept(), stop=Kept())
            return
        if chain.is_cycle:
            if not aways:
                yield Residency(variable=chain.variable, start=Kept(), stop=Kept())
            for away, following in pairwise(aways):
                yield from self._stay(away, following.release)
            if aways:
                yield from self._stay(aways[-1], aways[0].release + self.num_ops)
            return
        begin: Away | None = None
        remaining = list(aways)
        if chain.starts_away:
            begin = remaining.pop(0)
        for away in remaining:
            yield from self._stay(begin, away.release)
            begin = away
        if begin is None or begin.load is not None:
            yield from self._stay(begin, None)

    def _stay(self, begin: Away | None, release: int | None) -> Iterator[Residency]:
        """One stay: from birth (None) or the load of `begin`, to `release` or death (None)."""
        load = begin.load if begin is not None else None
        first = load if load is not None else 0
        step = first // self.num_ops
        shift = step * self.num_ops
        start: Start = Loaded(first - shift) if load is not None else Born()
        boundary = shift + self.num_ops
        crosses = self.chain.stop_tick > self.num_ticks if release is None else release > boundary
        if not crosses or (step > 0 and not self.chain.is_cycle):
            stop = self._stop(load, release, shift)
            yield Residency(variable=self._variable(step), start=start, stop=stop)
        else:
            yield Residency(variable=self._variable(step), start=start, stop=Kept())
            stop = self._stop(load, release, boundary)
            yield Residency(variable=self._variable(step + 1), start=Kept(), stop=stop)

    def _variable(self, step: int) -> int:
        return self.chain.variable if step == 0 else self.chain.heir

    def _stop(self, load: int | None, release: int | None, shift: int) -> Stop:
        """The end of a stay in the step that begins at position `shift`."""
        if release is None:
            return Dies()
        changed = [op for op in self.writes if (load is None or op >= load) and op < release]
        if load is not None and not changed:
            return Dropped(after_op=release - shift - 1)
        write_op = max(max(changed, default=0) - shift, 0)
        return Evicted(write_op=min(write_op, release - shift - 1), release_op=release - shift)
