"""Which ops of each sequence were shown to repeat their bits, in trials that were made within its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from ooc.replay.elastic import Envelope
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.planned_trials import trials_for, waits_much, with_replayable
from ooc.replay.rerun_trials import RerunTrials
from ooc.tracing.observed import Observed
from scheduler.budget import smallest_num_chunks
from scheduler.plan import Machine, Plan, PlanError, occupied_ticks
from scheduler.trace import Trace

_MOST_WITHOUT_ROOM = 2
"""Steps that leave a plan since there was no room to try an op of a new size."""

_MOST_ROOMIER = 3
"""Plans made for less memory, one after another: each may run other ops again."""


class ProvenOps:
    """Has the ops of plans tried that wait for the store, and remembers for each sequence which may run again.

    Args:
        trials: Who knows which kinds of op repeat their bits; None: nothing is tried within plans.
    """

    def __init__(self, trials: RerunTrials | None) -> None:
        self._trials = trials
        self._proven: dict[str, frozenset[int]] = {}
        self._kinds: dict[str, dict[int, int]] = {}  # by sequence and op, as they were when it was tried
        self._touched: dict[str, frozenset[int]] = {}  # ops on what code beside the ops often touches

    def __repr__(self) -> str:
        return f"<ProvenOps of {len(self._proven)} sequences>"

    def applied(self, key: str, trace: Trace) -> Trace:
        """The trace with the sequence's proven ops called replayable; as it is where nothing was tried."""
        return self.untouched(key, with_replayable(trace, self._proven[key]) if self._proven.get(key) else trace)

    def untouched(self, key: str, trace: Trace) -> Trace:
        """The trace without the ops that are not to run again, since code beside the ops touches what they use."""
        if not (touched := self._touched.get(key)):
            return trace
        return with_replayable(trace, frozenset(i for i, op in enumerate(trace.ops) if op.replayable) - touched)

    def forget_empty(self) -> None:
        """Try again where nothing was proven: there may have been no room for trials."""
        self._proven = {key: ops for key, ops in self._proven.items() if ops}

    def have_tried(self, key: str, executable: ExecutablePlan, step_ns: int) -> Machine | None:
        """Have a plan's ops tried in its next step, if it waits for the store so long that re-runs may pay.

        Where re-runs were asked for, ops are tried while they are learned. Then only plans for steps of any size need
        it: what was tried had other sizes.

        Returns:
            The machine for a plan with room for all of the trials, which may be had instead; None: there is no need.
        """
        if self._trials is None or key in self._proven or executable.may_omit:
            return None
        is_asked, is_elastic = self._trials.is_on, executable.is_elastic
        if is_asked and not is_elastic:
            return None
        if not waits_much(step_ns, executable.trace, is_elastic=is_elastic and not is_asked):
            return None
        executable.trials = trials_for(executable, self._trials.may_be_tried)
        return _machine_with_room(executable, executable.trials.ops) if executable.trials is not None else None

    def with_room(
        self,
        key: str,
        plan: Plan,
        envelope: Envelope,
        observed: Observed,
        make_plan: Callable[[Trace, Machine], Plan],
        make_executable: Callable[[Plan, Envelope, Observed, int], ExecutablePlan],
    ) -> ExecutablePlan:
        """A plan as it is executed; one for steps of any size that runs ops again has the room to try them.

        Another size is another kind of op: whether its bits repeat is tried when it first comes, in the middle of the
        plan. Without room for that the step would have to leave it. So where this plan lacks the room another is made
        for less memory; where those lack it, too, one without re-runs.
        """
        machine, trace, executable = plan.machine, envelope.trace, make_executable(plan, envelope, observed, 0)
        if not executable.is_elastic or self._trials is None:
            return executable
        num_chunks = machine.num_chunks
        for _ in range(_MOST_ROOMIER):
            lacking = _num_lacking(executable, self._first_of_each_kind(key, executable))
            if not lacking:
                return executable
            num_chunks -= lacking
            try:
                plan = replace(make_plan(trace, replace(machine, num_chunks=num_chunks)), machine=machine)
            except (PlanError, ValueError):
                break
            executable = make_executable(plan, envelope, observed, machine.num_chunks)
            executable.leaves_room = False  # the room is for good
        else:
            if not _num_lacking(executable, self._first_of_each_kind(key, executable)):
                return executable
        without = make_plan(with_replayable(trace, frozenset()), machine)
        return make_executable(without, envelope, observed, 0)

    def gives_up(self, key: str, executable: ExecutablePlan) -> bool:
        """Whether a plan was left too often for the sake of its re-runs: the next one has fewer, or none.

        For code beside the ops, which touches what they use. And for want of room for a new size: that happens where
        the program keeps more than when it was recorded.
        """
        touched = executable.reruns.often_touched(executable.timings.num_played)
        if touched:
            self._touched[key] = self._touched.get(key, frozenset()) | touched
            return True
        if not executable.is_elastic or executable.num_without_room < _MOST_WITHOUT_ROOM:
            return False
        self._proven[key] = frozenset()
        return True

    def _first_of_each_kind(self, key: str, executable: ExecutablePlan) -> list[int]:
        """Of the ops that leave recipes, those that are tried when sizes are new: later ones are known by then.

        What was one kind under the sizes at which it was tried is one under others.
        """
        kinds, found = self._kinds.get(key, {}), dict[int, int]()
        for index in executable.reruns.recipes_of:
            found.setdefault(kinds.get(index, -index), index)
        return list(found.values())

    def take(self, key: str, executable: ExecutablePlan) -> bool:
        """Note what came of the trials of a plan in the step that has just ended. Whether any op may run again."""
        done, executable.trials = executable.trials, None
        assert done is not None
        assert self._trials is not None
        self._kinds[key] = dict(done.kinds)
        self._proven[key] = frozenset(index for index, kind in done.kinds.items() if self._trials.repeats(kind))
        return bool(self._proven[key])


def _machine_with_room(executable: ExecutablePlan, ops: Iterable[int]) -> Machine | None:
    """The machine to plan for so that there is room to try each of these ops; None: the plan leaves it already.

    Where a step that leaves so much cannot be planned, as much is left as the op that needs most memory of all lets go
    of.
    """
    trace, machine = executable.trace, executable.plan.machine
    lacking = _num_lacking(executable, ops, beside_all=True)
    num_chunks = max(machine.num_chunks - lacking, smallest_num_chunks(trace, machine))
    return replace(machine, num_chunks=num_chunks) if num_chunks < machine.num_chunks else None


def _num_lacking(executable: ExecutablePlan, ops: Iterable[int], *, beside_all: bool = False) -> int:
    """Chunks that the plan does not leave free and a trial of one of these ops takes.

    It takes what the op allocates once more, and a copy of what it changes in place. With `beside_all` as much as the
    largest of these trials takes: another plan may leave nothing where this one leaves a part.
    """
    trace, machine = executable.trace, executable.plan.machine
    ops, births, lacking = list(ops), executable.reruns.graph.births, 0
    for index, num_free in zip(ops, _num_free(executable.plan, trace, ops), strict=True):
        written = {use.variable for use in trace.ops[index].uses if use.writes}
        needed = sum(machine.chunks_of(trace.variables[v].nbytes) for v in written.union(births[index]))
        if needed > num_free:
            lacking = max(lacking, needed if beside_all else needed - num_free)
    return lacking


def _num_free(plan: Plan, trace: Trace, ops: Iterable[int]) -> Iterator[int]:
    """For each of these ops, the chunks that nothing of the plan has at any time of it.

    Those are less than the plan has free at each time: what an op frees, it may allocate again.
    """
    runs = np.array(
        [(*occupied_ticks(r, trace), first, first + count) for r in plan.residencies for first, count in r.chunks],
        dtype=np.int64,
    ).reshape(-1, 4)
    for index in ops:
        op = trace.ops[index]
        held = runs[(runs[:, 0] <= op.stop_tick) & (runs[:, 1] >= op.start_tick)]
        changes = np.zeros(plan.machine.num_chunks + 1, dtype=np.int64)
        np.add.at(changes, held[:, 2], 1)
        np.add.at(changes, held[:, 3], -1)
        yield int(np.count_nonzero(np.cumsum(changes[:-1]) == 0))
