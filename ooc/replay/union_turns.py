"""Turns of loops in a union of steps and in a step: which of its turns one of the step is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ooc.replay.turns import repeated, turn_variables
from ooc.replay.union_parts import StepBirths, UnionOp, UnionVariable
from ooc.tracing.observed import Observed


class UnionTurns:
    """What tells the turns apart (`ooc.replay.turns`), in both.

    Args:
        ops: The union's.
        observed: The step.
        births: Of the step.
    """

    def __init__(self, ops: Sequence[UnionOp], observed: Observed, births: StepBirths) -> None:
        funcs, operands = [op.func for op in ops], [op.operands for op in ops]
        born = {v: op.place for op in ops for v in (*op.between, *op.inside)}
        self._places: dict[tuple[Any, UnionVariable], list[int]] = {}
        variables = turn_variables(funcs, operands, [op.where for op in ops], born)
        for op, variable in zip(ops, variables, strict=True):
            if variable is not None:
                self._places.setdefault((op.func, variable), []).append(op.place)
        self._ours: set[tuple[Any, tuple[UnionVariable | None, ...]]] = {*repeated(funcs, operands)}
        self._observed = observed
        self._theirs = repeated(observed.funcs, observed.occurrences)
        places = [op.where for op in observed.trace.ops]
        self._variables = turn_variables(observed.funcs, observed.occurrences, places, births.by_variable())

    def __repr__(self) -> str:
        return f"<UnionTurns: {len(self._places)} in the union>"

    def role(self, index: int, roles: Mapping[int, UnionVariable]) -> UnionVariable | None:
        """What the turn variable of an op of the step is in the union, by what its variables are there so far.

        None: nobody knows, or the op does not come with the same operands in each turn.
        """
        variable = self._variables[index]
        if variable is None:
            return None
        func, used = self._observed.funcs[index], self._observed.occurrences[index]
        if (func, used) in self._theirs or (func, tuple(map(roles.get, used))) in self._ours:
            return roles.get(variable)
        return None

    def places(self, func: Any, variable: UnionVariable | None) -> Sequence[int]:
        """The union's ops that call this in the turn of a turn variable."""
        return self._places.get((func, variable), ()) if variable is not None else ()
