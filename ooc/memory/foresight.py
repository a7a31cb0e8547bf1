"""Guesses when each variable is used next in a step that runs on demand. A wrong guess costs time, never bits.

Two sources. An earlier step that has begun with the same ops tells which variable its later ops used: variables that
live across steps are known by their serials, others by the order of their allocation. (Their sizes may differ: batches
of other lengths take the same ops.) Without one there is what every step has in common: the backward pass uses what the
forward pass left in reverse order, and what it has used itself comes next in the optimizer's step, which begins where
the backward pass has ended. Pure: knows neither torch nor memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ooc.memory.present_uses import PresentUses
from ooc.memory.step_uses import NEVER, Operands, Reference, StepUses, Variable

_MOST_REFERENCES = 4
"""Earlier steps that are remembered: a micro-batch, an optimizer's step, an evaluation and one more take turns."""


class Candidate(Protocol):
    """A variable that may go: its record."""

    @property
    def serial(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def used_ns(self) -> int:
        """When it was last used."""


class PresentStep(Protocol):
    """What has come in the present step so far."""

    def ops_since(self, start: int) -> Operands:
        """Its ops from one on."""

    def variable_at(self, address: int) -> tuple[int, int] | None:
        """The serial and the bytes of the variable at this address, if one is there now."""

    def next_serial(self) -> int:
        """More than any serial so far."""


class Foresight:
    """What is known of the rest of the present step.

    An earlier step that began with the same ops is followed as long as it goes on so. From then on nothing is known,
    until an op comes that it had later, on the same of the variables that live on: there it is taken up again. So a
    layer that is left out, or a loop that takes fewer turns, costs the guesses of a few ops.

    Attributes:
        present: The present step; None: nothing is told of it.
    """

    def __init__(self, present: PresentStep | None = None) -> None:
        self.present = present
        self._remembered: deque[Callable[[], StepUses]] = deque(maxlen=_MOST_REFERENCES)
        self._candidates: list[StepUses] | None = None
        self._num_compared = 0
        self._first_serial: int | None = None
        self._begun_ns = 0
        self._knows_births = True
        self._own = PresentUses()
        self._lost: tuple[StepUses, int, int] | None = None
        """The step that was followed, from which of its ops on it may be taken up, and how many births both share."""
        self._followed: Reference | None = None

    def __repr__(self) -> str:
        return f"<Foresight from {len(self._remembered)} steps, {self._num_compared} ops compared>"

    def begin(self, first_serial: int | None, now_ns: int = 0, *, knows_births: bool = True) -> None:
        """A step begins, whose first allocation will have this serial; None: nobody asks.

        Args:
            first_serial: All that lives on from earlier steps has a smaller one.
            now_ns: The time.
            knows_births: Whether each allocation takes the next serial.
        """
        self._candidates = self._followed = self._lost = None
        self._num_compared = 0
        self._first_serial = first_serial
        self._begun_ns = now_ns
        self._knows_births = knows_births
        self._own = PresentUses()
        self._own.note_births(0, first_serial or 0)

    def remember(self, make: Callable[[], StepUses]) -> None:
        """A step has ended; `make` tells what it used, if somebody asks."""
        self._remembered.appendleft(make)

    def forget(self) -> None:
        """Earlier steps tell nothing any more."""
        self._remembered.clear()
        self._candidates = self._followed = self._lost = None

    def note_backward(self, index: int) -> None:
        """A backward pass is under way, since about op `index`."""
        self._own.note_backward(index)

    def reference(self) -> Reference | None:
        """The earlier step that goes like the present one: of those that began so, the latest."""
        if self._first_serial is None or self.present is None:
            return None
        if self._candidates is None:
            self._candidates = [make() for make in self._remembered]
            self._follow(self._candidates)
        self._own.note_births(self._num_compared, self.present.next_serial())
        start = self._num_compared
        funcs, operands = self.present.ops_since(start)
        if funcs:
            used = [(place, self._used(start + place, addresses)) for place, addresses in operands]
            if self._candidates:
                self._compare(funcs, [(place, found) for place, serials in used if (found := self._standing(serials))])
            self._num_compared += len(funcs)
        return self._followed

    def _used(self, index: int, addresses: Sequence[int]) -> list[int]:
        """Note that op `index` used what is at these addresses. The variables' serials."""
        assert self.present is not None
        variables = [found for address in addresses if (found := self.present.variable_at(address)) is not None]
        self._own.note(index, variables)
        return [serial for serial, _ in variables]

    def _standing(self, serials: Sequence[int]) -> list[Variable]:
        """Those of these variables that have been there since before the step."""
        first = self._first_serial
        assert first is not None
        return [-1 - serial for serial in serials if serial < first]

    def _follow(self, candidates: Sequence[StepUses]) -> None:
        if candidates:
            self._followed = Reference(uses=candidates[0], born_until=NEVER if self._knows_births else 0)

    def _compare(self, funcs: list[Any], standing: Sequence[tuple[int, list[Variable]]]) -> None:
        """Follow the candidates, or what was taken up again, over the ops that have come: what each called, on what."""
        assert self._candidates is not None
        start = self._num_compared
        if self._followed is not None:
            if self._lost is None:
                num_same = [uses.num_same(start, funcs, standing) for uses in self._candidates]
                pairs = zip(self._candidates, num_same, strict=True)
                self._candidates = [uses for uses, number in pairs if number == max(num_same)]
                self._follow(self._candidates)
            followed = self._followed
            place = start + followed.shift
            num_same_now = followed.uses.num_same(place, funcs, standing)
            if num_same_now == len(funcs):
                return
            place += num_same_now
            shared = min(followed.uses.num_born_before(place), followed.born_until)
            self._lost, self._followed = (followed.uses, place, shared), None
        is_last = bool(standing) and standing[-1][0] == len(funcs) - 1
        self._take_up(start + len(funcs), funcs[-1], standing[-1][1] if is_last else ())

    def _take_up(self, index: int, func: Any, standing: Sequence[Variable]) -> None:
        """Follow the earlier step again if it had the last op, the one before op `index`, later than where it was."""
        assert self._lost is not None
        assert self._first_serial is not None
        assert self.present is not None
        uses, start, shared = self._lost
        known = uses.known(standing)
        place = uses.place_of(func, known, start) if known else None
        if place is None:
            return
        num_born = uses.num_born_before(place)
        # What the op itself has allocated is as many here as there.
        first_born = self.present.next_serial() - self._first_serial - (uses.num_born_before(place + 1) - num_born)
        self._lost = uses, place, shared
        self._followed = Reference(
            uses=uses,
            shift=place + 1 - index,
            born_until=shared,
            born_from=max(first_born, shared) if self._knows_births else NEVER,
            born_shift=num_born - first_born,
        )

    def latest_first(self, candidates: Sequence[Candidate], index: int) -> list[tuple[int, int]]:
        """The candidates in the order in which they should go, while op `index` runs: latest next use first.

        Returns:
            For each its place among `candidates`, and the op that will use it: of those of which nobody can say, those
            that were not used for the longest time go first.
        """
        reference, first = self.reference(), self._first_serial
        if reference is None or first is None:
            next_uses = [self._own.next_use(c.serial, c.nbytes, index) for c in candidates]
        else:
            next_uses = [self._next_use(reference, first, candidate, index) for candidate in candidates]
        latest = sorted(
            (-later, c.used_ns, place) for place, (later, c) in enumerate(zip(next_uses, candidates, strict=True))
        )
        return [(place, -later) for later, _, place in latest]

    def is_over(self, serial: int, index: int) -> bool:
        """Whether a variable is probably freed before any op after `index` uses it."""
        reference, first = self.reference(), self._first_serial
        if reference is None or first is None:
            return False
        return reference.is_over(serial - first if serial >= first else -1 - serial, index)

    def _next_use(self, reference: Reference, first: int, candidate: Candidate, index: int) -> int:
        if candidate.serial >= first:
            return reference.next_use(candidate.serial - first, index)
        later = reference.next_use(-1 - candidate.serial, index)
        # What was made since the earlier step, and before this one, and was not used yet: gradients for an update.
        is_awaited = later >= NEVER and candidate.used_ns < self._begun_ns
        return index if is_awaited and not reference.uses.known([-1 - candidate.serial]) else later

    def upcoming(self, index: int, num_ops: int) -> Iterator[tuple[int, int]]:
        """The serials of the variables that ops after `index` will use, of so many ops, each with the first that will.

        Some do not exist now.
        """
        reference, first = self.reference(), self._first_serial
        if reference is not None and first is not None:
            for later, variable in reference.upcoming(index, num_ops):
                yield later, first + variable if variable >= 0 else -1 - variable
