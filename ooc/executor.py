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

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ooc.books import Books, State, VariableRecord
from ooc.casting import Casting
from ooc.compiled import Compiled, Role, Stay
from ooc.errors import StoreFailed
from ooc.leaving import has_landed, land_transfers, pinned_by, recorder_so_far, return_records
from ooc.op_watch import OpWatch, named_calls
from ooc.recorder import StepRecorder
from scheduler.plan import Loaded, occupied_ticks
from vmm.chunks import ChunkPool
from vmm.driver import MemoryFault
from vmm.nvtx_ranges import names_ops
from vmm.store import StoreFull
from vmm.torch_cpu import MODE_DEMAND, MODE_PLANNED, AllocatorTable, Event

_log = logging.getLogger(__name__)


class Executor:
    """Plays one plan at a time over the session's books, allocator and dispatcher."""

    def __init__(
        self,
        *,
        books: Books,
        allocator: AllocatorTable,
        dispatcher: Any,
        new_pool: Callable[[], ChunkPool],
        watch: OpWatch | None = None,
    ) -> None:
        self._books = books
        self._allocator = allocator
        self._dispatcher = dispatcher
        self._new_pool = new_pool
        self._watch = watch
        self._space = books.space
        self._casting = Casting(books, allocator)
        self.active: Compiled | None = None
        self.left_because = ""
        self.events: list[Event] = []  # of the present period
        self._next_death = 0  # in `Compiled.deaths`
        self._mid_op_pins: list[VariableRecord] = []
        self._thread = threading.get_ident()
        self._start_heirs: list[tuple[Role, VariableRecord]] = []
        self._start_foreign: dict[int, VariableRecord] = {}
        self._writes: list[Stay] = []  # under way, or failed
        self._loads: list[Stay] = []
        self.guards_releases = False
        """Whether code that no op tells us of may touch variables now: between steps."""

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
        bound = self._casting.bind(compiled)
        if bound is None:
            self.left_because = self._casting.refusal
            return False
        targets = self._casting.start_stays(compiled)
        in_place = self._casting.in_place(bound, targets)
        # All that is not in place goes to the store first; then what should be here comes in.
        leaving = [r for r in books.records.values() if r.state is State.RESIDENT and r.address not in in_place]
        workspaces = [r for r in books.workspaces() if r.state is State.RESIDENT and not r.pins]
        leaving = [r for r in leaving if r not in workspaces or min(first for first, _ in r.runs) < compiled.num_chunks]
        if any(r.pins or not (r.seen or r in workspaces) for r in leaving):
            self.left_because = "a variable that must stay where it is lies in the plan's way"
            return False
        if any(r.exports for r in books.records.values()):
            self.left_because = "memory of a variable was given out (.numpy() or the like) and is still held"
            return False
        num_kept = sum(books.chunks_of(r.nbytes) for r in workspaces)
        if compiled.num_chunks + num_kept > books.pool.num_chunks:
            self.left_because = "a library's workspace has grown into the plan's memory"
            return False
        try:
            books.evict(leaving)
        except StoreFull as full:
            self.left_because = str(full)
            books.load([r for r in workspaces if r.state is State.AWAY])
            return False
        try:
            self._take_pool(compiled, [r for r in workspaces if r.state is State.RESIDENT])
            books.load([r for r in workspaces if r.state is State.AWAY])  # beside the plan's chunks
            if not self._casting.map_all(compiled, others):
                self.left_because = self._casting.refusal
                return False
        finally:
            books.retake_pool(self._new_pool())
        for _, record in bound:
            books.forget(record)
        self._take_pool(compiled, workspaces)
        missing = [(targets[role.index], r) for role, r in bound if role.index in targets and r.address not in in_place]
        failure = self._casting.start_loads(missing, self._loads)
        for role, record in bound:
            self._casting.set_alive(compiled, role, record)
        for role in compiled.roles:
            if role.record is not None:
                compiled.role_address[role.index] = role.record.address
        self._casting.hide_away(compiled)
        self._install(compiled)
        for role, record in bound:
            # Freed meanwhile (by the cycle collector): only from `_install` on do frees find their role.
            if not self._allocator.is_alive(record.address):
                compiled.role_alive[role.index] = 0
        self._start_period(compiled)
        if failure is not None:
            self.leave("a load could not be started")
            raise failure
        for _, record in bound:
            if record.state is State.LOADING:
                self._arrive(record)
        _log.debug("entered %r with %d variables bound", compiled, len(bound))
        return True

    def retire(self, compiled: Compiled) -> None:
        """A plan will not be played again: give back what it keeps for the variables born in it."""
        assert compiled is not self.active
        self._casting.give_up(compiled)

    def _install(self, compiled: Compiled) -> None:
        if self._watch is not None:
            compiled.calls = self._watch.calls_of(compiled)
        if names_ops():
            compiled.calls = named_calls(compiled.funcs, compiled.calls)
        self._dispatcher.install(*compiled.install_arguments())
        self._allocator.state.plan = compiled.tables_address
        self._allocator.state.mode = MODE_PLANNED
        self.active = compiled

    def _start_period(self, compiled: Compiled) -> None:
        self.events = []
        self.left_because = ""
        self._next_death = 0
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
        for stay in compiled.last_releases:
            record = stay.role.record if compiled.role_alive[stay.role.index] else None
            if record is not None and record.state is State.RESIDENT and not record.stored and not record.exports:
                # Allocated after the last op: no op's end was there to start the write.
                stay.transfer, stay.moved = self._books.start_write(record, stay.segments), record
                self._writes.append(stay)
            if not self._release(compiled, stay):
                return False
        self.absorb_events()
        if not self._casting.can_pass_on(compiled):
            self.leave("a variable that must stay where it is outlived its role in the plan")
            return False
        self._casting.pass_on(compiled)
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
        if not self._check_deaths(compiled, compiled.trace.ops[index].start_tick):
            return False
        for stay in acts.releases:
            if not self._release(compiled, stay):
                return False
        for stay in acts.loads:
            role = stay.role
            if alive[role.index]:
                self._start_load(stay)
                continue
            for other in stay.waits:  # whoever has the chunks next looks no further back than to this stay
                if other.transfer is not None:
                    self._await(other)
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
            heir = stay.role.heir
            if heir is not None and alive[heir.index] and heir.record is stay.role.record:
                self.leave("a variable was freed later than planned, and its addresses are to be used again")
                return False
            for other in stay.waits:
                if other.transfer is not None:
                    if not other.transfer.done():
                        started = started or time.monotonic_ns()
                    self._await(other)  # also when it is over: a write that failed must let nobody in
            self._prepare_birth(stay)
        if started:
            self._books.note_stall(started)
        return True

    def _check_deaths(self, compiled: Compiled, tick: int) -> bool:
        """What should have been freed by `tick` and was not leaves the plan's chunks. False: the step left the plan."""
        deaths, alive = compiled.deaths, compiled.role_alive
        while self._next_death < len(deaths) and deaths[self._next_death][0] <= tick:
            role = compiled.roles[deaths[self._next_death][1]]
            self._next_death += 1
            if not alive[role.index]:
                continue
            record = role.record
            assert record is not None
            shared = role.predecessor is not None and role.predecessor.record is record
            if record.exports or shared or not (role.evictable or record.seen):
                self.leave("a variable was freed later than planned")
                return False
            self._casting.expel(compiled, role)
        return True

    def _is_anyone_late(self, compiled: Compiled, tick: int) -> bool:
        """Whether something that should have been freed by `tick` was not."""
        deaths = compiled.deaths[self._next_death :]
        return any(compiled.role_alive[index] for _, index in itertools.takewhile(lambda d: d[0] <= tick, deaths))

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
                stay.transfer, stay.moved = self._books.start_write(record, stay.segments), record
                self._writes.append(stay)
        for stay in acts.drops:
            record = stay.role.record
            if record is None or not alive[stay.role.index]:
                continue
            if record.stored:
                self._books.counters.dropped_nbytes += record.nbytes
            else:  # the first step of a plan, where the store has no copy yet
                stay.transfer, stay.moved = self._books.start_write(record, stay.segments), record
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
            birth_tick, _ = occupied_ticks(stay.residency, compiled.trace)
            heir = role.heir
            if self._is_anyone_late(compiled, birth_tick) or (
                heir is not None and compiled.role_alive[heir.index] and heir.record is role.record
            ):
                return 0
            for other in stay.waits:
                if other.transfer is not None:
                    self._await(other)
            self._prepare_birth(stay)
            self._casting.set_alive(compiled, role, role.record, is_born=True)
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
        cursor = position // 2
        # Another thread cannot tell whether the session's is just about to run the op: as if it were.
        is_foreign = threading.get_ident() != self._thread and cursor < compiled.num_ops
        inside = position % 2 == 1 or is_foreign
        failure = land_transfers(self._books, compiled, writes=self._writes, loads=self._loads)
        self._writes.clear()
        self._loads.clear()
        self.absorb_events()
        start = {**self._start_foreign, **{record.address: record for _, record in self._start_heirs}}
        recorder = recorder_so_far(compiled, cursor, start_records=start, events=self.events)
        self.events = []
        pinned = pinned_by(compiled, cursor) if inside else set()
        self._mid_op_pins += return_records(self._books, self._allocator, compiled, pinned)
        for role in compiled.roles:
            if not role.is_born:
                self._casting.bury(compiled, role)
        self._books.retake_pool(self._new_pool())
        _log.info("left the plan at op %d: %s", cursor, reason)
        self.on_leave(recorder)  # also when a transfer had failed: the step goes on from true books
        if failure is not None:
            raise failure

    on_leave: Callable[[StepRecorder], None]

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
        # Its addresses show what they showed until it has arrived: a guarded variable stays guarded.
        stay.transfer, stay.moved = self._books.start_load(record, stay.runs, after, stay.segments), record
        self._loads.append(stay)

    def _arrive(self, record: VariableRecord) -> None:
        try:
            self._books.settle(record, for_ops=True)
            if self._books.guards.lift(record):
                # Touched on its way in: what was read may be older than what the store's file holds now.
                runs, record.state = record.runs, State.AWAY
                self._books.settle_load(record, runs)
        except StoreFailed as error:
            self._abandon(error)
        self._space.map(record.reservation, record.runs)

    def _await(self, stay: Stay) -> None:
        """Let ops wait for the stay's transfer. Over is not done: until this has passed, its chunks are its own."""
        assert stay.transfer is not None
        try:
            stay.transfer.order()
        except OSError as error:
            failure = StoreFailed(f"a transfer failed: {error}", errno=error.errno)
            failure.__cause__ = error
            self._abandon(failure)
        stay.transfer = None

    def _abandon(self, error: StoreFailed) -> None:
        """A transfer failed in mid-step: make the books true, then fail the step."""
        with contextlib.suppress(StoreFailed):
            self.leave("a transfer failed")
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
        if not (record.seen or stay.role.evictable):
            self.leave("a variable that may be in use unseen cannot be evicted")
            return False
        if record.exports or not record.stored:
            self.leave("a variable whose memory was given out cannot be evicted")
            return False
        if stay.transfer is not None and stay.transfer.done():
            self._await(stay)
        self._books.check_clean(record)
        record.state = State.AWAY
        record.runs = ()
        record.transfer = stay.transfer
        if self._books.debug or (self.guards_releases and not stay.role.dies_within):
            try:
                self._books.guards.guard_away([record])
            except (MemoryFault, OSError) as fault:
                self.leave(str(fault))
                return False
        return True

    def _prepare_birth(self, stay: Stay) -> None:
        record = stay.role.record
        assert record is not None
        if stay.transfer is not None and not stay.transfer.done():
            # Who was born here in the step before was freed on its way out. Nobody needs those bytes, well or not.
            with contextlib.suppress(OSError):
                stay.transfer.order()
        self._books.guards.lift(record)
        record.state = State.RESIDENT
        record.runs = stay.runs
        record.stored = False
        record.transfer = None
        self._space.map(record.reservation, stay.runs)

    # -- roles

    def skip_bystanders(self, func: Any) -> bool:
        """Let the plan go on at op `func` if only ops that touch no variable lie between. True if so.

        Of the ops that do not come, the plan's acts around them are done.
        """
        compiled = self.active
        assert compiled is not None
        cursor = index = self._dispatcher.cursor
        while index < compiled.num_ops and compiled.funcs[index] is not func and compiled.is_bystander(index):
            index += 1
        if index == cursor or index == compiled.num_ops or compiled.funcs[index] is not func:
            return False
        for skipped in range(cursor, index):
            self._allocator.state.position = 2 * skipped
            compiled.op_start_ns[skipped] = compiled.op_stop_ns[skipped] = time.monotonic_ns()
            if compiled.before[skipped] is not None and not self.before(skipped):
                return False
            if compiled.after[skipped] is not None:
                self.after(skipped)
            if self.active is None:
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
        if len({record.address for record in changes.values()}) != len(changes):
            return False  # one variable cannot play two roles
        for role_index, record in changes.items():
            if not self._cast(compiled, compiled.roles[role_index], record, index):
                return False
        return bool(changes)

    def _cast(self, compiled: Compiled, role: Role, record: VariableRecord, index: int) -> bool:
        stay = compiled.stay_at(role, index)
        if stay is None or record.exports or not record.seen:
            return False
        if self._is_anyone_late(compiled, compiled.trace.ops[index].start_tick):
            return False
        if compiled.role_alive[role.index]:
            self._casting.expel(compiled, role)
        if record.state is State.RESIDENT:
            self._books.evict([record])
        del self._books.records[record.address]
        self._casting.bury(compiled, role)
        role.record = record
        self._casting.set_alive(compiled, role, record)
        start = stay.residency.start
        started = time.monotonic_ns()
        if not (isinstance(start, Loaded) and start.before_op == index):
            self._start_load(stay)
            self._arrive(record)
        # Else `before` loads it, after it has released who holds the chunks until this very op.
        if compiled.is_written_from(role, index):
            record.stored = False  # the op that was to note the first write may have been another's
        self._books.note_stall(started)
        return True

    def _take_pool(self, compiled: Compiled, workspaces: Sequence[VariableRecord]) -> None:
        """The plan's chunks are its own from now on; beside workspaces, what is left serves the unplanned."""
        pool = self._new_pool()
        pool.take_exactly([(0, compiled.num_chunks)] if compiled.num_chunks else [])
        for record in workspaces:
            pool.take_exactly(record.runs)
        self._books.pool = pool

    def guard_away(self) -> None:
        """The step is over: let stray touches of what is away be served until it is next loaded.

        Until the next step begins (`guards_releases`) the same holds for what goes away meanwhile.
        """
        compiled = self.active
        if compiled is None:
            return
        alive = compiled.role_alive
        self._books.guards.guard_away(
            role.record
            for role in compiled.outlasting
            if role.record is not None and alive[role.index] and role.record.state is not State.RESIDENT
        )

    def unserve(self) -> None:
        """In debug mode a step begins: what was served between steps shows nothing again."""
        for record in self._books.guards.served_records():
            if self._books.records.get(record.address) is record:
                self._books.hide(record)
            elif self.active is not None and record.role >= 0:
                role = self.active.roles[record.role]
                self._casting.map_first(role)
                self._books.guards.guard_away([record])

    def live_records(self) -> list[VariableRecord]:
        """Records that play a role now."""
        return self.active.live_records() if self.active is not None else []

    def record_at(self, address: int) -> VariableRecord | None:
        """The record that plays a role at this address, if one does."""
        return next((record for record in self.live_records() if record.address == address), None)

    def _prune(self) -> None:
        """Forget what has landed well. A failed transfer stays: whoever needs it finds out."""
        self._writes = [stay for stay in dict.fromkeys(self._writes) if not has_landed(stay)]
        self._loads = [stay for stay in dict.fromkeys(self._loads) if not has_landed(stay)]
