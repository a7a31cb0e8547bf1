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
from scheduler.plan import Machine
from scheduler.trace import Trace
from vmm.store import StoreError, StoreSpeed

_NUM_ROWS_KEPT = 20_000
"""A row takes about 400 bytes: without a limit, a week of small steps would take gigabytes."""

_NUM_REASONS_KEPT = 32
_UNMEASURED = StoreSpeed(
    write_bytes_per_s=1e9, read_bytes_per_s=1e9, write_together_bytes_per_s=5e8, read_together_bytes_per_s=5e8
)
"""An average solid-state disk, assumed for a store that is full or failing when it is measured."""

_measured: dict[Path | None, StoreSpeed] = {}
"""Store speeds by directory. Measuring takes 0.3 s, so it is done once a process; real transfers refine plans later."""

_log = logging.getLogger(__name__)

StepKind = Literal["learning", "planned", "off_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One finished step. Bytes moved and stalls are those between its start and its end."""

    mode: StepKind
    duration_s: float
    stall_s: float
    loaded_nbytes: int
    evicted_nbytes: int
    dropped_nbytes: int
    num_remapped_chunks: int
    num_faults: int


class StepLog:
    """The rows of finished steps, and the counters behind them; measures the store's speed.

    Attributes:
        rows: One row per step, in order; the newest 20,000 at least.
        num_steps: Steps finished, also those whose rows were dropped.
        memory: Samples of the process's memory at step ends.
        refusals: Why an existing plan could not be replayed, and how often.
        past_budgets: Earlier budgets.
        in_core_peak_nbytes: The largest peak of the traces recorded so far: what a step needs in core.
    """

    def __init__(self, manager: ResidencyManager, space: Space) -> None:
        self._manager = manager
        self._space = space
        self._started = 0.0
        self._before: dict[str, int] = {}
        self._began_planned = False
        self._num_faults = 0
        self._speed: Any = None
        self.rows: list[StepRow] = []
        self.num_steps = 0
        self._planned_chunks = 0
        self.memory = MemoryWatch(space.driver.num_chunks * space.driver.chunk_nbytes)
        self.past_budgets = PastBudgets()
        self.in_core_peak_nbytes = 0
        self.refusals: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<StepLog of {len(self.rows)} steps>"

    def begin(self, *, planned: bool) -> None:
        """Begin a step."""
        self._began_planned = planned
        self._before = self.counters()
        # Touches between two steps count for the second: no row would have them otherwise.
        self._before["num_faults"], self._num_faults = self._num_faults, self._before["num_faults"]
        self._started = time.perf_counter()

    def end(self, *, on_plan: bool, learned: bool) -> None:
        """End the step that began last."""
        if not self._before:
            return
        duration_s = time.perf_counter() - self._started
        after, before = self.counters(), self._before
        self._num_faults = after["num_faults"]
        moved = {name: after[name] - before[name] for name in after}
        mode: StepKind = "planned" if self._began_planned and on_plan else "off_plan" if learned else "learning"
        self.rows.append(StepRow(mode=mode, duration_s=duration_s, stall_s=moved.pop("stall_ns") / 1e9, **moved))
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

    def note_trace(self, trace: Trace) -> None:
        """Note the trace of a step."""
        self.in_core_peak_nbytes = max(self.in_core_peak_nbytes, trace.peak_nbytes())

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
        )
