"""The log of steps: times, bytes moved and waits of each, and the process's memory meanwhile."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ooc.memory.protocols import Space, Store
from ooc.memory.residency import ResidencyManager
from ooc.telemetry.memory_watch import MemoryWatch
from ooc.telemetry.past_budgets import PastBudget, PastBudgets
from ooc.telemetry.why import Cause, Reason
from scheduler.plan import Machine
from vmm.store import StoreError
from vmm.store_speed import StoreSpeed
from vmm.torch_cpu import AllocatorTable

_NUM_ROWS_KEPT = 20_000
"""A row takes about 400 bytes: without a limit, a week of small steps would take gigabytes."""

_NUM_REASONS_KEPT = 32
_UNMEASURED = StoreSpeed(
    write_bytes_per_s=1e9, read_bytes_per_s=1e9, write_together_bytes_per_s=5e8, read_together_bytes_per_s=5e8
)
"""An average solid-state disk, assumed for a store that is full or failing when it is measured."""

_PLANNED = Reason()

_measured: dict[Path | None, StoreSpeed] = {}
"""Store speeds by directory. Measuring takes 0.3 s, so it is done once a process; real transfers refine plans later."""

_COUNTED_BETWEEN = ("num_faults", "relocate_ns", "relocated_nbytes")
"""Counters of what is done between two steps: stray touches, and copies within memory at the border."""

_log = logging.getLogger(__name__)

StepKind = Literal["learning", "planned", "off_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One finished step. Bytes moved and stalls are those between its start and its end.

    `cause` and `why` are its `ooc.telemetry.why.Reason`, unless it was planned. `policy` is that of the plan that it
    ended on, if any: until the plan of the policy that was asked for is there, another one's may stand in for it.
    """

    mode: StepKind
    duration_s: float
    stall_s: float
    loaded_nbytes: int
    evicted_nbytes: int
    dropped_nbytes: int
    num_remapped_chunks: int
    num_faults: int
    recomputed_nbytes: int = 0
    recompute_s: float = 0.0
    num_reruns: int = 0
    num_in_parts: int = 0
    relocated_nbytes: int = 0
    relocate_s: float = 0.0
    num_planned_ops: int = 0
    num_demand_ops: int = 0
    cause: Cause = ""
    why: str = ""
    policy: str = ""


class StepLog:
    """The rows of finished steps, and the counters behind them; measures the store's speed.

    Attributes:
        rows: One row per step, in order; the newest 20,000 at least.
        num_steps: Steps finished, also those whose rows were dropped.
        memory: Samples of the process's memory at step ends.
        refusals: Why an existing plan could not be replayed, and how often.
        past_budgets: Earlier budgets.
    """

    def __init__(self, manager: ResidencyManager, space: Space, allocator: AllocatorTable) -> None:
        self._manager = manager
        self._space = space
        self._allocator = allocator
        self._in_core_peak_nbytes: int | None = None  # the allocator has it while the session is open
        self._started = 0.0
        self._before: dict[str, int] = {}
        self._began_planned = False
        self._at_end = dict.fromkeys(_COUNTED_BETWEEN, 0)
        self._speed: Any = None
        self.rows: list[StepRow] = []
        self.num_steps = 0
        self._planned_chunks = 0
        self.memory = MemoryWatch(space.driver.num_chunks * space.driver.chunk_nbytes)
        self.past_budgets = PastBudgets()
        self.refusals: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<StepLog of {len(self.rows)} steps>"

    def begin(self, *, planned: bool) -> None:
        """Begin a step."""
        self._began_planned = planned
        self._before = self.counters()
        # What is done between two steps counts for the second: no row would have it otherwise.
        self._before.update(self._at_end)
        self._started = time.perf_counter()

    @property
    def began_planned(self) -> bool:
        """Whether the step that began last began on a plan."""
        return self._began_planned

    def end(
        self, *, policy: str, learned: bool, num_planned_ops: int, num_demand_ops: int, reason: Reason = _PLANNED
    ) -> None:
        """End the step that began last.

        Args:
            policy: Of the plan that is being replayed; empty if none is.
            learned: Whether there are plans.
            num_planned_ops, num_demand_ops: Its ops that were replayed from plans, and those that were not.
            reason: Why it was not planned.
        """
        if not self._before:
            return
        duration_s = time.perf_counter() - self._started
        after, before = self.counters(), self._before
        self._at_end = {name: after[name] for name in _COUNTED_BETWEEN}
        moved = {name: after[name] - before[name] for name in after}
        is_planned = num_demand_ops == 0 and ((self._began_planned and bool(policy)) or num_planned_ops > 0)
        mode: StepKind = "planned" if is_planned else "off_plan" if learned else "learning"
        stall_s, recompute_s = moved.pop("stall_ns") / 1e9, moved.pop("recompute_ns") / 1e9
        relocate_s = moved.pop("relocate_ns") / 1e9
        self.rows.append(
            StepRow(
                mode=mode,
                duration_s=duration_s,
                stall_s=stall_s,
                recompute_s=recompute_s,
                relocate_s=relocate_s,
                num_planned_ops=num_planned_ops,
                num_demand_ops=num_demand_ops,
                cause="" if is_planned else reason.cause,
                why="" if is_planned else reason.text,
                policy=policy,
                **moved,
            )
        )
        self.num_steps += 1
        if len(self.rows) >= 2 * _NUM_ROWS_KEPT:
            del self.rows[:_NUM_ROWS_KEPT]
        self._before = {}
        self.memory.sample_if_due()

    @property
    def peak_chunks(self) -> int:
        """Most chunks that held variables at once so far, in steps of every mode."""
        return max(self._manager.peak_chunks, self._planned_chunks)

    def note_plan(self, num_chunks: int) -> None:
        """Note that a plan is entered which holds at most so many chunks at once."""
        self._planned_chunks = max(self._planned_chunks, num_chunks)

    def note_budget(self, before_nbytes: int) -> None:
        """Note that the budget was `before_nbytes` until now; peaks start anew."""
        chunk_nbytes = self._space.driver.chunk_nbytes
        row = PastBudget(
            num_steps=self.num_steps, budget_nbytes=before_nbytes, peak_nbytes=self.peak_chunks * chunk_nbytes
        )
        self.past_budgets.note(row)
        self._planned_chunks = 0
        self._manager.peak_chunks = self._manager.resident_chunks()
        self.memory.pool_nbytes = self._space.driver.num_chunks * chunk_nbytes

    def note_refusal(self, reason: str) -> None:
        """Note why a step runs on demand although there is a plan for it."""
        if reason in self.refusals or len(self.refusals) < _NUM_REASONS_KEPT:
            self.refusals[reason] = self.refusals.get(reason, 0) + 1

    @property
    def in_core_peak_nbytes(self) -> int:
        """The most bytes of large storages alive at once so far, resident or away: what it all takes in core."""
        known = self._in_core_peak_nbytes
        return int(self._allocator.state.peak_live_nbytes) if known is None else known

    def close(self) -> None:
        """Keep what the allocator knows, which counts for another session next. After the last op."""
        self._in_core_peak_nbytes = self.in_core_peak_nbytes

    def counters(self) -> dict[str, int]:
        """Counters of what was moved so far, by name; they only grow."""
        self._manager.counters.num_faults = self._manager.guards.num_served
        return {**self._manager.counters.copy(), "num_remapped_chunks": self._space.num_remapped_chunks}

    def machine(self, num_chunks: int, chunk_nbytes: int, store: Store) -> Machine:
        """The machine that plans are made for; measures the store on first use."""
        if self._speed is None:
            self._speed = _measured.get(store.directory)
        if self._speed is None:
            try:
                self._speed = _measured[store.directory] = store.measure()
            except (StoreError, OSError) as error:
                _log.warning("cannot measure the store, planning for %s: %s", _UNMEASURED, error)
                self._speed = _UNMEASURED
        speed = self._speed
        return Machine(
            chunk_nbytes=chunk_nbytes,
            num_chunks=num_chunks,
            load_bytes_per_s=speed.read_bytes_per_s,
            evict_bytes_per_s=speed.write_bytes_per_s,
            shared_bytes_per_s=speed.read_together_bytes_per_s + speed.write_together_bytes_per_s,
            remap_ns=self._space.driver.remap_ns,
        )
