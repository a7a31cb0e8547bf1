"""Runs ops of other threads than the session's ("guest ops") on copies of the variables that they name.

A guest op comes at any moment, also in the middle of a planned step. So it is neither recorded nor compared with the
plan, and moves nothing. Under the session's lock each variable that it names is copied, from its chunks or from the
store, into ordinary memory: its stand-in. The op runs on the stand-ins, and what it wrote goes back to where the
variable is by then. What guest threads allocate is ordinary memory, too. See ooc/DESIGN.md, "Guest threads".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ooc.dispatch.out_of_memory import shape_of
from ooc.errors import SessionError, StoreFailed
from ooc.memory.no_room import NoRoom
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.executor import Executor
from ooc.tracing import op_semantics as ops
from ooc.tracing.collective_ops import is_collective
from ooc.units import format_nbytes
from vmm.files import BLOCK_NBYTES
from vmm.store import StoreError

_OP_WAIT_S = 0.0005
"""A guest that has to wait for the end of an op of the session's thread looks again so often."""


class _Local(threading.local):
    depth = 0


_local = _Local()
"""`_local.depth`: above 0 on a guest thread."""


def is_guest() -> bool:
    """Whether the calling thread is a guest's: its ops are run here, and its allocations are its own."""
    return _local.depth > 0


@contextlib.contextmanager
def as_guest() -> Iterator[None]:
    """The calling thread is a guest's for the time of the block."""
    become_guest()
    try:
        yield
    finally:
        cease_to_be_guest()


def become_guest() -> None:
    """The calling thread is a guest's until `cease_to_be_guest`."""
    _local.depth += 1


def cease_to_be_guest() -> None:
    """End what `become_guest` began."""
    _local.depth -= 1


class GuestOps:
    """The guest ops of one session. Called on any thread but the session's.

    Args:
        lock: The session's.
        is_open: Whether the session is.
        absorb: Takes the allocator's log.
        limit_nbytes: List ops whose operands exceed it are run in parts.
        is_inside_op: Whether the session's thread is within an op.

    Attributes:
        num_copies, copied_nbytes: Stand-ins made so far.
        num_apart, apart_nbytes: Large allocations of guest threads so far, outside the budget.
    """

    def __init__(
        self,
        *,
        manager: ResidencyManager,
        executor: Executor,
        dispatcher: Dispatcher,
        lock: contextlib.AbstractContextManager[None],
        is_open: Callable[[], bool],
        absorb: Callable[[], None],
        limit_nbytes: Callable[[], int],
        is_inside_op: Callable[[], bool],
    ) -> None:
        self._is_inside_op = is_inside_op
        self._manager = manager
        self._executor = executor
        self._dispatcher = dispatcher
        self._lock = lock
        self._is_open = is_open
        self._absorb = absorb
        self._limit_nbytes = limit_nbytes
        self._reading = threading.Condition()
        self._num_reading = 0  # threads that wait for the store without the session's lock
        self.num_copies = self.copied_nbytes = 0
        self.num_apart = self.apart_nbytes = 0

    def __repr__(self) -> str:
        return f"<GuestOps, {self.num_copies} copies of {self.copied_nbytes} bytes>"

    def settle(self) -> None:
        """Wait until no guest reads the store. The session is closed, so that none begins."""
        with self._reading:
            self._reading.wait_for(lambda: self._num_reading == 0)

    def takes_apart(self, nbytes: int) -> bool:
        """Whether an allocation is a guest's own, which torch's allocator serves. Takes no lock."""
        if not is_guest():
            return False
        self.num_apart += 1
        self.apart_nbytes += nbytes
        return True

    def document(self) -> dict[str, int]:
        """For the report: what guests copied and allocated so far, outside the budget."""
        return {
            "num_copies": self.num_copies,
            "copied_nbytes": self.copied_nbytes,
            "num_apart": self.num_apart,
            "apart_nbytes": self.apart_nbytes,
        }

    # -- ops

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of the calling thread.

        Raises:
            SessionError: It cannot be run on copies: a collective, or an op on sparse or quantized variables.
            StoreFailed: The bytes of a variable that is away could not be read or written.
        """
        with as_guest():
            tensors = list(_tensors((args, kwargs)))
            for tensor in tensors:
                self._check_layout(func, tensor)
            if not self._dispatcher.operands(args, kwargs) or _touches_no_bytes(func):
                with ops.versions_counted(func, args, kwargs):
                    return func(*args, **kwargs)
            if is_collective(func):
                raise SessionError(
                    f"{func} on the thread {threading.current_thread().name!r}: a collective goes on after its op, and "
                    "the session knows only of those that its own thread launches. Options: launch it on the thread "
                    "that opened the session; clone() its operands on this thread, and launch it on the clones."
                )
            if ops.is_list_op(func):
                return ops.run_list_op(func, args, kwargs, limit_nbytes=self._limit_nbytes(), run=self._run)
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cast = _Cast(self, list(_tensors((args, kwargs))))
        written = [t for t in _tensors(ops.written_values(func, args, kwargs)) if id(t) in cast.stand_ins]
        try:
            result = func(*_mapped(args, cast.stand_in), **_mapped(kwargs, cast.stand_in))
        finally:  # an op that raises half-way may have written
            if written:
                self._put_back(cast, written)
        return _mapped(result, cast.original)

    def _check_layout(self, func: Any, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            if not (tensor.is_quantized or tensor.is_nested) or not self._dispatcher.address(tensor):
                return
            kind = "nested" if tensor.is_nested else f"quantized, {shape_of(tensor)}"
        else:
            kind = f"{tensor.layout}, {shape_of(tensor)}"
            if not self._dispatcher.operands(tensor):
                return
        raise SessionError(
            f"{func} on the thread {threading.current_thread().name!r}: an operand ({kind}) is "
            "a variable of the session, and other threads get copies of strided tensors only. Options: run it on the "
            "thread that opened the session; make it dense, or dequantize it, there."
        )

    # -- copies

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor whose storage is the session's; any other tensor as it is."""
        with _disable_current_modes(), as_guest():
            cast = _Cast(self, [tensor])
            copied: torch.Tensor = cast.stand_in(tensor)
            return copied

    def copy_of_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy of a storage of the session's; any other as it is."""
        with _disable_current_modes(), as_guest():
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            copied: torch.UntypedStorage = self.copy_of(whole).untyped_storage()
            return copied

    def show(self, addresses: list[int]) -> dict[int, _Buffer]:
        """Copies of the variables at these addresses. What is no variable (any more) has its bytes at its address."""
        found: dict[int, _Buffer] = {}
        away = []
        with self._locked(addresses):
            if not self._is_open():
                return {}
            for address in addresses:
                record = self._record_at(address)
                if record is None:
                    continue
                buffer = found[address] = _Buffer(record.nbytes)
                self.num_copies += 1
                self.copied_nbytes += record.nbytes
                if record.state is State.RESIDENT:
                    buffer.take(self._manager.segments(record.runs, record.nbytes))
                else:  # on its way in, or away: the store has it, or will when a write under way has ended
                    away.append((record, buffer))
            transfers = [self._manager.store.read(record.slot, buffer.segments) for record, buffer in away]
            if transfers:
                with self._reading:
                    self._num_reading += 1
        if transfers:  # the store's own order keeps the slots as they are, so the step may go on
            try:
                _wait_for_all(transfers)
            finally:
                with self._reading:
                    self._num_reading -= 1
                    self._reading.notify_all()
        return found

    @contextlib.contextmanager
    def _locked(self, addresses: Sequence[int], *, writes: bool = False) -> Iterator[None]:
        """The session's lock, with the log absorbed and the bytes of these variables somewhere.

        With `writes`, no re-run is to come that reads them, either. A plan that stands in the way is left. What it had
        discarded is made again here, but not while the session's thread is within an op, which may draw random numbers.
        """
        while True:
            with self._lock:
                if self._is_open():
                    self._absorb()
                    self._free_from_plan(addresses, writes=writes)
                if not self._is_open() or self._executor.reruns.pending is None:
                    yield
                    return
            time.sleep(_OP_WAIT_S)

    def _free_from_plan(self, addresses: Sequence[int], *, writes: bool) -> None:
        executor = self._executor
        records = [record for address in addresses if (record := self._record_at(address)) is not None]
        active = executor.active
        needed = [r for r in records if r.state is State.DISCARDED or (writes and executor.reruns.needs(active, r))]
        if active is not None and needed:
            for record in needed:
                executor.reruns.note_touched(active, record)
            executor.bail_out("another thread uses a variable that re-runs need")
        if executor.reruns.pending is not None and not self._is_inside_op():
            executor.reruns.remake()

    def _record_at(self, address: int) -> VariableRecord | None:
        active = self._executor.active
        if active is not None:
            (indices,) = np.nonzero((active.variable_address == address) & (active.variable_alive != 0))
            if len(indices):
                return active.variables[int(indices[0])].record
        return self._manager.records.get(address)

    # -- writes

    def _put_back(self, cast: _Cast, written: list[torch.Tensor]) -> None:
        addresses = [self._dispatcher.address(tensor) for tensor in written]
        with self._locked(addresses, writes=True), _disable_current_modes():
            is_open = self._is_open()
            for tensor in written:
                stand_in = cast.stand_ins[id(tensor)]
                if _shape_of(tensor) != _shape_of(stand_in):  # `out=` of another shape, `transpose_`
                    offset, size, stride = _shape_of(stand_in)
                    tensor.set_(tensor.untyped_storage(), offset, size, stride)
                record = self._record_at(self._dispatcher.address(tensor)) if is_open else None
                if record is None:
                    tensor.copy_(stand_in)
                elif record.state is State.RESIDENT:
                    self._write_chunks(record, tensor, stand_in)
                elif record.slot is not None and self._manager.fork_readers.hold(record.slot):
                    self._load_and_write(record, tensor, stand_in)
                elif record.exports and record.state is State.AWAY and record.reservation.is_file:
                    tensor.copy_(stand_in)  # others may write to the rest of it, through pointers
                else:
                    self._write_store(record, stand_in, cast.buffers[record.address])

    def _write_chunks(self, record: VariableRecord, tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
        """Write a resident variable; where the store's copy is current it stays so, since a plan may count on that."""
        tensor.copy_(stand_in)
        if not record.stored:
            return
        try:
            self._manager.start_write(record)
            self._manager.settle(record)
        except (StoreFailed, StoreError):
            record.written()

    def _load_and_write(self, record: VariableRecord, tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
        """Write an away variable whose slot a forked process may read: it comes into memory, off any plan."""
        if self._executor.active is not None:
            self._executor.bail_out("another thread writes a variable that a forked process may read")
        record.pin()
        try:
            self._manager.load([record])
        except NoRoom as no_room:
            raise SessionError(
                f"a thread writes {record.label or 'a variable'} ({format_nbytes(record.nbytes)}), which a forked "
                f"process may still read, and there is no room to load it ({no_room}). Options: a larger budget; the "
                "write after the forked process has ended."
            ) from None
        finally:
            record.unpin()
        tensor.copy_(stand_in)
        record.written()

    def _write_store(self, record: VariableRecord, stand_in: torch.Tensor, buffer: _Buffer) -> None:
        """Write a variable that is away, or on its way in, where it is: in the store."""
        store = self._manager.store
        if stand_in.numel() * stand_in.element_size() < record.nbytes:
            # Others may have written the rest of it meanwhile.
            newest = _Buffer(record.nbytes)
            _wait_for_all([store.read(record.slot, newest.segments)])
            newest.like(stand_in).copy_(stand_in)
            buffer = newest
        if record.state is State.LOADING and record.transfer is not None:
            with contextlib.suppress(OSError):  # its op learns of that
                record.transfer.wait()
        _wait_for_all([store.write(record.slot, buffer.segments)])
        if self._manager.debug:
            record.checksum = buffer.checksum()
        if record.state is State.LOADING:
            buffer.give(self._manager.segments(record.runs, record.nbytes))


class _Buffer:
    """Ordinary memory for the bytes of one variable, as a storage that owns it."""

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES)  # what transfers need: whole blocks
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.storage = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).untyped_storage()

    @property
    def segments(self) -> list[tuple[int, int]]:
        """As the store wants it."""
        return [(self.address, self.nbytes)]

    def take(self, segments: list[tuple[int, int]]) -> None:
        """Copy these ranges of memory in."""
        place = self.address
        for address, nbytes in segments:
            ctypes.memmove(place, address, nbytes)
            place += nbytes

    def give(self, segments: list[tuple[int, int]]) -> None:
        """Copy it out to these ranges."""
        place = self.address
        for address, nbytes in segments:
            ctypes.memmove(address, place, nbytes)
            place += nbytes

    def checksum(self) -> int:
        """As the residency manager's of a resident variable."""
        return zlib.crc32((ctypes.c_char * self.nbytes).from_address(self.address))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over this memory, of another's type, shape, and place in its storage."""
        made = torch.empty(0, dtype=tensor.dtype).set_(self.storage, *_shape_of(tensor))
        if tensor.is_conj():
            torch._C._set_conj(made, True)
        if tensor.is_neg():
            torch._C._set_neg(made, True)
        return made


class _Cast:
    """The stand-ins of one op, one storage a variable.

    Attributes:
        buffers: By address of the variable.
        stand_ins: By identity of the op's tensor, which the op keeps alive.
    """

    def __init__(self, guests: GuestOps, tensors: list[torch.Tensor]) -> None:
        addressed = [(t, address) for t in tensors if (address := guests._dispatcher.address(t))]
        self.buffers = guests.show(list(dict.fromkeys(address for _, address in addressed)))
        self.stand_ins: dict[int, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}  # by identity of the stand-in
        self._by_storage: dict[int, torch.Tensor] = {}
        for tensor, address in addressed:
            buffer = self.buffers.get(address)
            if buffer is not None and id(tensor) not in self.stand_ins:
                stand_in = self.stand_ins[id(tensor)] = buffer.like(tensor)
                self._originals[id(stand_in)] = tensor
                self._by_storage[buffer.storage._cdata] = tensor

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What an op gets in place of a tensor."""
        return self.stand_ins.get(id(tensor), tensor)

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the program gets in place of a result: never a stand-in, or a view of one."""
        found = self._originals.get(id(tensor))
        if found is not None or not self._by_storage or tensor.layout is not torch.strided:
            return tensor if found is None else found
        base = self._by_storage.get(tensor.untyped_storage()._cdata)
        if base is None:
            return tensor
        view: torch.Tensor = torch.empty(0, dtype=tensor.dtype).set_(base.untyped_storage(), *_shape_of(tensor))
        return view


def _shape_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())


def _wait_for_all(transfers: list[Any]) -> None:
    """Wait for transfers, all of them whatever fails: their memory must stay until then."""
    failure = None
    for transfer in transfers:
        try:
            transfer.wait()
        except OSError as error:
            failure = error
    if failure is not None:
        raise StoreFailed(
            f"an op of the thread {threading.current_thread().name!r}: a variable that is away cannot be reached: "
            f"{failure}. The session's own step goes on.",
            errno=failure.errno,
        ) from failure


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    if type(value) is dict:
        return {name: _mapped(item, function) for name, item in value.items()}
    return value


@functools.cache
def _touches_no_bytes(func: Any) -> bool:
    """Whether an op only looks at shapes: it makes a view, or another tensor of the same kind."""
    name = getattr(getattr(func, "_schema", None), "name", "")
    if not name.startswith("aten::"):
        return False
    if name.endswith("_like") or name.startswith(("aten::new_", "aten::set_", "aten::detach")):
        return True
    # What is made of other ops may copy after all (reshape, to).
    has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return bool(func.is_view) and not has_parts
