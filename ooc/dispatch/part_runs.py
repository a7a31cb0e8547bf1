"""One op that runs in parts: its memory, the copies of slices, and where its results go.

[Note: when a part ends] Whatever a part allocates, it allocates before anything is written: copies, results, and
results in another order. Then all of it is written to its places. So a part that is refused memory has changed nothing,
and smaller ones begin where it began; and nothing that is copied to or from can be moved in between, since only
allocations move variables, and other threads do under the session's lock.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ooc.dispatch.refusals import RefusedAllocations
from ooc.dispatch.signals import CriticalLock
from ooc.errors import OocError
from ooc.memory.no_room import NoRoom
from ooc.memory.pieces import Pieces, pieces_of
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.memory.slices import Slices
from ooc.replay.dispatcher import Dispatcher
from ooc.tracing.part_cuts import Along, Blocks, Cut, Section, Split, Stretch
from ooc.tracing.part_probes import as_lists

_data_ptr: Any = torch.Tensor.data_ptr
"""Before a session replaces it: what is asked for here is given to nobody."""

_ROOM_FRACTION = 4
"""A part takes a quarter of the memory that there may be for it: with more, operands that are in memory would have to
go; with less there are more calls of an op and of the system, of which each takes 10 to 100 us."""
_LEAST_ROOM_FRACTION = 8
"""An eighth of the pool at least: with less an op that is planned would take longer than one on demand."""
_MAP_NORESERVE = 0x4000
"""linux/mman.h; in Python's `mmap` from 3.13 on."""
_AWAY_FRACTION = 8
"""A result of more than an eighth of the pool is born away."""


class PartRefused(Exception):
    """A part was refused memory: smaller ones may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A call that can be run in parts.

    Attributes:
        func, args, kwargs: The call.
        given: Its arguments by name; a list of one tensor as that tensor.
        whole: Its results without data, an operand where a result is one.
        returned: How the op returns them.
        split: How it is cut.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    given: dict[str, Any]
    whole: Sequence[Any]
    returned: Any
    split: Split


@dataclass(frozen=True, slots=True, kw_only=True)
class LentMemory:
    """What an op of a plan has while it runs in parts.

    Attributes:
        records: Of its operands and results, which are the executor's, by address.
        nbytes: The memory that the plan has for its parts; the pool has these chunks free meanwhile. 0: it runs in one
            part, of which the plan knows every allocation.
        is_planned: Whether the plan is still being replayed.
        leave: Leaves it, for the reason given: all of this is the residency manager's then.
    """

    records: Mapping[int, VariableRecord]
    nbytes: int
    is_planned: Callable[[], bool]
    leave: Callable[[str], None]


class PartMemory:
    """The memory of ops in parts, of one session and on its thread.

    Args:
        refusals: Where an allocation's refusal is noted.

    Attributes:
        takes_away: Whether the next large allocation is one that is born away (`allocate`).
        lent: While an op of a plan runs in parts, the plan's.
        slices: Reads and writes parts of variables.
    """

    def __init__(
        self, manager: ResidencyManager, dispatcher: Dispatcher, lock: CriticalLock, refusals: RefusedAllocations
    ) -> None:
        self.manager = manager
        self.dispatcher = dispatcher
        self.lock = lock
        self.refusals = refusals
        self.slices = Slices(manager)
        self.takes_away = False
        self.lent: LentMemory | None = None

    def __repr__(self) -> str:
        return f"<PartMemory of {self.manager!r}>"

    def allocate(self, nbytes: int) -> VariableRecord:
        """Serve an allocation that is born away. Raises as `Slices.allocate_away`."""
        self.takes_away = False
        return self.slices.allocate_away(nbytes)

    def has_refused(self) -> bool:
        """Whether an allocation has been refused since this was last asked. Raises what was no want of room."""
        if not self.refusals.pending:
            return False
        error = self.refusals.pending.pop()
        if not self.refusals.is_no_room(error):
            raise error from error.__cause__
        return True

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Memory for a result: born away if it is large."""
        manager = self.manager
        fills = torch._C._get_deterministic_fill_uninitialized_memory()
        torch._C._set_deterministic_fill_uninitialized_memory(False)  # it is not there to be filled
        is_large = manager.chunks_of(nbytes) * _AWAY_FRACTION > manager.num_chunks
        self.takes_away = is_large and (self.lent is None or not self.lent.is_planned())
        try:
            # A storage made directly would not come from the session's allocator.
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        finally:
            self.takes_away = False
            torch._C._set_deterministic_fill_uninitialized_memory(fills)

    def record_of(self, tensor: Tensor) -> VariableRecord | None:
        """The variable that a tensor is of; None for small ones, and those of nobody."""
        address = self.dispatcher.address(tensor)
        record = self.manager.records.get(address)
        return record if record is not None or self.lent is None else self.lent.records.get(address)

    def room_nbytes(self, lasting: Sequence[Tensor]) -> int:
        """So much memory may be taken for the parts of an op.

        In a plan they come beside what stays in memory throughout (`lasting`): so little enough, if that may be.
        """
        if self.lent is not None:
            return self.lent.nbytes
        manager = self.manager
        stays = sum(manager.chunks_of(r.nbytes) for r in manager.records.values() if r.state.holds_chunks and r.pins)
        room = max(manager.num_chunks - stays, 1) * manager.chunk_nbytes // _ROOM_FRACTION
        stays_then = {r.address: manager.chunks_of(r.nbytes) for t in lasting if (r := self.record_of(t)) is not None}
        left = (manager.num_chunks - sum(stays_then.values())) * manager.chunk_nbytes
        beside = left - left // _ROOM_FRACTION  # the rest is what rounding takes
        is_enough = beside * _LEAST_ROOM_FRACTION >= manager.num_chunks * manager.chunk_nbytes
        return min(room, beside) if is_enough else room

    @property
    def may_refuse(self) -> bool:
        """Whether an allocation for which a plan has no room may be refused: smaller parts will ask for less."""
        return self.lent is not None and self.lent.nbytes > 0

    def make_room(self) -> bool:
        """What a plan has lent does not do: leave the plan, so that there may be more. Whether it was left."""
        if self.lent is None or not self.lent.is_planned():
            return False
        with self.lock:
            self.lent.leave("an op in parts needs more memory than planned")
        return True


class PartRun:
    """One op that is being run in parts."""

    def __init__(self, memory: PartMemory, found: Found) -> None:
        self._memory = memory
        self._manager = memory.manager
        self._lock = memory.lock
        self._slices = memory.slices
        self._func = found.func
        self._found = found
        self._split = found.split
        self._pinned: list[VariableRecord] = []

    def run(self) -> Any:
        """All parts. Raises `PartRefused`."""
        found, split = self._found, self._split
        given = dict(found.given)
        if not split.is_view:
            given |= {name: _placeholder(given[name]) for name in split.unread & given.keys()}
        apart = split.operands.keys() | split.unread
        try:
            self._pin([t for name, t in given.items() if isinstance(t, Tensor) and name not in apart])
            if split.length == 0:
                with _Telling(self._memory):
                    return self._func(**as_lists(self._func, given))
            results = [self._with_room(partial(self._new_result, t)) for t in found.whole]
            if split.fill is not None:
                filled = [t for t in results if t is not None]
                self._pin(filled)
                for record in filter(None, map(self._memory.record_of, filled)):
                    record.written()  # it stays pinned until its last byte is: what the store has counts no more
            self._all_parts(given, results)
        finally:
            with self._lock:
                for record in self._pinned:
                    record.unpin()
        self._note_checksums([*results, *(found.given[name] for name in split.written)])
        return tree_unflatten(results, found.returned)

    def _with_room(self, make: Callable[[], Any]) -> Any:
        """What `make` returns; if it is refused memory, once more off the plan, if this is on one."""
        try:
            return make()
        except PartRefused:
            if not self._memory.make_room():
                raise
        return make()

    def _pin(self, tensors: Sequence[Tensor]) -> None:
        with self._lock:
            records = {r.address: r for t in tensors if (r := self._memory.record_of(t)) is not None}.values()
            for record in records:
                record.pin()
                self._pinned.append(record)
            if any(record.state is not State.RESIDENT for record in records):
                self._memory.make_room()  # not as planned
            try:
                self._manager.load(records)
            except NoRoom:
                raise PartRefused from None
            for record in records:
                record.note_seen()

    def _new_result(self, whole: Any) -> Any:
        if not isinstance(whole, Tensor) or whole.device.type != "meta":
            return whole  # an operand, or nothing
        with _Telling(self._memory):
            nbytes = whole.untyped_storage().nbytes()
            storage = self._memory.new_storage(nbytes)
            made: Tensor = torch.empty(0, dtype=whole.dtype, device="cpu")
            return made.set_(storage, 0, whole.shape, whole.stride())

    def _all_parts(self, given: dict[str, Any], results: list[Any]) -> None:
        split = self._split
        start, step = 0, self._first_step(given, results)
        while start < split.length:
            stop = min(start + step, split.length)
            try:
                self._part(given, results, start, stop)
            except PartRefused:
                if step <= split.granule:
                    if self._memory.make_room():
                        continue
                    raise
                step = max(split.granule, step // 2 // split.granule * split.granule)
            else:
                start = stop

    def _first_step(self, given: dict[str, Any], results: Sequence[Any]) -> int:
        """Positions of the first part, by the room that there may be and what a position takes."""
        split = self._split
        sliced = [given[name] for name in split.operands]
        sliced += [t for t, cut in zip(results, split.results, strict=False) if cut is not None and t is not None]
        nbytes = sum(t.numel() * t.element_size() for t in sliced)
        apart = split.operands.keys() - set(split.written) | split.unread
        lasting = [t for name, t in given.items() if isinstance(t, Tensor) and name not in apart]
        lasting += [t for t in results if isinstance(t, Tensor)]
        step = min(self._memory.room_nbytes(lasting) * split.length // max(nbytes, 1), split.length)
        return max(int(step) // split.granule * split.granule, split.granule)

    def _part(self, given: dict[str, Any], results: list[Any], start: int, stop: int) -> None:
        split, func = self._split, self._func
        with _Telling(self._memory):
            copies = {
                name: self._copy(given[name], cut, start, stop, is_read=name not in split.overwritten)
                for name, cut in split.operands.items()
            }
            arguments = given | copies
            if split.fill is not None:
                split.fill(arguments, results, start, stop)
                made = []
            else:
                returned = (split.part or _plainly(func))(as_lists(func, arguments), start, stop)
                made = tree_flatten(returned)[0]
            for index, _ in enumerate(made):
                if made[index] is None:
                    results[index] = None  # as the whole op would return it: by a mask, say
            sources = [
                (results[index], cut, _laid_out(made[index], results[index], cut, start, stop))
                for index, cut in enumerate(split.results)
                if cut is not None and results[index] is not None
            ]
        with self._lock:  # the part has ended well: from here on nothing is allocated
            for target, cut, source in sources:
                self._put(target, cut, source, start, stop)
            for name in split.written:
                way, copied = split.operands[name], copies[name]
                assert copied is not None
                assert not isinstance(way, Section)
                self._put(given[name], way, copied, start, stop)
        for index, result_cut in enumerate(split.results):
            if result_cut is None and index < len(made) and self._is_new(index):
                results[index] = made[index]

    def _is_new(self, index: int) -> bool:
        whole = self._found.whole[index]
        return isinstance(whole, Tensor) and whole.device.type == "meta"

    def _copy(self, tensor: Tensor, cut: Cut, start: int, stop: int, *, is_read: bool) -> Tensor | None:
        """A copy of a slice, in memory of the session's own; None if the part has nothing of the operand."""
        if isinstance(cut, Section):
            low, high = cut.within(start, stop)
            if low >= high:
                return None
            view = tensor.narrow(cut.dim, low, high - low)
        else:
            view = _slice(tensor, cut, start, stop)
        pieces = _pieces(view)
        buffer = torch.empty(pieces.num_elements, dtype=tensor.dtype, device="cpu")
        if self._memory.refusals.pending:
            raise PartRefused
        if is_read:
            with self._lock:
                self._get(tensor, pieces, _data_ptr(buffer))
        if isinstance(cut, Blocks):
            return buffer.view(*cut.lead, stop - start, *cut.tail)
        return buffer.as_strided(pieces.size, pieces.stride)

    def _get(self, tensor: Tensor, pieces: Pieces, address: int) -> None:
        record = self._memory.record_of(tensor)
        if record is not None:
            self._slices.read(record, pieces.pieces, address)
            return
        base = _data_ptr(tensor) - tensor.storage_offset() * tensor.element_size()
        for offset, nbytes in pieces.pieces:
            ctypes.memmove(address, base + offset, nbytes)
            address += nbytes

    def _put(self, tensor: Tensor, cut: Stretch, source: Tensor, start: int, stop: int) -> None:
        pieces, address = _pieces(_slice(tensor, cut, start, stop)), _data_ptr(source)
        record = self._memory.record_of(tensor)
        if record is not None:
            self._slices.write(record, pieces.pieces, address)
            return
        base = _data_ptr(tensor) - tensor.storage_offset() * tensor.element_size()
        for offset, nbytes in pieces.pieces:
            ctypes.memmove(base + offset, address, nbytes)
            address += nbytes

    def _note_checksums(self, tensors: Sequence[Any]) -> None:
        with self._lock:
            for tensor in tensors:
                record = self._memory.record_of(tensor) if isinstance(tensor, Tensor) else None
                if record is not None:
                    self._slices.note_checksum(record)


class _Telling:
    """Within the block an allocation that is refused, whether the op then raises or not, is raised as `PartRefused`."""

    def __init__(self, memory: PartMemory) -> None:
        self._memory = memory

    def __enter__(self) -> None:
        self._memory.refusals.pending.clear()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, PartRefused) and not self._memory.has_refused():
            return
        self._memory.refusals.pending.clear()
        if not isinstance(error, PartRefused):
            raise PartRefused from None


def _plainly(func: Any) -> Callable[[dict[str, Any], int, int], Any]:
    return lambda given, _start, _stop: func(**given)


def _slice(tensor: Tensor, cut: Stretch, start: int, stop: int) -> Tensor:
    if isinstance(cut, Along):
        return tensor.narrow(cut.dim, start, stop - start)
    offset = tensor.storage_offset() + start * cut.unit
    return tensor.as_strided(((stop - start) * cut.unit,), (1,), offset)


def _pieces(view: Tensor) -> Pieces:
    found = pieces_of(view.size(), view.stride(), view.storage_offset(), view.element_size())
    if found is None:
        raise OocError(f"a slice of sizes {tuple(view.size())}, strides {view.stride()}: it overlaps itself")
    return found


def _laid_out(made: Tensor, target: Tensor, cut: Stretch, start: int, stop: int) -> Tensor:
    """A part's result, its elements in the order in which they lie in the whole."""
    pieces = _pieces(_slice(target, cut, start, stop))
    if made.dtype != target.dtype or made.numel() != pieces.num_elements:
        raise PartRefused  # another form of the op than its rule knows: smaller parts will be refused, too
    if isinstance(cut, Blocks):
        return made.contiguous()
    stride = tuple(s for s, length in zip(pieces.stride, pieces.size, strict=True) if length > 1)
    if stride == tuple(s for s, length in zip(made.stride(), made.shape, strict=True) if length > 1):
        return made
    copied = torch.empty(pieces.num_elements, dtype=made.dtype, device="cpu")
    copied.as_strided(pieces.size, pieces.stride).copy_(made)
    return copied


def _placeholder(tensor: Tensor) -> Tensor:
    """A tensor of the same geometry, all zeros, that takes addresses and no memory: it is read by nobody."""
    if tensor.numel() == 0:
        return tensor
    size, stride = tensor.size(), tensor.stride()
    num_elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, num_elements * tensor.element_size(), flags=flags)
    made: Tensor = torch.frombuffer(memory, dtype=tensor.dtype, count=num_elements)
    return made.as_strided(size, stride)
