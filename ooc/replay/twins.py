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
"""Where what exists throughout is trained (members of an ensemble, heads of tasks), so many may have come once:
those of more than that are new each time."""

Twin = tuple[str, Shape, Alignment]
"""A sequence's key, its shape, and how a step is aligned with it."""


def joins(observed: Observed, others: Sequence[Twin]) -> tuple[str, Alignment] | None:
    """Which of these a step joins whose storages are others than theirs, the latest first. None: it is another twin."""
    once = [twin for twin in others if twin[1].num_seen == 1]
    if len(others) < _MOST_TWINS or (len(once) < _MOST_ONCE and _changes_throughout(observed)):
        return None
    key, _, alignment = (once or others)[0]
    return key, alignment


def _changes_throughout(observed: Observed) -> bool:
    """Whether a step changes what exists throughout it, as training does a model's parameters."""
    throughout = {i for i, v in enumerate(observed.trace.variables) if v.birth_tick is None and v.death_tick is None}
    return any(use.reads and use.writes and use.variable in throughout for op in observed.trace.ops for use in op.uses)
