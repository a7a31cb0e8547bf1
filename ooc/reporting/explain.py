"""Explains where a tensor is, when the plan moves it, and why (`session.explain`)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from ooc.engine import Engine
from ooc.memory.record import State, VariableRecord
from ooc.reporting.step_view import StepView, simulated_view
from ooc.telemetry.tensor_names import named_tensors, names_by_address
from ooc.units import format_duration, format_nbytes
from scheduler.plan import (
    Born,
    Dies,
    Discarded,
    Dropped,
    Evicted,
    Kept,
    Loaded,
    Plan,
    Recomputed,
    Residency,
    Start,
    Stop,
    occupied_ticks,
)
from scheduler.trace import Trace

_NUM_SUGGESTIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where a tensor's storage is, and what the plan does with it; `str()` gives it as text.

    Attributes:
        name: The tensor's name.
        is_managed: Whether the session manages it; if not, `reason` says why, and the rest is empty.
        nbytes: Size of the storage.
        state: "resident", "loading", "away (in the store)" or "discarded (...)"; more where its memory was given out.
        stays: One line for each residency that the plan has for it, in order.
        reasons: Why it is kept or evicted between its uses.
        reason: Why the plan says nothing about it.
    """

    name: str
    is_managed: bool
    nbytes: int = 0
    state: str = ""
    stays: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if not self.is_managed:
            return f"{self.name}: {self.reason}"
        lines = [f"{self.name}: {format_nbytes(self.nbytes)}, {self.state} now"]
        lines += [f"  {stay}" for stay in self.stays]
        lines += [f"  why: {reason}" for reason in self.reasons]
        if self.reason:
            lines.append(f"  {self.reason}")
        return "\n".join(lines)


def explain(engine: Engine, what: torch.Tensor | str) -> Explanation:
    """See `Session.explain`. The caller holds the session's lock and has absorbed the allocator's log."""
    address_of = engine.addresses()
    if isinstance(what, str):
        name, tensor = what, _find(address_of, what)
    elif isinstance(what, torch.Tensor):
        name, tensor = "", what
    else:
        raise TypeError(f"explain({what!r}): a {type(what).__name__}. Options: a tensor, or the name of one.")
    address = address_of(tensor)
    if not address:
        return Explanation(
            name=name or "this tensor",
            is_managed=False,
            reason=f"the session does not hold it: its storage has {format_nbytes(tensor.untyped_storage().nbytes())}, "
            f"and those below {format_nbytes(engine.options.threshold_nbytes)}, or made outside the session, stay in "
            "ordinary memory",
        )
    record = engine.record_at(address)
    if record is None:
        return Explanation(
            name=name or "this tensor", is_managed=False, reason="its storage is not the session's any more"
        )
    if not name:
        known = names_by_address(address_of).get(address)
        name = known.label if known is not None else f"a tensor at {address:#x}"
    return _explain(engine, record, name)


def _find(address_of: Callable[[torch.Tensor], int], name: str) -> torch.Tensor:
    found = {known.label: tensor for known, tensor in named_tensors(address_of)}
    if name not in found:
        similar = difflib.get_close_matches(name, found, n=_NUM_SUGGESTIONS, cutoff=0.4)
        options = ", ".join(similar or list(found)[:_NUM_SUGGESTIONS]) or "the tensor itself"
        raise ValueError(f"no tensor is called {name!r} among the {len(found)} that have names. Options: {options}")
    return found[name]


def _explain(engine: Engine, record: VariableRecord, name: str) -> Explanation:
    planned = engine.planned_variable(record.address)
    where = {
        State.RESIDENT: "resident",
        State.LOADING: "loading",
        State.AWAY: "away (in the store)",
        State.DISCARDED: "discarded (ops are run again to make it)",
    }[record.state]
    if record.exports:
        where += ", its memory given out (.numpy() or the like)"
    residencies: list[Residency] = []
    reasons: list[str] = []
    reason = ""
    if planned is None:
        reason = "no plan is being played"
    else:
        trace, plan, variable = planned
        residencies = [r for r in plan.residencies if r.variable == variable]
        if variable is None:
            reason = "the plan that is being played does not have it"
        elif not residencies:
            reason = "the plan never brings it in: nothing uses it before it is freed"
        else:
            reasons = _reasons(variable, residencies, trace, plan)
    return Explanation(
        name=name,
        is_managed=True,
        nbytes=record.nbytes,
        state=where,
        stays=tuple(_residency_line(residency, *planned[:2]) for residency in residencies)
        if planned is not None
        else (),
        reasons=tuple(reasons),
        reason=reason,
    )


def _residency_line(residency: Residency, trace: Trace, plan: Plan) -> str:
    chunks = sum(count for _, count in residency.chunks)
    if isinstance(residency.stop, Kept):
        heir = trace.variables[residency.variable].becomes
        starts = next((r for r in plan.residencies if r.variable == heir and isinstance(r.start, Kept)), residency)
        if starts.chunks != residency.chunks:
            copied = f"{_stop(residency.stop, trace)}, then copied to other chunks"
            return f"{_start(residency.start, trace)}; {copied} ({chunks} chunks)"
    return f"{_start(residency.start, trace)}; {_stop(residency.stop, trace)} ({chunks} chunks)"


def _start(start: Start, trace: Trace) -> str:
    match start:
        case Born():
            return "allocated in the step"
        case Loaded(before_op=op):
            return f"loaded from before {_op(op, trace)} on"
        case Recomputed(before_op=op, ops=ops):
            return f"recomputed before {_op(op, trace)}, by {len(ops)} ops"
        case Kept():
            return "in memory when the step starts"


def _stop(stop: Stop, trace: Trace) -> str:
    match stop:
        case Dies():
            return "then freed"
        case Evicted(write_op=write, release_op=release):
            until = "the end of the step" if release >= len(trace.ops) else _op(release, trace)
            if write < 0:
                write += len(trace.ops)
                return f"written out in the step before, after {_op(write, trace)}, gone from {until} on"
            return f"written out after {_op(write, trace)}, gone from {until} on"
        case Dropped(after_op=op):
            return f"dropped after {_op(op, trace)}: the store's copy is current"
        case Discarded(after_op=op):
            return f"discarded after {_op(op, trace)}"
        case Kept():
            return "still there when the step ends"


def _op(index: int, trace: Trace) -> str:
    op = trace.ops[index]
    return f"op {index} ({op.name}, {op.where})" if op.where else f"op {index} ({op.name})"


def _reasons(variable: int, residencies: list[Residency], trace: Trace, plan: Plan) -> list[str]:
    """What the plan does in each gap between two uses, and the figures that speak for it."""
    view = simulated_view(trace, plan)
    uses = [index for index, op in enumerate(trace.ops) if any(use.variable == variable for use in op.uses)]
    if not trace.variables[variable].evictable:
        return ["it can never be away: no op has named it, so a library may use it unseen"]
    machine, nbytes = plan.machine, trace.variables[variable].nbytes
    seconds = nbytes / machine.evict_bytes_per_s + nbytes / machine.load_bytes_per_s
    way_ns = int(seconds * 1e9) + 2 * machine.latency_ns
    found = []
    kept: tuple[int, str] | None = None  # the longest gap in which it is in memory
    for gap in _gaps(variable, uses, view):
        is_away = _is_away(residencies, trace, gap.before, gap.after)
        place = f"{_op(gap.before, trace)} and {_op(gap.after, trace)}{' of the next step' if gap.wraps else ''}"
        if not is_away and (kept is None or gap.nanoseconds > kept[0]):
            kept = (gap.nanoseconds, place)
        if is_away:
            live = format_nbytes(_most_live(view, gap.before, gap.after))
            again = _made_again(residencies, gap, trace)
            instead = f"; its {again}" if again else " of transfer"
            found.append(
                f"away between its uses by {place}, {format_duration(gap.nanoseconds / 1e9)}: meanwhile the step has "
                f"up to {live} alive, and the budget is {format_nbytes(machine.budget_nbytes)}; out and back takes "
                f"{format_duration(way_ns / 1e9)}{instead}"
            )
    if kept is not None and (not found or kept[0] > way_ns):
        if way_ns >= kept[0]:
            because = f"out and back alone takes {format_duration(way_ns / 1e9)}"
        elif plan.predicted.get("evicted_nbytes"):
            because = f"policy {plan.policy!r} found others to move instead"
        else:
            because = "all that is alive fits in the budget"
        length = format_duration(kept[0] / 1e9)
        found.append(f"it stays between {kept[1]}, its longest gap in memory ({length}): {because}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """The time between two uses by ops; `wraps` if the second is in the next step."""

    before: int
    after: int
    nanoseconds: int
    wraps: bool = False


def _gaps(variable: int, uses: list[int], view: StepView) -> Iterator[_Gap]:
    for before, after in pairwise(uses):
        yield _Gap(before=before, after=after, nanoseconds=view.op_start_ns[after] - view.op_stop_ns[before])
    if uses and view.trace.variables[variable].becomes == variable:
        first, last = uses[0], uses[-1]
        wait_ns = view.duration_ns - view.op_stop_ns[last] + view.op_start_ns[first]
        yield _Gap(before=last, after=first, nanoseconds=wait_ns, wraps=True)


def _is_away(residencies: list[Residency], trace: Trace, before: int, after: int) -> bool:
    """Whether two ops that use a variable do so in two residencies; `after <= before`: in the next step."""
    start, stop = trace.ops[before].start_tick, trace.ops[after].start_tick
    spans = [occupied_ticks(residency, trace) for residency in residencies]
    if after <= before:
        crosses = isinstance(residencies[-1].stop, Kept) and isinstance(residencies[0].start, Kept)
        return not (crosses and spans[-1][0] <= start and spans[0][1] > stop)
    return not any(first < trace.ops[before].stop_tick and last > stop for first, last in spans if last > start)


def _made_again(residencies: list[Residency], gap: _Gap, trace: Trace) -> str:
    """The ops that make a variable again within a gap, and how long they took; empty if it is loaded."""
    for residency in residencies:
        start = residency.start
        if isinstance(start, Recomputed) and gap.before < start.before_op <= gap.after:
            length = format_duration(sum(trace.ops[op].duration_ns for op in start.ops) / 1e9)
            return f"{len(start.ops)} ops took {length}, and are run again instead"
    return ""


def _most_live(view: StepView, before: int, after: int) -> int:
    """Most bytes alive between two ops; `after <= before`: over the step's end."""
    first, last = view.trace.ops[before].stop_tick, view.trace.ops[after].start_tick
    curve = list(view.trace.live_nbytes())
    spans = [(first, last)] if after > before else [(first, view.trace.num_ticks), (0, last)]
    most = 0
    for start, stop in spans:
        held = [nbytes for tick, nbytes in curve if tick <= start][-1:]
        most = max([most, *held, *(nbytes for tick, nbytes in curve if start < tick <= stop)])
    return most
