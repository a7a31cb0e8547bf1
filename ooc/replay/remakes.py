"""Remakes what a plan had discarded when a step left it, by running ops again on demand.

Whatever is discarded has a re-run to come in the plan, so everything that re-run needs still has bytes somewhere, or
can be made in the same way: unchanged variables (held, so that they are not freed before), and ghosts that a re-run had
already made. Each op takes place as on demand: its operands are loaded and pinned, room is made by evicting others, and
what it makes may be evicted in turn. So a remake needs no more memory at once than these ops needed at first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ooc.errors import RerunLost
from ooc.memory.no_room import NoRoom
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.planned_reruns import PlannedReruns, replayed_reads
from ooc.replay.present_sizes import trim
from ooc.replay.recipes import Recipe
from ooc.replay.rerun_device import RerunDevice
from vmm.table import AllocatorTable

if TYPE_CHECKING:
    from ooc.replay.executable_plan import ExecutablePlan


class Remake:
    """What has to be made again after a plan was left, and all that it takes.

    Args:
        reruns: Of the plan.
        recipes: By op.
        holds: Storages that must not be freed before.
        pool: The record of each variable that has bytes or is a target; ghosts included.
        targets: Variables to be made.
        num_ops: Ops of the step that have run, or have begun.
        sizes: Of all variables, as they are in this step; 0: too small to be one.
    """

    def __init__(
        self,
        reruns: PlannedReruns,
        *,
        recipes: Mapping[int, Recipe],
        holds: Sequence[torch.UntypedStorage],
        pool: Mapping[int, VariableRecord],
        targets: Sequence[int],
        num_ops: int,
        sizes: Mapping[int, int],
    ) -> None:
        self._reruns = reruns
        self._recipes = recipes
        self._holds = list(holds)
        self._pool = dict(pool)
        self._targets = list(targets)
        self._num_ops = num_ops
        self._sizes = sizes
        self._ghosts: list[VariableRecord] = []
        self._copied = self._find_copied()

    def __repr__(self) -> str:
        return f"<Remake of variables {self._targets} after op {self._num_ops - 1}>"

    def adopt_ghosts(
        self, manager: ResidencyManager, executable: ExecutablePlan, ghosts: Mapping[int, VariableRecord]
    ) -> None:
        """Let the manager have the ghosts until this is done: the remake may read them."""
        for index, record in ghosts.items():
            variable = executable.variables[index]
            variable.record = None
            executable.variable_address[index] = 0
            record.serial = manager.next_serial()
            record.note_seen()
            record.nbytes = min(self._sizes[index] or record.nbytes, record.reservation.nbytes)
            trim(manager, record)
            manager.records[record.address] = record
            self._ghosts.append(record)

    def run(self, manager: ResidencyManager, allocator: AllocatorTable, device: RerunDevice) -> None:
        """Make all of it. If that fails, it may be tried again.

        Raises:
            RerunLost: It cannot be done; the message says why.
        """
        self._targets = [v for v in self._targets if manager.records.get(self._pool[v].address) is self._pool[v]]
        ops = self._reruns.missing_ops(self._targets, self._num_ops, self._has_bytes)
        if ops is None or any(op not in self._recipes for op in ops):
            raise RerunLost(f"variables {self._targets} were discarded, and cannot be made again. Please report this")
        run = _OnDemand(self, manager, allocator, device, ops)
        try:
            run.run()
        except NoRoom as no_room:
            raise RerunLost(
                f"what the plan had discarded has to be made again, and there is no room for it: {no_room}.\n"
                "  Options: a larger budget; recompute=False (ooc run --no-recompute)."
            ) from None
        finally:
            run.close()
        for record in self._ghosts:
            manager.free(record.address)
        self._ghosts.clear()
        self._holds.clear()

    def _has_bytes(self, variable: int) -> bool:
        if variable in self._pool:
            return self._pool[variable].state is not State.DISCARDED
        return variable in self._copied

    def _find_copied(self) -> set[int]:
        """What recipes have copies of: variables of the plan that are too small to be any in this step."""
        ops = self._reruns.graph.trace.ops
        read = {use.variable for index in self._recipes for use in ops[index].uses if use.reads}
        named = {variable for recipe in self._recipes.values() for variable in recipe.variables}
        return read - named


class _OnDemand:
    """One attempt."""

    def __init__(
        self,
        remake: Remake,
        manager: ResidencyManager,
        allocator: AllocatorTable,
        device: RerunDevice,
        ops: Sequence[int],
    ) -> None:
        self._remake = remake
        self._manager = manager
        self._allocator = allocator
        self._device = device
        self._ops = ops
        self._graph = remake._reruns.graph
        self._made: dict[int, VariableRecord] = {}
        self._unfinished: set[int] = set()
        self._kept: set[int] = set()  # what an op that was run again keeps

    def run(self) -> None:
        made, _ = replayed_reads(self._graph, self._ops)
        uses = [[u.variable for u in self._graph.trace.ops[op].uses] + self._graph.births[op] for op in self._ops]
        last = {variable: at for at, used in enumerate(uses) for variable in used}
        targets = set(self._remake._targets)
        for at, op in enumerate(self._ops):
            self._run_op(op, made[op], targets)
            for variable in [v for v in self._made if last[v] == at]:
                record = self._made.pop(variable)
                if variable in targets:
                    self._unfinished.discard(variable)
                elif variable not in self._kept:
                    self._manager.free(record.address)

    def close(self) -> None:
        """Free what is not the program's, and give up what is not finished."""
        for variable, record in self._made.items():
            if variable in self._unfinished:
                self._manager.give_up(record)
            elif variable not in self._kept:
                self._manager.free(record.address)
        self._made.clear()

    def _run_op(self, op: int, made: frozenset[int], targets: set[int]) -> None:
        manager, pool = self._manager, self._remake._pool
        recipe = self._remake._recipes[op]
        births = [v for v in self._graph.births[op] if self._remake._sizes[v]]
        reads = [u for u in self._graph.trace.ops[op].uses if u.variable in recipe.variables]
        operands = {u.variable: self._made[u.variable] if u.variable in made else pool[u.variable] for u in reads}
        with contextlib.ExitStack() as pinned:
            for record in operands.values():
                record.pin()
                pinned.callback(record.unpin)
            manager.load(operands.values())
            for variable in births:
                record = self._give_birth(variable, is_target=variable in targets)
                record.pin()
                pinned.callback(record.unpin)
            places = [self._place_of(self._made[v], v in targets, pinned) for v in births]
            allocs = [(self._remake._sizes[v], place) for v, place in zip(births, places, strict=True)]

            def storage_of(variable: int) -> torch.UntypedStorage:
                return self._device.storage_at(operands[variable].address, operands[variable].nbytes)

            used = [(operands[u.variable].address, operands[u.variable].nbytes, u.writes) for u in reads]
            with (
                self._device.running(
                    recipe,
                    reads=[(address, nbytes) for address, nbytes, writes in used if not writes],
                    writes=[(address, nbytes) for address, nbytes, writes in used if writes],
                    births=[(place, nbytes) for nbytes, place in allocs],
                ),
                self._allocator.rerunning(allocs) as served,
            ):
                result = recipe.run(storage_of)
                del result
            for (nbytes, address), variable in zip(allocs, births, strict=True):
                if variable not in targets and self._allocator.adopt(address, nbytes):
                    self._made[variable].is_workspace = True
                    self._kept.add(variable)
            for row, variable in zip(served, births, strict=True):
                if variable in targets and not row["served"]:
                    raise RerunLost(
                        f"op {op} ({recipe.func}) did not allocate again what it had allocated. Please report"
                    )
            for use in reads:
                if use.writes:
                    operands[use.variable].written()

    def _place_of(self, record: VariableRecord, is_target: bool, undo: contextlib.ExitStack) -> int:
        """Where the op is to allocate the variable: see [Note: a re-run's addresses on a device]."""
        if not is_target or not self._device.has_own_addresses:
            return record.address
        reservation = self._manager.space.reserve(record.nbytes)
        undo.callback(self._manager.space.release, reservation)
        self._manager.space.map(reservation, record.runs)
        return reservation.address

    def _give_birth(self, variable: int, *, is_target: bool) -> VariableRecord:
        manager = self._manager
        if is_target:
            record = self._remake._pool[variable]
            manager.give_chunks(record)
            self._unfinished.add(variable)
        else:
            record = manager.new_record(self._remake._sizes[variable])
            try:
                manager.give_chunks(record)
            except BaseException:
                manager.dispose(record)
                raise
        record.note_seen()
        self._made[variable] = record
        return record
