"""The log of steps, and the report made from it."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ooc.books import Books
from scheduler.plan import Machine
from vmm.addresses import AddressSpace
from vmm.store import FileStore

if TYPE_CHECKING:
    from ooc.session import Session

REPORT_SCHEMA_VERSION = 1

StepKind = Literal["learning", "planned", "off_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step as it went. Bytes moved and stalls are those between its start and its end."""

    mode: StepKind
    duration_s: float
    stall_s: float
    loaded_nbytes: int
    evicted_nbytes: int
    dropped_nbytes: int
    num_remapped_chunks: int
    num_faults: int


class StepLog:
    """Rows of finished steps, and the measured speed of the store."""

    def __init__(self, books: Books, space: AddressSpace) -> None:
        self._books = books
        self._space = space
        self._started = 0.0
        self._before: dict[str, int] = {}
        self._began_planned = False
        self._speed: Any = None
        self.rows: list[StepRow] = []

    def __repr__(self) -> str:
        return f"<StepLog of {len(self.rows)} steps>"

    def begin(self, *, planned: bool) -> None:
        """A step starts now."""
        self._began_planned = planned
        self._before = self._counters()
        self._started = time.perf_counter()

    def end(self, *, on_plan: bool, learned: bool) -> None:
        """The step that began last ends now."""
        if not self._before:
            return
        duration_s = time.perf_counter() - self._started
        after, before = self._counters(), self._before
        moved = {name: after[name] - before[name] for name in after}
        mode: StepKind = "planned" if self._began_planned and on_plan else "off_plan" if learned else "learning"
        self.rows.append(
            StepRow(mode=mode, duration_s=duration_s, stall_s=moved.pop("stall_ns") / 1e9, **moved)
        )
        self._before = {}

    def _counters(self) -> dict[str, int]:
        return {**self._books.counters.copy(), "num_remapped_chunks": self._space.num_remapped_chunks}

    def machine(self, num_chunks: int, chunk_nbytes: int, store: FileStore) -> Machine:
        """What plans are made for; measures the store on first use."""
        if self._speed is None:
            self._speed = store.measure()
        speed = self._speed
        return Machine(
            chunk_nbytes=chunk_nbytes,
            num_chunks=num_chunks,
            load_bytes_per_s=speed.read_bytes_per_s,
            evict_bytes_per_s=speed.write_bytes_per_s,
            shared_bytes_per_s=speed.read_together_bytes_per_s + speed.write_together_bytes_per_s,
        )

    def report(self, session: Session) -> dict[str, Any]:
        """The session so far, as plain data."""
        from vmm.machine import process_nbytes

        trace, plan = session.trace(), session.plan()
        planned_chunks = session._executor.active.num_chunks if session._executor.active is not None else 0
        return {
            "schema": "ooc.report",
            "schema_version": REPORT_SCHEMA_VERSION,
            "budget_nbytes": session.budget_nbytes,
            "chunk_nbytes": session.chunk_nbytes,
            "threshold_nbytes": session.threshold_nbytes,
            "peak_nbytes": max(self._books.peak_chunks, planned_chunks) * session.chunk_nbytes,
            "process_nbytes": asdict(process_nbytes()),
            "in_core_peak_nbytes": trace.peak_nbytes() if trace is not None else None,
            "steps": [asdict(row) for row in self.rows],
            "policy": session.policy,
            "plan": None
            if plan is None
            else {"predicted": dict(plan.predicted), "bounds": dict(plan.bounds), "parameters": dict(plan.parameters)},
            "unplannable": dict(session._sequences.unplannable),
            "planning_s": session._sequences.planning_s,
            "versions": {"torch": torch.__version__, "python": platform.python_version(), "ooc": _version()},
        }


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ooc")
    except PackageNotFoundError:
        return "unknown"
