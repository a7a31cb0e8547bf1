"""Twins: sequences of the same ops that differ in the storages that they use, as two networks of one form do.

Each has a plan of its own, which knows its parameters. But where the storages are new each time (weights that an inner
loop makes, a batch's own state), sequences that are told apart would never come twice: they share one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ooc.replay.elastic import Alignment, Shape
from ooc.tracing.observed import Observed

_MOST_TWINS = 2
"""So many are told apart in any case."""
_MOST_ONCE = 6
"""Where what exists throughout is trained (members of an ensemble, heads of tasks), so many may have come once."""

Twin = tuple[str, Shape, Alignment]
"""A sequence's key, its shape, and how a step is aligned with it."""


class Twins:
    """Tells twins apart, or lets them share a sequence."""

    def __init__(self) -> None:
        self._shared: set[str] = set()

    def __repr__(self) -> str:
        return f"<Twins, {len(self._shared)} sequences shared>"

    def joined(self, observed: Observed, others: Sequence[Twin]) -> tuple[str, Alignment] | None:
        """Which of these a step joins whose storages are others than theirs, the latest first. None: it is new."""
        once = [twin for twin in others if twin[1].num_seen == 1]
        if len(others) < _MOST_TWINS or (len(once) < _MOST_ONCE and _trains(observed, others[0])):
            return None
        shared = [twin for twin in others if twin[0] in self._shared]
        key, _, alignment = (shared or once or others)[0]
        self._shared.add(key)
        return key, alignment


def _trains(observed: Observed, other: Twin) -> bool:
    """Whether a step changes, as training does a model's parameters, what is another storage than in the other twin."""
    _, shape, alignment = other
    others = shape.others_throughout(observed, alignment)
    return any(use.reads and use.writes and use.variable in others for op in observed.trace.ops for use in op.uses)
