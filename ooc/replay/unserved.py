"""Allocations that a plan's tables do not serve: planned ones between two ops, others within an op, those of no plan.

Within an op native code serves what the plan has there by the size, and in elastic plans by the number of the
allocation. Where a kernel takes another way on other sizes, as a convolution's backward does, it may ask for more or
less on the way, and the numbers shift. What is left of the op's allocations then serves what is small enough, before
the step has to leave its plan for it. A result may so come to lie where another one was planned: then later ops are not
as planned, and the step leaves its plan there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ooc.memory.no_room import NoRoom
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import PlanVariable
from ooc.replay.replaying import PartOfReplay
from ooc.units import format_nbytes
from scheduler.plan import occupied_ticks


class Unserved(PartOfReplay):
    """Of the plan that an executor replays, with the session's lock held. Owns nothing."""

    def serve(self, nbytes: int, *, is_whole: bool) -> int:
        """Serve an allocation of the session's thread. Its address; 0 if the plan has none here, or was left.

        `is_whole`: an op that is running does so at once, not in parts, which ask for their own memory.
        """
        if self._allocator.state.is_inside_op:
            return self._within(nbytes) if is_whole else 0
        return self._between(nbytes)

    def _between(self, nbytes: int) -> int:
        """Serve a planned allocation between two ops."""
        executable = self._executor.active
        assert executable is not None
        for residency in executable.births_between(self._dispatcher.cursor, nbytes, self._allocator.state.num_counted):
            variable = residency.variable
            if executable.variable_alive[variable.index] or variable.record is None:
                continue
            birth_tick, _ = occupied_ticks(residency.planned, executable.trace)
            if variable.is_taken(executable.variable_alive):
                return 0
            if not self._executor.check_deaths(executable, birth_tick):
                return 0
            self._acts.await_all(residency.waits)
            self._acts.prepare_birth(residency)
            return self._bear(executable, variable, nbytes)
        return 0

    def _within(self, nbytes: int) -> int:
        """Serve an allocation of the running op, which has no room beside the plan, by one that is left of its own.

        The smallest that is large enough, whether its turn comes or has passed: then its chunks may have been passed on
        to others, which are not born this time.
        """
        executable, state, cursor = self._executor.active, self._allocator.state, self._dispatcher.cursor
        assert executable is not None
        if self._manager.num_free >= self._manager.chunks_of(nbytes) or cursor >= executable.num_ops:
            return 0
        entries, alive = executable.allocs_of(cursor), executable.variable_alive
        born = [variable for _, _, variable in entries if alive[variable.index]]
        taken = {chunk for variable in born for chunk in variable.residencies[0].planned.chunk_indices()}
        for index, capacity, variable in sorted(entries, key=lambda entry: entry[1]):
            if capacity >= nbytes and self._is_ready(executable, variable, taken):
                state.window_next = max(state.window_next, index + 1)
                return self._bear(executable, variable, nbytes)
        return 0

    @staticmethod
    def _is_ready(executable: ExecutablePlan, variable: PlanVariable, taken: set[int]) -> bool:
        """Whether what has its addresses or its chunks before it is dead. Its op has prepared its birth."""
        alive, residency = executable.variable_alive, variable.residencies[0]
        if variable.record is None or alive[variable.index] or variable.is_taken(alive):
            return False
        return taken.isdisjoint(residency.planned.chunk_indices()) and not any(alive[other] for other in residency.dead)

    def _bear(self, executable: ExecutablePlan, variable: PlanVariable, nbytes: int) -> int:
        assert variable.record is not None
        executable.variable_nbytes[variable.index] = nbytes
        self._bindings.set_alive(executable, variable, variable.record, is_born=True)
        return variable.record.address

    def make_way(self, nbytes: int, *, may_refuse: bool, call_site: Callable[[], str]) -> None:
        """Bail out if the plan leaves no room for an allocation that it does not have.

        With `may_refuse` raise `NoRoom` instead: an op that runs in parts will ask for less. `call_site` tells where in
        the program the op that runs was called: in the plan that may be another line, with the same op.
        """
        num_free, num_needed = self._manager.num_free, self._manager.chunks_of(nbytes)
        if num_free >= num_needed:
            return
        if may_refuse:
            raise NoRoom(num_needed=num_needed, num_free=num_free, num_pinned=0)
        self._executor.bail_out(f"{self._asks(call_site)} {format_nbytes(nbytes)} that the plan does not have")

    def _asks(self, call_site: Callable[[], str]) -> str:
        executable, cursor = self._executor.active, self._dispatcher.cursor
        assert executable is not None
        if self._executor.beside.is_running:
            return f"before op {cursor}, {self._executor.beside.func} allocates"
        if not self._allocator.state.is_inside_op or cursor >= executable.num_ops:
            return "code between ops allocates"
        func: Any = executable.funcs[cursor]
        where = call_site()
        return f"op {cursor} ({func}{', ' if where else ''}{where}) allocates"
