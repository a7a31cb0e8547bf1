"""What a step that goes like no earlier one says itself of its variables' next uses. Knows neither torch nor memory.

A loop uses the same variables once a turn: the weights of a recurrent cell, the sum of their gradients so far. A
backward pass uses what the forward pass made in reverse order; what it is done with, the optimizer is next to use.
"""

from __future__ import annotations

from collections.abc import Iterable

OUT_OF_SIGHT = 1 << 40
"""The next use of a variable that the step has not used yet: it was made earlier, and comes some time."""
AFTER_ALL = 1 << 41
"""That of one which the backward pass is done with."""
_OVERDUE = 2
"""So many turns after its last use a variable is taken to be used in no more of them."""


class PresentUses:
    """Last uses in the present step, by serial, and how many ops lay between them."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._turns: dict[int, int] = {}  # ops from one use to the next
        self._born: dict[int, int] = {}  # before about which op, of those not used yet
        self._waits: dict[int, int] = {}  # ops from birth to first use, of the last variable of so many bytes
        self._num_serials: int | None = None
        self._backward: int | None = None

    def __repr__(self) -> str:
        return f"<PresentUses of {len(self._last)} variables>"

    def note_backward(self, index: int) -> None:
        """A backward pass is under way since about op `index`."""
        if self._backward is None:
            self._backward = index
            self._waits.clear()

    def note_births(self, index: int, num_serials: int) -> None:
        """Before op `index` this was one more than the last serial."""
        if self._num_serials is not None:
            for serial in range(self._num_serials, num_serials):
                self._born[serial] = index
        self._num_serials = num_serials

    def note(self, index: int, variables: Iterable[tuple[int, int]]) -> None:
        """Op `index` used these: their serials, and their bytes."""
        for serial, nbytes in variables:
            last = self._last.get(serial)
            self._last[serial] = index
            if last is None:
                born = self._born.pop(serial, None)
                if born is not None:
                    self._waits[nbytes] = index - born
            elif last == index:
                continue
            elif self._backward is None or last >= self._backward:
                # Often an op on a view follows at once: half of the turn before counts, too.
                self._turns[serial] = max(index - last, self._turns.get(serial, 0) // 2)
            elif serial in self._turns:
                self._turns[serial] *= 2  # its first use in the backward pass, which takes two ops for one

    def next_use(self, serial: int, nbytes: int, index: int) -> int:
        """The op after `index` that probably uses it, as far as can be told."""
        last, begun = self._last.get(serial), self._backward
        if last is None:
            born = self._born.get(serial)
            if born is None:
                return OUT_OF_SIGHT
            wait = self._waits.get(nbytes)
            if wait is not None and index <= born + _OVERDUE * wait:
                return max(born + wait, index + 1)
            return AFTER_ALL if begun is not None and born >= begun else 2 * index - born
        turn = self._turns.get(serial)
        if turn is not None and index <= last + _OVERDUE * turn:
            return max(last + turn, index + 1)
        if begun is None:
            return 2 * index - last  # the longer ago it was used, the longer it may take
        if last >= begun:
            return AFTER_ALL
        return max(begun + 2 * (begun - last), index + 1)
