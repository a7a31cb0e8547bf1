"""Playing a plan: before and after each op, at a step's boundary, and when a step leaves the plan.

The executor has no opinions. It does what `Compiled` says, checks what the plan took for granted
(what should be dead was freed; what is dropped is clean), and the moment something is not as
planned it hands true books to the on-demand way and the step goes on there (DESIGN.md sections 6, 8).

While a plan is played, the records that play a role are the executor's; the books hold only the
others, in chunks that the plan does not use. Ordering rules (DESIGN.md section 10):

* a load starts after its own variable's write, and after the writes of whoever held its chunks;
* an allocation waits for the writes of whoever held its chunks;
* what should have died before its chunks are reused is checked to be dead;
* at a step's start every reservation has its step-start chunks again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ooc.books import Books, State, VariableRecord
from ooc.compiled import Compiled, Role, Stay
from ooc.errors import StoreFailed
from ooc.recorder import OpRecord, StepRecorder
from scheduler.plan import Kept
from vmm.chunks import ChunkPool
from vmm.driver import MemoryFault
from vmm.torch_cpu import MODE_DEMAND, MODE_PLANNED, CpuAllocator, Event

_log = logging.getLogger(__name__)


class Executor:
    """Plays one plan at a time over the session's books, allocator and dispatcher."""

    def __init__(
        self,
        *,
        books: Books,
        allocator: CpuAllocator,
        dispatcher: Any,
        new_pool: Callable[[], ChunkPool],
    ) -> None:
        self._books = books
        self._allocator = allocator
        self._dispatcher = dispatcher
        self._new_pool = new_pool
        self._space = books.space
        self.active: Compiled | None = None
        self.left_because = ""
        self.events: list[Event] = []  # of the present period
        self._mid_op_pins: list[VariableRecord] = []
        self._start_heirs: list[tuple[Role, VariableRecord]] = []
        self._start_foreign: dict[int, VariableRecord] = {}
        self._writes: list[Stay] = []  # under way, or failed
        self._loads: list[Stay] = []

    def __repr__(self) -> str:
        return f"<Executor of {self.active!r}>"

    # -- between steps

    def enter(self, compiled: Compiled, others: Sequence[Compiled] = ()) -> bool:
        """Move all variables to where the plan's step starts. Called at a step boundary, on demand.

        Args:
            compiled: The plan.
            others: Plans that are not being played; their mappings are given up if the kernel's
                limit on mappings stands in the way.

        Returns:
            False if the plan cannot start from here (`left_because` says why); the books are true.

        Raises:
            StoreFailed: A transfer failed; the books are true.
        """
        books = self._books
        bound = self._bind_from_books(compiled)
        if bound is None:
            return False
        targets = self._start_stays(compiled)
        in_place = {
            record.address
            for role, record in bound
            if record.state is State.RESIDENT
            and role.index in targets
            and tuple(map(tuple, record.runs)) == tuple(map(tuple, targets[role.index].runs))
        }
        # All that is not in place goes to the store first; then what should be here comes in.
        leaving = [r for r in books.records.values() if r.state is State.RESIDENT and r.address not in in_place]
        if any(r.pins or not r.seen for r in leaving):
            self.left_because = "a variable that must stay where it is lies in the plan's way"
            return False
        if any(r.exports for r in books.records.values()):
            self.left_because = "memory of a variable was given out (.numpy() or the like) and is still held"
            return False
        books.evict(leaving)
        if not self._map_all(compiled, others):
            return False
        for _, record in bound:
            books.forget(record)
        self._take_pool(compiled)
        for role, record in bound:
            stay = targets.get(role.index)
            if stay is not None and record.address not in in_place:
                books.start_load(record, stay.runs, (), stay.segments)
                stay.transfer = record.transfer
                self._loads.append(stay)
            self._set_alive(compiled, role, record)
        for role in compiled.roles:
            if role.record is not None:
                compiled.role_address[role.index] = role.record.address
        self._hide_away(compiled)
        self._install(compiled)
        self._start_period(compiled)
        for role, record in bound:
            if record.state is State.LOADING:
                self._arrive(record)
        _log.debug("entered %r with %d variables bound", compiled, len(bound))
        return True

    @staticmethod
    def _start_stays(compiled: Compiled) -> dict[int, Stay]:
        """Per role that is in memory when the step starts, its first stay."""
        return {
            role.index: role.stays[0]
            for role in compiled.roles
            if role.stays and isinstance(role.stays[0].residency.start, Kept)
        }

    def _map_all(self, compiled: Compiled, others: Sequence[Compiled]) -> bool:
        """Map every role's reservation to its first chunks. False, and nothing kept, if that cannot be."""
        for attempt in range(2):
            try:
                for role in compiled.roles:
                    if role.record is None:
                        self._give_new_record(role)
                    self._map_first(role)
                return True
            except MemoryFault as fault:
                self.left_because = str(fault)
                for plan in others if attempt == 0 else (compiled,):
                    self._give_up(plan)
                if attempt == 0 and others:
                    self._give_up(compiled, keep_bound=True)
        return False

    def _give_up(self, compiled: Compiled, *, keep_bound: bool = False) -> None:
        """Unmap what a plan that is not being played keeps mapped."""
        bound = [(r, r.record) for r in compiled.roles if not r.is_born and r.record is not None]
        for _, record in bound:
            if record.state is State.AWAY and self._books.records.get(record.address) is record:
                self._books.hide(record)
        for record in compiled.give_up_records():
            if record.address not in self._books.records:
                self._books.dispose(record)
        if keep_bound:
            for role, record in bound:
                role.record = record

    def retire(self, compiled: Compiled) -> None:
        """A plan will not be played again: give back what it keeps for the variables born in it."""
        assert compiled is not self.active
        self._give_up(compiled)

    def _install(self, compiled: Compiled) -> None:
        self._dispatcher.install(*compiled.install_arguments())
        self._allocator.state.plan = compiled.tables_address
        self._allocator.state.mode = MODE_PLANNED
        self.active = compiled

    def _start_period(self, compiled: Compiled) -> None:
        self.events = []
        self.left_because = ""
        self._start_heirs = [
            (role, role.record)
            for role in compiled.heirs
            if role.record is not None and compiled.role_alive[role.index]
        ]
        self._start_foreign = dict(self._books.records)
        self._allocator.state.position = 0
        self._dispatcher.start(0)

    def is_complete(self) -> bool:
        """Whether every op of the plan has been played in this period."""
        return self.active is not None and self._dispatcher.cursor == self.active.num_ops

    def rotate(self) -> bool:
        """The step is complete and the same plan comes again: variables take their roles for it.

        Returns:
            False if the step had to leave the plan instead (`left_because`).
        """
        compiled = self.active
        assert compiled is not None
        books = self._books
        for stay in compiled.last_releases:
            if not self._release(compiled, stay):
                return False
        self.absorb_events()
        alive = compiled.role_alive
        for index in compiled.dies[alive[compiled.dies] != 0].tolist():
            self._expel(compiled, compiled.roles[index])
        promoted = []
        for role in compiled.movers:
            if not alive[role.index]:
                continue
            if role.heir is None:
                self._expel(compiled, role)
            else:
                promoted.append(role)
        moves = [(role, role.heir, role.record) for role in promoted]
        spares = {role.index: role.heir.record for role in promoted if role.heir is not None}
        moving = {id(role.record) for role in promoted}
        for role, heir, record in moves:
            assert heir is not None and record is not None
            compiled.role_alive[role.index] = 0
            record.serial = books.next_serial()
            heir.record = record
            if role.double_buffered:
                spare = spares[role.index]
                role.record = spare if spare is not record else None
                if role.record is None:
                    self._give_new_record(role)
                    self._map_first(role)
                assert role.record is not None
                compiled.role_address[role.index] = role.record.address
            else:
                dead = spares[role.index]  # another one than `record` only in the first step after `enter`
                if dead is not None and dead is not record and id(dead) not in moving:
                    books.dispose(dead)
            self._set_alive(compiled, heir, record)
        for role in compiled.heirs:
            if not alive[role.index]:
                compiled.role_address[role.index] = 0  # nobody plays it in this step
        self._prune()
        self._start_period(compiled)
        return True

    def persistent_is_missing(self) -> bool:
        """Whether a variable that lives across steps was freed in this one."""
        compiled = self.active
        assert compiled is not None
        return not compiled.role_alive[compiled.persistent].all()

    # -- around an op; called by the dispatcher

    def before(self, index: int) -> bool:
        """Releases, loads, arrivals and births of op `index`. False: the step has left the plan."""
        compiled = self.active
        assert compiled is not None
        acts = compiled.before[index]
        assert acts is not None
        alive = compiled.role_alive
        for stay in acts.releases:
            if not self._release(compiled, stay):
                return False
        for stay in acts.loads:
            role = stay.role
            if not alive[role.index]:
                continue
            if any(alive[d] for d in stay.dead):
                self.leave("a variable was freed later than planned")
                return False
            self._start_load(stay)
        started = 0
        for stay in acts.arrivals:
            role = stay.role
            record = role.record
            if record is None or not alive[role.index]:
                continue
            if record.state is State.LOADING:
                started = started or time.monotonic_ns()
                self._arrive(record)
            elif record.state is State.AWAY:
                self.leave("a variable was not where the plan expects it")
                return False
        for stay in acts.births:
            for other in stay.waits:
                if other.transfer is not None:
                    if not other.transfer.done():
                        started = started or time.monotonic_ns()
                    self._await(other)  # also when it is over: a write that failed must let nobody in
            self._prepare_birth(stay)
        if started:
            self._books.counters.stall_ns += time.monotonic_ns() - started
        return True

    def after(self, index: int) -> None:
        """Writes and drops after op `index`."""
        compiled = self.active
        assert compiled is not None
        acts = compiled.after[index]
        assert acts is not None
        alive = compiled.role_alive
        for role in acts.dirties:
            if role.record is not None:
                role.record.stored = False
        for stay in acts.writes:
            record = stay.role.record
            if record is None or not alive[stay.role.index]:
                continue
            if record.stored:
                self._books.counters.dropped_nbytes += record.nbytes
            else:
                stay.transfer = self._books.start_write(record, stay.segments)
                self._writes.append(stay)
        for stay in acts.drops:
            record = stay.role.record
            if record is None or not alive[stay.role.index]:
                continue
            if record.stored:
                self._books.counters.dropped_nbytes += record.nbytes
            else:  # the first step of a plan, where the store has no copy yet
                stay.transfer = self._books.start_write(record, stay.segments)
                self._writes.append(stay)
            if not self._release(compiled, stay):
                return

    def fail(self, index: int) -> None:
        """Op `index` raised, perhaps after it had written some of its operands."""
        assert self.active is not None
        for use in self.active.trace.ops[index].uses:
            record = self.active.roles[use.variable].record
            if use.writes and record is not None:
                record.stored = False

    def mid_op_records(self) -> list[VariableRecord]:
        """Operands, and what was allocated so far, of the op in which the step left its plan."""
        return list(self._mid_op_pins)

    def finish(self) -> None:
        """The op in which the step left its plan has ended: its operands need not stay any more."""
        for record in self._mid_op_pins:
            record.pins -= 1
        self._mid_op_pins.clear()

    # -- allocations that the table did not serve

    def serve_between(self, nbytes: int) -> int:
        """A planned allocation between two ops; 0 if the plan has none here."""
        compiled = self.active
        assert compiled is not None
        for stay in compiled.between_births.get(self._dispatcher.cursor, ()):
            role = stay.role
            if role.nbytes != nbytes or compiled.role_alive[role.index] or role.record is None:
                continue
            if any(compiled.role_alive[d] for d in stay.dead):
                return 0
            for other in stay.waits:
                if other.transfer is not None:
                    self._await(other)
            self._prepare_birth(stay)
            self._set_alive(compiled, role, role.record)
            return role.record.address
        return 0

    def absorb_events(self) -> list[Event]:
        """Take the allocator's log into this period's, and forget freed variables of the books."""
        events = self._allocator.drain()
        self.events.extend(events)
        for event in events:
            if event.kind != 0 and event.address in self._books.records:
                self._books.free(event.address)
        return events

    # -- leaving

    def leave(self, reason: str) -> None:
        """Go on on demand from here. `on_leave` gets the recorder with what was played of the step.

        Safe at any point: between ops, or inside one (from an allocation), where that op's
        operands and allocations stay pinned until `finish`.

        Raises:
            StoreFailed: A transfer had failed. The books are true nevertheless.
        """
        compiled = self.active
        assert compiled is not None
        self.left_because = reason
        self._dispatcher.leave()
        self._allocator.state.mode = MODE_DEMAND
        self._allocator.state.plan = None
        self.active = None
        position = self._allocator.state.position
        inside = position % 2 == 1
        cursor = position // 2
        failure = self._land_transfers(compiled)
        self.absorb_events()
        recorder = self._recorder_so_far(compiled, cursor)
        pinned = self._pins_of(compiled, cursor) if inside else set()
        books = self._books
        for role in compiled.roles:
            record, role_is_alive = role.record, compiled.role_alive[role.index]
            if record is None or not role_is_alive:
                continue
            self._allocator.bind(record.address, -1)
            compiled.role_alive[role.index] = 0
            record.role = -1
            record.seen = record.seen or role.evictable
            if role.is_born:
                record.serial = books.next_serial()
            books.records[record.address] = record
            if record.state is State.RESIDENT and self._books.guards.was_served(record):
                record.state = State.AWAY  # it came in while somebody may have written to the store's copy
            if record.state is State.AWAY:
                books.hide(record)
            else:
                books.guards.lift(record)
                self._space.unprotect(record.reservation)
            if role.index in pinned:
                record.pins += 1
                self._mid_op_pins.append(record)
        for role in compiled.roles:
            if role.record is not None and role.record.address in books.records:
                role.record = None
                compiled.role_address[role.index] = 0
        for role in compiled.roles:
            if not role.is_born:
                self._bury(compiled, role)
        books.retake_pool(self._new_pool())
        _log.info("left the plan at op %d: %s", cursor, reason)
        self.on_leave(recorder)  # also when a transfer had failed: the step goes on from true books
        if failure is not None:
            raise failure

    def _bury(self, compiled: Compiled, role: Role) -> None:
        """Whoever played a role that is not born in the step is dead: nobody will ask for its reservation again.

        (Unless it serves a role that is born in the step, too.)
        """
        record = role.record
        if record is None or record.address in self._books.records:
            return
        role.record = None
        compiled.role_address[role.index] = 0
        if not any(other.record is record for other in compiled.roles):
            self._books.dispose(record)

    on_leave: Callable[[StepRecorder], None]

    def _land_transfers(self, compiled: Compiled) -> StoreFailed | None:
        """Wait for all that is under way; undo what failed."""
        failure: StoreFailed | None = None
        for role in compiled.roles:
            if role.record is not None and role.record.transfer is not None:
                try:
                    self._books.settle(role.record)
                except StoreFailed as error:
                    failure = error
        under_way = [(stay, True) for stay in self._writes] + [(stay, False) for stay in self._loads]
        for stay, is_write in under_way:
            record, transfer = stay.role.record, stay.transfer
            stay.transfer = None
            if transfer is None:
                continue
            try:
                transfer.wait()
            except OSError as error:
                if failure is None:
                    failure = StoreFailed(f"a transfer failed: {error}", errno=error.errno)
                    failure.__cause__ = error
                if is_write and record is not None and record.state is State.AWAY:
                    # Released but not written, so nobody was let into its chunks: it is still there.
                    record.state = State.RESIDENT
                    record.runs = stay.runs
                    record.stored = False
        self._writes.clear()
        self._loads.clear()
        return failure

    def _recorder_so_far(self, compiled: Compiled, num_ops: int) -> StepRecorder:
        start = dict(self._start_foreign)
        start.update({record.address: record for _, record in self._start_heirs})
        persistent = (compiled.roles[i].record for i in compiled.persistent.tolist())
        start.update({record.address: record for record in persistent if record is not None})
        recorder = StepRecorder(start)
        address = compiled.role_address
        for index in range(num_ops):
            op = compiled.trace.ops[index]
            written = {u.variable for u in op.uses if u.writes and u.reads}
            births = [u.variable for u in op.uses if not u.reads and compiled.roles[u.variable].evictable]
            recorder.ops.append(
                OpRecord(
                    func=compiled.funcs[index],
                    where=op.where,
                    occurrences=[int(address[r]) for r in compiled.occurrences[index]],
                    written=[int(address[r]) for r in written],
                    results=[int(address[r]) for r in births],
                    duration_ns=int(compiled.op_stop_ns[index] - compiled.op_start_ns[index]),
                )
            )
        recorder.events = self.events
        self.events = []
        return recorder

    def _pins_of(self, compiled: Compiled, index: int) -> set[int]:
        return {use.variable for use in compiled.trace.ops[index].uses} | set(compiled.occurrences[index])

    # -- acts

    def _start_load(self, stay: Stay) -> None:
        record = stay.role.record
        assert record is not None
        if record.state is not State.AWAY:
            return
        after = []
        for other in stay.waits:
            if other.transfer is None:
                continue
            if other.transfer.done():
                self._await(other)
            else:
                after.append(other.transfer)
        self._books.guards.lift(record)
        self._map(stay)
        stay.transfer = self._books.start_load(record, stay.runs, after, stay.segments)
        self._loads.append(stay)

    def _arrive(self, record: VariableRecord) -> None:
        try:
            self._books.settle(record)
        except StoreFailed as error:
            self._abandon(error)
        if self._books.guards.lift(record):
            # Touched on its way in: what was read may be older than what the store's file holds now.
            runs = record.runs
            record.state = State.AWAY
            self._space.map(record.reservation, runs)
            try:
                self._books.settle_load(record, runs)
            except StoreFailed as error:
                self._abandon(error)
        if self._books.debug:
            self._space.unprotect(record.reservation)

    def _await(self, stay: Stay) -> None:
        """Wait for the stay's transfer. Over is not done: until this has passed, its chunks are its own."""
        assert stay.transfer is not None
        try:
            stay.transfer.wait()
        except OSError as error:
            failure = StoreFailed(f"a transfer failed: {error}", errno=error.errno)
            failure.__cause__ = error
            self._abandon(failure)
        stay.transfer = None

    def _abandon(self, error: StoreFailed) -> None:
        """A transfer failed in mid-step: make the books true, then fail the step."""
        try:
            self.leave("a transfer failed")
        except StoreFailed:
            pass
        raise error

    def _release(self, compiled: Compiled, stay: Stay) -> bool:
        """The stay ends here, in the store. False: it must not, and the step has left the plan."""
        record = stay.role.record
        if record is None or not compiled.role_alive[stay.role.index]:
            return True
        if record.state is State.LOADING:  # loaded, but freed or not used after all
            self._arrive(record)
        if record.state is not State.RESIDENT:
            return True
        if record.exports:
            self._books.end_exports()
        if record.exports or not record.stored:
            self.leave("a variable whose memory was given out cannot be evicted")
            return False
        if stay.transfer is not None and stay.transfer.done():
            self._await(stay)
        self._books.check_clean(record)
        record.state = State.AWAY
        record.runs = ()
        record.transfer = stay.transfer
        if self._books.debug:
            self._space.protect(record.reservation)
        return True

    def _prepare_birth(self, stay: Stay) -> None:
        record = stay.role.record
        assert record is not None
        self._books.guards.lift(record)
        record.state = State.RESIDENT
        record.runs = stay.runs
        record.stored = False
        record.transfer = None
        self._map(stay)

    def _map(self, stay: Stay) -> None:
        record = stay.role.record
        assert record is not None
        self._space.map(record.reservation, stay.runs)

    # -- roles

    def _bind_from_books(self, compiled: Compiled) -> list[tuple[Role, VariableRecord]] | None:
        """Find who plays the roles that exist at the start. None: a persistent one is missing."""
        records = self._books.records
        by_serial = {record.serial: record for record in records.values()}
        bound: list[tuple[Role, VariableRecord]] = []
        taken: set[int] = set()
        for role in compiled.roles:
            if role.is_persistent:
                record = by_serial.get(role.serial) if role.serial is not None else None
                if record is None or record.nbytes != role.nbytes:
                    self.left_because = "a variable that lived across steps is gone"
                    return None
                role.record = record
                bound.append((role, record))
                taken.add(record.serial)
        candidates: dict[int, list[VariableRecord]] = {}
        for record in sorted(records.values(), key=lambda r: -r.serial):
            if record.serial not in taken and record.seen:
                candidates.setdefault(record.nbytes, []).append(record)
        heirs = sorted((r for r in compiled.roles if r.predecessor is not None), key=lambda r: -r.ordinal)
        for role in heirs:
            found = candidates.get(role.nbytes)
            role.record = found.pop(0) if found else None
            if role.record is not None:
                bound.append((role, role.record))
        return bound

    def _give_new_record(self, role: Role) -> None:
        """A record with a reservation for a role that is born in the step (or may be: an heir's)."""
        if role.is_born:
            heir = role.heir
            if heir is not None and heir.record is not None and not role.double_buffered:
                role.record = heir.record  # one reservation serves both: the one dies before the other is born
                return
            role.record = self._books.new_record(role.nbytes)
            role.record.seen = role.evictable

    def _map_first(self, role: Role) -> None:
        if role.record is None or not role.stays:
            return
        if role.heir is not None and role.heir.record is role.record:
            return  # one reservation: until this one is born it shows the heir's chunks
        self._books.guards.lift(role.record)
        self._space.map(role.record.reservation, role.stays[0].runs)

    def _set_alive(self, compiled: Compiled, role: Role, record: VariableRecord) -> None:
        compiled.role_alive[role.index] = 1
        compiled.role_address[role.index] = record.address
        record.role = role.index
        self._allocator.bind(record.address, role.index)

    def _expel(self, compiled: Compiled, role: Role) -> None:
        """A record that is alive where the plan has no more role for it goes back to the books, away."""
        record = role.record
        assert record is not None
        books = self._books
        if record.state is State.RESIDENT and not record.stored:
            books.start_write(record, books.segments(record.runs, record.nbytes))
        books.settle(record)
        compiled.role_alive[role.index] = 0
        compiled.role_address[role.index] = 0
        self._allocator.bind(record.address, -1)
        record.role = -1
        record.serial = books.next_serial()
        books.hide(record)
        books.records[record.address] = record
        for other in (role, role.heir, role.predecessor):
            if other is not None and other.record is record:
                other.record = None
        if role.is_born:
            self._give_new_record(role)
            assert role.record is not None
            self._map_first(role)
            compiled.role_address[role.index] = role.record.address

    def skip_bystanders(self, func: Any) -> bool:
        """Let the plan go on at op `func` if only ops that touch no variable lie between. True if so."""
        compiled = self.active
        assert compiled is not None
        cursor = index = self._dispatcher.cursor
        while index < compiled.num_ops and compiled.funcs[index] is not func and compiled.is_bystander(index):
            index += 1
        if index == cursor or index == compiled.num_ops or compiled.funcs[index] is not func:
            return False
        self._allocator.state.position = 2 * index
        self._dispatcher.start(index)
        return True

    def rebind(self, addresses: Sequence[int]) -> bool:
        """Let operands of the next op play roles that nobody plays yet (a batch from a list).

        Returns:
            True if the op's operands are now as planned, and resident.
        """
        compiled = self.active
        assert compiled is not None
        index = self._dispatcher.cursor
        expected = compiled.occurrences[index]
        if len(expected) != len(addresses):
            return False
        changes: dict[int, VariableRecord] = {}
        for role_index, address in zip(expected, addresses, strict=True):
            if int(compiled.role_address[role_index]) == address:
                continue
            role, record = compiled.roles[role_index], self._books.records.get(address)
            if record is None or role.is_born or role.is_persistent or record.nbytes != role.nbytes:
                return False
            changes[role_index] = record
        for role_index, record in changes.items():
            if not self._cast(compiled, compiled.roles[role_index], record, index):
                return False
        return bool(changes)

    def _cast(self, compiled: Compiled, role: Role, record: VariableRecord, index: int) -> bool:
        stay = compiled.stay_at(role, index)
        if stay is None or record.exports or any(compiled.role_alive[d] for d in stay.dead):
            return False
        if compiled.role_alive[role.index]:
            self._expel(compiled, role)
        if record.state is State.RESIDENT:
            self._books.evict([record])
        del self._books.records[record.address]
        self._bury(compiled, role)
        role.record = record
        self._set_alive(compiled, role, record)
        self._start_load(stay)
        started = time.monotonic_ns()
        self._arrive(record)
        self._books.counters.stall_ns += time.monotonic_ns() - started
        return True

    def _take_pool(self, compiled: Compiled) -> None:
        """The plan's chunks are its own from now on; what is left serves the unplanned."""
        pool = self._new_pool()
        pool.take_exactly([(0, compiled.num_chunks)] if compiled.num_chunks else [])
        self._books.pool = pool

    def guard_away(self) -> None:
        """The step is over: let stray touches of what is away be served until it is next loaded."""
        compiled = self.active
        if compiled is None:
            return
        alive = compiled.role_alive
        self._books.guards.guard_away(
            role.record
            for role in compiled.away_at_end
            if role.record is not None and alive[role.index] and role.record.state is not State.RESIDENT
        )

    def unserve(self) -> None:
        """In debug mode a step begins: what was served between steps shows nothing again."""
        for record in self._books.guards.served_records():
            if self._books.records.get(record.address) is record:
                self._books.hide(record)
            elif self.active is not None and record.role >= 0:
                role = self.active.roles[record.role]
                self._map_first(role)
                self._space.protect(record.reservation)

    def live_records(self) -> list[VariableRecord]:
        """Records that play a role now."""
        if self.active is None:
            return []
        alive = self.active.role_alive
        return [role.record for role in self.active.roles if role.record is not None and alive[role.index]]

    def record_at(self, address: int) -> VariableRecord | None:
        """The record that plays a role at this address, if one does."""
        compiled = self.active
        if compiled is None:
            return None
        for role in compiled.roles:
            if role.record is not None and role.record.address == address and compiled.role_alive[role.index]:
                return role.record
        return None

    def _hide_away(self, compiled: Compiled) -> None:
        if not self._books.debug:
            return
        for role in compiled.roles:
            record = role.record
            if record is not None and compiled.role_alive[role.index] and record.state is State.AWAY:
                if record.reservation.runs is not None:
                    self._space.protect(record.reservation)

    def _prune(self) -> None:
        """Forget what has landed well. A failed transfer stays: whoever needs it finds out."""
        self._writes = [stay for stay in self._writes if not _has_landed(stay)]
        self._loads = [stay for stay in self._loads if not _has_landed(stay)]


def _has_landed(stay: Stay) -> bool:
    if stay.transfer is None:
        return True
    if not stay.transfer.done():
        return False
    try:
        stay.transfer.wait()
    except OSError:
        return False
    return True
