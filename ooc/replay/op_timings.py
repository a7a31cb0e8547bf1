"""Measured times and store rates of a plan's replays, for planning the same step again, and for what is said of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ooc.memory.protocols import Store
from scheduler.cost.simulate import simulate
from scheduler.plan import Machine, Plan
from scheduler.trace import Trace

Times = npt.NDArray[np.int64]
"""Nanoseconds, one for each op."""

_MOST_STEPS = 8
"""So many of the latest steps tell how long ops take."""


class Between:
    """What was done between the ops of the step that is being replayed, beside the program's own and torch's.

    Attributes:
        num_rerun_ops: Ops that were run again; `rerun_ns`: the time that re-runs took, with all that goes with them.
        own_ns: What the same ops took when they ran first.
    """

    def __init__(self) -> None:
        self._ns: dict[int, int] = {}
        self.num_rerun_ops = self.rerun_ns = self.own_ns = 0

    def __repr__(self) -> str:
        return f"<Between, {len(self._ns)} ops, {self.num_rerun_ops} run again>"

    def begin(self) -> None:
        """A step begins."""
        self._ns.clear()
        self.num_rerun_ops = self.rerun_ns = self.own_ns = 0

    def note_wait(self, index: int, ns: int) -> None:
        """Before an op, transfers were waited for."""
        self._ns[index] = self._ns.get(index, 0) + ns

    def note_rerun(self, index: int, ops: Iterable[int], ns: int, op_ns: Times) -> None:
        """Before an op, these were run again; `op_ns`: what ops took when they ran first."""
        self.note_wait(index, ns)
        own = [int(op_ns[op]) for op in ops]
        self.num_rerun_ops += len(own)
        self.own_ns += sum(own)
        self.rerun_ns += ns

    def host_ns(self, start_ns: Times, stop_ns: Times) -> Times:
        """What is left before each op; 0 before the first: between steps the program may do as it likes."""
        found = np.zeros_like(start_ns)
        found[1:] = start_ns[1:] - stop_ns[:-1]
        for index, ns in self._ns.items():
            found[index] -= ns
        return np.maximum(found, 0)


class OpTimings:
    """Op durations and store rates, measured over the steps that were replayed from one plan.

    Attributes:
        num_played: Steps replayed from the first op to the last.
    """

    def __init__(self) -> None:
        self.num_played = 0
        self._op_ns: deque[Times] = deque(maxlen=_MOST_STEPS)
        self._host_ns: deque[Times] = deque(maxlen=_MOST_STEPS)
        self._rerun_op_ns: deque[int] = deque(maxlen=_MOST_STEPS)
        self._start: tuple[int, int, int, int] | None = None
        self._elapsed_ns = 0  # of the steps noted since

    def __repr__(self) -> str:
        return f"<OpTimings of {self.num_played} steps>"

    def note(self, start_ns: Times, stop_ns: Times, between: Between, store: Store) -> None:
        """Note when the ops of a step began and ended that was replayed whole. The first one does not count: it touches
        memory for the first time."""
        self.num_played += 1
        if self.num_played == 1:
            self._start = _odometer(store)
        else:
            self._elapsed_ns += int(stop_ns[-1] - start_ns[0])
            self._op_ns.append(stop_ns - start_ns)
            self._host_ns.append(between.host_ns(start_ns, stop_ns))
            if between.num_rerun_ops:
                self._rerun_op_ns.append((between.rerun_ns - between.own_ns) // between.num_rerun_ops)

    def timed(self, trace: Trace) -> Trace:
        """The trace with each op's median time, of two the shorter: noise and first touches do not lengthen it much.

        The shortest of many promises a step that never comes: each op is at its best in another one. So do medians, by
        less, since now and then an op takes several times its time: all together are lengthened to the median of the
        steps' sums. With each op comes what lay between it and the op before.
        """
        if not self._op_ns:
            return trace
        own, host = _typical(self._op_ns), _typical(self._host_ns)
        return replace(
            trace,
            ops=tuple(
                replace(op, duration_ns=ns + before, host_ns=before)
                for op, ns, before in zip(trace.ops, own, host, strict=False)
            ),
        )

    def machine(self, before: Machine, store: Store) -> Machine:
        """The machine with the rates seen since this was last asked for, each way while it was busy.

        They were had under the load that matters (ops computing, both ways busy), so no further
        contention is assumed. A store that works in bursts (a card with a cache, a throttled disk) is fast while
        little is asked of it: what was seen under a plan that moves little says nothing of one that moves all. So a
        rate grows to what the store has moved over the whole time of the steps, which no burst can feign: else an
        encoder's plan that moved 20 MiB a step at 2 GB/s gave way to one that moved 200 at the 100 MB/s that there are,
        and took 1.6 times as long. With it comes what running an op again took beyond the op's own time.
        """
        if self._rerun_op_ns:
            before = replace(before, rerun_op_ns=max(_middle(self._rerun_op_ns), 0))
        if self._start is None:
            return before
        start, self._start = self._start, _odometer(store)
        elapsed_ns, self._elapsed_ns = self._elapsed_ns, 0
        read_nbytes, read_ns, written_nbytes, write_ns = (
            now - then for now, then in zip(self._start, start, strict=True)
        )
        if min(read_nbytes, read_ns, written_nbytes, write_ns) <= 0:
            return before
        return replace(
            before,
            load_bytes_per_s=_believed(before.load_bytes_per_s, read_nbytes, read_ns, elapsed_ns),
            evict_bytes_per_s=_believed(before.evict_bytes_per_s, written_nbytes, write_ns, elapsed_ns),
            shared_bytes_per_s=None,
        )


def told_anew(plan: Plan, trace: Trace, machine: Machine) -> Plan:
    """The plan with what the simulator says of it by measured times and rates. It knows no bounds for these."""
    found = simulate(replace(plan, machine=machine), trace, with_timeline=False)
    told: Mapping[str, int] = {"duration_ns": found.duration_ns, "stall_ns": found.stall_ns}
    if plan.recomputes:
        told = {**told, "recompute_ns": found.recompute_ns}
    return replace(plan, predicted={**plan.predicted, **told}, bounds={})


def _believed(before: float, nbytes: int, busy_ns: int, elapsed_ns: int) -> float:
    """The rate to plan with, in bytes per second: slower is believed at once."""
    throughput = nbytes * 1e9 / elapsed_ns if elapsed_ns else 0.0
    return min(nbytes * 1e9 / busy_ns, max(before, throughput))


def _middle(values: Iterable[int]) -> int:
    """The median; of an even number the smaller of the two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _typical(steps: Iterable[Times]) -> list[int]:
    """The median of each op, stretched so that they add up to the median step."""
    each = np.stack(list(steps))
    times = np.maximum(np.sort(each, axis=0)[(len(each) - 1) // 2], 0)
    total, medians = _middle(each.sum(axis=1).tolist()), int(times.sum())
    scale = max(total / medians, 1.0) if medians else 1.0
    return [int(ns) for ns in (times * scale).tolist()]


def _odometer(store: Store) -> tuple[int, int, int, int]:
    reads, writes = store.statistics("read"), store.statistics("write")
    return reads.nbytes, reads.busy_ns, writes.nbytes, writes.busy_ns
