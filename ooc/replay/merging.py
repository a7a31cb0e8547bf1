"""Two observations of the same ops in which other variables were large enough to be seen, as one that has them all.

Rows that are routed to one of many networks, or lengths near the threshold: each step sees others of its variables.
Those that one observation has and the other has not (*strangers*) are born in the step, or freed in it, so it is known
where they belong: at the place of their birth among the allocations there, and at that of their free, at the latest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ooc.tracing.observed import NEED, Observed
from scheduler.trace import Op, Trace, Use
from vmm.table import inside_op

_BIRTH, _DEATH_INSIDE, _DEATH_BETWEEN = 0.25, 0.5, -0.5
"""Where a stranger's events come among the ticks: after that of the allocation before it, or of the op's last event;
right before that of the next op's start."""


def strangers(observed: Observed, known: Iterable[int]) -> list[int] | None:
    """The observation's variables besides `known`. None: one of them cannot be merged into another observation."""
    found = sorted(set(range(len(observed.trace.variables))).difference(known))
    return found if all(_is_mergeable(observed, index) for index in found) else None


def _is_mergeable(observed: Observed, index: int) -> bool:
    v, origin = observed.trace.variables[index], observed.origins[index]
    if (
        not v.evictable
        or any(observed.flights)
        or any(observed.sliced)
        or (v.birth_tick is None and v.death_tick is None)
    ):
        return False
    return v.birth_tick is None or (origin is not None and inside_op(_op_at(observed.trace, v.birth_tick)) == origin[1])


def _op_at(trace: Trace, tick: int) -> int:
    """The op inside which, or after which, this tick comes; -1: before the first."""
    return bisect_right(trace.op_starts, tick) - 1


def merged(observed: Observed, other: Observed, alignment: Mapping[int, int]) -> Observed:
    """`observed` with the strangers of `other` behind its own variables.

    Args:
        observed: Its variables keep their indices.
        other: Of the same ops.
        alignment: Variables of `other`, and the same ones in `observed`.
    """
    new = strangers(other, alignment)
    assert new is not None
    index_of = dict(alignment) | {theirs: len(observed.trace.variables) + n for n, theirs in enumerate(new)}
    marks = _Marks(observed, other, new)
    ops = tuple(
        replace(op, start_tick=marks.tick(op.start_tick), stop_tick=marks.stop_tick(op), uses=uses)
        for op, uses in zip(observed.trace.ops, _uses(observed.trace, other.trace, index_of), strict=True)
    )
    variables = [
        replace(
            v,
            birth_tick=None if v.birth_tick is None else marks.tick(v.birth_tick),
            death_tick=None if v.death_tick is None else marks.tick(v.death_tick),
        )
        for v in observed.trace.variables
    ]
    variables += [
        replace(other.trace.variables[i], birth_tick=marks.birth_tick(i), death_tick=marks.death_tick(i)) for i in new
    ]
    metadata = dict(observed.trace.metadata)
    if NEED in metadata and NEED in other.trace.metadata:
        metadata[NEED] = max(metadata[NEED], other.trace.metadata[NEED])
    return replace(
        observed,
        trace=replace(
            observed.trace, ops=ops, variables=tuple(variables), num_ticks=marks.num_ticks, metadata=metadata
        ),
        occurrences=tuple(
            tuple(_in_order(ours, [index_of[i] for i in theirs]))
            for ours, theirs in zip(observed.occurrences, other.occurrences, strict=True)
        ),
        start_serials=observed.start_serials + tuple(other.start_serials[i] for i in new),
        start_ranks=observed.start_ranks + tuple(other.start_ranks[i] for i in new),
        end_serials=observed.end_serials + tuple(other.end_serials[i] for i in new),
        origins=observed.origins + tuple(other.origins[i] for i in new),
    )


def _uses(ours: Trace, theirs: Trace, index_of: Mapping[int, int]) -> Iterator[tuple[Use, ...]]:
    for op, other in zip(ours.ops, theirs.ops, strict=True):
        by_variable = {index_of[use.variable]: replace(use, variable=index_of[use.variable]) for use in other.uses}
        by_variable |= {use.variable: use for use in op.uses}
        order = _in_order([u.variable for u in op.uses], [index_of[u.variable] for u in other.uses])
        yield tuple(by_variable[variable] for variable in order)


def _in_order(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """All of `ours`, and what else is in `theirs`, each behind what it is behind there."""
    found: list[int] = []
    place = 0
    for variable in theirs:
        if variable in ours[place:]:
            upto = ours.index(variable, place) + 1
            found += ours[place:upto]
            place = upto
        elif variable not in ours:
            found.append(variable)
    return [*found, *ours[place:]]


@dataclass(frozen=True, slots=True, order=True)
class _Mark:
    """Where an event belongs: a tick of the trace that is merged into, or a place among these; and in which order."""

    at: float
    ordinal: int = 0
    index: int = -1


class _Marks:
    """All events of one trace, and those of another's strangers among them, in order: the ticks of the merged trace."""

    def __init__(self, observed: Observed, other: Observed, new: Sequence[int]) -> None:
        trace = observed.trace
        self._births: dict[int, _Mark] = {}
        self._deaths: dict[int, _Mark] = {}
        self._last_inside: dict[int, _Mark] = {}  # by the tick that comes after an op's last event
        allocations: dict[int, list[tuple[int, int]]] = {}  # by place: which of the allocations there, and its tick
        for index, v in enumerate(trace.variables):
            origin = observed.origins[index]
            if v.birth_tick is not None and origin is not None:
                allocations.setdefault(origin[1], []).append((origin[2], v.birth_tick))
        for index in new:
            v, origin = other.trace.variables[index], other.origins[index]
            if v.birth_tick is not None and origin is not None:
                op = trace.ops[_op_at(other.trace, v.birth_tick)]
                before = [tick for ordinal, tick in allocations.get(origin[1], ()) if ordinal < origin[2]]
                self._births[index] = _Mark(max(before, default=op.start_tick) + _BIRTH, origin[2], index)
                self._note_inside(op, self._births[index])
            if v.death_tick is not None:
                self._deaths[index] = self._death(trace, other.trace, index, v.death_tick)
        marks = [_Mark(tick) for tick in range(trace.num_ticks)]
        self._ticks = {
            mark: tick for tick, mark in enumerate(sorted([*marks, *self._births.values(), *self._deaths.values()]))
        }

    def _death(self, trace: Trace, other: Trace, index: int, tick: int) -> _Mark:
        number = _op_at(other, tick)
        if number >= 0 and tick < other.ops[number].stop_tick:
            mark = _Mark(trace.ops[number].stop_tick - 1 + _DEATH_INSIDE, index=index)
            self._note_inside(trace.ops[number], mark)
            return mark
        is_last = number + 1 == len(trace.ops)
        return _Mark((trace.num_ticks if is_last else trace.op_starts[number + 1]) + _DEATH_BETWEEN, 1, index)

    def _note_inside(self, op: Op, mark: _Mark) -> None:
        self._last_inside[op.stop_tick] = max(mark, self._last_inside.get(op.stop_tick, mark))

    @property
    def num_ticks(self) -> int:
        return len(self._ticks)

    def tick(self, tick: int) -> int:
        return self._ticks[_Mark(tick)]

    def stop_tick(self, op: Op) -> int:
        last = _Mark(op.stop_tick - 1)
        return self._ticks[max(last, self._last_inside.get(op.stop_tick, last))] + 1

    def birth_tick(self, index: int) -> int | None:
        return self._ticks[self._births[index]] if index in self._births else None

    def death_tick(self, index: int) -> int | None:
        return self._ticks[self._deaths[index]] if index in self._deaths else None
