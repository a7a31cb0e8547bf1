"""Casting: which record plays which role of a plan, from one step to the next.

A plan knows variables as roles. Parameters play the same role in every step; a gradient that is
freed and allocated anew passes from the role that it was born in to the role that exists at the
next step's start. Where the two are alive at once they take turns with two reservations; otherwise
one reservation serves both. A record that is alive where the plan has no role for it goes back to
the books.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ooc.books import Books, State, VariableRecord
from ooc.compiled import Compiled, Role, Stay
from ooc.recorder import ranks_by_age
from scheduler.plan import Dropped, Evicted, Kept
from vmm.driver import MemoryFault
from vmm.files import BLOCK_NBYTES
from vmm.store import StoreFull
from vmm.torch_cpu import AllocatorTable

Bound = list[tuple[Role, VariableRecord]]


class Casting:
    """Gives the roles of plans their records, reservations and mappings. Owns nothing."""

    def __init__(self, books: Books, allocator: AllocatorTable) -> None:
        self._books = books
        self._space = books.space
        self._allocator = allocator
        self.refusal = ""
        """Why the last `bind` or `map_all` said no."""

    def __repr__(self) -> str:
        return f"<Casting over {self._books!r}>"

    # -- before a plan's first step

    def bind(self, compiled: Compiled) -> Bound | None:
        """Find who plays the roles that exist at the start. None: a persistent one is missing."""
        records = self._books.records
        by_serial = {record.serial: record for record in records.values()}
        ranks = ranks_by_age(records.values())
        bound: Bound = []
        taken: set[int] = set()
        for role in compiled.roles:
            if role.is_persistent:
                record = by_serial.get(role.serial) if role.serial is not None else None
                if record is None or record.nbytes != role.nbytes:
                    self.refusal = "a variable that lived across steps is gone"
                    return None
                role.record = record
                bound.append((role, record))
                taken.add(record.serial)
        by_rank = {}
        for record in records.values():
            by_rank[record.nbytes, ranks[record.serial]] = record
        for role in compiled.roles:
            if role.predecessor is None:
                continue
            record = by_rank.get((role.nbytes, role.rank))
            role.record = record if record is not None and record.seen and record.serial not in taken else None
            if role.record is not None:
                bound.append((role, role.record))
                taken.add(role.record.serial)
        return bound

    @staticmethod
    def start_stays(compiled: Compiled) -> dict[int, Stay]:
        """Per role that is in memory when the step starts, its first stay."""
        return {
            role.index: role.stays[0]
            for role in compiled.roles
            if role.stays and isinstance(role.stays[0].residency.start, Kept)
        }

    @staticmethod
    def in_place(bound: Bound, targets: Mapping[int, Stay]) -> set[int]:
        """Addresses of those that are in memory, in the very chunks in which the step finds them."""
        return {
            record.address
            for role, record in bound
            if record.state is State.RESIDENT
            and role.index in targets
            and tuple(map(tuple, record.runs)) == tuple(map(tuple, targets[role.index].runs))
        }

    def map_all(self, compiled: Compiled, others: Sequence[Compiled]) -> bool:
        """Map every role's reservation to its first chunks. False, and nothing kept, if that cannot be."""
        for attempt in range(2):
            try:
                for role in compiled.roles:
                    if role.record is None:
                        self.give_new_record(role)
                    self.map_first(role)
                # What is away may be guarded: there must be room for that, too.
                num_guards = sum(self._books.debug or not role.dies_within for role in compiled.roles)
                self._books.guards.check_room(num_guards)
                self._reserve_store(compiled)
                return True
            except (MemoryFault, StoreFull) as fault:
                self.refusal = str(fault)
                for plan in others if attempt == 0 else (compiled,):
                    self.give_up(plan)
                if attempt == 0 and others:
                    self.give_up(compiled, keep_bound=True)
        return False

    def start_loads(self, missing: Sequence[tuple[Stay, VariableRecord]], loads: list[Stay]) -> MemoryFault | None:
        """Start the loads of a plan's first step, noting each in `loads`. Stops at the first that a device refuses."""
        for stay, record in missing:
            try:
                self._books.start_load(record, stay.runs, (), stay.segments)
            except MemoryFault as fault:
                return fault
            stay.transfer, stay.moved = record.transfer, record
            loads.append(stay)
        return None

    def _reserve_store(self, compiled: Compiled) -> None:
        """Let the store have room now for all that the plan evicts: a full disk must be found before the step."""
        new = {
            role.record.address: role.record.nbytes
            for role in compiled.roles
            if role.record is not None
            and role.record.slot is None
            and any(isinstance(stay.residency.stop, Evicted | Dropped) for stay in role.stays)
        }
        self._books.store.reserve(sum(-(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES for nbytes in new.values()))

    def give_up(self, compiled: Compiled, *, keep_bound: bool = False) -> None:
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

    def hide_away(self, compiled: Compiled) -> None:
        """In debug mode: a touch of what is away when the plan's first step starts faults."""
        if not self._books.debug:
            return
        alive = [r.record for r in compiled.roles if r.record is not None and compiled.role_alive[r.index]]
        self._books.guards.guard_away(
            record for record in alive if record.state is State.AWAY and record.reservation.runs is not None
        )

    # -- from one step to the next

    def can_pass_on(self, compiled: Compiled) -> bool:
        """Whether all that is alive where the plan has no more role for it may be evicted."""
        alive = compiled.role_alive
        over = [compiled.roles[index] for index in compiled.dies[alive[compiled.dies] != 0].tolist()]
        over += [role for role in compiled.movers if alive[role.index] and role.heir is None]
        records = [(role, role.record) for role in over if role.record is not None]
        return not any(record.exports or not (record.seen or role.evictable) for role, record in records)

    def pass_on(self, compiled: Compiled) -> None:
        """The step is complete and the same plan comes again: variables take their roles for it."""
        books = self._books
        alive = compiled.role_alive
        for index in compiled.dies[alive[compiled.dies] != 0].tolist():
            self.expel(compiled, compiled.roles[index])
        promoted = []
        for role in compiled.movers:
            if not alive[role.index]:
                continue
            if role.heir is None:
                self.expel(compiled, role)
            else:
                promoted.append(role)
        moves = [(role, role.heir, role.record) for role in promoted]
        spares = {role.index: role.heir.record for role in promoted if role.heir is not None}
        moving = {id(role.record) for role in promoted}
        for role, heir, record in moves:
            assert heir is not None
            assert record is not None
            compiled.role_alive[role.index] = 0
            record.serial = books.next_serial()
            heir.record = record
            if role.double_buffered:
                spare = spares[role.index]
                role.record = spare if spare is not record else None
                if role.record is None:
                    self.give_new_record(role)
                    self.map_first(role)
                assert role.record is not None
                compiled.role_address[role.index] = role.record.address
            else:
                dead = spares[role.index]  # another one than `record` only in the first step after `enter`
                if dead is not None and dead is not record and id(dead) not in moving:
                    books.dispose(dead)
            self.set_alive(compiled, heir, record)
        for role in compiled.heirs:
            if not alive[role.index]:
                compiled.role_address[role.index] = 0  # nobody plays it in this step

    # -- single roles

    def give_new_record(self, role: Role) -> None:
        """A record with a reservation for a role that is born in the step (or may be: an heir's)."""
        if role.is_born:
            heir = role.heir
            if heir is not None and heir.record is not None and not role.double_buffered:
                role.record = heir.record  # one reservation serves both: the one dies before the other is born
                return
            role.record = self._books.new_record(role.nbytes)
            role.record.seen = role.evictable

    def map_first(self, role: Role) -> None:
        if role.record is None or not role.stays:
            return
        if role.heir is not None and role.heir.record is role.record:
            return  # one reservation: until this one is born it shows the heir's chunks
        self._books.guards.lift(role.record)
        self._space.map(role.record.reservation, role.stays[0].runs)

    def set_alive(self, compiled: Compiled, role: Role, record: VariableRecord, *, is_born: bool = False) -> None:
        """`record` plays `role` from now on, unless its storage was freed a moment ago."""
        compiled.role_alive[role.index] = 1  # first: a free that comes right after `bind` takes it back
        compiled.role_address[role.index] = record.address
        record.role = role.index
        if not self._allocator.bind(record.address, role.index, is_born=is_born):
            compiled.role_alive[role.index] = 0

    def expel(self, compiled: Compiled, role: Role) -> None:
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
        for other in (role, role.predecessor):  # the predecessor, where the two shared one reservation
            if other is not None and other.is_born and other.record is None:
                self.give_new_record(other)
                assert other.record is not None
                self.map_first(other)
                compiled.role_address[other.index] = other.record.address

    def bury(self, compiled: Compiled, role: Role) -> None:
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
