"""Bindings between a plan's variables and the session's records, from one step to the next.

A plan is made for the variables of one recorded step; in each replay they are bound to the records that are alive
then. A parameter is bound to the same plan variable in every step. A gradient that is freed and allocated anew passes
from the plan variable that it was born as to its successor, the one that exists at the next step's start. Where
the two are alive at once they take turns with two reservations (double buffering); otherwise one reservation serves
both. A record that outlives its plan variable is evicted, and managed on demand from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence

from ooc.errors import StoreFailed
from ooc.memory.record import State, VariableRecord
from ooc.memory.relocation import relocate
from ooc.memory.residency import ResidencyManager
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.replay.present_sizes import fitting, note_present_nbytes, spans, trim
from ooc.tracing.observed import ranks_by_age
from scheduler.plan import Dropped, Evicted
from vmm.chunks import ChunkPool
from vmm.driver import MemoryFault
from vmm.files import BLOCK_NBYTES
from vmm.store import StoreFull
from vmm.torch_cpu import AllocatorTable

Bound = list[tuple[PlanVariable, VariableRecord]]
_Records = Mapping[int, VariableRecord]


class Bindings:
    """Binds plan variables to records, and gives them reservations and mappings. Owns nothing."""

    def __init__(self, manager: ResidencyManager, allocator: AllocatorTable) -> None:
        self._manager = manager
        self._space = manager.space
        self._allocator = allocator
        self.refusal = ""
        """Why the last `bind` or `map_all` said no."""
        self.keep_room: Collection[VariableRecord] = ()
        """What `expel` leaves as large as the plan has it."""
        self._first_serial = 0  # of this period; what has a smaller one existed before

    def __repr__(self) -> str:
        return f"<Bindings over {self._manager!r}>"

    # -- before a plan's first step

    def bind(
        self, executable: ExecutablePlan, *, is_begun: bool = False, among: _Records | None = None
    ) -> Bound | None:
        """Bind records to the plan variables that exist at the step's start. None: a persistent one is missing.

        With `is_begun`, not those that are freed before the first op that touches a variable: that is about to run.
        `among`: what existed then, by address; all that the manager has, if the step is only beginning.
        """
        records = self._manager.records if among is None else among
        self._first_serial = self._manager.next_serial()
        executable.num_entered = len(records)
        by_serial = {record.serial: record for record in records.values()}
        ranks = ranks_by_age(records.values())
        bound: Bound = []
        taken: set[int] = set()
        for variable in executable.variables:
            if variable.is_persistent:
                record = by_serial.get(variable.serial) if variable.serial is not None else None
                if record is None or record.nbytes != variable.nbytes:
                    self.refusal, executable.waits_in_vain = "a variable that lived across steps is gone", True
                    return None
                variable.record = record
                bound.append((variable, record))
                taken.add(record.serial)
        by_rank: dict[tuple[int, int | None], VariableRecord] = {}
        by_origin = {record.origin: record for record in records.values() if record.origin is not None}
        num_born: Counter[tuple[str, int, int] | None] = Counter()
        for record in records.values():
            by_rank[record.nbytes, ranks[record.serial]] = record
            num_born[record.birthplace] += 1
        by_birthplace = {r.birthplace: r for r in records.values() if r.birthplace and num_born[r.birthplace] == 1}
        for variable in executable.variables:
            if variable.predecessor is None and not variable.is_standing:
                continue
            variable.record = None
            if is_begun and executable.is_freed_at_head(variable):
                continue
            origin = variable.predecessor.origin if variable.predecessor is not None else None
            record = by_origin.get(origin) if executable.is_elastic and origin is not None else None
            if record is None and not variable.is_elastic and origin is not None:
                # Others of its size may have come since, as another network's gradients: it has another rank then.
                record = by_birthplace.get(origin) or by_origin.get(origin)
                record = record if record is not None and record.nbytes == variable.nbytes else None
            if record is None and not variable.is_elastic:
                record = by_rank.get((variable.nbytes, variable.rank))
            may_be = record is not None and record.seen and variable.has_room(record.nbytes)
            variable.record = record if may_be and record is not None and record.serial not in taken else None
            if variable.record is not None:
                bound.append((variable, variable.record))
                taken.add(variable.record.serial)
        return bound

    def in_place(self, bound: Bound, targets: Mapping[int, ExecutableResidency]) -> set[int]:
        """Addresses of the bound records that are resident in the very chunks in which the plan starts with them."""
        return {
            record.address
            for variable, record in bound
            if record.state is State.RESIDENT
            and variable.index in targets
            and tuple(map(tuple, record.runs))
            == tuple(map(tuple, fitting(self._manager, targets[variable.index], record)[0]))
        }

    def may_make_way(
        self,
        executable: ExecutablePlan,
        bound: Bound,
        targets: Mapping[int, ExecutableResidency],
    ) -> bool:
        """Whether all that is in the plan's way, or in other chunks than it starts with, may be moved."""
        workspaces = [r for r in self._manager.workspaces() if r.state is State.RESIDENT and not r.pins]
        found = self._in_the_way(executable, bound, self.in_place(bound, targets))
        num_kept = sum(self._manager.chunks_of(r.nbytes) for r in workspaces)
        if any(r.pins or not (r.seen or r in workspaces) for r in found):
            self.refusal = "a variable that must stay where it is lies in the plan's way"
        elif not self._manager.is_host and self.is_any_given_out():
            self.refusal = "memory of a variable was given out (data_ptr() or the like) and is still held"
        elif executable.num_chunks + num_kept > self._manager.num_chunks:
            self.refusal, executable.is_outgrown = "a library's workspace has grown into the plan's memory", True
        else:
            return True
        return False

    def is_any_given_out(self) -> bool:
        """Whether somebody outside of ops holds memory of a variable."""
        return any(r.exports for r in self._manager.records.values())

    def place(
        self,
        executable: ExecutablePlan,
        others: Sequence[ExecutablePlan],
        bound: Bound,
        targets: Mapping[int, ExecutableResidency],
        new_pool: Callable[[], ChunkPool],
        loads: list[ExecutableResidency],
    ) -> MemoryFault | StoreFailed | None:
        """Bring what is bound to its targets, or start its load, and map all of the plan's reservations.

        From then on what is bound is the executor's. If that cannot be, `refusal` says why, and all is the manager's.

        Returns:
            Why a load did not start; None if all did. They are noted in `loads`.

        Raises:
            StoreFailed: A transfer failed.
        """
        manager, self.refusal = self._manager, ""
        workspaces = [r for r in manager.workspaces() if r.state is State.RESIDENT and not r.pins]
        manager.foresight.begin(None)  # nothing is to be on its way in
        # All that is in the plan's way goes elsewhere first; then what should be here comes in.
        try:
            self.make_way(executable, bound, targets, new_pool)
        except StoreFull as full:
            self.refusal = str(full)
            manager.load([r for r in workspaces if r.state is State.AWAY])
            return None
        in_place = self.in_place(bound, targets)
        try:
            beside, away = self.beside(bound, workspaces), [r for r in workspaces if r.state is State.AWAY]
            resident = [r for r in workspaces if r.state is State.RESIDENT]
            manager.share_pool(new_pool(), executable.num_chunks, [*resident, *beside])
            if sum(manager.chunks_of(r.nbytes) for r in away) > manager.num_free:
                manager.evict([r for r in beside if r.seen and not r.pins])  # else `load` would evict what is in place
            manager.load(away)
            if not self.map_all(executable, others):
                return None
        finally:
            manager.retake_pool(new_pool())
        beside = self.beside(bound, workspaces)
        for _, record in bound:
            manager.forget(record)
        manager.share_pool(new_pool(), executable.num_chunks, [*workspaces, *beside])
        missing = [
            (targets[variable.index], r)
            for variable, r in bound
            if variable.index in targets and r.address not in in_place
        ]
        failure = self.start_loads(missing, loads)
        for variable, record in bound:
            self.set_alive(executable, variable, record)
        for variable in executable.variables:
            if variable.record is not None:
                executable.variable_address[variable.index] = variable.record.address
        self.hide_away(executable)
        return failure

    def make_way(
        self,
        executable: ExecutablePlan,
        bound: Bound,
        targets: Mapping[int, ExecutableResidency],
        new_pool: Callable[[], ChunkPool],
    ) -> None:
        """Bring all that is in memory to where the plan starts with it, or out of its way; else to the store.

        On the host by copies within the pool, as far as there is room for that.

        Raises:
            StoreFailed: A write failed. `StoreFull`: there is no room for one.
        """
        manager = self._manager
        if manager.is_host:
            bound_addresses = {record.address for _, record in bound}
            found = self._in_the_way(executable, bound, self.in_place(bound, targets))
            manager.evict([r for v, r in bound if r.state is State.RESIDENT and v.index not in targets])
            manager.evict([r for r in found if r.state is State.RESIDENT and r.exports])  # no copy is to miss a write
            relocate(
                manager,
                targets={
                    record.address: fitting(manager, targets[variable.index], record)[0]
                    for variable, record in bound
                    if record in found and record.state is State.RESIDENT
                },
                others=[r for r in found if r.address not in bound_addresses and r.state is State.RESIDENT],
                area=executable.num_chunks,
            )
            manager.retake_pool(new_pool())
        manager.evict(self._in_the_way(executable, bound, self.in_place(bound, targets)))

    def _in_the_way(self, executable: ExecutablePlan, bound: Bound, in_place: Container[int]) -> list[VariableRecord]:
        """Resident records that have to move: bound ones that are not in place, and others in the plan's chunks."""
        bound_addresses = {record.address for _, record in bound}
        return [
            record
            for record in self._manager.records.values()
            if record.state is State.RESIDENT
            and record.address not in in_place
            and (record.address in bound_addresses or min(first for first, _ in record.runs) < executable.num_chunks)
        ]

    def beside(self, bound: Bound, workspaces: Sequence[VariableRecord]) -> list[VariableRecord]:
        """What is in memory beside the plan, and stays there until somebody needs the room."""
        besides = {record.address for _, record in bound} | {record.address for record in workspaces}
        return [r for r in self._manager.records.values() if r.state is State.RESIDENT and r.address not in besides]

    def map_all(self, executable: ExecutablePlan, others: Sequence[ExecutablePlan]) -> bool:
        """Map every variable's reservation to its first chunks. False, and nothing kept, if that cannot be."""
        for attempt in range(2):
            self.refusal = ""
            try:
                for variable in executable.variables:
                    if variable.record is None:
                        self.give_new_record(variable)
                    self.map_first(variable)
                # What is away may be guarded: there must be room for that, too.
                self._map_scratch(executable)
                num_guards = sum(self._manager.debug or not variable.dies_within for variable in executable.variables)
                self._manager.guards.check_room(num_guards)
                self._reserve_store(executable)
                return True
            except (MemoryFault, StoreFull) as fault:
                self.refusal = str(fault)
                for plan in others if attempt == 0 else (executable,):
                    self.give_up(plan)
                if attempt == 0 and others:
                    self.give_up(executable, keep_bound=True)
        return False

    def _map_scratch(self, executable: ExecutablePlan) -> None:
        """Map what re-runs make and do not keep, each variable of each re-run through a reservation of its own.

        On a device also what they keep: [Note: a re-run's addresses on a device] in `ooc.replay.rerun_device`.
        """
        for rerun in executable.reruns.by_op.values():
            rooms = dict(rerun.scratch)
            if not self._manager.is_host:
                rooms |= {variable: residency.runs for variable, residency in rerun.kept.items()}
            for variable, runs in rooms.items():
                key = rerun.before_op, variable
                if key not in executable.scratch:
                    executable.scratch[key] = self._space.reserve(executable.variables[variable].nbytes)
                self._space.map(executable.scratch[key], runs)

    def start_loads(
        self, missing: Sequence[tuple[ExecutableResidency, VariableRecord]], loads: list[ExecutableResidency]
    ) -> MemoryFault | StoreFailed | None:
        """Start the loads of a plan's first step, noting each in `loads`. Stops at the first that cannot be started."""
        for residency, record in missing:
            runs, segments = fitting(self._manager, residency, record)
            try:
                if self._manager.moves_still(record):
                    self._manager.still.arrive(record, runs, segments)
                    continue
                self._manager.start_load(record, runs, (), segments)
            except (MemoryFault, StoreFailed) as failure:
                return failure
            residency.transfer, residency.moved = record.transfer, record
            loads.append(residency)
        return None

    def _reserve_store(self, executable: ExecutablePlan) -> None:
        """Reserve room in the store for all that the plan evicts: a full disk must be found before the step."""
        new = {
            variable.record.address: variable.record.reservation.nbytes
            for variable in executable.variables
            if variable.record is not None
            and variable.record.slot is None
            and any(isinstance(residency.planned.stop, Evicted | Dropped) for residency in variable.residencies)
        }
        self._manager.store.reserve(sum(-(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES for nbytes in new.values()))

    def give_up(self, executable: ExecutablePlan, *, keep_bound: bool = False) -> None:
        """Unmap what an inactive plan keeps mapped."""
        found = ((v, v.record) for v in executable.variables if v.record is not None)
        bound = [(v, record) for v, record in found if not v.is_born or self._manager.manages(record)]
        for _, record in bound:
            if record.state is State.AWAY and self._manager.manages(record):
                self._manager.guards.hide(record)
        while executable.scratch:
            self._space.release(executable.scratch.popitem()[1])
        for record in executable.give_up_records():
            if record.address not in self._manager.records:
                self._manager.dispose(record)
        if keep_bound:
            for variable, record in bound:
                variable.record = record

    def hide_away(self, executable: ExecutablePlan) -> None:
        """In debug mode: a touch of what is away when the plan's first step starts faults."""
        if not self._manager.debug:
            return
        alive = [r.record for r in executable.variables if r.record is not None and executable.variable_alive[r.index]]
        self._manager.guards.guard_away(
            record for record in alive if record.state is State.AWAY and record.reservation.runs is not None
        )

    def guard_away(self, executable: ExecutablePlan) -> None:
        """Guard what may outlast the step and is not in memory."""
        alive = executable.variable_alive
        self._manager.guards.guard_away(
            variable.record
            for variable in executable.outlasting
            if variable.record is not None and alive[variable.index] and variable.record.state is not State.RESIDENT
        )

    def unserve(self, executable: ExecutablePlan | None) -> None:
        """What was served since it was guarded, or given out, shows nothing again (in debug mode)."""
        if executable is not None:
            for record in executable.live_records():
                if record.state is State.AWAY and record.reservation.is_file and not record.exports:
                    self.map_first(executable.variables[record.variable_index])
                    self._manager.guards.guard_away([record])
        for record in self._manager.guards.served_records():
            if self._manager.manages(record):
                self._manager.guards.hide(record)
            elif executable is not None and record.variable_index >= 0:
                self.map_first(executable.variables[record.variable_index])
                self._manager.guards.guard_away([record])

    # -- from one step to the next

    def can_pass_on(self, executable: ExecutablePlan) -> bool:
        """Whether every record that has outlived its plan variable may be evicted."""
        may_leave, alive = self._manager.may_leave, executable.variable_alive
        over = [executable.variables[index] for index in executable.dies[alive[executable.dies] != 0].tolist()]
        over += [variable for variable in executable.movers if alive[variable.index] and variable.successor is None]
        records = [(variable, variable.record) for variable in over if variable.record is not None]
        return not any(
            record.state is State.DISCARDED or not (may_leave(record) and (record.seen or variable.evictable))
            for variable, record in records
        )

    def pass_on(self, executable: ExecutablePlan) -> None:
        """Rebind records for the next step of the same plan: each that lives on passes to its variable's successor."""
        manager = self._manager
        alive = executable.variable_alive
        for managed in manager.records.values():
            if managed.serial < self._first_serial:
                managed.origin = None  # it was not born in the step that ends
        for variable in executable.successors:
            if variable.record is not None:
                variable.record.origin = None  # nor was this
        for index in executable.dies[alive[executable.dies] != 0].tolist():
            self.expel(executable, executable.variables[index])
        promoted = []
        for variable in executable.movers:
            if not alive[variable.index]:
                continue
            if variable.successor is None:
                self.expel(executable, variable)
            else:
                promoted.append(variable)
        moves = [(variable, variable.successor, variable.record) for variable in promoted]
        spares = {variable.index: variable.successor.record for variable in promoted if variable.successor is not None}
        moving = {id(variable.record) for variable in promoted}
        for variable, successor, record in moves:
            assert successor is not None
            assert record is not None
            note_present_nbytes(executable, variable)
            executable.variable_alive[variable.index] = 0
            record.serial = manager.next_serial()
            record.origin = record.birthplace = variable.origin
            successor.record = record
            if variable.double_buffered:
                spare = spares[variable.index]
                variable.record = spare if spare is not record else None
                if spare is not None and spare is not record and not spans(manager, spare, variable):
                    manager.dispose(spare)  # it came from outside of the plan, with a reservation of its own size
                    variable.record = None
                if variable.record is None:
                    self.give_new_record(variable)
                    self.map_first(variable)
                assert variable.record is not None
                executable.variable_address[variable.index] = variable.record.address
            else:
                dead = spares[variable.index]  # another one than `record` only in the first step after `enter`
                if dead is not None and dead is not record and id(dead) not in moving:
                    manager.dispose(dead)
            self.set_alive(executable, successor, record)
        for variable in executable.successors:
            if not alive[variable.index]:
                executable.variable_address[variable.index] = 0  # not bound in this step
        self._first_serial = manager.next_serial()

    def give_new_record(self, variable: PlanVariable) -> None:
        """Give a plan variable that is born in the step a record with a reservation (perhaps its successor's)."""
        if variable.is_born:
            successor = variable.successor
            shared = successor.record if successor is not None and not variable.double_buffered else None
            if shared is not None and spans(self._manager, shared, variable):
                variable.record = shared  # one reservation serves both: the one dies before the other is born
                return
            variable.record = self._manager.new_record(variable.nbytes)
            if variable.evictable:
                variable.record.note_seen()

    def map_first(self, variable: PlanVariable) -> None:
        """Map a variable's reservation to the chunks of its first residency."""
        if variable.record is None or not variable.residencies:
            return
        if variable.successor is not None and variable.successor.record is variable.record:
            return  # one reservation: until this one is born it shows the successor's chunks
        if variable.record.exports and variable.record.state is not State.RESIDENT:
            return  # its addresses show the store's file, to whoever has a pointer, until it has arrived
        self._manager.guards.lift(variable.record)
        runs = variable.record.runs  # bound, and where the plan has it already, perhaps later than at first
        if variable.record.state is not State.RESIDENT or not self._manager.manages(variable.record):
            runs, _ = fitting(self._manager, variable.residencies[0], variable.record)
        self._space.map(variable.record.reservation, runs)

    def set_alive(
        self, executable: ExecutablePlan, variable: PlanVariable, record: VariableRecord, *, is_born: bool = False
    ) -> None:
        """Mark the variable alive, bound to `record`, unless its storage was freed a moment ago."""
        executable.variable_alive[variable.index] = 1  # first: a free that comes right after `bind` takes it back
        executable.variable_address[variable.index] = record.address
        record.variable_index = variable.index
        if not self._allocator.bind(record.address, variable.index, is_born=is_born):
            executable.variable_alive[variable.index] = 0

    def unbind_freed(self, executable: ExecutablePlan, bound: Bound) -> None:
        """Note what was freed (by the cycle collector) before the plan was installed: frees find it from then on."""
        for variable, record in bound:
            if not self._allocator.is_alive(record.address):
                executable.variable_alive[variable.index] = 0

    def stand_in(self, executable: ExecutablePlan, variable: PlanVariable, record: VariableRecord) -> None:
        """Bind a variable that is born in the step, and was not in this one, to the record that is used in its place.

        That is another such variable's, or the manager's, and has room there. The bytes stay where they are.
        """
        spare, other = variable.record, executable.variable_at(record.address)
        if variable.successor is not None and variable.successor.record is spare:
            spare = None  # it goes on serving that
        fresh: VariableRecord | None = None
        if other is not None:
            may_have = spare is not None and other.successor is None and spans(self._manager, spare, other)
            fresh, spare = (spare, None) if may_have else (self._manager.new_record(other.nbytes), spare)
            executable.note_address(other, self._allocator.state.op_index)
            executable.variable_alive[other.index] = 0
            if other.successor is not None and other.successor.record is record:
                other.successor.record = None
            other.record = fresh
            assert fresh is not None
            if other.evictable:
                fresh.note_seen()
            executable.variable_address[other.index] = fresh.address
        else:
            self._manager.forget(record)
        executable.note_address(variable, self._allocator.state.op_index)
        variable.record = record
        self.set_alive(executable, variable, record)
        # What may fail comes last: all records have their places.
        if other is not None:
            self.map_first(other)
        if spare is not None:
            self._manager.settle(spare)
            self._manager.dispose(spare)

    def expel(self, executable: ExecutablePlan, variable: PlanVariable) -> None:
        """Evict a record that outlived its plan variable; from here on it is managed on demand."""
        record = variable.record
        assert record is not None
        manager = self._manager
        note_present_nbytes(executable, variable)
        if record.state is State.RESIDENT and manager.moves_still(record):
            manager.still.leave(record)
        elif record.state is State.RESIDENT and not record.stored:
            manager.start_write(record, manager.segments(record.runs, record.nbytes))
        manager.settle(record)
        executable.note_address(variable, self._allocator.state.op_index)
        executable.variable_alive[variable.index] = 0
        executable.variable_address[variable.index] = 0
        self._allocator.bind(record.address, -1)
        record.variable_index = -1
        if variable.is_born or variable.predecessor is not None:
            record.serial = manager.next_serial()
        if variable.is_born:
            record.origin = record.birthplace = variable.origin
        if record.state is State.RESIDENT:
            record.released()
        if not any(record is kept for kept in self.keep_room):
            trim(manager, record)
        if not (record.exports and record.reservation.is_file):
            manager.guards.hide(record)
        manager.records[record.address] = record
        for other in (variable, variable.successor, variable.predecessor):
            if other is not None and other.record is record:
                other.record = None
        for other in (variable, variable.predecessor):  # the predecessor, where the two shared one reservation
            if other is not None and other.is_born and other.record is None:
                self.give_new_record(other)
                assert other.record is not None
                self.map_first(other)
                executable.variable_address[other.index] = other.record.address

    def bury(self, executable: ExecutablePlan, variable: PlanVariable) -> None:
        """Dispose of the record of a dead variable that is not born in the step: no allocation will use it again.

        Unless it serves a variable that is born in the step, too.
        """
        record = variable.record
        if record is None or record.address in self._manager.records:
            return
        variable.record = None
        executable.variable_address[variable.index] = 0
        if not any(other.record is record for other in executable.variables):
            self._manager.dispose(record)
