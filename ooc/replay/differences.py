"""Says how a step differs from its plan."""

from __future__ import annotations

from typing import Any

from ooc.replay.executable_plan import ExecutablePlan
from ooc.tracing.op_semantics import op_name


def difference(active: ExecutablePlan, cursor: int, func: Any, place: str) -> str:
    """What came at op `cursor`, from this place in the program, and what the plan expects there."""
    came = f"op {cursor} ({op_name(func)}{f', {place}' if place else ''})"
    if cursor >= active.num_ops:
        return f"{came} is not what the plan expects: nothing comes after op {cursor - 1}"
    if active.funcs[cursor] is func:
        return f"{came} is not what the plan expects: the same op on other variables"
    op = active.trace.ops[cursor]
    return f"{came} is not what the plan expects: {op_name(op.name)}{f', {op.where}' if op.where else ''}"
