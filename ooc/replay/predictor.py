"""Predicts the next step's op sequence with a variable-order Markov model of the last eight steps.

Steps mostly repeat; but an evaluation every fifth step, a checkpoint every sixth, two shapes that take turns are
patterns, too. A wrong guess costs the rest of a step on demand, so it is worth some memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

_MOST_KEYS = 8
"""The longest context: patterns of up to eight steps are told apart."""
_SURE = 2
"""What alone has followed a context so often follows it again, however often shorter contexts went on otherwise."""
_MOST_PASTS = 512
"""Contexts (the keys before a step) that are remembered: steps that are never the same must not fill memory."""

_MOST_KNOWN = 2 * _MOST_KEYS * _MOST_PASTS
"""More than these have: with so many keys it is looked which they still have."""

_FEW, _SMALL_PART = 2, 0.05
"""With so many more or fewer variables, absolute or as a part, the same plan may begin: a loss that is kept, what falls
below the threshold."""

_Plan = TypeVar("_Plan")


class SequencePredictor:
    """A variable-order Markov model over sequence keys, learned from the order in which they come."""

    def __init__(self) -> None:
        self._recent: deque[str] = deque(maxlen=_MOST_KEYS)
        self._followers: dict[tuple[str, ...], Counter[str]] = {}
        self._known: set[str] = set()  # all keys that these have, and some more

    def __repr__(self) -> str:
        return f"<SequencePredictor after {list(self._recent)}, {len(self._followers)} pasts known>"

    def __len__(self) -> int:
        """Contexts that are remembered."""
        return len(self._followers)

    def note(self, key: str) -> None:
        """Learn that the step that has just ended was `key`."""
        for past in _pasts(tuple(self._recent)):
            followers = self._followers.pop(past, None) or Counter()  # to the end: seen most recently
            count = followers.pop(key, 0)
            followers[key] = count + 1
            self._followers[past] = followers
        while len(self._followers) > _MOST_PASTS:
            del self._followers[next(iter(self._followers))]
        self._recent.append(key)
        self._known.add(key)
        if len(self._known) > _MOST_KNOWN:
            self._known = {*self._recent, *chain(*self._followers), *chain(*self._followers.values())}

    def rename(self, old: str, new: str) -> None:
        """What was noted as `old` is called `new` from now on."""
        if old not in self._known:
            return
        self._known.remove(old)
        self._known.add(new)
        self._recent = deque((new if key == old else key for key in self._recent), maxlen=_MOST_KEYS)
        followers, self._followers = self._followers, {}
        for past, counts in followers.items():
            renamed = self._followers.setdefault(tuple(new if key == old else key for key in past), Counter())
            for key, count in counts.items():
                renamed[new if key == old else key] += count

    def interrupt(self) -> None:
        """Something without a key has run: the next context begins after it."""
        self._recent.clear()

    def next(self, may_come: Callable[[str], bool] = lambda _: True) -> str | None:
        """The most likely next key of those that may come; None before anything is known.

        Of all contexts that match now, the one with the most probable follower decides, where contexts seen seldom
        count for less; of equally probable ones, the longest. Of followers seen equally often, the one seen last.
        So the one step in six that is another one is expected from its third time on.
        """
        best: tuple[float, int, str] | None = None
        recent = tuple(self._recent)
        for past in _pasts(recent):
            followers = {key: count for key, count in self._followers.get(past, {}).items() if may_come(key)}
            if not followers:
                continue
            count = max(followers.values())
            key = next(key for key in reversed(followers) if followers[key] == count)
            total = sum(followers.values())
            if count == total >= _SURE:
                return key  # the contexts that come are shorter, and none is surer
            sureness = count / (total + 1)
            if best is None or (sureness, len(past)) > best[:2]:
                best = sureness, len(past), key
        if best is not None:
            return best[2]
        return recent[-1] if recent and may_come(recent[-1]) else None


def likeliest(found: Sequence[_Plan], num_of: Callable[[_Plan], int], num_now: int) -> _Plan | None:
    """Of plans, the likeliest first, that which comes where `num_now` variables exist; None: there are none.

    The likeliest, unless another one was last begun with clearly closer to so many.

    Args:
        num_of: How many existed when a plan was last begun.
    """
    if not found:
        return None
    nearest = min(found, key=lambda plan: abs(num_of(plan) - num_now))  # the likeliest of those
    closer_by = abs(num_of(found[0]) - num_now) - abs(num_of(nearest) - num_now)
    return nearest if closer_by > max(_FEW, num_now * _SMALL_PART) else found[0]


def _pasts(recent: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [recent[i:] for i in range(len(recent))]
