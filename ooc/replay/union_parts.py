"""What a union of steps consists of: ops in order, the variables that they use, and when those are born and freed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ooc.tracing.observed import Observed

_MOST_RATIO = 4.0
"""So many times as large one variable may be as another to stand in for it: in a plan, both have the larger size."""
_MOST_SIZES = 8
"""So many steps' sizes are remembered."""


class FreePhase(IntEnum):
    """Where a free comes, relative to an op."""

    INSIDE = 0
    AFTER = 1


@dataclass(slots=True, eq=False)
class UnionVariable:
    """A variable of a union.

    Attributes:
        nbytes: The largest size seen. Sizes differ only in elastic unions.
        smallest: The smallest; 0: it was below the threshold, or nobody asked for it, where another step had it.
        ordinal: Which allocation it was at the place of its birth, from 1 on; 0: nobody knows.
        group: Those that have one size in a plan, as they stood in for each other, or one becomes the other.
        num_seen: Steps that had it.
        sizes: In the latest steps that had it, by the number of the step.
        twin: Where one step alone had it: another one that had its size in that step, and is known better.
        birth: The op in which it is born, or before which; None: it exists when the step starts.
        death: The last place at which it was freed in any of the steps: an op and where there; the op is None for what
            is freed before the first one. None: it lives on.
        is_persistent: Known to be the same storage in every step.
        is_replaced: It was another storage in another step.
        serial: Of what exists at the start: the storage's, as last seen.
        heir: What it is when the next step starts.
        is_replaceable: Another one has stood in for it, in a step that left out the op that makes it.
        is_new: Of the step that is just being added.
        index: Among the union's variables; it never changes.
    """

    nbytes: int
    kind: str
    label: str
    evictable: bool
    birth: UnionOp | None = None
    is_born: bool = False
    death: tuple[UnionOp | None, FreePhase] | None = None
    is_persistent: bool = False
    is_replaced: bool = False
    serial: int | None = None
    rank: int | None = None
    end_serial: int | None = None
    heir: UnionVariable | None = None
    is_replaceable: bool = False
    is_new: bool = True
    index: int = -1
    smallest: int = 0
    ordinal: int = 0
    group: list[UnionVariable] = field(default_factory=list)
    num_seen: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    twin: UnionVariable | None = None

    def __post_init__(self) -> None:
        self.smallest = self.nbytes
        self.group.append(self)

    @property
    def may_vary(self) -> bool:
        """Whether it may have another size in another step: it does not live across steps."""
        return self.is_born or (self.death is not None and not self.is_persistent)

    @property
    def is_constant(self) -> bool:
        """Whether it had one size, in more than one step."""
        return len(self.sizes) > 1 and self.smallest == self.nbytes

    def may_have(self, nbytes: int) -> bool:
        """Whether it may have this size in another step."""
        sizes = nbytes, *(each.nbytes for each in self.group)
        may_vary = self.may_vary and not self.is_constant and max(sizes) <= _MOST_RATIO * min(sizes)
        return nbytes == self.nbytes or may_vary

    def note_nbytes(self, nbytes: int, step: int) -> None:
        """Note its size in a step."""
        self.nbytes, self.smallest = max(self.nbytes, nbytes), min(self.smallest, nbytes)
        self.sizes[step] = nbytes
        if len(self.sizes) > _MOST_SIZES:
            del self.sizes[next(iter(self.sizes))]

    def join(self, other: UnionVariable) -> None:
        """Let two have one size in a plan, and all that have one with them."""
        if self.group is not other.group:
            self.group += other.group
            for each in other.group:
                each.group = self.group

    def __repr__(self) -> str:
        return f"<UnionVariable of {self.nbytes} bytes, {self.label or self.kind}>"


NO_VARIABLES: frozenset[UnionVariable] = frozenset()
"""One for all: each call makes another."""


@dataclass(slots=True, eq=False)
class UnionOp:
    """An op of a union.

    Attributes:
        operands: One variable per operand, repeats included.
        written: Operands that it changes.
        between: Variables born between the op before and this one, in order.
        inside: Variables born in it, in order. (No containers of its own where there is nothing in them: a union has
            ops by the ten thousand, and the cycle collector follows each object.)
        place: Which op of the union it is.
        equal: Operands and what was born in it that had one size, in some step this one.
        forward: Of an op of a backward pass, the one whose gradient it is a part of; None: none, or nobody knows.
    """

    func: Any
    name: str
    where: str
    duration_ns: int
    operands: tuple[UnionVariable, ...] = ()
    written: frozenset[UnionVariable] = NO_VARIABLES
    between: tuple[UnionVariable, ...] = ()
    inside: tuple[UnionVariable, ...] = ()
    place: int = -1
    equal: dict[tuple[UnionVariable, UnionVariable], int] = field(default_factory=dict)
    forward: UnionOp | None = None

    @property
    def is_bystander(self) -> bool:
        """Whether it touches no variable."""
        return not (self.operands or self.inside)

    def born(self, *, is_inside: bool) -> tuple[UnionVariable, ...]:
        """What is born in it, or between the op before and this one."""
        return self.inside if is_inside else self.between

    def bear(self, variables: tuple[UnionVariable, ...], *, is_inside: bool) -> None:
        """These are all that is born there."""
        if is_inside:
            self.inside = variables
        else:
            self.between = variables

    def __repr__(self) -> str:
        return f"<UnionOp {self.place}: {self.name}>"


class StepBirths:
    """By op of an observation, what is born in it and before it; and where each variable is freed."""

    def __init__(self, observed: Observed) -> None:
        trace = observed.trace
        self._trace = trace
        self._between: dict[int, list[int]] = {}  # of the ops that have any
        self._inside: dict[int, list[int]] = {}
        born = [(v.birth_tick, index) for index, v in enumerate(trace.variables) if v.birth_tick is not None]
        for tick, index in sorted(born):
            op, is_inside = self._place(tick)
            (self._inside if is_inside else self._between).setdefault(op + (not is_inside), []).append(index)

    def at(self, op: int, *, is_inside: bool) -> Sequence[int]:
        """What is born in op `op`, or between it and the one before, in order."""
        return (self._inside if is_inside else self._between).get(op, ())

    def by_variable(self) -> dict[int, int]:
        """Of each variable that is born in the step, the op in which, or before which, that is."""
        return {v: op for places in (self._between, self._inside) for op, there in places.items() for v in there}

    def _place(self, tick: int) -> tuple[int, bool]:
        """The op in which, or after which, this tick comes (-1: before the first); whether in it."""
        op = bisect_right(self._trace.op_starts, tick) - 1
        return op, op >= 0 and tick < self._trace.ops[op].stop_tick

    def death(self, index: int, ops: Sequence[UnionOp]) -> tuple[UnionOp | None, FreePhase] | None:
        """Where a variable is freed, by the union's ops in place of the observation's."""
        tick = self._trace.variables[index].death_tick
        if tick is None:
            return None
        op, is_inside = self._place(tick)
        return (ops[op] if op >= 0 else None), FreePhase.INSIDE if is_inside else FreePhase.AFTER


def later(
    one: tuple[UnionOp | None, FreePhase] | None, other: tuple[UnionOp | None, FreePhase] | None
) -> tuple[UnionOp | None, FreePhase] | None:
    """The later one of two frees; None, which never comes, is the latest."""
    if one is None or other is None:
        return None
    return max(one, other, key=lambda death: (_place(death[0]), death[1]))


def outlive_uses(ops: Sequence[UnionOp], tail: UnionOp) -> None:
    """No variable is freed before an op that uses it, nor before it is born: after the last op that comes before that.

    In its own step nothing came between its birth and its end; the union may have ops there. `tail` is behind all ops.
    """
    before: UnionOp | None = None
    for op in (*ops, tail):
        for variables, least in ((op.between, before), (op.operands, op)):
            for variable in variables:
                death = variable.death
                if death is not None and _place(death[0]) < _place(least):
                    variable.death = least, FreePhase.AFTER
        before = op


def _place(op: UnionOp | None) -> int:
    """Of an op; of None, which stands for what comes before all ops, -1."""
    return op.place if op is not None else -1


def is_born_later(one: UnionVariable, other: UnionVariable) -> bool:
    """Of two that are born in a step, whether the first one is so after the other."""
    assert one.birth is not None
    assert other.birth is not None
    return one.birth.place > other.birth.place


@dataclass(slots=True)
class Match:
    """What it takes to let an op of the step be one of the union.

    Attributes:
        operands: The union's op has these from then on.
        is_exact: Each of the step's operands is known to be what the union's op has.
        is_certain: Besides, one of them was made in the step.
        has_stand_ins: One of them is known to be something else so far.
        is_small: Some of what the op has in other steps is too small for variables in this one, or was in those.
        roles: What the step's operands are from then on.
    """

    op: UnionOp
    operands: tuple[UnionVariable, ...]
    is_exact: bool
    is_certain: bool = False
    has_stand_ins: bool = False
    is_small: bool = False
    roles: dict[int, UnionVariable] = field(default_factory=dict)
