"""What earlier steps used, op by op, and how the present step lies beside one of them. Pure: knows neither torch nor
memory."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

NEVER = 1 << 62
"""A next use later than all others."""

Variable = int
"""Identity of a variable from one step to the next: `-1 - serial` of one that is there at the start, else how many
were allocated before it."""


class Allocation(NamedTuple):
    """An allocation or a free, at a step position (`vmm.table`)."""

    address: int
    is_free: bool
    position: int


class Operands(NamedTuple):
    """Ops in order, and what those of them use that use variables. Most of a small model's ops use none."""

    funcs: list[Any]
    """What each calls."""
    used: list[tuple[int, Sequence[int]]]
    """Of those that use any: its place among these, and its operands' addresses, repeats included."""

    @classmethod
    def of(cls, ops: Iterable[tuple[Any, Sequence[int]]]) -> Operands:
        """From each op and its operands' addresses."""
        pairs = list(ops)
        return cls([func for func, _ in pairs], [(place, found) for place, (_, found) in enumerate(pairs) if found])


class StepUses:
    """Which op of a recorded step used which variables.

    Attributes:
        funcs: The ops.
        uses_at: By op, the variables that it used, if any.
    """

    def __init__(
        self,
        ops: Operands,
        *,
        start: Mapping[int, int],
        allocations: Sequence[Allocation],
    ) -> None:
        """From ops, the serials at the step's start by address, and the log in order."""
        live = {address: -1 - serial for address, serial in start.items()}
        self.funcs = ops.funcs
        self.uses_at: dict[int, tuple[Variable, ...]] = {}
        self._when: dict[Variable, list[int]] = {}
        self._freed_at: dict[Variable, int] = {}  # the op before which, of those freed within the step
        self._births: list[int] = []  # the op before which, in order
        next_event = 0
        for index, addresses in (*ops.used, (NEVER, ())):
            while next_event < len(allocations) and allocations[next_event].position <= 2 * index:
                event = allocations[next_event]
                next_event += 1
                before = min((event.position + 1) // 2, len(self.funcs))
                if not event.is_free:
                    live[event.address] = len(self._births)
                    self._births.append(before)
                elif (freed := live.pop(event.address, None)) is not None:
                    self._freed_at[freed] = before
            used = tuple(dict.fromkeys([live[address] for address in addresses if address in live]))
            if not used:
                continue
            self.uses_at[index] = used
            for variable in used:
                when = self._when.get(variable)
                if when is None:
                    self._when[variable] = [index]
                else:
                    when.append(index)

    def __repr__(self) -> str:
        return f"<StepUses of {len(self._when)} variables in {len(self.funcs)} ops>"

    def num_born_before(self, index: int) -> int:
        """How many variables were allocated before op `index`."""
        return bisect_right(self._births, index)

    def known(self, variables: Iterable[Variable]) -> frozenset[Variable]:
        """Those of these that it used."""
        return frozenset(variable for variable in variables if variable in self._when)

    def num_same(self, place: int, funcs: list[Any], standing: Iterable[tuple[int, list[Variable]]]) -> int:
        """How many of some ops go as this step's do from `place` on.

        Args:
            place: One of this step's ops.
            funcs: What the ops call.
            standing: For some, by their place among these, variables that they use. What this step never used is
                no difference.
        """
        there = self.funcs[place : place + len(funcs)]
        number = len(funcs)
        if there != funcs:
            pairs = enumerate(zip(there, funcs, strict=False))
            number = next((index for index, (own, other) in pairs if own != other), len(there))
        for index, variables in standing:
            if index >= number:
                break
            used = self.uses_at.get(place + index, ())
            if any(variable not in used and variable in self._when for variable in variables):
                return index
        return number

    def place_of(self, func: Any, standing: frozenset[Variable], start: int) -> int | None:
        """The first op from `start` on that calls `func` on these, among others."""
        with contextlib.suppress(ValueError):  # there are no more such ops
            while True:
                start = self.funcs.index(func, start)
                if standing.issubset(self.uses_at.get(start, ())):
                    return start
                start += 1
        return None

    def next_use(self, variable: Variable, index: int) -> int:
        """The first op after `index` that uses it; of one that lives on, that is in the next step. Else `NEVER`.

        Of one that is freed before it is used again it is the op before which it was: until then it holds its memory,
        and to evict it takes a write for nothing.
        """
        when = self._when.get(variable, ())
        place = bisect_right(when, index)
        if place < len(when):
            return when[place]
        freed_at = self._freed_at.get(variable)
        if freed_at is not None:
            return freed_at if freed_at > index else NEVER
        return len(self.funcs) + when[0] if when and variable < 0 else NEVER

    def is_over(self, variable: Variable, index: int) -> bool:
        """Whether no op after `index` used it before it was freed, which was after that, too."""
        when = self._when.get(variable, ())
        return self._freed_at.get(variable, -1) > index and (not when or when[-1] <= index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An earlier step, and where the present one is in it.

    Attributes:
        uses: The earlier step.
        shift: The present step's op `i` is op `i + shift` there.
        born_until: Variables allocated before so many others are the same in both.
        born_from, born_shift: Those allocated from here on are `born_shift` further on there.
    """

    uses: StepUses
    shift: int = 0
    born_until: int = NEVER
    born_from: int = NEVER
    born_shift: int = 0

    def next_use(self, variable: Variable, index: int) -> int:
        """The first op after `index` that uses a variable of the present step; `index` where nobody can say.

        `NEVER` also of one that was there when the present step began and not when the earlier one did.
        """
        if variable >= self.born_from:
            variable += self.born_shift
        elif variable >= self.born_until:
            return index
        later = self.uses.next_use(variable, index + self.shift)
        return later if later >= NEVER else later - self.shift

    def is_over(self, variable: Variable, index: int) -> bool:
        """Whether a variable of the present step will be freed before an op uses it again; False if nobody can say."""
        if variable >= self.born_from:
            variable += self.born_shift
        elif variable >= self.born_until:
            return False
        return self.uses.is_over(variable, index + self.shift)

    def upcoming(self, index: int, num_ops: int) -> Iterator[tuple[int, Variable]]:
        """The variables of the present step that ops after `index` will use, of so many ops, each where it is first."""
        seen: set[Variable] = set()
        start = index + 1 + self.shift
        for place in range(max(start, 0), min(start + num_ops, len(self.uses.funcs))):
            for variable in self.uses.uses_at.get(place, ()):
                if variable in seen:
                    continue
                seen.add(variable)
                if variable >= self.born_until:
                    variable -= self.born_shift
                    if variable < self.born_from:
                        continue
                yield place - self.shift, variable
