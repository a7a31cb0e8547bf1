"""Forks of a process with an open session: the child reads each variable from the store's file, as it was at the fork.

Before a fork everything dirty is written to the store, and afterwards no slot that a child may read is written again
(`ooc.memory.fork_readers`): the variable gets a fresh slot, and the old one is freed when the last child has ended. An
array or pointer writes to the slot of an away variable without telling anybody: so the child gets a copy of the slot of
what is given out at the fork, and what is given out later is moved to another slot first (`Exports.export`). In
the child each variable's addresses map its slot privately: pages are read when touched and copied when written, so the
child takes no memory of the pool and changes nothing of the parent's. Its allocations are ordinary, and its dispatch
mode is inert.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

import vmm.posix  # noqa: F401  (its hook must be registered first: in a child it unmaps what ours then maps)
from ooc.dispatch.op_runner import OpRunner
from ooc.errors import RerunLost, StoreFailed
from ooc.memory.fork_readers import PID
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.memory.slices import Slices
from vmm.files import StoreError
from vmm.store import FileStore, Slot, Transfer
from vmm.syscalls import MAP_FIXED, Syscalls
from vmm.table import AllocatorTable

_log = logging.getLogger(__name__)


class _Pages(NamedTuple):
    """What a child maps for a variable: address, whole pages, their offset in the file, bytes of its reservation."""

    address: int
    nbytes: int
    offset: int
    span_nbytes: int


class Forks(Protocol):
    """What a fork does to an open session, in this process and in the child."""

    def before(self) -> None:
        """Called before a fork: stop the session from changing."""

    def after_in_parent(self) -> None:
        """Called after a fork, in the parent: let the session go on."""

    def after_in_child(self) -> None:
        """Called after a fork, in the child: make the session inert."""

    def close(self) -> None:
        """Take no part in forks any more. Idempotent."""


class HostForks:
    """Handles forks of a session on the CPU: a child sees every variable as it was at the fork.

    Args:
        store: The store whose file children map.
        slices: Copies its slots.
        become_inherited: Makes the child's copy of the session inert, since the parent owns it.
    """

    def __init__(
        self,
        *,
        manager: ResidencyManager,
        runner: OpRunner,
        allocator: AllocatorTable,
        store: FileStore,
        slices: Slices,
        become_inherited: Callable[[], None],
    ) -> None:
        self._manager = manager
        self._runner = runner
        self._allocator = allocator
        self._file = store
        self._slices = slices
        self._become_inherited = become_inherited
        self._descriptors: tuple[int, int] | None = None  # reading and writing end, during a fork
        self._pages: list[_Pages] = []
        self._transfers: list[Transfer] = []
        self._scratch: list[Slot] = []  # the children's alone
        self._copies: dict[int, Slot] = {}  # those of what is given out, by serial, while a child reads them
        self._uncopied: list[Exception] = []  # why there is none
        _live.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._manager!r}>"

    def close(self) -> None:
        """Take no part in forks any more. Idempotent."""
        _live.discard(self)

    def before(self) -> None:
        """Stop the session from changing, and write every variable's bytes to the store."""
        self._runner.lock.__enter__()
        self._runner.absorb()
        manager = self._manager
        manager.end_exports()
        manager.fork_readers.forget_gone()
        failures: list[Exception] = []
        records = self._records(failures)
        self._copies = {i: slot for i, slot in self._copies.items() if manager.fork_readers.is_retired(slot)}
        self._descriptors = os.pipe()
        # Inside an op its operands change under us: what is written then is the child's alone.
        is_quiet = not self._allocator.state.is_inside_op and not any(r.pins for r in records)
        self._pages = []
        slots = []
        for record in records:
            try:
                slot = self._store(record, is_quiet=is_quiet)
            except (OSError, StoreError, StoreFailed) as error:
                failures.append(error)
                continue
            slots.append(slot)
            span = record.reservation.num_chunks * manager.chunk_nbytes
            self._pages.append(_Pages(record.address, min(slot.capacity_nbytes, span), slot.offset, span))
        for transfer in self._transfers:
            try:
                transfer.wait()
            except OSError as error:
                failures.append(error)
        self._transfers.clear()
        if failures:
            _log.error("a forked process will not see %d variables: %s", len(failures), failures[0])
        if self._uncopied:
            _log.warning(
                "a forked process may see what is written later through arrays or pointers to %d variables that are "
                "away: %s\n  Options: fork before such arrays are made, or when they are gone.",
                len(self._uncopied),
                self._uncopied[0],
            )
            self._uncopied.clear()
        manager.fork_readers.add(self._descriptors[0], slots)
        for slot in self._scratch:
            manager.fork_readers.free(slot)
        self._scratch.clear()

    def _records(self, failures: list[Exception]) -> list[VariableRecord]:
        """All variables whose bytes are somewhere. What a plan has discarded is made again first, if it can be now."""
        executor = self._runner.executor
        if any(record.state is State.DISCARDED for record in executor.live_records()):
            self._runner.bail_out("a fork while a variable was discarded")
        if not self._allocator.state.is_inside_op:
            executor.reruns.remake()
        records = [*self._manager.records.values(), *executor.live_records()]
        lost = sum(record.state is State.DISCARDED for record in records)
        if lost:
            failures.append(RerunLost(f"{lost} variables were discarded, and the fork is inside an op"))
        return [record for record in records if record.state is not State.DISCARDED]

    def after_in_parent(self) -> None:
        """Go on."""
        assert self._descriptors is not None
        os.close(self._descriptors[1])
        self._descriptors = None
        self._pages = []
        self._runner.lock.__exit__(None, None, None)

    def after_in_child(self) -> None:
        """Map each variable's bytes as they were, privately; touch nothing else of the session."""
        descriptors = self._descriptors
        assert descriptors is not None
        self._become_inherited()
        syscalls = Syscalls()
        prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED
        for pages in self._pages:
            syscalls.mmap(pages.address, pages.nbytes, prot, flags, self._file.descriptor, pages.offset)
            self._allocator.detach(pages.address, pages.span_nbytes)
        self._manager.fork_readers.close()
        os.write(descriptors[1], PID.pack(os.getpid()))  # this end remains open for the life of the process
        self._descriptors = None
        self._runner.dispatcher.be_alone()
        self._runner.lock.__exit__(None, None, None)

    def _store(self, record: VariableRecord, *, is_quiet: bool) -> Slot:
        """The slot that holds the record's present bytes, or will hold them when `_transfers` are done."""
        manager = self._manager
        is_dirty = record.state is State.RESIDENT and (not record.stored or record.exports > 0)
        if is_dirty and not is_quiet:
            slot: Slot = self._file.allocate(record.nbytes)
            self._scratch.append(slot)
            self._transfers.append(self._file.write(slot, manager.segments(record.runs, record.nbytes)))
            return slot
        if is_dirty:
            manager.settle(record)
            self._transfers.append(manager.start_write(record))
        elif record.state is not State.LOADING and record.transfer is not None:
            self._transfers.append(record.transfer)
        if record.exports and record.state is not State.RESIDENT:
            try:
                return self._copy(record)
            except (OSError, StoreError) as error:
                self._uncopied.append(error)
        assert isinstance(record.slot, Slot), record
        return record.slot

    def _copy(self, record: VariableRecord) -> Slot:
        """A slot for children alone, with the bytes of what is away and may be written there.

        All workers of a data loader get the same one, if nothing was written in between. Raises OSError, `StoreError`.
        """
        slot = self._copies.get(record.serial)
        if slot is None or not self._slices.is_copy(slot, record):
            slot = self._copies[record.serial] = self._slices.copy(record)
        self._scratch.append(slot)
        return slot


class DeviceForks:
    """Handles forks of a session on a GPU: a child has no CUDA, and so none of the session's variables."""

    def __init__(self, *, runner: OpRunner, become_inherited: Callable[[], None]) -> None:
        self._runner = runner
        self._become_inherited = become_inherited
        _live.add(self)

    def __repr__(self) -> str:
        return f"<DeviceForks of {self._runner!r}>"

    def close(self) -> None:
        """As `Forks.close`."""
        _live.discard(self)

    def before(self) -> None:
        """Stop the session from changing."""
        self._runner.lock.__enter__()

    def after_in_parent(self) -> None:
        """Go on."""
        self._runner.lock.__exit__(None, None, None)

    def after_in_child(self) -> None:
        """Make the session inert, and touch nothing else of it."""
        self._become_inherited()
        self._runner.dispatcher.be_alone()
        self._runner.lock.__exit__(None, None, None)


_live: weakref.WeakSet[Forks] = weakref.WeakSet()
"""Those that take part in forks now: the interpreter's hook cannot be removed, so it looks here."""


def _before_fork() -> None:
    for forks in list(_live):
        forks.before()


def _after_fork_in_parent() -> None:
    for forks in list(_live):
        forks.after_in_parent()


def _after_fork_in_child() -> None:
    for forks in list(_live):
        forks.after_in_child()
        forks.close()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
