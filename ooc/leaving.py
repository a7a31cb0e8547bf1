"""What leaving a plan takes: transfers that must land first, and the step so far as a recording."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from ooc.books import Books, State, VariableRecord
from ooc.compiled import Compiled, Stay
from ooc.errors import StoreFailed
from ooc.recorder import OpRecord, StepRecorder
from vmm.torch_cpu import AllocatorTable, Event


def land_transfers(
    books: Books, compiled: Compiled, *, writes: Iterable[Stay], loads: Iterable[Stay]
) -> StoreFailed | None:
    """Wait for all that is under way; undo what failed."""
    failure: StoreFailed | None = None
    for role in compiled.roles:
        if role.record is not None and role.record.transfer is not None:
            try:
                books.settle(role.record)
            except StoreFailed as error:
                failure = error
    under_way = [(stay, True) for stay in writes] + [(stay, False) for stay in loads]
    for stay, is_write in under_way:
        record, transfer = stay.moved, stay.transfer  # not the role's: since then it may have passed to another
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
    return failure


def recorder_so_far(
    compiled: Compiled, num_ops: int, *, start_records: Mapping[int, VariableRecord], events: list[Event]
) -> StepRecorder:
    """The ops played so far, as if they had been recorded on demand.

    `start_records` are those that did not play a persistent role when the step began.
    """
    start = dict(start_records)
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
    recorder.events = events
    return recorder


def return_records(
    books: Books, allocator: AllocatorTable, compiled: Compiled, pinned: Container[int]
) -> list[VariableRecord]:
    """Give the records that play a role back to the books, as they are; their roles are free.

    Those of the roles in `pinned` are pinned.

    Returns:
        The pinned ones.
    """
    found = []
    for role in compiled.roles:
        record, is_alive = role.record, compiled.role_alive[role.index]
        compiled.role_alive[role.index] = 0
        if record is None or not is_alive or not allocator.is_alive(record.address):
            continue
        allocator.bind(record.address, -1)
        record.role = -1
        record.seen = record.seen or role.evictable
        if role.is_born:
            record.serial = books.next_serial()
        books.records[record.address] = record
        if record.state is State.RESIDENT and books.guards.was_served(record):
            record.state = State.AWAY  # it came in while somebody may have written to the store's copy
        if record.state is State.AWAY:
            books.hide(record)
        else:
            books.guards.lift(record)
            books.space.map(record.reservation, record.runs)
        if role.index in pinned:
            record.pins += 1
            found.append(record)
    for role in compiled.roles:
        if role.record is not None and role.record.address in books.records:
            role.record = None
            compiled.role_address[role.index] = 0
    return found


def pinned_by(compiled: Compiled, index: int) -> set[int]:
    """Roles that op `index` uses or allocates: they stay where they are until it has ended."""
    return {use.variable for use in compiled.trace.ops[index].uses} | set(compiled.occurrences[index])


def has_landed(stay: Stay) -> bool:
    """Whether the stay's transfer is over and went well, or there is none."""
    if stay.transfer is None:
        return True
    if not stay.transfer.done():
        return False
    try:
        stay.transfer.wait()
    except OSError:
        return False
    return True
