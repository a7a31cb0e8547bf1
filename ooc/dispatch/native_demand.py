"""Lets native code run the ops on demand whose operands are all in memory (native/run_on_demand.h)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ooc.dispatch.hidden_operands import uses_unnamed
from ooc.dispatch.signals import CriticalLock
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.executor import Executor
from ooc.tracing import op_semantics as ops
from ooc.tracing.collective_ops import is_collective
from ooc.tracing.recording import StepRecording

_SLOTS = ("_state", "_stored", "_pins", "_seen", "used_ns")


def run_natively(
    dispatcher: Dispatcher,
    *,
    manager: ResidencyManager,
    executor: Executor,
    recording: StepRecording,
    lock: CriticalLock,
    refused: list[BaseException],
    failed: Callable[..., tuple[Any] | None],
    may_run_again: Callable[[Any], bool],
    most_ops: int,
) -> None:
    """Tell native code where it finds what `OpRunner` looks at before and after an op on demand.

    Args:
        dispatcher: The native dispatcher.
        manager, executor, recording, lock: The session's.
        refused: Allocations refused in the present op; native code calls `failed` where there are any.
        failed: `FailedOps.on_demand`.
        may_run_again: Whether trials of an op tell if it is replayable.
        most_ops: After so many ops in a period native code leaves them to Python.
    """
    sites = recording.call_sites.native_parts()
    dispatcher.prepare_demand(
        manager.records,
        State.RESIDENT,
        lock.acquire,
        lock.release,
        (executor.mid_op_pins, *manager.flights.lists(), manager.flights.waited_for),
        refused,
        lambda func: _describe(func, may_run_again),
        failed,
        sites,
        sites,
        tuple(VariableRecord.__dict__[name] for name in _SLOTS),
        most_ops,
    )
    recording.log_natively(dispatcher)


def _describe(
    func: Any, may_run_again: Callable[[Any], bool]
) -> tuple[Any, tuple[tuple[int, str], ...] | None, bool] | None:
    """How native code calls an op, the arguments it writes (None: all), and whether it may run again.

    None: Python looks at it first.
    """
    if not hasattr(func, "_schema") or is_special(func) or func.namespace == ops.REGION_NAMESPACE:
        return None
    return getattr(func, "_op", func), ops.written_arguments(func), may_run_again(func)


@functools.cache
def is_special(func: Any) -> bool:
    """Whether an op is run in parts, goes on after it has returned, or uses what it does not name. One look at them."""
    return ops.way_in_parts(func) is not None or is_collective(func) or uses_unnamed(func)


class Intercepts:
    """The ops that Python looks at before they are replayed, as a container: those that are special."""

    def __contains__(self, func: object) -> bool:
        return hasattr(func, "_schema") and is_special(func)
