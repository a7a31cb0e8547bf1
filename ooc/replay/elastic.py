"""Elastic plans: one plan for all steps with the same ops, whatever the sizes, up to an envelope.

Steps whose batches differ in size run the same ops, whose operands come from the same places; only the sizes of some
variables differ, and of small ones a session sees nothing (below the threshold). So two observations of such steps are
*aligned*: a variable that is born in the step is told by the position at which it is allocated and by which of the
allocations there it is, small ones counted. One observation gives the *shape*, that in which the most variables are
large enough to be seen, and those that only others have are merged into it; the *envelope* is the shape with each
variable's largest size so far, and headroom for those that differ, so that the number of plans grows with the logarithm
of the largest size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from ooc.replay.merging import merged, strangers
from ooc.tracing.observed import Observed, close_cycle
from scheduler.trace import Trace, Variable
from vmm.table import between_ops, inside_op

if TYPE_CHECKING:
    from ooc.replay.executable_plan import ExecutablePlan

_Found = TypeVar("_Found")

HEADROOM = 1.25
"""The envelope holds so much more than the largest step seen (of what grows slowest with the step's size). Not tuned: a
larger one makes fewer plans, and each of them moves more."""
_MOST_EXPONENT = 64
"""Where the slowest growth is next to none, another is any power of it; the headroom has its limit long before."""
_MOST_HEADROOM = 2.0
"""Of what grows fastest, attention's scores for one."""

_MOST_LABELS = 0.8
"""Of the labels, so many come in each repetition of a step equally often; the others are what comes once."""

Alignment = Mapping[int, int]
"""Variables of one observation, and the same ones in another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What one plan is made for.

    Attributes:
        trace: The shape's, cyclic, with the sizes that the plan holds.
        elastic: Variables whose sizes differ from step to step.
        standing: Variables that exist throughout and are other storages each time: in the optimizer's part of a step,
            the gradients. They are taken to be where the segment before left them. In whole steps, what is the same for
            some steps and then another one.
        may_omit: Whether steps may leave out ops of it (`ooc.replay.step_unions`).
        union: The union of steps, if it is one, as it was when this was made: it may have grown since.
    """

    trace: Trace
    elastic: frozenset[int]
    standing: frozenset[int] = frozenset()
    may_omit: bool = False
    union: Observed | None = None

    @classmethod
    def of(cls, executable: ExecutablePlan, trace: Trace) -> Envelope:
        """What a plan is for, with another trace of the same sequence."""
        return cls(
            trace=trace,
            elastic=executable.elastic,
            standing=executable.standing,
            may_omit=executable.may_omit,
        )

    def is_of(self, trace: Trace) -> bool:
        """Whether a trace has the same variables, whatever their sizes: the same index means the same one."""
        return len(trace.variables) == len(self.trace.variables) and all(
            (ours.birth_tick, ours.death_tick) == (theirs.birth_tick, theirs.death_tick)
            for ours, theirs in zip(self.trace.variables, trace.variables, strict=True)
        )

    def has_room(self, index: int, nbytes: int) -> bool:
        """Whether a variable may have this size."""
        held = self.trace.variables[index].nbytes
        return nbytes == held or (index in self.elastic and nbytes < held)


class Plannable(Protocol):
    """What was seen of a sequence, as far as planning asks: a `Shape`, or a union of steps."""

    num_seen: int

    @property
    def is_elastic(self) -> bool: ...
    @property
    def observed(self) -> Observed: ...
    def envelope(self, chunk_nbytes: int, *, headroom: float = ..., is_segment: bool = ...) -> Envelope: ...
    def for_plan(self, envelope: Envelope) -> Observed | None: ...


class Shape:
    """Observations of one sequence of ops that differ in sizes alone, and so can share a plan.

    Args:
        observed: The first of them.

    Attributes:
        observed: The one in which the most variables were seen; indices of variables are its own.
        num_seen: How many there were.
    """

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.num_seen = 1
        self._earlier: Observed | None = None
        self._latest = observed
        self._largest = [v.nbytes for v in observed.trace.variables]
        self._smallest = list(self._largest)
        self._serials: list[set[int]] = [set() if s is None else {s} for s in observed.start_serials]
        self._persistent: set[int] = set()
        self._replaced: set[int] = set()  # was persistent, and is another storage now: it may be that for a while
        self._becomes: dict[int, int] = {}
        self._find_becomes(observed, {i: i for i in range(len(self._largest))})

    def __repr__(self) -> str:
        return f"<Shape of {len(self._largest)} variables, seen {self.num_seen} times>"

    @property
    def is_elastic(self) -> bool:
        """Whether some variable's size differs from one observation to another."""
        return any(least < most for least, most in zip(self._smallest, self._largest, strict=True))

    def align(self, observed: Observed, *, exactly: bool = False) -> Alignment | None:
        """The variables that an observation has in common with this shape; None: it is of another shape.

        What only one of them has can be merged into the other; with `exactly`, they differ in nothing.
        """
        if exactly and observed.trace.fingerprint() != self.observed.trace.fingerprint():
            return None
        forth = align(observed, self.observed)
        if forth is None:
            return None
        if any(v not in forth for v in observed.strays) or any(v not in forth.values() for v in self.observed.strays):
            return None
        if len(forth) == len(observed.trace.variables) or len(forth) == len(self._largest):
            return forth
        can_merge = strangers(observed, forth) is not None and strangers(self.observed, forth.values()) is not None
        return forth if can_merge else None

    def has_new(self, alignment: Alignment, observed: Observed) -> bool:
        """Whether the observation has variables that this shape does not have."""
        return len(alignment) < len(observed.trace.variables)

    def has_lost(self, alignment: Alignment) -> bool:
        """Whether the observation lacks a variable that lived across steps: it is gone, or not the session's now."""
        return not self._persistent.issubset(alignment.values())

    def add(self, observed: Observed, alignment: Alignment) -> None:
        """Note another observation, aligned with this shape."""
        self.num_seen += 1
        is_same = observed.trace.fingerprint() == self._latest.trace.fingerprint()
        self._earlier, self._latest = self._latest if is_same else None, observed
        if self.has_new(alignment, observed) and len(alignment) == len(self._largest):
            self._grow(observed, alignment)
            alignment = {i: i for i in range(len(self._largest))}
        elif len(alignment) < len(self._largest):  # what was not seen this time was below the threshold
            unseen = set(range(len(self._largest))).difference(alignment.values())
            self._smallest = [0 if i in unseen else nbytes for i, nbytes in enumerate(self._smallest)]
            if self.has_new(alignment, observed):
                alignment = self._merge(observed, alignment)
        if is_same and not self.is_elastic:
            self.observed = observed  # its serials are those that a plan is made for
        seen = [set(serials) for serials in self._serials]
        for theirs, ours in alignment.items():
            nbytes = observed.trace.variables[theirs].nbytes
            self._largest[ours] = max(self._largest[ours], nbytes)
            self._smallest[ours] = min(self._smallest[ours], nbytes)
            serial = observed.start_serials[theirs]
            if serial is not None and serial in seen[ours]:
                self._persistent.add(ours)
                self._replaced.discard(ours)
            elif ours in self._persistent:
                self._persistent.discard(ours)
                self._replaced.add(ours)
            if serial is not None:
                self._serials[ours] = {serial}
        self._find_becomes(observed, alignment)

    def _grow(self, observed: Observed, alignment: Alignment) -> None:
        """Let the observation, which has all variables of this shape and more, be the shape."""
        back = {ours: theirs for theirs, ours in alignment.items()}
        sizes = [v.nbytes for v in observed.trace.variables]
        largest, smallest = list(sizes), [0 if i not in alignment else n for i, n in enumerate(sizes)]
        serials: list[set[int]] = [set() for _ in sizes]
        for ours, theirs in back.items():
            largest[theirs] = self._largest[ours]
            smallest[theirs] = self._smallest[ours]
            serials[theirs] = self._serials[ours]
        self._persistent, self._replaced = (
            {back[ours] for ours in known} for known in (self._persistent, self._replaced)
        )
        self._becomes = {back[a]: back[b] for a, b in self._becomes.items()}
        self._largest, self._smallest, self._serials = largest, smallest, serials
        self.observed = observed

    def _merge(self, observed: Observed, alignment: Alignment) -> Alignment:
        """Take over the variables that only the observation has. Returns the alignment with these."""
        new = strangers(observed, alignment)
        assert new is not None
        self.observed = merged(self.observed, observed, alignment)
        found = dict(alignment) | {theirs: len(self._largest) + n for n, theirs in enumerate(new)}
        self._largest += [observed.trace.variables[theirs].nbytes for theirs in new]
        self._smallest += [0] * len(new)
        self._serials += [
            {serial} if (serial := observed.start_serials[theirs]) is not None else set() for theirs in new
        ]
        return found

    def _find_becomes(self, observed: Observed, alignment: Alignment) -> None:
        """Which variables at a step's end are which at the next one's start, as far as this observation shows."""
        born = {
            origin: index
            for index, origin in enumerate(self.observed.origins)
            if origin is not None and self.observed.trace.variables[index].birth_tick is not None
        }
        for theirs, ours in alignment.items():
            origin = observed.origins[theirs]
            if observed.trace.variables[theirs].birth_tick is not None or origin is None:
                continue
            index = born.get(origin)
            if index is not None and self.observed.trace.variables[index].death_tick is None:
                self._becomes = {a: b for a, b in self._becomes.items() if b != ours} | {index: ours}  # the latest

    def fits(self, envelope: Envelope, observed: Observed, alignment: Alignment) -> bool:
        """Whether a plan for the envelope, of this shape, could have played the observed step."""
        if not envelope.is_of(self.observed.trace):  # the shape has grown since: other indices
            return False
        return not self.has_new(alignment, observed) and all(
            envelope.has_room(ours, observed.trace.variables[theirs].nbytes) for theirs, ours in alignment.items()
        )

    def envelope(self, chunk_nbytes: int, *, headroom: float = HEADROOM, is_segment: bool = False) -> Envelope:
        """The trace to plan for, after at least two observations.

        Args:
            chunk_nbytes: Size of a chunk.
            headroom: The envelope holds so much more than the largest seen.
            is_segment: Of a part of a step: other parts come before and after it.
        """
        among = None if is_segment else self._replaced
        if not self.is_elastic and self._earlier is not None:
            trace = close_cycle(self._earlier, self._latest)
            return standing(trace, trace.variables, among=among)
        variables = self.observed.trace.variables
        varying = {
            index
            for index, (least, most) in enumerate(zip(self._smallest, self._largest, strict=True))
            if least < most and index not in self._persistent
        }
        alike = [group for group in _alike(self.observed) if not varying.isdisjoint(group)]
        varying.update(*alike)
        becomes = {a: b for a, b in self._becomes.items() if b not in self._persistent and variables[a].evictable}
        becomes.update(self._becomes_by_age(becomes, varying))
        for a, b in becomes.items():  # one reservation, one size
            if a in varying or b in varying:
                varying |= {a, b}
        sizes = self._sizes(varying, alike, chunk_nbytes, headroom)
        for a, b in becomes.items():
            sizes[a] = sizes[b] = max(sizes[a], sizes[b])
        for index in self._persistent:
            if variables[index].death_tick is None:
                becomes[index] = index
        ops = self.observed.trace.ops
        if varying:  # ops that were tried had other sizes: they are tried within the plan (`ProvenOps`)
            ops = tuple(replace(op, replayable=False) for op in ops)
        trace = replace(
            self.observed.trace,
            ops=ops,
            variables=tuple(
                replace(v, nbytes=sizes[index], becomes=becomes.get(index)) for index, v in enumerate(variables)
            ),
        )
        return standing(trace, trace.variables, frozenset(varying), among=among)

    def _becomes_by_age(self, known: Mapping[int, int], varying: set[int]) -> dict[int, int]:
        """Of those whose size never differs, which is which in the next step: matched by size, in order of age."""
        observed, variables = self.observed, self.observed.trace.variables
        taken = set(known.values())
        entering: dict[int, list[tuple[int, int]]] = {}
        leaving: dict[int, list[tuple[int, int]]] = {}
        for index, v in enumerate(variables):
            start, end = observed.start_serials[index], observed.end_serials[index]
            if index in varying:
                continue
            if v.birth_tick is None and start is not None and v.death_tick is not None and index not in taken:
                if index not in self._persistent:
                    entering.setdefault(v.nbytes, []).append((start, index))
            elif v.birth_tick is None or v.death_tick is not None or end is None:
                continue
            elif v.evictable and index not in known:
                leaving.setdefault(v.nbytes, []).append((end, index))
        return {
            born: successor
            for nbytes, comers in entering.items()
            for (_, successor), (_, born) in zip(
                sorted(comers, reverse=True), sorted(leaving.get(nbytes, ()), reverse=True), strict=False
            )
        }

    def _sizes(self, varying: set[int], alike: list[list[int]], chunk_nbytes: int, headroom: float) -> list[int]:
        """Each variable's size in the envelope: whole chunks for those that differ, which costs nothing."""
        largest, smallest = list(self._largest), list(self._smallest)
        for group in alike:
            seen = [smallest[index] for index in group if smallest[index] > 0]
            for index in group:
                largest[index] = max(self._largest[i] for i in group)
                smallest[index] = min(seen, default=0)
        growth = {index: largest[index] / smallest[index] for index in varying if smallest[index] > 0}
        slowest = min((g for g in growth.values() if g > 1.0), default=1.0)
        sizes = list(largest)
        for index in varying:
            factor = headroom
            if headroom > 1.0 and growth.get(index, 1.0) > slowest > 1.0:
                exponent = min(math.log(growth[index]) / math.log(slowest), _MOST_EXPONENT)
                factor = min(headroom**exponent, _MOST_HEADROOM)
            sizes[index] = -(-int(sizes[index] * factor) // chunk_nbytes) * chunk_nbytes
        return sizes

    def for_plan(self, envelope: Envelope) -> Observed | None:
        """The observation that gives the shape, with the storages seen last; None: it has grown since the envelope."""
        if not envelope.is_of(self.observed.trace):
            return None
        serials = self.observed.start_serials
        newest = tuple(max(self._serials[i]) if i in self._persistent else s for i, s in enumerate(serials))
        return replace(self.observed, start_serials=newest)

    def others_throughout(self, observed: Observed, alignment: Alignment) -> set[int]:
        """What exists throughout an observed step, and is another storage than before."""
        return {
            theirs
            for theirs, ours in alignment.items()
            if observed.trace.variables[theirs].birth_tick is None
            and observed.trace.variables[theirs].death_tick is None
            and observed.start_serials[theirs] not in self._serials[ours]
        }

    def num_persistent_changed(self, observed: Observed, alignment: Alignment) -> tuple[int, int]:
        """Of what exists throughout a step, how many are other storages than before; and how many there are."""
        variables = (observed.trace.variables[theirs] for theirs in alignment)
        throughout = sum(v.birth_tick is None and v.death_tick is None for v in variables)
        return len(self.others_throughout(observed, alignment)), throughout


def standing(
    trace: Trace,
    variables: tuple[Variable, ...],
    elastic: frozenset[int] = frozenset(),
    *,
    among: Container[int] | None = None,
) -> Envelope:
    """The envelope in which what exists throughout and is not the same each time stays where it is at the borders.

    `among`: no others than these; None: all. In a whole step, what is another storage each time is a batch from a list,
    and the next one is not known; what was the same for some steps will be so again, as what an agent has collected.
    """
    heirs = {v.becomes for v in variables}
    standing = frozenset(
        index
        for index, v in enumerate(variables)
        if v.birth_tick is None
        and v.death_tick is None
        and v.becomes is None
        and v.evictable
        and index not in elastic
        and index not in heirs
        and (among is None or index in among)
    )
    changed = tuple(replace(v, becomes=index) if index in standing else v for index, v in enumerate(variables))
    return Envelope(trace=replace(trace, variables=changed), elastic=elastic, standing=standing)


def _alike(observed: Observed) -> list[list[int]]:
    """Variables that are the same thing in another repetition within the step, as in each of several micro-batches.

    Each repetition may be as large as any other was: a group has one size. They are found by labels (the op with its
    place in the program): of a step of m repetitions, most labels come a multiple of m times.
    """
    by_label: dict[str, list[int]] = {}
    for index, v in enumerate(observed.trace.variables):
        if v.birth_tick is not None and v.label:
            by_label.setdefault(v.label, []).append(index)
    counts = [len(found) for found in by_label.values()]
    num_repetitions = next(
        (
            m
            for m in sorted(set(counts), reverse=True)
            if sum(count % m == 0 for count in counts) >= _MOST_LABELS * len(counts)
        ),
        1,
    )
    groups = []
    for found in by_label.values():
        num_apart, rest = divmod(len(found), num_repetitions)
        if num_repetitions > 1 and rest == 0:
            groups += [found[start::num_apart] for start in range(num_apart)]
    return groups


def align(first: Observed, second: Observed) -> Alignment | None:
    """Variables of `first` that `second` has, too. None: the two contradict each other, whatever the sizes."""
    if first.family != second.family or first.funcs != second.funcs:
        return None
    if first.trace.fingerprint() == second.trace.fingerprint():
        return {index: index for index in range(len(first.trace.variables))}
    places, others = _known(_births, first), _known(_births, second)
    if places is None or others is None:
        return None
    found = {index: others[place] for place, index in places.items() if place in others}
    for kind in (_by_identity, _by_turn):  # what exists when the step starts and was not born in the one before
        there, also = kind(first, found.keys()), kind(second, found.values())
        found.update({index: also[place] for place, index in there.items() if place in also})
    lives, other_lives = _known(_lives, first), _known(_lives, second)
    return found if all(lives[a] == other_lives[b] for a, b in found.items()) else None


def _known(find: Callable[[Observed], _Found], observed: Observed) -> _Found:
    """What `find` says of an observation. It is asked once: each new one is compared with all shapes."""
    name = find.__name__
    if name not in observed.known:
        observed.known[name] = find(observed)
    found: _Found = observed.known[name]
    return found


_Place = tuple[object, ...]
"""What tells a variable from the others of its step, whatever its size."""


def _births(observed: Observed) -> dict[_Place, int] | None:
    """What is born in the step, or was in the one before, by its place of birth. None: two cannot be told apart."""
    found: dict[_Place, int] = {}
    for index, v in enumerate(observed.trace.variables):
        origin, is_born = observed.origins[index], v.birth_tick is not None
        if origin is None or origin[0] != observed.family:
            if is_born:
                return None
            continue
        place = (is_born, *origin[1:])
        if place in found:
            return None
        found[place] = index
    return found


def _by_identity(observed: Observed, besides: Collection[int]) -> dict[_Place, int]:
    """What exists when the step starts, by its storage and the op that first uses it."""
    serials = observed.start_serials
    return {(serials[index], first): index for index, first in _known(_first_uses, observed) if index not in besides}


def _by_turn(observed: Observed, besides: Collection[int]) -> dict[_Place, int]:
    """The same, by the op that first uses it, and which of several it is."""
    found: dict[_Place, int] = {}
    turns: dict[int, int] = {}
    for index, first in _known(_first_uses, observed):
        if index not in besides:
            turns[first] = turns.get(first, -1) + 1
            found[first, turns[first]] = index
    return found


def _first_uses(observed: Observed) -> list[tuple[int, int]]:
    """What exists when the step starts, in order, with the step position of its first use, or of its free."""
    variables = observed.trace.variables
    found: dict[int, int] = {}
    for op, occurrences in enumerate(observed.occurrences):
        for index in occurrences:
            if variables[index].birth_tick is None:
                found.setdefault(index, inside_op(op))
    for index, v in enumerate(variables):
        if v.birth_tick is None:
            found.setdefault(index, _death_position(observed.trace, v.death_tick))
    return list(found.items())


def _lives(observed: Observed) -> list[int]:
    """Per variable what must be equal in two observations: its uses, where it is freed, whether it can be away.

    As hashes, since they are kept: the uses themselves would take as much memory as the trace. Two that are equal by
    chance would make a plan that is left where the step differs, as any wrong one.
    """
    uses = observed.trace.uses_by_variable()
    return [
        hash(
            (
                tuple((op, use.reads, use.writes) for op, use in uses[index]),
                _death_position(observed.trace, v.death_tick),
                v.evictable,
            )
        )
        for index, v in enumerate(observed.trace.variables)
    ]


def _death_position(trace: Trace, tick: int | None) -> int:
    """The step position of a free; -1: none."""
    if tick is None:
        return -1
    op = bisect_right(trace.op_starts, tick) - 1
    if op >= 0 and tick < trace.ops[op].stop_tick:
        return inside_op(op)
    return between_ops(op + 1)
