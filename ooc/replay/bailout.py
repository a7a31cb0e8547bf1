"""Bailout from a plan in mid-step: ends its transfers, returns its variables, records the ops replayed so far."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence

from ooc.errors import StoreFailed
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.ops_beside import OpsBeside
from ooc.replay.plan_variables import ExecutableResidency
from ooc.replay.present_sizes import note_present_nbytes, trim
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recorder import StepRecorder
from vmm.table import between_ops, op_at
from vmm.torch_cpu import AllocatorTable, Event

_log = logging.getLogger(__name__)


def land_transfers(
    manager: ResidencyManager,
    executable: ExecutablePlan,
    *,
    writes: Iterable[ExecutableResidency],
    loads: Iterable[ExecutableResidency],
) -> StoreFailed | None:
    """Wait for all transfers under way, and undo the releases whose writes failed. A load's failure, if any.

    A write that failed is none: its variable is still in memory, and whoever must evict it writes it again. After a
    load, ops may be under way that have read what never came.
    """
    failure: StoreFailed | None = None
    for variable in executable.variables:
        if variable.record is not None and variable.record.transfer is not None:
            loading = variable.record.state is State.LOADING
            try:
                manager.settle(variable.record)
            except StoreFailed as error:
                failure = error if loading else failure
                _log.warning("while leaving the plan: %s", error)
    under_way = [(residency, True) for residency in writes] + [(residency, False) for residency in loads]
    for residency, is_write in under_way:
        # Not the variable's record: since the transfer began, it may have been bound to another.
        record, transfer = residency.moved, residency.transfer
        residency.transfer = None
        if transfer is None:
            continue
        try:
            transfer.wait()
        except OSError as error:
            _log.warning("while leaving the plan: a transfer failed: %s", error)
            if failure is None and not is_write:
                failure = StoreFailed(f"a transfer failed: {error}", errno=error.errno)
                failure.__cause__ = error
            if is_write and record is not None and record.state is State.AWAY:
                # Released but not written, so nothing else was put into its chunks: its bytes are still there.
                record.restored(residency.runs)
    return failure


def recorder_so_far(
    executable: ExecutablePlan,
    num_ops: int,
    start_records: Mapping[int, VariableRecord],
    *,
    events: list[Event],
    beside: OpsBeside,
    earlier: StepRecorder | None,
) -> StepRecorder:
    """A recorder of the ops replayed so far, as if they had run on demand.

    `start_records` are those that were not bound to a persistent variable when the step began. `earlier`: what came
    before the plan was entered, in its middle.
    """
    start = dict(start_records if earlier is None else earlier.start_records)
    persistent = (executable.variables[i].record for i in executable.persistent.tolist())
    start.update({record.address: record for record in persistent if record is not None})
    recorder = StepRecorder(start)
    prefix = list(earlier.as_records()) if earlier is not None else []
    recorder.grad_mode = executable.grad_mode
    recorder.is_begun = num_ops > executable.num_idle
    address, changes = executable.variable_address.tolist(), list(executable.readdressed)
    durations_ns = (executable.op_stop_ns[:num_ops] - executable.op_start_ns[:num_ops]).tolist()
    variables, ops = executable.variables, []
    omitted, nodes, forward = set(executable.omitted), executable.op_nodes.tolist(), executable.observed.forward
    nodes[: len(prefix)] = [op.node for op in prefix]
    for index in reversed(range(len(prefix), num_ops)):
        while changes and changes[-1][0] > index:  # back to the addresses that the op has seen
            _, variable, before = changes.pop()
            address[variable] = before
        if index in omitted:
            continue
        op = executable.trace.ops[index]
        launched, is_held, landed = executable.flights[index] or ((), False, ())
        written, births = [], []
        source = forward[index] if forward else -1
        for use in op.uses:
            if not use.reads:
                if variables[use.variable].evictable:
                    births.append(address[use.variable])
                if use.variable in launched:
                    written.append(address[use.variable])
            elif use.writes:
                written.append(address[use.variable])
        ops.append(
            OpRecord(
                func=executable.funcs[index],
                where=op.where,
                node=nodes[index] if source < 0 else 0 if source in omitted else -nodes[source],
                occurrences=tuple([address[r] for r in executable.occurrences[index]]),
                written=tuple(written),
                results=tuple(births),
                duration_ns=durations_ns[index],
                in_flight=[address[r] for r in launched],
                is_held=is_held,
                replayable=op.replayable,
                sliced=None if (apart := executable.parts.sliced[index]) is None else [address[r] for r in apart],
                landed=[address[r] for r in landed],
            )
        )
    ops += prefix[::-1]
    found, recorder.events = beside.joined(ops[::-1], _without_omitted(events, executable.omitted), executable.omitted)
    recorder.extend(found)
    recorder.num_replayed, recorder.num_beside = len(found), len(found) - len(ops)
    if earlier is not None:
        recorder.num_replayed += earlier.num_replayed - len(prefix)
        recorder.num_beside += earlier.num_beside
    return recorder


def _without_omitted(events: list[Event], omitted: Sequence[int]) -> list[Event]:
    """The events at the positions that they have where ops that were left out do not count."""
    if not omitted:
        return events
    return [e._replace(position=e.position - between_ops(bisect_left(omitted, op_at(e.position)))) for e in events]


def return_records(
    manager: ResidencyManager, allocator: AllocatorTable, executable: ExecutablePlan, pinned: Container[int]
) -> list[VariableRecord]:
    """Unbind all live records and return them, where they are, to the residency manager.

    Those of the plan variables in `pinned` are pinned.

    Returns:
        The pinned ones.
    """
    found = []
    for variable in executable.variables:
        record, is_alive = variable.record, executable.variable_alive[variable.index]
        executable.variable_alive[variable.index] = 0
        if record is None or not is_alive or not allocator.is_alive(record.address):
            continue
        allocator.bind(record.address, -1)
        record.variable_index = -1
        if variable.evictable:
            record.note_seen()
        note_present_nbytes(executable, variable)
        if variable.is_born:
            record.serial = manager.next_serial()
            record.origin = record.birthplace = variable.origin
        record.used_ns = time.monotonic_ns()
        manager.records[record.address] = record
        if record.state is State.RESIDENT and manager.guards.was_served(record):
            record.load_undone()  # it came in while somebody may have written to the store's copy
        if record.state is State.AWAY:
            trim(manager, record)
            manager.guards.hide(record)
        elif record.state is State.DISCARDED:
            trim(manager, record)  # it is made again with its own size
        else:
            manager.guards.lift(record)
            manager.space.map(record.reservation, record.runs)
            trim(manager, record)
        if variable.index in pinned:
            record.pin()
            found.append(record)
    for variable in executable.variables:
        if variable.record is not None and variable.record.address in manager.records:
            variable.record = None
            executable.variable_address[variable.index] = 0
    return found


def pinned_by(executable: ExecutablePlan, index: int) -> set[int]:
    """Indices of the plan variables that op `index` uses or allocates: pinned until it has ended."""
    operands = set(executable.occurrences[index]).difference(executable.parts.sliced[index] or ())
    return {use.variable for use in executable.trace.ops[index].uses} | operands


def records_of(executable: ExecutablePlan | None, index: int) -> dict[int, VariableRecord]:
    """By address, the records that op `index` of a plan uses or has made."""
    if executable is None:
        return {}
    operands = pinned_by(executable, index) | set(executable.occurrences[index])
    records = (executable.variables[i].record for i in operands)
    return {record.address: record for record in records if record is not None}


def born_in(executable: ExecutablePlan | None, index: int) -> list[int]:
    """Addresses of what op `index` of a plan, which has just run, has allocated and not freed."""
    if executable is None:
        return []
    born = (executable.variables[use.variable] for use in executable.trace.ops[index].uses if not use.reads)
    return [v.record.address for v in born if v.record is not None and executable.variable_alive[v.index]]


def has_landed(residency: ExecutableResidency) -> bool:
    """Whether the residency's transfer has ended well, or there is none."""
    if residency.transfer is None:
        return True
    if not residency.transfer.done():
        return False
    try:
        residency.transfer.wait()
    except OSError:
        return False
    return True
