"""What those have in common that do a part of an executor's work on the plan which it replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ooc.memory.residency import ResidencyManager
from ooc.replay.acts import ResidencyActs
from ooc.replay.bindings import Bindings
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.ops_beside import OpsBeside
from ooc.replay.plan_variables import ExecutableResidency
from vmm.table import AllocatorTable


class Replaying(Protocol):
    """What they need of the executor; see there."""

    active: ExecutablePlan | None
    beside: OpsBeside

    def before(self, index: int, bear: Callable[[Sequence[ExecutableResidency]], bool] | None = None) -> bool: ...
    def after(self, index: int) -> None: ...
    def check_deaths(self, executable: ExecutablePlan, tick: int) -> bool: ...
    def bail_out(self, reason: str) -> None: ...
    def is_anyone_late(self, executable: ExecutablePlan, tick: int) -> bool: ...


class PartOfReplay:
    """Of the plan that an executor replays, on the session's thread and with its lock held. Owns nothing."""

    def __init__(
        self,
        executor: Replaying,
        manager: ResidencyManager,
        allocator: AllocatorTable,
        dispatcher: Dispatcher,
        bindings: Bindings,
        acts: ResidencyActs,
    ) -> None:
        self._parts = executor, manager, allocator, dispatcher, bindings, acts
        self._executor = executor
        self._manager = manager
        self._allocator = allocator
        self._dispatcher = dispatcher
        self._bindings = bindings
        self._acts = acts

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._executor!r}>"

    def _pass_over(
        self,
        executable: ExecutablePlan,
        start: int,
        stop: int,
        bear: Callable[[Sequence[ExecutableResidency]], bool] | None = None,
    ) -> bool:
        """Do what the plan does around these ops, which do not come. False: the step has left the plan.

        `bear` is what `Executor.before` says of births.
        """
        before, after = executable.before, executable.after
        index = start
        while index < stop:
            first = index
            while index < stop and before[index] is None and after[index] is None:
                index += 1
            if index > first:
                executable.note_passed_over(first, index, time.monotonic_ns())
                continue
            self._allocator.state.set_between(index)
            index += 1
            executable.note_passed_over(first, index, time.monotonic_ns())
            if before[first] is not None and not self._executor.before(first, bear):
                return False
            if after[first] is not None:
                self._executor.after(first)
            if self._executor.active is None:
                return False
        self._allocator.state.set_between(stop)
        self._dispatcher.start(stop)
        return True
