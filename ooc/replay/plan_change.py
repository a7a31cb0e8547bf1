"""Whether a step whose budget shrinks can go on with another plan, and by which (`ooc.replay.plan_switch`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ooc.memory.residency import ResidencyManager
from ooc.replay.executor import Executor
from ooc.replay.plan_switch import PlanChange
from ooc.replay.planned_trials import with_replayable
from ooc.replay.sequences import Sequences
from scheduler.adapt import SwitchKind, switch

_log = logging.getLogger(__name__)


def change_plans(
    executor: Executor,
    sequences: Sequences,
    manager: ResidencyManager,
    at: int,
    num_chunks: int,
    resize: Callable[[], None],
) -> bool:
    """Plan the present step for a smaller pool, and go over to that plan right before the next op.

    Args:
        at: The step's next op.
        num_chunks: Of the pool, from now on.
        resize: Forgets all plans and gives chunks back; called when nothing that stays is in them.

    Returns:
        False if that cannot be done; the step may have left its plan. All is as `Executor.bail_out` leaves it then.

    Raises:
        As `Executor.go_over` does.
    """
    old = executor.active
    if old is None or not old.reruns or old.is_elastic or not 0 < at < old.num_ops or manager.flights:
        return False
    noted = executor.reruns.noted()
    num_kept = sum(manager.chunks_of(record.nbytes) for record in manager.workspaces())
    if noted is None or num_chunks <= num_kept:
        return False
    log = old.timings
    ops = frozenset(i for i, op in enumerate(old.trace.ops) if op.replayable and (i >= at or i in noted.recipes))
    machine = replace(log.machine(old.plan.machine, manager.store), num_chunks=num_chunks - num_kept)
    try:
        found = sequences.plan_beside(old, with_replayable(log.timed(old.trace), ops), machine)
    except Exception:  # noqa: BLE001 - a fault of the planner's must not end the user's training
        _log.exception("a fault in the planner; the step goes on on demand. Please report it")
        return False
    if found is None:
        return False
    key, new = found
    new.timings, new.stands_for = log, old.stands_for or old.trace
    way = switch(old.plan, new.plan, new.trace, at, num_way_chunks=old.plan.machine.num_chunks)
    if way.kind is not SwitchKind.ON_THE_FLY:
        _log.info("the budget shrinks, and the plan is left: %s", way.reason)
        return False
    if not executor.go_over(PlanChange(new=new, way=way, resize=resize)):
        return False
    sequences.adopt(key, new)
    _log.info(
        "the budget shrinks before op %d: variables that stay, move, are loaded, made again, written, given up: %s",
        at,
        [len(own) for own in (way.stays, way.moves, way.loads, way.recomputes, way.writes, way.drops)],
    )
    return True
