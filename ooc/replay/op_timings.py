"""Measured op durations and store rates of a plan's replays, for planning the same step again."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ooc.memory.protocols import Store
from scheduler.plan import Machine
from scheduler.trace import Trace

_MOST_STEPS = 8
"""So many of the latest steps tell how long ops take."""

_MOST_GROWTH = 1.5
"""From plan to plan a rate grows by so much at most. Else a plan that hardly moves anything gives way to one that moves
all, at a rate that is not there: a conv stack at a third of its peak, 100 MB/s, then took 9 times the step's time."""


class OpTimings:
    """Op durations and store rates, measured over the steps that were replayed from one plan.

    Attributes:
        num_played: Steps replayed from the first op to the last.
    """

    def __init__(self) -> None:
        self.num_played = 0
        self._op_ns: deque[npt.NDArray[np.int64]] = deque(maxlen=_MOST_STEPS)
        self._start: tuple[int, int, int, int] | None = None

    def __repr__(self) -> str:
        return f"<OpTimings of {self.num_played} steps>"

    def note(self, op_ns: npt.NDArray[np.int64], store: Store) -> None:
        """Note the op durations of a step that was replayed whole. The first one does not count: it touches
        memory for the first time."""
        self.num_played += 1
        if self.num_played == 1:
            self._start = _odometer(store)
        else:
            self._op_ns.append(op_ns.copy())

    def timed(self, trace: Trace) -> Trace:
        """The trace with each op's median time, of two the shorter: noise and first touches do not lengthen it much.

        The shortest of many promises a step that never comes: each op is at its best in another one.
        """
        if not self._op_ns:
            return trace
        times = np.sort(np.stack(self._op_ns), axis=0)[(len(self._op_ns) - 1) // 2].tolist()
        return replace(
            trace, ops=tuple(replace(op, duration_ns=max(ns, 0)) for op, ns in zip(trace.ops, times, strict=False))
        )

    def machine(self, before: Machine, store: Store) -> Machine:
        """The machine with the rates seen since this was last asked for, each way while it was busy.

        They were had under the load that matters (ops computing, both ways busy), so no further
        contention is assumed. A store that works in bursts (a card with a cache, a throttled disk) is fast while
        little is asked of it: what was seen under an earlier plan says little of what a new one will see, and a rate
        grows by half of itself at a time.
        """
        if self._start is None:
            return before
        start, self._start = self._start, _odometer(store)
        read_nbytes, read_ns, written_nbytes, write_ns = (
            now - then for now, then in zip(self._start, start, strict=True)
        )
        if min(read_nbytes, read_ns, written_nbytes, write_ns) <= 0:
            return before
        return replace(
            before,
            load_bytes_per_s=min(read_nbytes * 1e9 / read_ns, _MOST_GROWTH * before.load_bytes_per_s),
            evict_bytes_per_s=min(written_nbytes * 1e9 / write_ns, _MOST_GROWTH * before.evict_bytes_per_s),
            shared_bytes_per_s=None,
        )


def _odometer(store: Store) -> tuple[int, int, int, int]:
    reads, writes = store.statistics("read"), store.statistics("write")
    return reads.nbytes, reads.busy_ns, writes.nbytes, writes.busy_ns
