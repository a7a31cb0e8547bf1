"""Where a plan's variables are when it is played for the first time: where they are already, as far as that can be.

Plans that take turns have many variables in common, and each was coloured on its own. So a plan that is entered would
find the same weights in memory as the one before, at other places, and copy them there and back with each turn; where
memory is short even by way of the store. Its chunks are renamed at first (`scheduler.renaming`).
"""

from __future__ import annotations

from ooc.memory.record import State
from ooc.memory.residency import ResidencyManager
from ooc.replay.bindings import Bound
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import ExecutableResidency
from ooc.replay.present_sizes import fitting
from scheduler.plan import Plan
from scheduler.renaming import names_that_match, renamed

_MOST_PIECES = 1.25
"""So many times as many runs at most may the plan's variables be in: each is a mapping, and a segment of transfers."""


def start_places(executable: ExecutablePlan, bound: Bound, manager: ResidencyManager) -> dict[int, ExecutableResidency]:
    """Per variable that is in memory when the plan's step starts, its first residency.

    The first time that this is asked of a plan, its chunks are renamed by where the bound records are. Not those of
    one that runs ops again, tries some or copies at its border: what that takes is laid out by their numbers.
    """
    targets = executable.start_residencies()
    if executable.is_placed:
        return targets
    executable.is_placed = True
    if executable.reruns.by_op or executable.trials is not None or executable.border is not None:
        return targets
    pairs = [
        (fitting(manager, targets[variable.index], record)[0], record.runs)
        for variable, record in bound
        if record.state is State.RESIDENT and variable.index in targets
    ]
    names = names_that_match(pairs, executable.num_chunks)
    if names == list(range(executable.num_chunks)):
        return targets
    plan = renamed(executable.plan, names)
    if _num_runs(plan) <= _MOST_PIECES * _num_runs(executable.plan):
        _take_names(executable, plan, manager)
    return targets


def _num_runs(plan: Plan) -> int:
    return sum(len(residency.chunks) for residency in plan.residencies)


def _take_names(executable: ExecutablePlan, plan: Plan, manager: ResidencyManager) -> None:
    """Let the plan be this one, which is the same under other names. Nothing is mapped for it yet."""
    under_new = dict(zip(map(id, executable.plan.residencies), plan.residencies, strict=True))
    executable.plan = plan
    for variable in executable.variables:
        for residency in variable.residencies:
            residency.planned = under_new[id(residency.planned)]
            residency.runs = residency.planned.chunks
            residency.segments = manager.segments(residency.runs, variable.nbytes)
            residency.fitted.clear()
