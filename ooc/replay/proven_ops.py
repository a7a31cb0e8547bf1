"""Which ops of each sequence were shown to repeat their bits, in trials that were made within its plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.planned_trials import trials_for, waits_much, with_replayable
from ooc.replay.rerun_trials import RerunTrials
from scheduler.budget import smallest_num_chunks
from scheduler.plan import Machine, Plan, occupied_ticks
from scheduler.trace import Trace


class ProvenOps:
    """Has the ops of plans tried that wait for the store, and remembers for each sequence which may run again.

    Args:
        trials: Who knows which kinds of op repeat their bits; None: nothing is tried within plans.
    """

    def __init__(self, trials: RerunTrials | None) -> None:
        self._trials = trials
        self._proven: dict[str, frozenset[int]] = {}

    def __repr__(self) -> str:
        return f"<ProvenOps of {len(self._proven)} sequences>"

    def applied(self, key: str, trace: Trace) -> Trace:
        """The trace with the sequence's proven ops called replayable; as it is where nothing was tried."""
        return with_replayable(trace, self._proven[key]) if self._proven.get(key) else trace

    def forget_empty(self) -> None:
        """Try again where nothing was proven: there may have been no room for trials."""
        self._proven = {key: ops for key, ops in self._proven.items() if ops}

    def have_tried(self, key: str, executable: ExecutablePlan, step_ns: int) -> Machine | None:
        """Have a plan's ops tried in its next step, if it waits for the store so long that re-runs may pay.

        Returns:
            The machine for a plan with room for all of the trials, which may be had instead; None: there is no need.
        """
        if (
            self._trials is None
            or executable.is_elastic
            or key in self._proven
            or not waits_much(step_ns, executable.trace)
        ):
            return None
        executable.trials = trials_for(executable, self._trials.may_be_tried)
        return _machine_with_room(executable, executable.trials.ops) if executable.trials is not None else None

    def take(self, key: str, executable: ExecutablePlan) -> bool:
        """Note what came of the trials of a plan in the step that has just ended. Whether any op may run again."""
        done, executable.trials = executable.trials, None
        assert done is not None
        assert self._trials is not None
        self._proven[key] = frozenset(index for index, kind in done.kinds.items() if self._trials.repeats(kind))
        return bool(self._proven[key])


def _machine_with_room(executable: ExecutablePlan, ops: Iterable[int]) -> Machine | None:
    """The machine to plan for so that there is room to try each of these ops; None: the plan leaves it already.

    A trial takes what the op allocates once more, and a copy of what it changes in place. Where a step that leaves so
    much cannot be planned, as much is left as the op that needs most memory of all lets go of.
    """
    trace, machine = executable.trace, executable.plan.machine
    free = _num_free(executable.plan, trace)
    births = executable.reruns.graph.births
    lacking = 0
    for index in ops:
        written = {use.variable for use in trace.ops[index].uses if use.writes}
        needed = sum(machine.chunks_of(trace.variables[v].nbytes) for v in written.union(births[index]))
        if needed > free[index]:
            lacking = max(lacking, needed)
    if not lacking:
        return None
    num_chunks = max(machine.num_chunks - lacking, smallest_num_chunks(trace, machine))
    return replace(machine, num_chunks=num_chunks) if num_chunks < machine.num_chunks else None


def _num_free(plan: Plan, trace: Trace) -> list[int]:
    """For each op, the chunks that the plan leaves free throughout it."""
    held = np.zeros(trace.num_ticks + 1, dtype=np.int64)
    for residency in plan.residencies:
        start, stop = occupied_ticks(residency, trace)
        count = sum(count for _, count in residency.chunks)
        held[start] += count
        held[stop] -= count
    held = np.cumsum(held)
    return [plan.machine.num_chunks - int(held[op.start_tick : op.stop_tick + 1].max()) for op in trace.ops]
