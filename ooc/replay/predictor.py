"""Predicts the next step's op sequence with a variable-order Markov model of the last eight steps.

Steps mostly repeat; but an evaluation every fifth step, a checkpoint every sixth, two shapes that take turns are
patterns, too. A wrong guess costs the rest of a step on demand, so it is worth some memory.
"""

from __future__ import annotations

from collections import Counter, deque

_MOST_KEYS = 8
"""The longest context: patterns of up to eight steps are told apart."""
_MOST_PASTS = 512
"""Contexts (the keys before a step) that are remembered: steps that are never the same must not fill memory."""


class SequencePredictor:
    """A variable-order Markov model over sequence keys, learned from the order in which they come."""

    def __init__(self) -> None:
        self._recent: deque[str] = deque(maxlen=_MOST_KEYS)
        self._followers: dict[tuple[str, ...], Counter[str]] = {}

    def __repr__(self) -> str:
        return f"<SequencePredictor after {list(self._recent)}, {len(self._followers)} pasts known>"

    def __len__(self) -> int:
        """Contexts that are remembered."""
        return len(self._followers)

    def note(self, key: str) -> None:
        """Learn that the step that has just ended was `key`."""
        for past in self._pasts():
            followers = self._followers.pop(past, None) or Counter()  # to the end: seen most recently
            count = followers.pop(key, 0)
            followers[key] = count + 1
            self._followers[past] = followers
        while len(self._followers) > _MOST_PASTS:
            del self._followers[next(iter(self._followers))]
        self._recent.append(key)

    def interrupt(self) -> None:
        """Something without a key has run: the next context begins after it."""
        self._recent.clear()

    def next(self) -> str | None:
        """The most likely next key; None before anything is known.

        Of all contexts that match now, the one with the most probable follower decides, where contexts seen seldom
        count for less; of equally probable ones, the longest. Of followers seen equally often, the one seen last.
        """
        best: tuple[float, int, str] | None = None
        for past in self._pasts():
            followers = self._followers.get(past)
            if not followers:
                continue
            count = max(followers.values())
            key = next(key for key in reversed(followers) if followers[key] == count)
            sureness = count / (followers.total() + 1)
            if best is None or (sureness, len(past)) > best[:2]:
                best = sureness, len(past), key
        if best is not None:
            return best[2]
        return self._recent[-1] if self._recent else None

    def _pasts(self) -> list[tuple[str, ...]]:
        recent = tuple(self._recent)
        return [recent[i:] for i in range(len(recent))]
