"""Guesses when each variable is used next in a step that runs on demand. A wrong guess costs time, never bits.

Two sources. An earlier step that has begun with the same ops tells which variable its later ops used: variables that
live across steps are known by their serials, others by the order of their allocation. (Their sizes may differ: batches
of other lengths take the same ops.) Without one there is what every step has in common: the backward pass uses what the
forward pass left in reverse order, and what it has used itself comes next in the optimizer's step, which begins where
the backward pass has ended. Pure: knows neither torch nor memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_REFERENCES = 4
"""Earlier steps that are remembered: a micro-batch, an optimizer's step, an evaluation and one more take turns."""

NEVER = 1 << 62
"""A next use later than all others."""

Variable = int
"""Identity of a variable from one step to the next: `-1 - serial` of one that is there at the start, else how many
were allocated before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """An allocation or a free, at a step position (`vmm.table`)."""

    address: int
    is_free: bool
    position: int


class StepUses:
    """Which op of a recorded step used which variables.

    Attributes:
        funcs: The ops.
        uses_at: Per op, the variables that it used.
    """

    def __init__(
        self,
        ops: Iterable[tuple[Any, Sequence[int]]],
        *,
        start: Mapping[int, int],
        allocations: Sequence[Allocation],
    ) -> None:
        """From ops with the addresses of their operands, the serials at the step's start by address, and the log."""
        live = {address: -1 - serial for address, serial in start.items()}
        self.funcs: list[Any] = []
        self.uses_at: list[tuple[Variable, ...]] = []
        self._when: dict[Variable, list[int]] = {}
        num_born = next_event = 0
        for index, (func, addresses) in enumerate(ops):
            while next_event < len(allocations) and allocations[next_event].position <= 2 * index:
                event = allocations[next_event]
                next_event += 1
                if event.is_free:
                    live.pop(event.address, None)
                else:
                    live[event.address] = num_born
                    num_born += 1
            used = tuple(dict.fromkeys(live[address] for address in addresses if address in live))
            self.funcs.append(func)
            self.uses_at.append(used)
            for variable in used:
                self._when.setdefault(variable, []).append(index)

    def __repr__(self) -> str:
        return f"<StepUses of {len(self._when)} variables in {len(self.funcs)} ops>"

    def next_use(self, variable: Variable, index: int) -> int:
        """The first op after `index` that uses it; of one that lives on, that is in the next step. Else `NEVER`."""
        when = self._when.get(variable)
        if not when:
            return NEVER
        place = bisect_right(when, index)
        if place < len(when):
            return when[place]
        return len(self.funcs) + when[0] if variable < 0 else NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A variable that may go.

    Attributes:
        serial: Its record's.
        used_ns: When it was last used.
    """

    serial: int
    used_ns: int


class Foresight:
    """What is known of the rest of the present step.

    Args:
        funcs_since: The ops of the present step from one index on.
    """

    def __init__(self, funcs_since: Callable[[int], Sequence[Any]] = lambda _: ()) -> None:
        self.funcs_since = funcs_since
        self._remembered: deque[Callable[[], StepUses]] = deque(maxlen=_MOST_REFERENCES)
        self._candidates: list[StepUses] | None = None
        self._num_compared = 0
        self._first_serial: int | None = None
        self._backward_ns: int | None = None

    def __repr__(self) -> str:
        return f"<Foresight from {len(self._remembered)} steps, {self._num_compared} ops compared>"

    def begin(self, first_serial: int | None) -> None:
        """A step begins, whose first allocation will have this serial; None: the order of allocations is not known."""
        self._candidates = None
        self._num_compared = 0
        self._first_serial = first_serial
        self._backward_ns = None

    def remember(self, make: Callable[[], StepUses]) -> None:
        """A step has ended; `make` tells what it used, if somebody asks."""
        self._remembered.appendleft(make)

    def forget(self) -> None:
        """Earlier steps tell nothing any more."""
        self._remembered.clear()
        self._candidates = None

    def note_backward(self, now_ns: int) -> None:
        """A backward pass is under way."""
        if self._backward_ns is None:
            self._backward_ns = now_ns

    def reference(self) -> StepUses | None:
        """The earlier step that begins like the present one, the latest of several."""
        if self._candidates is None:
            self._candidates = [make() for make in self._remembered]
        if self._candidates:
            new = self.funcs_since(self._num_compared)
            start, stop = self._num_compared, self._num_compared + len(new)
            self._candidates = [uses for uses in self._candidates if uses.funcs[start:stop] == list(new)]
            self._num_compared = stop
        return self._candidates[0] if self._candidates else None

    def variable(self, serial: int) -> Variable | None:
        """A record's variable in this step; None: not known."""
        if self._first_serial is None:
            return None
        return -1 - serial if serial < self._first_serial else serial - self._first_serial

    def latest_first(self, candidates: Sequence[Candidate], index: int) -> list[tuple[int, int]]:
        """The candidates in the order in which they should go, while op `index` runs: latest next use first.

        Returns:
            For each its place among `candidates`, and the op that will use it: `index` itself where nobody can say.
        """
        uses = self.reference()
        if uses is None:
            order = sorted(range(len(candidates)), key=lambda place: self._stack_order(candidates[place]))
            return [(place, index) for place in order]
        next_uses = []
        for candidate in candidates:
            variable = self.variable(candidate.serial)
            next_uses.append(uses.next_use(variable, index) if variable is not None else index)
        order = sorted(range(len(candidates)), key=lambda place: (-next_uses[place], candidates[place].used_ns))
        return [(place, next_uses[place]) for place in order]

    def _stack_order(self, candidate: Candidate) -> tuple[bool, int]:
        """Least recently used first; in a backward pass, those first that it has used already."""
        return self._backward_ns is None or candidate.used_ns < self._backward_ns, candidate.used_ns

    def upcoming(self, index: int, num_ops: int) -> list[tuple[int, Variable]]:
        """The variables that ops after `index` will use, of so many ops, in order of their first use."""
        uses = self.reference()
        if uses is None:
            return []
        first: dict[Variable, int] = {}
        for later in range(index + 1, min(index + 1 + num_ops, len(uses.funcs))):
            for variable in uses.uses_at[later]:
                first.setdefault(variable, later)
        return [(later, variable) for variable, later in first.items()]
