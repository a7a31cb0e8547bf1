"""What each op needs at once, hence the smallest budget that works.

A **pin** is a stretch of ticks in which a variable cannot be away, whatever the plan: around each
op that uses it, and around its allocation. Everything else is up to the planner. The sum of pins
at the worst tick is the floor of every budget.

An op's pin lasts until the *next* op's start, because that is the first moment at which an
eviction can hand its chunks on (`scheduler.plan.Evicted`). A variable allocated between two ops
cannot be written out before the second of them has ended, and is pinned until then.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.plan import Machine, PlanError
from scheduler.trace import Trace

IntArray = npt.NDArray[np.int64]

# How many variables a refusal lists: of an op's own, and of what a policy holds.
_MOST_OPERANDS = 12
_MOST_HELD = 4

# From this share of the need on, a refusal says how much of it is rounding.
_MUCH_ROUNDING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A variable that must be resident around one op, in ticks `[start_tick, stop_tick)`.

    Attributes:
        op_index: The op that uses the variable, or, for an allocation, the first op after
            which the variable can be written out.
        writes: Whether the store's copy, if there is one, is out of date afterwards.
    """

    op_index: int
    start_tick: int
    stop_tick: int
    writes: bool


class BudgetTooSmall(PlanError):
    """No plan exists: an op needs more at once than the budget holds.

    Attributes:
        op_index, op_name, where: The op with the largest need.
        needed_nbytes, budget_nbytes: What it needs at once, in whole chunks, and what there is.
        smallest_budget_nbytes: The least budget with which the policy can plan this trace.
        operands: `(name, bytes)` of what the op needs at its worst moment, largest first; for a policy that finds
            nothing more to release, of all that it has in memory then.
        fixed: How many other variables can never be away and are in memory then, and their bytes.
        is_policys: Whether the op alone would fit, and not what the policy keeps beside it.
        chunk_nbytes, rounding_nbytes: Size of a chunk; of the need, what is the rest of variables' last chunks.
    """

    def __init__(
        self,
        *,
        op_index: int,
        op_name: str,
        where: str,
        needed_nbytes: int,
        budget_nbytes: int,
        smallest_budget_nbytes: int,
        operands: tuple[tuple[str, int], ...],
        fixed: tuple[int, int] = (0, 0),
        is_policys: bool = False,
        chunk_nbytes: int = 1,
        rounding_nbytes: int = 0,
    ) -> None:
        self.op_index = op_index
        self.op_name = op_name
        self.where = where
        self.needed_nbytes = needed_nbytes
        self.budget_nbytes = budget_nbytes
        self.smallest_budget_nbytes = smallest_budget_nbytes
        self.operands = operands
        self.fixed = fixed
        self.is_policys = is_policys
        self.chunk_nbytes = chunk_nbytes
        self.rounding_nbytes = rounding_nbytes
        place = f"op {op_index} ({op_name}{', ' + where if where else ''})"
        most = _MOST_HELD if is_policys else _MOST_OPERANDS
        listed = ", ".join(f"{name} {format_mib(nbytes)}" for name, nbytes in operands[:most])
        more = f", and {len(operands) - most} more" if len(operands) > most else ""
        what = "in memory, and not to be released by this policy" if is_policys else "operands"
        with_what = ", with what the policy keeps and makes again" if is_policys else ""
        num_fixed, fixed_nbytes = fixed
        beside = f"\n  beside what can never be away: {num_fixed} more, {format_mib(fixed_nbytes)}" if num_fixed else ""
        rounds = rounding_nbytes >= _MUCH_ROUNDING * needed_nbytes
        rounding = (
            f"\n  rounded up to chunks of {format_mib(chunk_nbytes)}, none of which two variables share: "
            f"{format_mib(rounding_nbytes)} of it"
        )
        super().__init__(
            f"{place} needs {format_mib(needed_nbytes, up=True)} at once{with_what}; "
            f"the budget is {format_mib(budget_nbytes, up=False)}.\n"
            f"  {what}: {listed or 'none'}{more}{beside}{rounding if rounds else ''}\n"
            f"  Options: budget >= {format_mib(smallest_budget_nbytes, up=True)} ({smallest_budget_nbytes} bytes); "
            f"{'smaller chunks; ' if rounds else ''}a smaller batch (operands grow with it)."
        )

    def naming(self, smallest_budget_nbytes: int) -> BudgetTooSmall:
        """The same, with another budget that works."""
        return BudgetTooSmall(
            op_index=self.op_index,
            op_name=self.op_name,
            where=self.where,
            needed_nbytes=self.needed_nbytes,
            budget_nbytes=self.budget_nbytes,
            smallest_budget_nbytes=smallest_budget_nbytes,
            operands=self.operands,
            fixed=self.fixed,
            is_policys=self.is_policys,
            chunk_nbytes=self.chunk_nbytes,
            rounding_nbytes=self.rounding_nbytes,
        )


def format_mib(nbytes: int, *, up: bool | None = None) -> str:
    """`nbytes` for people: `96.0 MiB`, or bytes where that would read as nothing; rounded up or down where asked.

    A need is rounded up and a budget down, so that what does not fit never reads as if it did.
    """
    if nbytes < 2**16:
        return f"{nbytes} bytes"
    if up is None:
        return f"{nbytes / 2**20:.1f} MiB"
    tenths = -(-10 * nbytes >> 20) if up else 10 * nbytes >> 20
    return f"{tenths // 10}.{tenths % 10} MiB"


def pins_of(trace: Trace) -> tuple[tuple[Pin, ...], ...]:
    """For each variable its pins, in order and disjoint, at most one an op."""
    return trace.once("pins", lambda: _pins_of(trace))


def _pins_of(trace: Trace) -> tuple[tuple[Pin, ...], ...]:
    if not trace.ops:
        return tuple(() for _ in trace.variables)
    starts = [op.start_tick for op in trace.ops] + [trace.num_ticks]
    found: list[tuple[Pin, ...]] = []
    for variable, uses in enumerate(trace.uses_by_variable()):
        born, dead = trace.lifetime(variable)
        if not trace.variables[variable].evictable:
            found.append((Pin(op_index=len(trace.ops) - 1, start_tick=born, stop_tick=dead, writes=True),))
            continue
        needed = [(index, max(starts[index], born), use.writes) for index, use in uses]
        if trace.variables[variable].birth_tick is not None:
            birth = first_op_to_end_after(trace, born)
            needed = [use for use in needed if use[0] != birth]
            insort(needed, (birth, born, True))
        found.append(
            tuple(
                [
                    Pin(op_index=index, start_tick=start, stop_tick=min(starts[index + 1], dead), writes=writes)
                    for index, start, writes in needed
                ]
            )
        )
    return tuple(found)


def first_op_to_end_after(trace: Trace, tick: int) -> int:
    """The first op whose stop lies after `tick` (the last op where there is none)."""
    index = max(bisect_right(trace.op_starts, tick) - 1, 0)
    if trace.ops[index].stop_tick <= tick:
        index += 1
    return min(index, len(trace.ops) - 1)


def pinned_chunks(trace: Trace, machine: Machine, pins: tuple[tuple[Pin, ...], ...]) -> IntArray:
    """Chunks pinned at each tick of the step; no plan holds fewer."""
    change = np.zeros(trace.num_ticks + 1, dtype=np.int64)
    for variable, own in enumerate(pins):
        chunks = machine.chunks_of(trace.variables[variable].nbytes)
        for pin in own:
            change[pin.start_tick] += chunks
            change[pin.stop_tick] -= chunks
    return np.cumsum(change)[:-1]


def smallest_num_chunks(trace: Trace, machine: Machine) -> int:
    """The least `num_chunks` with which a plan exists, at this chunk size."""
    pinned = pinned_chunks(trace, machine, pins_of(trace))
    return int(pinned.max()) if len(pinned) else 0


def require_budget(trace: Trace, machine: Machine, pins: tuple[tuple[Pin, ...], ...]) -> None:
    """Raise `BudgetTooSmall` if the pins alone do not fit the budget."""
    pinned = pinned_chunks(trace, machine, pins)
    if not len(pinned) or int(pinned.max()) <= machine.num_chunks:
        return
    tick = int(pinned.argmax())
    operands = [
        variable for variable, own in enumerate(pins) if any(pin.start_tick <= tick < pin.stop_tick for pin in own)
    ]
    raise budget_too_small(trace, machine, tick=tick, variables=operands, smallest_num_chunks=int(pinned.max()))


def budget_too_small(
    trace: Trace,
    machine: Machine,
    *,
    tick: int,
    variables: list[int],
    smallest_num_chunks: int,
    num_missing_chunks: int | None = None,
) -> BudgetTooSmall:
    """The error for an op (the one at `tick`) that needs all of `variables` at once.

    With `num_missing_chunks` it is a policy's: the variables are what it had in memory and could not release, and so
    many chunks were missing for what the op makes and for what has to be made again.
    """
    index = max(bisect_right(trace.op_starts, tick) - 1, 0)
    op = trace.ops[index] if trace.ops else None
    sizes = {v: machine.chunks_of(trace.variables[v].nbytes) for v in variables}
    used = {use.variable for use in op.uses} if op else set()
    fixed = [v for v in variables if not trace.variables[v].evictable and v not in used]
    named = [v for v in variables if v not in set(fixed)]
    return BudgetTooSmall(
        op_index=index,
        op_name=op.name if op else "no op",
        where=op.where if op else "",
        needed_nbytes=(
            sum(sizes.values()) if num_missing_chunks is None else machine.num_chunks + max(num_missing_chunks, 1)
        )
        * machine.chunk_nbytes,
        budget_nbytes=machine.budget_nbytes,
        smallest_budget_nbytes=smallest_num_chunks * machine.chunk_nbytes,
        operands=tuple(
            (trace.variables[v].label or f"{trace.variables[v].kind} {v}", trace.variables[v].nbytes)
            for v in sorted(named, key=lambda v: (-sizes[v], v))
        ),
        fixed=(len(fixed), sum(sizes[v] for v in fixed) * machine.chunk_nbytes),
        is_policys=num_missing_chunks is not None,
        chunk_nbytes=machine.chunk_nbytes,
        rounding_nbytes=sum(sizes[v] * machine.chunk_nbytes - trace.variables[v].nbytes for v in variables),
    )


def zone_maxima(trace: Trace, per_tick: IntArray) -> list[int]:
    """For each op, the maximum of `per_tick` from its start to the next op's (op 0: from the step's start)."""
    if not trace.ops:
        return []
    starts = np.array([0] + [op.start_tick for op in trace.ops[1:]], dtype=np.int64)
    return [int(most) for most in np.maximum.reduceat(per_tick, starts)]
