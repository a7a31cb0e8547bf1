"""Late entry: a step that has left its plan goes on with another one, from the op that told them apart.

Of several plans that begin alike nobody knows which is meant: a batch is made, then one of several networks runs on it;
a step has one layer more in one of ten. What was expected is entered, and left where another op comes. If there is a
plan for what comes, with the same ops so far on the same variables, the step goes on with that: what it has made so far
is bound by where it was born, what existed before as at the step's start, and all of it is brought to where that plan
has it right before the op.

It is compared op by op from there on, like any step on a plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.bindings import Bindings, Bound
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_switch import residency_before
from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.tracing.recorder import StepRecorder
from vmm.torch_cpu import ALLOC

_MOST_TRIED = 4
"""So many plans are tried for one sequence, the first at its beginning."""
_LEAST_LEFT = 16
"""So many ops of a plan at least must be to come."""
_LEAST_SHARE = 0.25
"""So much of it, that is: to enter it takes as long as to run some hundred ops on demand."""


def may_go_on(
    executable: ExecutablePlan,
    so_far: StepRecorder,
    func: Any,
    addresses: Sequence[int],
    record_at: Callable[[int], VariableRecord | None],
) -> bool:
    """Whether a plan goes on with an op on these operands, after what a step has had so far.

    Its ops were the plan's, and used what the plan has there, as far as that lives across steps. Not a plan whose ops
    are left out or vary in size, run again, in parts, or beside collectives.
    """
    at = so_far.num_ops
    num_left = executable.num_ops - at
    if num_left < max(_LEAST_LEFT, _LEAST_SHARE * executable.num_ops) or executable.funcs[at] is not func:
        return False
    if so_far.is_cut or so_far.grad_mode != executable.grad_mode or not _is_plain(executable):
        return False
    if not _is_on(executable, at, addresses, record_at) or so_far.funcs() != executable.funcs[:at]:
        return False
    start = so_far.start_records
    return all(_is_on(executable, index, op.occurrences, start.get) for index, op in enumerate(so_far.as_records()))


class LatePlans:
    """Chooses the plan with which a sequence goes on that has left another one.

    Args:
        record_at: What the manager has at an address.
    """

    def __init__(self, record_at: Callable[[int], VariableRecord | None]) -> None:
        self._record_at = record_at
        self._tried: list[ExecutablePlan] = []

    def __repr__(self) -> str:
        return f"<LatePlans: {len(self._tried)} tried>"

    def begin(self, plan: ExecutablePlan | None) -> None:
        """A sequence begins, by this plan."""
        self._tried = [plan] if plan is not None else []

    def take(
        self, plans: Iterable[ExecutablePlan], so_far: StepRecorder, func: Any, addresses: Sequence[int]
    ) -> ExecutablePlan | None:
        """The first of these that goes on with an op (`may_go_on`), and was not tried for the present sequence yet."""
        if len(self._tried) >= _MOST_TRIED or not so_far.is_begun:  # before, it is at its head, where it may begin
            return None
        for plan in plans:
            if plan not in self._tried and may_go_on(plan, so_far, func, addresses, self._record_at):
                self._tried.append(plan)
                return plan
        return None


def _is_plain(executable: ExecutablePlan) -> bool:
    """Whether a plan has nothing of which more would have to be known than where variables are."""
    if executable.may_omit or executable.is_elastic or executable.reruns.by_op or executable.trials is not None:
        return False
    return not any(executable.flights) and all(apart is None for apart in executable.parts.sliced)


def _is_on(
    executable: ExecutablePlan,
    op: int,
    addresses: Sequence[int],
    record_at: Callable[[int], VariableRecord | None],
) -> bool:
    """Whether operands that live across a plan's steps are at these addresses."""
    expected = executable.occurrences[op]
    if len(expected) != len(addresses):
        return False
    for index, address in zip(expected, addresses, strict=True):
        if executable.variables[index].is_persistent:
            record = record_at(address)
            if record is None or record.serial != executable.variables[index].serial:
                return False
    return True


class LateEntry:
    """Where a step is, that goes on with another plan, and what that plan has there.

    Args:
        so_far: The step's ops so far, as if they had run on demand.
    """

    def __init__(self, executable: ExecutablePlan, so_far: StepRecorder) -> None:
        self.so_far = so_far
        self.at = so_far.num_ops
        self._executable = executable
        self._allocated = {event.address: event for event in so_far.events if event.kind == ALLOC}
        self._tick = executable.trace.ops[self.at].start_tick

    def __repr__(self) -> str:
        return f"<LateEntry before op {self.at} of {self._executable!r}>"

    def bind(self, bindings: Bindings, manager: ResidencyManager) -> Bound | None:
        """Bind what the plan has right before the op. None: it is not there; `bindings.refusal` says why.

        Whoever does not enter the plan then is to `undo` it.
        """
        executable = self._executable
        found = bindings.bind(executable, among=self.so_far.start_records)
        if found is None:
            return None
        bound: Bound = []
        for variable, record in found:
            # One that was freed may have been allocated anew: two variables of the plan before shared its addresses.
            is_there = manager.manages(record) and record.address not in self._allocated
            if is_there and self._is_alive(variable):
                bound.append((variable, record))
                continue
            variable.record = None
            if variable.is_persistent:
                bindings.refusal = "a variable that lives across steps was freed"
                return None
        born = self._born(manager)
        if born is None:
            bindings.refusal = "what this step has made so far is not what the plan has made there"
            return None
        for variable, record in born:
            bindings.bury(executable, variable)  # with what it was to be made in
            variable.record = record
            executable.variable_nbytes[variable.index] = record.nbytes
        return bound + born

    def undo(self, manager: ResidencyManager) -> None:
        """The plan was not entered, or was left at once: what its variables are bound to is the manager's."""
        for variable in self._executable.variables:
            record = variable.record
            if record is not None and manager.manages(record):
                variable.record = None
                self._executable.variable_address[variable.index] = 0

    def _born(self, manager: ResidencyManager) -> Bound | None:
        """The plan's variables that were born so far and are alive, with their records: by where they were born."""
        records = {
            (event.position, event.ordinal): manager.records[address]
            for address, event in self._allocated.items()
            if address in manager.records and event.ordinal
        }
        found: Bound = []
        for variable in self._executable.variables:
            if not variable.is_born or not self._is_alive(variable):
                continue
            record = records.get(variable.origin[1:]) if variable.origin is not None else None
            if record is None or record.nbytes != variable.nbytes or not record.seen:
                return None  # what no op has named may be in use unseen, as a library's workspace
            if record.state is State.DISCARDED:
                return None
            found.append((variable, record))
        return found

    def _is_alive(self, variable: PlanVariable) -> bool:
        traced = self._executable.trace.variables[variable.index]
        is_born = traced.birth_tick is None or traced.birth_tick < self._tick
        return is_born and (traced.death_tick is None or traced.death_tick > self._tick)

    def targets(self, bound: Bound) -> dict[int, ExecutableResidency]:
        """By variable, the residencies that the plan is in right before the op."""
        found = ((v.index, residency_before(self._executable, v, self.at)) for v, _ in bound)
        return {index: residency for index, residency in found if residency is not None}

    def begin(self, bound: Bound) -> None:
        """All has arrived. What is written from here on counts as changed, and nothing before that may fail.

        A plan notes the first write of a residency, which may be over.
        """
        executable = self._executable
        for variable, record in bound:
            if record.state is State.RESIDENT and executable.is_written_from(variable, self.at):
                record.written()
        now = time.monotonic_ns()
        executable.op_start_ns[: self.at] = executable.op_stop_ns[: self.at] = now
