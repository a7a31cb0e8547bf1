"""Exports: memory that torch hands out without running an op (`.numpy()`, `data_ptr()`, `torch.save`, `resident()`).

A session sees ops through its dispatch mode. The functions here hand out or read memory without an op, so they are
replaced while a session is open. (A TorchFunctionMode would see them, too, and slow down every op.) A tensor that is
not the session's costs one address check.

What was handed out is an *export* of its variable. On demand the variable may still be moved: its addresses show its
bytes at any time, from its chunks or from the store's file. But it always counts as written. So it is within a plan,
on the host: it is written each time that it is evicted, shows the store's file then, and is loaded right before the op
that uses it. A device's memory cannot be read by the host: there a session bails out of a plan that would evict an
exported variable, and enters none while there are exports. See ooc/DESIGN.md.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ooc.devices.protocols import Memory
from ooc.dispatch.guest_ops import as_guest, is_guest
from ooc.dispatch.op_runner import OpRunner
from ooc.errors import BudgetTooSmall, SessionError
from ooc.interop import made_storages, memory_functions, torchscript, unseen_access
from ooc.interop.boundary_exports import BoundaryExports
from ooc.interop.replacements import Replacements
from ooc.memory.no_room import NoRoom
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager


class _Local(threading.local):
    depth = 0
    saves = 0


_local = _Local()
"""`_local.depth`: how many replaced functions run on this thread; what they call is no export of its own.
`_local.saves`: how many `torch.save`, which read each storage by `storage_to_read`."""


@contextlib.contextmanager
def within_op() -> Iterator[None]:
    """Mark the inside of an op whose operands are pinned already: pointers asked for here are no exports."""
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1


class Exports:
    """The exports of one session: replaces the functions of torch that hand out memory, and keeps account of it.

    `open` replaces the functions, and `close` restores them.
    """

    def __init__(self, *, manager: ResidencyManager, runner: OpRunner, memory: Memory) -> None:
        self._manager = manager
        self._runner = runner
        self._executor = runner.executor
        self._lock = runner.lock
        self._slices = runner.parts.memory.slices
        self._memory = memory
        self._until_boundary = BoundaryExports(manager.ended_exports, self._is_alive)
        self._replacements = Replacements()
        self._is_open = False

    def __repr__(self) -> str:
        return f"<Exports {'open' if self._is_open else 'closed'}, {self._until_boundary!r}>"

    def open(self) -> None:
        """Replace the functions. If that fails halfway, `close` restores those that were replaced."""
        self._is_open = True
        for owner, name, make in (
            *memory_functions.replacements(),
            *unseen_access.replacements(),
            *made_storages.replacements(),
            *torchscript.replacements(),
        ):
            original = getattr(owner, name)
            self._replacements.replace(owner, name, functools.wraps(original)(make(self, original)))
        self._replacements.replace_in_modules()

    # -- step boundaries; the session calls these with its lock held

    def step_begins(self) -> None:
        """A step begins: end the exports by `data_ptr`; in debug mode let stray touches fault from now on."""
        self._until_boundary.end()
        self._executor.finish()
        self._manager.end_exports()
        self._manager.fork_readers.forget_gone()
        self._executor.step_begins()
        if self._manager.debug:
            self._manager.guards.serve(False)
            self._executor.unserve()

    def step_ends(self) -> None:
        """A step ends: serve stray touches from now on."""
        self._executor.guard_away()
        self._manager.guards.serve(True)

    # -- what the replaced functions call (`ooc.interop.memory_functions.Exporter`)

    @property
    def is_saving(self) -> bool:
        """Whether a `torch.save` runs on this thread."""
        return _local.saves > 0

    def address(self, tensor: Any) -> int:
        """The address of a tensor's storage if it is the session's, else 0."""
        if not self._is_open or _local.depth:
            return 0
        found: int = self._runner.dispatcher.address(tensor)
        return found

    def owns(self, address: int) -> bool:
        """Whether this storage address is the session's."""
        start, stop = self._memory.driver.arena
        return self._is_open and not _local.depth and start <= address < stop

    def export(self, address: int) -> VariableRecord | None:
        """Export the variable at `address`, loaded if there is room.

        The caller ends the export with `end`. None if there is no variable any more.
        """
        with self._lock:
            record = self._find(address)
            if record is None:
                return None
            record.export()
            try:
                self._show(record)
                if record.state is not State.RESIDENT and address in self._manager.records:
                    record.pin()
                    try:
                        self._load_to_export(record)
                    finally:
                        record.unpin()
                self._slices.part_from_forks(record)
            except BaseException:
                record.cancel_export()
                raise
            self._memory.host_touches(record)
            return record

    def _is_alive(self, record: VariableRecord) -> bool:
        return (self._executor.record_at(record.address) or self._manager.records.get(record.address)) is record

    def _show(self, record: VariableRecord) -> None:
        """Let the addresses of what was exported show its bytes, where a plan or debug mode has it away."""
        if record.address not in self._manager.records:
            self._executor.acts.show(record)
        elif self._manager.debug and record.state is State.AWAY:
            self._manager.guards.hide(record)

    def _load_to_export(self, record: VariableRecord) -> None:
        try:
            self._manager.load([record])
        except NoRoom as no_room:
            if not self._memory.is_host:
                if self._runner.is_yielded:
                    raise _yielded("an export") from None
                raise self._too_small([record], no_room) from None
            # Else the kernel serves it from the store's file.

    def export_until_boundary(self, address: int) -> None:
        """Export a bare pointer. How long it is used cannot be known; the export ends when the next step begins."""
        with self._lock:
            record = self._find(address)
            if record is not None and not self._until_boundary.has(record):
                self._give_out(record)
                self._until_boundary.hold(record)

    def _give_out(self, record: VariableRecord) -> None:
        """Export a variable where it is."""
        if record.state is State.LOADING and record.address in self._manager.records:
            self._manager.land()  # read ahead: what the pointer writes would not be in what arrives
        record.export()
        self._show(record)
        self._slices.part_from_forks(record)

    def end(self, record: VariableRecord) -> None:
        """Note that an export has ended. Takes no lock: finalizers call it, on any thread."""
        self._manager.ended_exports.append(record)

    def end_at_boundary(self, record: VariableRecord) -> None:
        """As `end`, on the host when the next step begins: an array's address may be in use for longer."""
        (self._until_boundary.hold if self._memory.is_host else self.end)(record)

    @contextlib.contextmanager
    def reading(self, address: int) -> Iterator[None]:
        """Export a variable for the length of a call."""
        record = self.export(address)
        _local.depth += 1
        try:
            yield
        finally:
            _local.depth -= 1
            if record is not None:
                self.end(record)

    def copy_for_guest(self, tensor: torch.Tensor) -> torch.Tensor:
        """On a guest thread: a copy of one of the session's tensors."""
        return self._runner.guests.copy_of(tensor)

    def storage_to_read(self, storage: Any) -> Any:
        """What may be read in place of a storage: a copy on a guest thread, or where a plan has its bytes elsewhere."""
        if not (self._is_open and isinstance(storage, torch.UntypedStorage)):
            return storage
        start, stop = self._memory.driver.arena
        pointer = unseen_access.storage_pointer(storage)
        if not start <= pointer < stop or not (is_guest() or self._is_elsewhere(pointer)):
            return storage
        return self._runner.guests.copy_of_storage(storage)

    def _is_elsewhere(self, address: int) -> bool:
        """Whether other bytes than its own may be at a variable's address: it is away within a plan."""
        with self._lock:
            self._runner.absorb()
            executor = self._executor
            if executor.active is None and not self._manager.debug:
                return False
            record = executor.record_at(address) or self._manager.records.get(address)
            return record is not None and record.state is not State.RESIDENT

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """For calls that read a variable's addresses below the dispatcher: hold the session still, off any plan."""
        with self._lock:
            if self._is_open and self._executor.active is not None:
                self._runner.bail_out("a tensor is moved to shared memory by another thread")
            with within_op():
                yield

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Prepare a call that reads many variables: each when it is its turn, where it is then (`storage_to_read`).

        A plan goes on, and so it may on the session's thread while a guest thread saves.
        """
        if not self._memory.is_host:
            yield  # each is exported by itself: no kernel serves a touch of what is away
            return
        _local.saves += 1
        try:
            yield
        finally:
            _local.saves -= 1

    @contextlib.contextmanager
    def everything(self) -> Iterator[None]:
        """For calls that may use any variable below the dispatcher, nobody can say which: each is exported meanwhile.

        No mode is on in the block, and what it allocates is torch's own.
        """
        if not self._is_open or _local.depth:
            yield
            return
        records: list[VariableRecord] = []
        try:
            with self._lock:
                self._runner.absorb()
                alive = [*self._manager.records.values(), *self._executor.live_records()]
                for address in [record.address for record in alive]:
                    if not self._memory.is_host:
                        record = self.export(address)
                    else:
                        record = self._find(address)
                        if record is not None:
                            self._give_out(record)
                    if record is not None:
                        records.append(record)
            with _disable_current_modes(), as_guest(), within_op():
                yield
        finally:
            for record in records:
                self.end(record)

    @contextlib.contextmanager
    def resident(self, tensors: tuple[torch.Tensor, ...]) -> Iterator[None]:
        """See `Session.resident`."""
        for each in tensors:
            if not isinstance(each, torch.Tensor):
                raise TypeError(f"resident({each!r}): a {type(each).__name__}. Options: tensors, each an argument.")
        addresses = [a for t in tensors if (a := self.address(t))]
        if addresses and self._runner.is_yielded:
            raise _yielded("resident")
        with self._lock:
            records = [r for a in dict.fromkeys(addresses) if (r := self._find(a, in_memory=True)) is not None]
            for record in records:
                record.pin()
                record.export()
            try:
                self._manager.load(records)
            except BaseException as error:
                self._let_go(records)
                if isinstance(error, NoRoom):
                    raise self._too_small(records, error) from None
                raise
        try:
            yield
        finally:
            with self._lock:
                self._let_go(records)

    def close(self) -> None:
        """Restore every replaced function. Exports that are still held remain valid. Idempotent."""
        self._is_open = False
        self._replacements.put_back()

    def _too_small(self, records: list[VariableRecord], no_room: NoRoom) -> BudgetTooSmall:
        manager = self._manager
        return BudgetTooSmall(
            op_index=None,
            op_name="session.resident",
            where="",
            needed_nbytes=(no_room.num_needed + no_room.num_pinned) * manager.chunk_nbytes,
            budget_nbytes=manager.num_chunks * manager.chunk_nbytes,
            operands=[(record.label or "variable", record.nbytes) for record in records],
        )

    def _let_go(self, records: list[VariableRecord]) -> None:
        for record in records:
            record.unpin()
            self.end(record)
        self._manager.end_exports()

    def _find(self, address: int, *, in_memory: bool = False) -> VariableRecord | None:
        """The variable at an address.

        Bails out of a plan that has discarded it, or has yet to make others from its bytes; on a device, or where it is
        to be `in_memory`, also of one that has it away.
        """
        self._runner.absorb()
        self._until_boundary.forget_freed()
        self._manager.end_exports()
        executor = self._executor
        if executor.active is not None:
            record = executor.record_at(address)
            if record is not None:
                is_there = record.state is State.RESIDENT
                can_be_shown = self._manager.is_host and not in_memory and record.state is not State.DISCARDED
                is_needed = executor.reruns.needs(executor.active, record)
                if (is_there or can_be_shown) and not is_needed:
                    return record
                what = "from which ops are to run again" if is_needed else "that is away"
                if is_needed:
                    executor.reruns.note_touched(executor.active, record)
                self._runner.bail_out(f"a variable {what} was used outside the dispatcher")
        return self._manager.records.get(address)


def _yielded(act: str) -> SessionError:
    return SessionError(
        f"{act} while session.yielded() has given all memory back: nothing can be loaded.\n  Options: after the block."
    )
