"""Anchors: ops that use what exists throughout, parameters for one. They tell where in its model a step is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from ooc.replay.union_parts import UnionOp, UnionVariable
from ooc.tracing.observed import Observed

_Token = tuple[Any, tuple[UnionVariable, ...]]
"""What an op calls, and with which of what exists throughout. Of the others some may be too small for variables."""


class UnionAnchors:
    """Those of a union, and those of a step that is compared with it.

    Args:
        ops: The union's.
        observed: The step.
        roles: What the step's variables are in the union, as far as that is known; it grows.
    """

    def __init__(self, ops: Sequence[UnionOp], observed: Observed, roles: Mapping[int, UnionVariable]) -> None:
        self._observed = observed
        self._roles = roles
        self._next = self._next_anchors()
        self._places: dict[_Token, list[int]] = {}
        self._tokens: list[tuple[int, _Token]] = []
        for op in ops:
            used = tuple(v for v in op.operands if v.is_persistent)
            if any(not v.is_born and v.death is None for v in op.operands):
                token = op.func, used
                self._places.setdefault(token, []).append(op.place)
                self._tokens.append((op.place, token))

    def __repr__(self) -> str:
        return f"<UnionAnchors: {len(self._tokens)} in the union>"

    def _next_anchors(self) -> list[int | None]:
        """For each op of the step the first anchor from it on."""
        variables, serials = self._observed.trace.variables, self._observed.start_serials
        throughout = {i for i, v in enumerate(variables) if serials[i] is not None and v.death_tick is None}
        found: list[int | None] = []
        anchor: int | None = None
        for index in reversed(range(len(self._observed.funcs))):
            anchor = index if not throughout.isdisjoint(self._observed.occurrences[index]) else anchor
            found.append(anchor)
        return found[::-1]

    def belongs_to_new(self, index: int, place: int) -> bool:
        """Whether an op of the step comes before an anchor that the union does not have, from one of its ops on."""
        anchor = self._next[index]
        if anchor is None or anchor == index:
            return False
        places = self._places.get(self._token(anchor), ())
        return bisect_left(places, place) == len(places)

    def is_same(self, index: int, place: int) -> bool:
        """Whether after an op of the step and after one of the union the same parameters are used first."""
        anchor = self._next[index]
        number = bisect_left(self._tokens, place, key=lambda each: each[0])
        if anchor is None or number == len(self._tokens):
            return True
        return self._token(anchor) == self._tokens[number][1]

    def _token(self, index: int) -> _Token:
        roles = map(self._roles.get, self._observed.occurrences[index])
        return self._observed.funcs[index], tuple(role for role in roles if role is not None and role.is_persistent)
