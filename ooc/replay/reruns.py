"""Plays the re-runs of a plan: discards variables, and makes them again by running ops once more.

While a step is replayed, the ops that some re-run needs leave a recipe behind (`ooc.replay.recipes`). A discard gives
up a variable's chunks without a write. A re-run (`ooc.replay.planned_reruns`) runs recipes in order: operands are
stand-ins over the addresses of their variables, and the allocator's table sends each large allocation to the
addresses where the plan wants it: a variable's own, or scratch.

What re-runs read from the pool is held until the last of them: a storage that the program frees earlier than planned
would otherwise never be loaded for the re-run. So at any moment whatever is discarded can be made again, in this plan
or off it (`ooc.replay.remakes`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ooc.errors import RerunDiffers
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.acts import ResidencyActs
from ooc.replay.bindings import Bound
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import ExecutableResidency
from ooc.replay.planned_reruns import PlannedRerun, RerunOp
from ooc.replay.planned_trials import TrialsInPlans, adopt_kept
from ooc.replay.present_sizes import births_of, forget_births
from ooc.replay.recipes import NoRecipe, Recipe, SmallCopies
from ooc.replay.remakes import Remake
from ooc.replay.rerun_device import RerunDevice
from ooc.tracing.replayability import makes_undefined_bytes
from scheduler.trace import Op
from vmm.table import AllocatorTable

_log = logging.getLogger(__name__)


class RerunFailed(Exception):
    """A re-run did not go as planned; what it was to make is still discarded. The caller leaves the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What re-runs of the present step may use: see `Reruns`. A copy, which outlives the plan."""

    recipes: dict[int, Recipe]
    holds: dict[int, torch.UntypedStorage]
    named: dict[int, StorageWeakRef]
    checksums: dict[int, int]
    present: dict[int, int]

    def storage(self, variable: int) -> torch.UntypedStorage | None:
        """The storage of a variable that a recipe reads; None if there is no such, or it was freed."""
        if variable not in self.named:
            return None
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.named[variable].cdata)
        return found


class Reruns:
    """Notes recipes, discards, and runs ops again, for the plan that is being replayed.

    Attributes:
        broken: Why ops left no recipe; empty if all did. The plan is to be left at the next opportunity. One list for
            good, which native code looks at.
        pending: What was discarded when a plan was left and is not made again yet.
    """

    def __init__(
        self,
        manager: ResidencyManager,
        allocator: AllocatorTable,
        dispatcher: Dispatcher,
        acts: ResidencyActs,
        device: RerunDevice,
        trials: TrialsInPlans,
        *,
        bail_out: Callable[[str], None],
    ) -> None:
        self._bail_out = bail_out
        self._manager = manager
        self._allocator = allocator
        self._dispatcher = dispatcher
        self._acts = acts
        self._device = device
        self._trials = trials
        self._recipes: dict[int, Recipe] = {}
        self._copies = SmallCopies()
        self._holds: dict[int, torch.UntypedStorage] = {}
        self._named: dict[int, StorageWeakRef] = {}  # storages of the variables that recipes read
        self._ghosts: dict[int, VariableRecord] = {}
        self._checksums: dict[int, int] = {}
        self._present: dict[int, int] = {}  # bytes of what ops with recipes have allocated in this step
        self.broken: list[str] = []
        self.pending: Remake | None = None

    def __repr__(self) -> str:
        return f"<Reruns, {len(self._recipes)} recipes, {len(self._holds)} storages held, pending: {self.pending!r}>"

    def begin(self) -> None:
        """A period of a plan begins: forget the last one's recipes."""
        self._recipes.clear()
        self._copies.clear()
        self._holds.clear()
        self._named.clear()
        self._ghosts.clear()
        self._checksums.clear()
        self._present.clear()
        self.broken.clear()

    def calls_of(self, executable: ExecutablePlan, calls: list[Any]) -> list[Any]:
        """The functions to call for a plan's ops: those that re-runs need leave a recipe behind."""
        found = list(calls)
        for index in executable.reruns.recipes_of:
            if getattr(calls[index], "func", None) != self._call_noted:  # else it is since an earlier `enter`
                found[index] = functools.partial(self._call_noted, executable, index, calls[index])
        return found

    # -- recipes

    def _call_noted(
        self, executable: ExecutablePlan, index: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        stream = self._device.begin_noting()
        expected = executable.occurrences[index]
        addresses = executable.variable_address

        def variable_of(tensor: torch.Tensor) -> int | None:
            address = self._dispatcher.address(tensor)
            if not address:
                return None
            for variable in expected:
                if addresses[variable] == address and executable.variable_alive[variable]:
                    if executable.reruns.held_until.get(variable, -1) > index and variable not in self._holds:
                        self._holds[variable] = tensor.untyped_storage()
                    if variable not in self._named:
                        self._named[variable] = StorageWeakRef(tensor.untyped_storage())
                    return variable
            raise NoRecipe("an operand is no variable of the plan")

        try:
            self._recipes[index] = Recipe(
                executable.funcs[index],
                args,
                kwargs,
                variable_of=variable_of,
                small_nbytes=self._allocator.state.threshold,
                apart=self._allocator.apart,
                copies=self._copies,
                stream=stream,
            )
        except NoRecipe as error:
            self.broken.append(f"op {index} ({executable.funcs[index]}) cannot be run again: {error}")
        self._allocator.state.num_counted = 0  # what the recipe has copied is no allocation of the op's
        forget_births(executable, index)
        kind, result = self._trials.call_tried(executable, index, call, args, kwargs)
        self._present.update(births_of(executable, index))
        if not self._trials.repeats(kind):  # with other numbers than before, or other threads
            self.broken.append(f"op {index} ({executable.funcs[index]}) may not repeat its bits")
        return result

    # -- discards

    def discard(self, executable: ExecutablePlan, residency: ExecutableResidency) -> bool:
        """End a residency whose bytes the plan makes again, or whose variable was a ghost. False: bailed out."""
        index, record = residency.variable.index, residency.variable.record
        if self._ghosts.pop(index, None) is not None or record is None or not executable.variable_alive[index]:
            return True
        if not self._acts.may_move(record):
            return False
        if record.exports:
            self._manager.end_exports()
        if record.exports or (self._acts.guards_releases and not residency.variable.dies_within):
            self._bail_out("a variable that may be touched between ops was to be discarded")
            return False
        self._give_up(executable, index, record, self._checksums)
        return True

    def _give_up(
        self, executable: ExecutablePlan, index: int, record: VariableRecord, checksums: dict[int, int]
    ) -> None:
        if self._manager.debug:
            checksums[index] = self._checksum(executable, index, record)
        record.discarded()
        if self._manager.debug:
            self._manager.space.unmap(record.reservation)

    # -- to another plan of the same step

    def noted(self) -> Noted | None:
        """What re-runs of this step may use; None while something is in memory for re-runs alone."""
        if self._ghosts or self.broken:
            return None
        return Noted(
            recipes=dict(self._recipes),
            holds=dict(self._holds),
            named=dict(self._named),
            checksums=dict(self._checksums),
            present=dict(self._present),
        )

    def take_over(self, noted: Noted) -> None:
        """Another plan goes on with what was noted under the last one."""
        self.begin()
        self._recipes.update(noted.recipes)
        self._holds.update(noted.holds)
        self._named.update(noted.named)
        self._checksums.update(noted.checksums)
        self._present.update(noted.present)

    def give_up(self, executable: ExecutablePlan, index: int, record: VariableRecord, noted: Noted) -> None:
        """Discard what is resident between two plans, and made again by the second."""
        self._give_up(executable, index, record, noted.checksums)

    def _checksum(self, executable: ExecutablePlan, index: int, record: VariableRecord) -> int:
        """Of the present storage: it may be smaller than planned, and what lies behind it is noise."""
        nbytes = min(record.nbytes, int(executable.variable_nbytes[index]) or record.nbytes)
        return self._device.checksum(self._manager, record, nbytes)

    def any_discarded(self, executable: ExecutablePlan) -> bool:
        """Whether a variable of the program has its bytes nowhere now."""
        return any(record.state is State.DISCARDED for record in executable.live_records())

    def needs(self, executable: ExecutablePlan | None, record: VariableRecord) -> bool:
        """Whether a re-run of the active plan is yet to use this record as it is, or to make it again.

        Who may write to it beside the ops has to leave the plan first, and says so by `note_touched`.
        """
        if record.state is State.DISCARDED:
            return True
        if executable is None:
            return False
        needed, cursor = executable.reruns.needed_until.items(), self._dispatcher.cursor
        return any(executable.variables[index].record is record for index, last in needed if last >= cursor)

    @staticmethod
    def note_touched(executable: ExecutablePlan, record: VariableRecord) -> None:
        """Note that a step leaves its plan for code beside the ops, which may write to what re-runs need."""
        for index in executable.reruns.needed_until:
            if executable.variables[index].record is record and executable.variable_alive[index]:
                executable.reruns.num_touched[index] += 1

    @staticmethod
    def read_given_out(executable: ExecutablePlan, bound: Bound | None = None) -> bool:
        """Whether what re-runs of the step that is about to begin use was given out, and may be written meanwhile.

        Args:
            executable: The plan.
            bound: What it begins with; None: what its step before has left.
        """
        if bound is not None:
            needed = executable.reruns.needed_until
            return any(record.exports for variable, record in bound if variable.index in needed)
        starting = (executable.variables[index] for index in executable.reruns.needed_until)
        records = [(own.predecessor or own).record for own in starting if not own.is_born]
        return any(record.exports for record in records if record is not None)

    # -- re-runs

    def play(self, executable: ExecutablePlan, rerun: PlannedRerun) -> bool:
        """Make the residencies that begin before an op by recomputation. False: that failed, and it has bailed out.

        Raises:
            RerunDiffers: In debug mode: it made other bytes. It has bailed out, too.
        """
        try:
            self._play(executable, rerun)
        except RerunFailed as failure:
            self._bail_out(str(failure))
            return False
        except RerunDiffers as differs:
            self._bail_out(str(differs))
            raise
        return True

    def _play(self, executable: ExecutablePlan, rerun: PlannedRerun) -> None:
        manager = self._manager
        started, op_ns = time.monotonic_ns(), executable.op_stop_ns - executable.op_start_ns
        before = [*rerun.waits, *(w for residency in rerun.kept.values() for w in residency.waits)]
        pending = [other for other in before if other.transfer is not None and not other.transfer.done()]
        for other in before:
            if other.transfer is not None:
                self._acts.await_transfer(other)
        if pending:
            self._acts.end_wait(executable, rerun.before_op, started)
            started = time.monotonic_ns()
        made: list[VariableRecord] = []
        for index, residency in rerun.kept.items():
            record = residency.variable.record
            assert record is not None
            self._acts.forget_write(residency)
            manager.settle(record, for_ops=True)
            manager.guards.lift(record)
            if executable.variable_alive[index]:
                record.recomputed(residency.runs)
                made.append(record)
            else:
                record.born(residency.runs)
                self._ghosts[index] = record
            manager.space.map(record.reservation, residency.runs)
        try:
            with self._device.timed(manager.counters):
                self._run(executable, rerun)
        except BaseException as error:
            for record in made:
                record.discarded()
            for index in rerun.kept:
                self._ghosts.pop(index, None)
            if isinstance(error, Exception) and not isinstance(error, RerunFailed):
                raise RerunFailed(f"an op raised when it was run again: {error}") from error
            raise
        executable.between.note_rerun(
            rerun.before_op, (op.index for op in rerun.ops), time.monotonic_ns() - started, op_ns
        )
        counters = manager.counters
        counters.num_reruns += 1
        counters.num_crowded += 1
        counters.recomputed_nbytes += sum(residency.variable.nbytes for residency in rerun.kept.values())
        for index in [v for v in self._holds if executable.reruns.held_until.get(v, -1) <= rerun.before_op]:
            del self._holds[index]
        if manager.debug:
            self._compare(executable, rerun)

    def _run(self, executable: ExecutablePlan, rerun: PlannedRerun) -> None:
        where: dict[int, int] = {}  # addresses of what the re-run has made
        for op in rerun.ops:
            for variable in op.births:
                record = executable.variables[variable].record
                if variable in rerun.kept and not self._device.has_own_addresses:
                    assert record is not None
                    where[variable] = record.address
                else:
                    where[variable] = executable.scratch[rerun.before_op, variable].address
            self._run_op(executable, rerun, op, where)

    def _run_op(self, executable: ExecutablePlan, rerun: PlannedRerun, op: RerunOp, where: dict[int, int]) -> None:
        variables = executable.variables
        recipe = self._recipes.get(op.index)
        if recipe is None:
            raise RerunFailed(f"op {op.index} left no recipe")

        def range_of(index: int) -> tuple[int, int]:
            variable = variables[index]
            if index in op.made:
                if index not in where:
                    raise RerunFailed(f"op {op.index} reads variable {index}, which was not made again")
                return where[index], variable.nbytes
            record = variable.record
            if record is None or record.state is not State.RESIDENT:
                raise RerunFailed(f"op {op.index} reads variable {index}, which is not in memory")
            return record.address, variable.nbytes

        def storage_of(index: int) -> torch.UntypedStorage:
            return self._device.storage_at(*range_of(index))

        num_alive = self._allocator.state.num_rerun_alive
        served_births = [index for index in op.births if self._present.get(index, 1)]
        allocs = [(self._present.get(index, variables[index].nbytes), where[index]) for index in served_births]
        named = recipe.variables  # not what is too small to be a variable in this step: of that it has copies
        uses = [use for use in executable.trace.ops[op.index].uses if use.variable in named]
        reads = [range_of(use.variable) for use in uses if not use.writes]
        writes = [range_of(use.variable) for use in uses if use.writes]
        births = [(address, nbytes) for nbytes, address in allocs]
        with (
            self._device.running(recipe, reads=reads, writes=writes, births=births),
            self._allocator.rerunning(allocs) as served,
        ):
            result = recipe.run(storage_of)
            del result
        for row, index in zip(served, served_births, strict=True):
            if not row["served"]:
                if index in rerun.kept:
                    raise RerunFailed(f"op {op.index} did not allocate variable {index} when it was run again")
                del where[index]
        if self._allocator.state.num_rerun_alive != num_alive:
            for (nbytes, address), index in zip(allocs, served_births, strict=True):
                if self._allocator.adopt(address, nbytes):
                    self._keep(executable, rerun, index)
            raise RerunFailed(f"op {op.index} ({recipe.func}) keeps memory that it allocated when it was run again")

    def _keep(self, executable: ExecutablePlan, rerun: PlannedRerun, index: int) -> None:
        """Let what an op has allocated and keeps stay where it is; the plan is about to be left."""
        manager, ghost = self._manager, self._ghosts.pop(index, None)
        if ghost is None or self._device.has_own_addresses:
            adopt_kept(manager, executable.scratch.pop((rerun.before_op, index)))
            return
        ghost.is_workspace = True
        manager.records[ghost.address] = ghost

    def _compare(self, executable: ExecutablePlan, rerun: PlannedRerun) -> None:
        for index in rerun.kept:
            record, expected = executable.variables[index].record, self._checksums.get(index)
            if record is None or expected is None or not executable.variable_alive[index]:
                continue
            writers = [op.index for op in rerun.ops if _writes(executable.trace.ops[op.index], index)]
            if all(makes_undefined_bytes(executable.funcs[writer]) for writer in writers):
                continue  # the program has not written to it yet
            if self._checksum(executable, index, record) != expected:
                ops = ", ".join(f"{op.index} ({executable.funcs[op.index]})" for op in rerun.ops)
                raise RerunDiffers(
                    f"variable {index} ({record.label or executable.trace.variables[index].label}) was discarded, and "
                    f"running its ops again before op {rerun.before_op} made other bytes. Ops: {ops}.\n  Options: "
                    "recompute=False (ooc run --no-recompute); a report, since these ops were taken to repeat their "
                    "bits."
                )

    # -- off plan

    def leave(self, executable: ExecutablePlan, num_ops: int) -> None:
        """The plan is being left after so many ops: note what must be made again. Its records are still bound."""
        lost = [v.index for v in executable.variables if _is_lost(executable, v.index)]
        self.pending = None
        if lost:
            alive = {v.index: v.record for v in executable.variables if executable.variable_alive[v.index]}
            self.pending = Remake(
                executable.reruns,
                recipes=dict(self._recipes),
                holds=list(self._holds.values()),
                pool={**{i: r for i, r in alive.items() if r is not None}, **self._ghosts},
                targets=lost,
                num_ops=num_ops,
                sizes={v.index: self._present.get(v.index, v.nbytes) for v in executable.variables},
            )
            self.pending.adopt_ghosts(self._manager, executable, self._ghosts)
        self.begin()

    def remake(self) -> None:
        """Make again what was discarded when the plan was left. Raises `RerunLost` if that cannot be done (now)."""
        if self.pending is not None:
            self.run_now(self.pending)
            self.pending = None

    def run_now(self, remake: Remake) -> None:
        """Carry out a remake. Raises `RerunLost`."""
        with self._device.timed(self._manager.counters):
            remake.run(self._manager, self._allocator, self._device)

    def count_times(self) -> None:
        """Count what re-runs have taken so far; on a device those that have ended by now."""
        self._device.count(self._manager.counters)


def _writes(op: Op, variable: int) -> bool:
    return any(use.variable == variable and use.writes for use in op.uses)


def _is_lost(executable: ExecutablePlan, index: int) -> bool:
    record = executable.variables[index].record
    return bool(executable.variable_alive[index]) and record is not None and record.state is State.DISCARDED
