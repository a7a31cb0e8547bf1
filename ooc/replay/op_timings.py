"""Measured op durations and store rates of a plan's replays, for planning the same step again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ooc.memory.protocols import Store
from scheduler.plan import Machine
from scheduler.trace import Trace


class OpTimings:
    """Op durations and store rates, measured over the steps that were replayed from one plan.

    Attributes:
        num_played: Steps replayed from the first op to the last.
    """

    def __init__(self) -> None:
        self.num_played = 0
        self._best_ns: npt.NDArray[np.int64] | None = None
        self._start: tuple[int, int, int, int] | None = None

    def __repr__(self) -> str:
        return f"<OpTimings of {self.num_played} steps>"

    def note(self, op_ns: npt.NDArray[np.int64], store: Store) -> None:
        """Note the op durations of a step that was replayed whole. The first one does not count: it touches
        memory for the first time."""
        self.num_played += 1
        if self.num_played == 1:
            self._start = _odometer(store)
        elif self._best_ns is None:
            self._best_ns = op_ns.copy()
        else:
            self._best_ns = np.minimum(self._best_ns, op_ns)

    def timed(self, trace: Trace) -> Trace:
        """The trace with each op's shortest time, which noise and first touches do not lengthen."""
        if self._best_ns is None:
            return trace
        times = self._best_ns.tolist()
        return replace(
            trace, ops=tuple(replace(op, duration_ns=max(ns, 0)) for op, ns in zip(trace.ops, times, strict=False))
        )

    def machine(self, before: Machine, store: Store) -> Machine:
        """The machine with the rates seen since the first step, each way while it was busy.

        They were had under the load that matters (ops computing, both ways busy), so no further
        contention is assumed.
        """
        if self._start is None:
            return before
        read_nbytes, read_ns, written_nbytes, write_ns = (
            now - then for now, then in zip(_odometer(store), self._start, strict=True)
        )
        if min(read_nbytes, read_ns, written_nbytes, write_ns) <= 0:
            return before
        return replace(
            before,
            load_bytes_per_s=read_nbytes * 1e9 / read_ns,
            evict_bytes_per_s=written_nbytes * 1e9 / write_ns,
            shared_bytes_per_s=None,
        )


def _odometer(store: Store) -> tuple[int, int, int, int]:
    reads, writes = store.statistics("read"), store.statistics("write")
    return reads.nbytes, reads.busy_ns, writes.nbytes, writes.busy_ns
