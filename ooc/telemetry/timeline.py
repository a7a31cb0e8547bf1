"""When everything happened in the last planned step: what reports and timelines are drawn from.

While a plan is played, native code stamps each op's start and stop, and the store's engine stamps
each transfer's. Here the two are put beside the plan at the end of each step that was played whole;
only the newest is kept. All times are of the monotonic clock, which torch.profiler's can be
converted to (`ClockPair`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ooc.memory.protocols import Store
from ooc.memory.residency import Move, ResidencyManager
from ooc.replay.executable_plan import ExecutablePlan
from ooc.telemetry.tensor_names import TensorName, names_by_address
from scheduler.plan import Plan
from scheduler.trace import Trace
from vmm.transfers import TransferRecord

TIMELINE_SCHEMA_VERSION = 1
_NUM_SHAPES_KEPT = 64
_LOOKUP_FRACTION = 0.02
"""Looking names up may take 2 % of the time: it took 70 ms, and many plans may take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPair:
    """One moment on two clocks, each in nanoseconds: adds up to a conversion between them."""

    monotonic_ns: int
    unix_ns: int

    @classmethod
    def now(cls) -> ClockPair:
        """Read both. The monotonic clock is read around the other, so the error is half that time."""
        before = time.monotonic_ns()
        unix_ns = time.time_ns()
        return cls(monotonic_ns=(before + time.monotonic_ns()) // 2, unix_ns=unix_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """One step that was played whole. Times are of the monotonic clock, in nanoseconds.

    Attributes:
        role_address: Of each variable of the trace; 0 where it has none now.
        names: What people call variables, by index.
        moves: Transfers begun in it.
        stalls: When it waited for transfers: `(start, stop)`.
    """

    step_index: int
    trace: Trace
    plan: Plan
    start_ns: int
    stop_ns: int
    op_start_ns: npt.NDArray[np.int64]
    op_stop_ns: npt.NDArray[np.int64]
    variable_address: npt.NDArray[np.uint64]
    names: Mapping[int, TensorName]
    moves: tuple[Move, ...]
    stalls: tuple[tuple[int, int], ...]

    def role_at(self, address: int, time_ns: int) -> int:
        """The variable at `address` then; -1 if the plan has none. A variable and its heir may take turns there."""
        candidates = np.flatnonzero(self.variable_address == address).tolist()
        if len(candidates) < 2:
            return candidates[0] if candidates else -1
        op = max(int(np.searchsorted(self.op_start_ns[: len(self.trace.ops)], time_ns, side="right")) - 1, 0)
        start_tick, stop_tick = self.trace.ops[op].start_tick, self.trace.ops[op].stop_tick
        for index in candidates:
            birth, death = self.trace.lifetime(index)
            if birth < stop_tick and death > start_tick:
                return int(index)
        return int(candidates[0])


class Timeline:
    """Keeps the newest step that was played whole. Costs a planned step three array copies.

    Args:
        address_of: Makes a function that gives a tensor's address if it is the session's, else 0.
    """

    def __init__(
        self, manager: ResidencyManager, store: Store, address_of: Callable[[], Callable[[torch.Tensor], int]]
    ) -> None:
        self._manager = manager
        self._store = store
        self._address_of = address_of
        self._named: dict[int, dict[int, TensorName]] = {}  # by the shape of a trace
        self._shape: tuple[ExecutablePlan, int] | None = None
        self._next_lookup_s = 0.0
        self._start_ns = time.monotonic_ns()
        self._played: ExecutablePlan | None = None  # in the period that ended last
        self._newest: _Played | None = None
        self._records: dict[int, TransferRecord] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Timeline of {'no step' if self._newest is None else f'step {self._newest.step_index}'}>"

    def end_period(self, played: ExecutablePlan | None, step_index: int) -> None:
        """A period ends and the next begins. `played` is the plan if it was played whole."""
        now_ns = time.monotonic_ns()
        self._played = played
        moves = tuple(self._manager.moves)
        self._manager.moves.clear()
        stalls = tuple(self._manager.stalls)
        self._manager.stalls.clear()
        if played is not None:
            self._newest = _Played(
                step_index=step_index,
                trace=played.trace,
                plan=played.plan,
                start_ns=self._start_ns,
                stop_ns=now_ns,
                op_start_ns=played.op_start_ns.copy(),
                op_stop_ns=played.op_stop_ns.copy(),
                variable_address=played.variable_address.copy(),
                names=self._names(played),
                moves=moves,
                stalls=stalls,
            )
            self._records.clear()

    def begin_step(self, active: ExecutablePlan | None) -> None:
        """What lay between two steps (learning, planning) is over: the step's time counts from here."""
        self._start_ns = time.monotonic_ns()
        if active is not self._played:
            self._manager.stalls.clear()
            self._manager.moves.clear()  # they took everything to where the plan starts; the step is not to blame

    def _names(self, played: ExecutablePlan) -> Mapping[int, TensorName]:
        """Names of the plan's variables, looked up when its sequence is played for the first time, or soon after."""
        if self._shape is None or self._shape[0] is not played:
            self._shape = (played, _shape(played.trace))
        shape = self._shape[1]
        started = time.monotonic()
        if shape in self._named or started < self._next_lookup_s:
            return self._named.get(shape, {})
        by_address = names_by_address(self._address_of())
        now = time.monotonic()
        self._next_lookup_s = now + (now - started) / _LOOKUP_FRACTION
        found = {}
        for role in played.variables:
            record = role.record
            if record is not None and played.variable_alive[role.index] and record.address in by_address:
                found[role.index] = by_address[record.address]
                if role.predecessor is not None:  # the same thing a step later: a gradient, mostly
                    found.setdefault(role.predecessor.index, by_address[record.address])
        if len(self._named) >= _NUM_SHAPES_KEPT:
            self._named.clear()
        self._named[shape] = found
        return found

    def document(self) -> dict[str, Any] | None:
        """The newest step with its trace and its plan, as JSON-able data. None before the first.

        Times count from the step's start, in nanoseconds; `clock` says when that was.
        """
        played = self._newest
        if played is None:
            return None
        self._take_records()
        start_ns = played.start_ns
        num_ops = len(played.trace.ops)
        found = [(move, self._records[move[0]]) for move in played.moves if move[0] in self._records]
        found = [(move, record) for move, record in found if not record.error]
        columns: dict[str, list[Any]] = {
            "variable": [played.role_at(address, record.submit_ns) for (_, address, _), record in found],
            "kind": ["load" if record.direction == "read" else "evict" for _, record in found],
            "nbytes": [nbytes for (_, _, nbytes), _ in found],
            **{
                name: [getattr(record, name) - start_ns for _, record in found]
                for name in ("submit_ns", "start_ns", "stop_ns")
            },
        }
        clock = ClockPair.now()
        return {
            "schema": "ooc.timeline",
            "schema_version": TIMELINE_SCHEMA_VERSION,
            "step_index": played.step_index,
            "clock": asdict(ClockPair(monotonic_ns=start_ns, unix_ns=clock.unix_ns - clock.monotonic_ns + start_ns)),
            "duration_ns": played.stop_ns - start_ns,
            "op_start_ns": (played.op_start_ns[:num_ops] - start_ns).tolist(),
            "op_stop_ns": (played.op_stop_ns[:num_ops] - start_ns).tolist(),
            "transfers": columns,
            "stalls": {
                "start_ns": [start - start_ns for start, _ in played.stalls],
                "stop_ns": [stop - start_ns for _, stop in played.stalls],
            },
            "num_transfers_lost": len(played.moves) - len(found),
            "trace": _as_data(_with_names(played.trace, played.names).to_json()),
            "plan": _as_data(played.plan.to_json()),
        }

    def close(self) -> None:
        """The store is about to be closed: take what it knows. `document` goes on working. Idempotent."""
        self._take_records()
        self._is_closed = True

    def _take_records(self) -> None:
        """Let the step's transfers land, and take their records; the engine gives out each only once."""
        wanted = {ticket for ticket, _, _ in self._newest.moves} if self._newest is not None else set()
        if self._is_closed or not wanted - self._records.keys():
            return
        self._store.wait_all()
        for record in self._store.take_records():
            if record.ticket in wanted:
                self._records[record.ticket] = record


def _shape(trace: Trace) -> int:
    """The same for traces whose variables have the same places: a plan made anew need not be named anew."""
    return hash((trace.num_ticks, tuple(op.name for op in trace.ops), tuple(v.nbytes for v in trace.variables)))


def _with_names(trace: Trace, names: Mapping[int, TensorName]) -> Trace:
    variables = tuple(
        replace(variable, kind=names[index].kind, label=names[index].label) if index in names else variable
        for index, variable in enumerate(trace.variables)
    )
    return replace(trace, variables=variables)


def _as_data(text: str) -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads(text)
    return document
