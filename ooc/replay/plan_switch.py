"""Goes over from one plan of a step to another in its middle, when the budget shrinks (Melon, MobiSys 2022, 4.4).

`scheduler.adapt.switch` says what that takes; here it is done, right before an op, where the plan so far runs ops
again. What both plans have in memory stays or moves; what only the new one has is loaded or made again; what only the
old one has is given up, unwritten where the new plan makes it again. Then the step goes on under the new plan.

It is left to a bailout (all that is discarded is made again, and the rest of the step runs on demand) where the new
plan would run ops again that left no recipe in this step, or read what may have been freed by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.bindings import Bindings, Bound
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.replay.remakes import Remake
from scheduler.adapt import Switch
from scheduler.plan import Kept, Recomputed, occupied_ticks
from vmm.chunks import ChunkPool

if TYPE_CHECKING:
    from ooc.replay.reruns import Noted, Reruns


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """A change of plans before an op, decided upon.

    Attributes:
        new: The plan to go over to; of the same trace.
        way: What that takes.
        resize: Gives chunks back, once nothing that stays is in them.
    """

    new: ExecutablePlan
    way: Switch
    resize: Callable[[], None]


class Handover:
    """What a plan hands over to another of the same step. Made while the old one is replayed.

    Args:
        noted: What re-runs of this step may use.
    """

    def __init__(self, old: ExecutablePlan, change: PlanChange, noted: Noted) -> None:
        self.old, self.new, self.at = old, change.new, change.way.op_index
        self.noted = noted
        self._way, self._resize = change.way, change.resize
        self._times = old.op_start_ns[: self.at].copy(), old.op_stop_ns[: self.at].copy()
        self._addresses, self._nbytes = old.variable_address.copy(), old.variable_nbytes.copy()
        self._alive = {v.index: v.record for v in old.variables if old.variable_alive[v.index]}

    def __repr__(self) -> str:
        return f"<Handover before op {self.at}>"

    @property
    def records(self) -> dict[int, VariableRecord]:
        """The records of the variables that are still alive, by index."""
        return {index: record for index, record in self._alive.items() if record is not None}

    def carry_out(
        self,
        manager: ResidencyManager,
        bindings: Bindings,
        reruns: Reruns,
        loads: list[ExecutableResidency],
        new_pool: Callable[[], ChunkPool],
        absorb: Callable[[], object],
    ) -> Bound | None:
        """Bring all to where the new plan has it. The old one was left, and what it had discarded is so still.

        Args:
            loads: Where loads that begin are noted.
            absorb: Lets the manager forget what was freed.

        Returns:
            What is bound; None if that cannot be done, and all is the manager's.
        """
        new = self.new
        absorb()
        self._drop_freed(manager)
        self._take_reservations(manager)
        self._change_memory(manager, reruns, new_pool)
        absorb()
        self._drop_freed(manager)
        bound, targets = self._bound(), self._targets()
        if bindings.is_any_given_out() or not bindings.may_make_way(new, bound, targets):
            return None
        bindings.make_way(new, bound, targets, new_pool)
        for record in self.records.values():
            if record.state is State.DISCARDED:
                manager.space.unmap(record.reservation)  # what it shows is given back
        self._resize()
        failure = bindings.place(new, (), bound, targets, new_pool, loads)
        if failure is not None:
            raise failure
        if bindings.refusal:
            return None
        self._show(manager)
        new.op_start_ns[: self.at], new.op_stop_ns[: self.at] = self._times
        new.variable_nbytes[:] = self._nbytes
        unknown = new.variable_address == 0
        new.variable_address[unknown] = self._addresses[unknown]
        return bound

    def _drop_freed(self, manager: ResidencyManager) -> None:
        """Forget records whose storages were freed meanwhile."""
        self._alive = {i: r for i, r in self.records.items() if manager.manages(r)}

    def _take_reservations(self, manager: ResidencyManager) -> None:
        """Take over the records that the old plan keeps for variables that are not alive: their addresses are known."""
        for ours, theirs in zip(self.old.variables, self.new.variables, strict=True):
            record, ours.record = ours.record, None
            theirs.record = record
            if record is not None:
                manager.space.unmap(record.reservation)  # what it shows may be given back

    def remake_of(self, targets: Iterable[int]) -> Remake:
        """The remake of some of the variables."""
        return Remake(
            self.new.reruns,
            recipes=self.noted.recipes,
            holds=list(self.noted.holds.values()),
            pool=self.records,
            targets=list(targets),
            num_ops=self.at,
            sizes={v.index: v.nbytes for v in self.new.variables},
        )

    def lost(self, manager: ResidencyManager) -> list[int]:
        """Variables that are alive and discarded now."""
        self._drop_freed(manager)
        return [index for index, record in self.records.items() if record.state is State.DISCARDED]

    def _change_memory(self, manager: ResidencyManager, reruns: Reruns, new_pool: Callable[[], ChunkPool]) -> None:
        """Make again what only the new plan has, give up what only the old one has, and write what is to be stored."""
        sources = {use.variable for op in self._way.ops for use in self.new.trace.ops[op].uses}
        self._discard(reruns, lambda index: index not in sources)
        manager.retake_pool(new_pool())
        self._drop_freed(manager)
        wanted = [index for index in self._way.recomputes if index in self.records]
        if wanted:
            reruns.run_now(self.remake_of(wanted))
        self._discard(reruns, lambda _: True)
        manager.retake_pool(new_pool())
        self._drop_freed(manager)
        started = []
        for index in self._way.writes:
            record = self.records.get(index)
            if record is not None and record.state is State.RESIDENT and not record.stored:
                manager.settle(record)
                manager.start_write(record)
                started.append(record)
        for record in started:
            manager.settle(record)

    def _bound(self) -> Bound:
        """The new plan's variables that are alive, with their records, which they have from now on."""
        found: Bound = []
        for index, record in self.records.items():
            self.new.variables[index].record = record
            found.append((self.new.variables[index], record))
        return found

    def _targets(self) -> dict[int, ExecutableResidency]:
        """The residencies that the new plan is in right before the op."""
        found = {}
        for variable in self.new.variables:
            residency = residency_before(self.new, variable, self.at)
            if residency is not None and variable.index in self.records:
                found[variable.index] = residency
        return found

    def _show(self, manager: ResidencyManager) -> None:
        """Let addresses show what is there now, after all were mapped as at the step's start."""
        for record in self.records.values():
            if record.state is State.RESIDENT:
                manager.space.map(record.reservation, record.runs)
            elif record.state is State.DISCARDED and manager.debug:
                manager.space.unmap(record.reservation)

    def _discard(self, reruns: Reruns, may_be: Callable[[int], bool]) -> None:
        for index, record in self.records.items():
            is_there = record.state is State.RESIDENT and not (record.stored or record.exports or record.pins)
            if is_there and may_be(index) and self._is_made_again(index):
                reruns.give_up(self.old, index, record, self.noted)

    def _is_made_again(self, index: int) -> bool:
        """Whether the new plan has a variable nowhere before the op, and next in memory by a re-run."""
        new, variable = self.new, self.new.variables[index]
        if index in self._way.writes or residency_before(new, variable, self.at) is not None:
            return False
        tick = new.trace.ops[self.at].start_tick
        coming = (r for r in variable.residencies if occupied_ticks(r.planned, new.trace)[0] >= tick)
        first = next(coming, None)
        return first is not None and isinstance(first.planned.start, Recomputed) and id(first) in _for_the_program(new)


def residency_before(plan: ExecutablePlan, variable: PlanVariable, at: int) -> ExecutableResidency | None:
    """The residency in which a variable is right before an op, before what the plan does there."""
    tick = plan.trace.ops[at].start_tick
    for residency in variable.residencies:
        if residency.is_left_out:
            continue
        start, stop = occupied_ticks(residency.planned, plan.trace)
        if start <= tick < stop and (start < tick or isinstance(residency.planned.start, Kept)):
            return residency
    return None


def _for_the_program(plan: ExecutablePlan) -> set[int]:
    """Re-runs of variables that the program still holds then; of the others, nobody may ask for their bytes."""
    trace = plan.trace
    found = set()
    for variable in plan.variables:
        death = trace.variables[variable.index].death_tick
        for residency in variable.residencies:
            if isinstance(residency.planned.start, Recomputed):
                start, _ = occupied_ticks(residency.planned, trace)
                if death is None or start < death:
                    found.add(id(residency))
    return found


def held_for(new: ExecutablePlan, at: int, alive: Callable[[int], bool], noted: Noted) -> bool:
    """Hold what re-runs from op `at` on read from the pool. False: they cannot all be played from here on."""
    trace = new.trace
    to_come = [rerun for op, rerun in new.reruns.by_op.items() if op >= at]
    if any(op.index < at and op.index not in noted.recipes for rerun in to_come for op in rerun.ops):
        return False
    start_tick = trace.ops[at].start_tick
    for variable, last in new.reruns.held_until.items():
        birth = trace.variables[variable].birth_tick
        if last < at or (birth is not None and birth >= start_tick) or variable in noted.holds:
            continue
        if not alive(variable):
            return False
        storage = noted.storage(variable)
        if storage is not None:
            noted.holds[variable] = storage
        elif not any(
            at <= op < last and any(u.variable == variable for u in trace.ops[op].uses) for op in new.reruns.recipes_of
        ):
            return False
    return True
