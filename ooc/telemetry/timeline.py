"""The times of all ops and transfers in the last planned step, from which reports and timelines are drawn.

While a plan is replayed, native code stamps each op's start and stop, and the store's engine stamps
each transfer's. At the end of each step that was replayed whole, both are kept together with the plan,
in place of the step before. All times are of the monotonic clock, which torch.profiler's can be
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
from ooc.memory.record_transfers import Move
from ooc.memory.residency import ResidencyManager
from ooc.replay.executable_plan import ExecutablePlan
from ooc.telemetry.tensor_names import TensorName, names_by_address
from scheduler.plan import Plan
from scheduler.trace import Trace
from vmm.transfers import TransferRecord

TIMELINE_SCHEMA_VERSION = 1
_NUM_SHAPES_KEPT = 64
_NUM_CLOCK_READINGS = 16
_LOOKUP_FRACTION = 0.005
"""Looking names up may take half a percent of the time: it took 70 ms, and many plans may take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPair:
    """The same moment on two clocks, in nanoseconds, by which times of one convert to the other."""

    monotonic_ns: int
    unix_ns: int

    @classmethod
    def now(cls) -> ClockPair:
        """Read both clocks. The monotonic clock is read around the other, so the error is half that time.

        The narrowest of several readings counts: where others run, too, the machine may take the processor away
        within one, and 20 ms between its ends were a clock 10 ms off.
        """
        readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(_NUM_CLOCK_READINGS)]
        before, unix_ns, after = min(readings, key=lambda reading: reading[2] - reading[0])
        return cls(monotonic_ns=(before + after) // 2, unix_ns=unix_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayedStep:
    """One step that was replayed whole. Times are of the monotonic clock, in nanoseconds.

    Attributes:
        variable_address: Address of each variable of the trace; 0 where it has none now.
        names: Names of variables, by index.
        moves: Transfers that began in it.
        stalls: Waits for transfers: `(start, stop)`.
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

    def variable_at(self, address: int, time_ns: int) -> int:
        """The variable at `address` at that time; -1 if the plan has none. Variable and successor may share it."""
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
    """Keeps the times of the newest step that was replayed whole. Costs a planned step three array copies.

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
        self._replayed: ExecutablePlan | None = None  # in the period that ended last
        self._newest: _ReplayedStep | None = None
        self._records: dict[int, TransferRecord] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Timeline of {'no step' if self._newest is None else f'step {self._newest.step_index}'}>"

    def end_period(self, replayed: ExecutablePlan | None, step_index: int) -> None:
        """End a period; `replayed` is its plan if that was replayed whole."""
        now_ns = time.monotonic_ns()
        self._replayed = replayed
        moves = tuple(self._manager.moves)
        self._manager.moves.clear()
        stalls = tuple(self._manager.stalls)
        self._manager.stalls.clear()
        if replayed is not None:
            self._newest = _ReplayedStep(
                step_index=step_index,
                trace=replayed.trace,
                plan=replayed.plan,
                start_ns=self._start_ns,
                stop_ns=now_ns,
                op_start_ns=replayed.op_start_ns.copy(),
                op_stop_ns=replayed.op_stop_ns.copy(),
                variable_address=replayed.variable_address.copy(),
                names=self._names(replayed),
                moves=moves,
                stalls=stalls,
            )
            self._records.clear()

    def begin_step(self, active: ExecutablePlan | None) -> None:
        """Count the step's time from here: what lay between two steps (recording, planning) is over."""
        self._start_ns = time.monotonic_ns()
        if active is not self._replayed:
            self._manager.stalls.clear()
            self._manager.moves.clear()  # they took everything to where the plan starts; the step is not to blame

    def _names(self, replayed: ExecutablePlan) -> Mapping[int, TensorName]:
        """Names of the plan's variables, looked up when its sequence is first replayed, or soon after."""
        if self._shape is None or self._shape[0] is not replayed:
            self._shape = (replayed, _shape(replayed.trace))
        shape = self._shape[1]
        started = time.monotonic()
        if shape in self._named or started < self._next_lookup_s:
            return self._named.get(shape, {})
        by_address = names_by_address(self._address_of())
        now = time.monotonic()
        self._next_lookup_s = now + (now - started) / _LOOKUP_FRACTION
        found = {}
        for variable in replayed.variables:
            record = variable.record
            if record is not None and replayed.variable_alive[variable.index] and record.address in by_address:
                found[variable.index] = by_address[record.address]
                if variable.predecessor is not None:  # the same thing a step later: a gradient, mostly
                    found.setdefault(variable.predecessor.index, by_address[record.address])
        if len(self._named) >= _NUM_SHAPES_KEPT:
            self._named.clear()
        self._named[shape] = found
        return found

    def document(self) -> dict[str, Any] | None:
        """The newest step with its trace and its plan, as JSON-able data. None before the first.

        Times count from the step's start, in nanoseconds; `clock` says when that was.
        """
        newest = self._newest
        if newest is None:
            return None
        self._take_records()
        start_ns = newest.start_ns
        num_ops = len(newest.trace.ops)
        found = [(move, self._records[move[0]]) for move in newest.moves if move[0] in self._records]
        found = [(move, record) for move, record in found if not record.error]
        columns: dict[str, list[Any]] = {
            "variable": [newest.variable_at(address, record.submit_ns) for (_, address, _), record in found],
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
            "step_index": newest.step_index,
            "clock": asdict(ClockPair(monotonic_ns=start_ns, unix_ns=clock.unix_ns - clock.monotonic_ns + start_ns)),
            "duration_ns": newest.stop_ns - start_ns,
            "op_start_ns": (newest.op_start_ns[:num_ops] - start_ns).tolist(),
            "op_stop_ns": (newest.op_stop_ns[:num_ops] - start_ns).tolist(),
            "transfers": columns,
            "stalls": {
                "start_ns": [start - start_ns for start, _ in newest.stalls],
                "stop_ns": [stop - start_ns for _, stop in newest.stalls],
            },
            "num_transfers_lost": len(newest.moves) - len(found),
            "trace": _as_data(_with_names(newest.trace, newest.names).to_json()),
            "plan": _as_data(newest.plan.to_json()),
        }

    def close(self) -> None:
        """Take the transfers' times before the store is closed. `document` remains usable. Idempotent."""
        self._take_records()
        self._is_closed = True

    def _take_records(self) -> None:
        """Wait for the step's transfers and take their times; the store's engine gives out each only once."""
        wanted = {ticket for ticket, _, _ in self._newest.moves} if self._newest is not None else set()
        if self._is_closed or not wanted - self._records.keys():
            return
        self._store.wait_all()
        for record in self._store.take_records():
            if record.ticket in wanted:
                self._records[record.ticket] = record


def _shape(trace: Trace) -> int:
    """A number that is equal for traces with the same variables, so that a new plan of a step keeps its names."""
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
