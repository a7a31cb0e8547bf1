"""Runs an op in parts where it does not fit the budget as a whole: the last resort before `BudgetTooSmall`.

Operands and results stay where they are, mostly in the store. For each part, slices of the operands are copied into
memory of the session's own, the op runs on the copies, and its results are written to their places. Which ops may be
cut, and how, is in `ooc.tracing.part_rules`; there each part's bits are the whole's. See ooc/DESIGN.md, "Ops in parts".

A result that is too large for the pool is born *away*: its record has a slot of the store and no chunks, and is filled
there. What an op writes in place is written back part by part, after the part has ended well.

In a recording such an op uses its results, the memory in which its parts ran, what it changes, and what it needs as a
whole; marks after it stand for its other operands (`ooc.tracing.operand_marks`). So it is planned like any other op,
and the plan lends it that memory (`run_planned`).
"""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ooc.dispatch.part_runs import Found, LentMemory, PartMemory, PartRefused, PartRun
from ooc.dispatch.refusals import Call, RefusedAllocations, RunInParts
from ooc.dispatch.signals import CriticalLock
from ooc.memory.no_room import NoRoom
from ooc.memory.pieces import pieces_of
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.bailout import records_of
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.executor import Executor
from ooc.replay.recipes import below_everything
from ooc.tracing import op_semantics as ops
from ooc.tracing.moving_rules import LISTS
from ooc.tracing.operand_marks import ROOM_ORDINAL, marks_of
from ooc.tracing.part_cuts import Blocks, Split
from ooc.tracing.part_probes import as_lists
from ooc.tracing.part_rules import is_view, split_of
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recording import StepRecording
from vmm.table import inside_op
from vmm.torch_cpu import ALLOC, FREE, AllocatorTable, Event

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNotes:
    """What is noted of any op on demand; with the session's lock held.

    Attributes:
        complete: Completes an op that has run, with its result.
        absorb: Takes the allocator's log.
        failed: Notes an op that has raised.
    """

    complete: Callable[[OpRecord, Any], None]
    absorb: Callable[[], None]
    failed: Callable[[Any], None]


class OpsInParts:
    """Runs ops of one session in parts, on its thread.

    Args:
        executor: Has it run the ops of plans that were in parts when they were recorded.
        recording: The present step's.
        refusals: Makes the error of an op that cannot run in parts either.
        notes: What is noted of any op on demand.

    Attributes:
        memory: Serves what is born away.
    """

    def __init__(
        self,
        manager: ResidencyManager,
        allocator: AllocatorTable,
        dispatcher: Dispatcher,
        executor: Executor,
        lock: CriticalLock,
        recording: StepRecording,
        refusals: RefusedAllocations,
        notes: OpNotes,
    ) -> None:
        self.memory = PartMemory(manager, dispatcher, lock, refusals)
        self._manager = manager
        self._allocator = allocator
        self._dispatcher = dispatcher
        self._executor = executor
        executor.run_in_parts = self.run_planned
        self._left: Found | None = None  # the op that has left its plan while it ran in parts
        self._lock = lock
        self._recording = recording
        self._refusals = refusals
        self._notes = notes
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"<OpsInParts, {self._manager.counters.num_in_parts} so far>"

    def close(self) -> None:
        """Close the store's second descriptor. Idempotent."""
        self.memory.slices.close()

    # -- whether

    def resolve(self, error: BaseException, call: Call) -> Any:
        """The result of an op that was refused memory, run in parts; or raise the error that explains it."""
        if isinstance(error, RunInParts):
            recorder = self._recording.recorder
            assert recorder is not None
            recorder.drop_last()  # noted as one that raised
            return self.run(call, error.records, error.no_room, error.nbytes, is_noted=True)
        raise error from error.__cause__

    def run(
        self, call: Call, records: list[VariableRecord], no_room: NoRoom, nbytes: int, *, is_noted: bool = False
    ) -> Any:
        """Run an op in parts that does not fit as a whole. Nothing of it is pinned.

        Args:
            call: The op.
            records: Its operands'.
            no_room: The pool's refusal.
            nbytes: The allocation that was refused; 0 if operands could not be loaded.
            is_noted: Whether it has run as a whole, and is noted as an op that raised if it cannot be cut.

        Raises:
            BudgetTooSmall: It cannot be cut, or does not fit in parts either.
            StoreFailed: A part's bytes could not be moved.
        """
        no_room = no_room.with_traceback(None)  # whose frames are this op's: they would keep its operands alive
        with self._lock:
            self._refusals.pending.clear()
            found = self._find(call)
            if found is None:
                too_small = self._refusals.too_small(call, records, no_room, nbytes)
                if is_noted:
                    self._notes.failed(call[0])
                raise too_small from None
            op = self._begin(call, found)
        started = time.monotonic_ns()
        try:
            with below_everything():
                result = self._run_parts(found)
        except BaseException as error:
            with self._lock:
                self._refusals.pending.clear()
                refused = None
                if isinstance(error, PartRefused):
                    refused = self._refusals.too_small(call, records, no_room, nbytes)
                self._notes.failed(call[0])
                self._notes.absorb()
            if refused is not None:
                raise refused from None
            raise
        op.duration_ns = time.monotonic_ns() - started
        with self._lock:
            self._notes.absorb()
            self._note_done(op, result, found)
            self._manager.counters.num_in_parts += 1
        return result

    def _run_parts(self, found: Found) -> Any:
        self._allocator.state.num_counted = 0  # on a plan, and off it, results are the first that the op allocates
        return PartRun(self.memory, found).run()

    def take_left(self, op: OpRecord, result: Any) -> bool:
        """Note an op of a plan if it has run in parts, and has left the plan meanwhile. Whether that was so."""
        found, self._left = self._left, None
        if found is None or found.func is not op.func:
            return False
        op.sliced, op.replayable = self._sliced(found, op.written), False
        self._note_done(op, result, found)
        return True

    def _note_done(self, op: OpRecord, result: Any, found: Found) -> None:
        """Note an op that has run in parts, its memory, and the marks after it."""
        if found.split.length:
            num_chunks = self._forget_memory()
            if num_chunks:
                self._note_memory(num_chunks)
        written, op.written = op.written, ()  # what is away is current there, and all else is noted
        self._notes.complete(op, result)
        op.written = written
        recorder = self._recording.recorder
        assert recorder is not None
        recorder.extend(marks_of(op))
        self._allocator.state.set_between(recorder.num_ops)

    def run_planned(self, executable: ExecutablePlan, index: int, /, *args: Any, **kwargs: Any) -> Any:
        """Run op `index` of the plan that is being replayed in parts, in memory that the plan has for that.

        Should this not do, the step leaves the plan, and the op goes on in what memory there is then.

        Raises as `run`.
        """
        call = executable.funcs[index], args, kwargs
        self._left = None
        with self._lock:
            found = self._find(call)
            if found is not None:
                records = records_of(executable, index)
                lent = self._borrow(executable, index, records)
        if found is None:
            return self._run_whole(call)
        try:
            with below_everything():
                result = self._run_parts(found)
        except PartRefused:
            with self._lock:
                self._refusals.pending.clear()
                num_needed = sum(self._manager.chunks_of(r.nbytes) for r in records.values())
                no_room = NoRoom(num_needed=num_needed, num_free=self._manager.num_free, num_pinned=0)
                raise self._refusals.too_small(call, list(records.values()), no_room, 0) from None
        finally:
            with self._lock:
                self._give_back(executable, lent)
        with self._lock:
            self._left = found if self._executor.active is not executable else None
            self._manager.counters.num_in_parts += 1
        return result

    def _run_whole(self, call: Call) -> Any:
        """Run an op of the plan that cannot be cut as it comes this time: on one row, or on small operands."""
        with self._lock:
            planned = {r.address: r for r in self._executor.live_records()}
            named = self._dispatcher.operands(call[1], call[2])
            if any(planned[address].state is not State.RESIDENT for address in named if address in planned):
                self._executor.bail_out("an op that runs in parts cannot be cut")
            there = self._manager.records
            records = [r for a in named if (r := there.get(a) or planned.get(a)) is not None]
            for record in records:  # the plan keeps in memory only what the op changes
                record.pin()
        try:
            with self._lock:
                self._manager.load(records)
            return call[0](*call[1], **call[2])
        except NoRoom as no_room:
            raise self._refusals.too_small(call, records, no_room, 0) from None
        finally:
            with self._lock:
                for record in records:
                    record.unpin()

    def _borrow(
        self, executable: ExecutablePlan, index: int, records: dict[int, VariableRecord]
    ) -> list[tuple[int, int]]:
        """Let the pool have the chunks that the plan keeps for an op's parts, until `_give_back`. Which they are."""
        manager, executor = self._manager, self._executor
        acts = executable.before[index]
        rooms = executable.parts.divide(index, acts.births)[1] if acts is not None else []
        lent = [(first, count) for room in rooms for first, count in room.runs]
        if executor.active is executable and any(executable.variable_alive[i] for room in rooms for i in room.dead):
            executor.bail_out("a variable was freed later than planned")
        self.memory.lent = LentMemory(
            records=records,
            nbytes=sum(count for _, count in lent) * manager.chunk_nbytes,
            is_planned=lambda: executor.active is executable,
            leave=executor.bail_out,
        )
        if executor.active is executable:
            manager.pool.give(lent)
        return lent

    def _give_back(self, executable: ExecutablePlan, lent: list[tuple[int, int]]) -> None:
        self.memory.lent = None
        if self._executor.active is not executable:
            return  # which has returned all
        self._executor.absorb_events()
        if not self._manager.pool.take_if_free(lent):
            self._executor.bail_out("an op in parts has kept memory that the plan needs")

    def _find(self, call: Call) -> Found | None:
        func, args, kwargs = call
        if not self._manager.is_host or torch._C._len_torch_dispatch_stack() or not self.memory.slices.open():
            return None
        schema = getattr(func, "_schema", None)
        if schema is None or schema.name.partition("::")[0] != "aten":
            return None
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        lists = {a.name for a in schema.arguments if isinstance(a.type, torch.ListType)}
        for name, value in list(given.items()):
            if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
                if name not in lists or (len(value) != 1 and schema.name not in LISTS):
                    return None
                del given[name]
                given |= {name: value[0]} if len(value) == 1 else {f"{name}.{i}": t for i, t in enumerate(value)}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        if not all(map(_is_plain, tensors.values())):
            return None
        if is_view(func):
            as_it_is = Split(unread=frozenset(given), is_view=True)
            return Found(func=func, args=args, kwargs=kwargs, given=given, whole=(), returned=None, split=as_it_is)
        with below_everything(), self._allocator.apart():  # probes must not be refused, nor be noted as the op's memory
            try:
                whole, returned = without_data(func, given, tensors)
                split = split_of(func, given, whole)
            except (RuntimeError, NotImplementedError, KeyError, TypeError, ValueError):
                return None  # torch knows no sizes without data, or the rule does not know this form of the op
        if split is None or split.length == 1:
            return None
        if not _are_apart(split, tensors):
            return None
        return Found(func=func, args=args, kwargs=kwargs, given=given, whole=whole, returned=returned, split=split)

    # -- the op as others see it

    def _sliced(self, found: Found, written: Sequence[int]) -> list[int]:
        """Addresses of the operands that a call reads, in slices alone."""
        apart = found.split.operands.keys() | found.split.unread
        whole = self._dispatcher.operands([value for name, value in found.given.items() if name not in apart])
        named = self._dispatcher.operands([value for name, value in found.given.items() if name in apart])
        return [address for address in named if address not in whole and address not in written]

    def _begin(self, call: Call, found: Found) -> OpRecord:
        func, args, kwargs = call
        recorder, state = self._recording.recorder, self._allocator.state
        assert recorder is not None
        self._notes.absorb()
        self._forget_memory()  # it may have run as a whole, until it was refused memory
        if str(func) not in self._told:
            self._told.add(str(func))
            where = self._recording.call_sites.of_this_op()
            _log.warning(
                "%s%s does not fit the budget and runs in parts, through the store: slower",
                func,
                f" ({where})" if where else "",
            )
        op = OpRecord(
            func=func,
            **self._recording.place_of_this_op(),
            occurrences=self._dispatcher.occurrences(args, kwargs),
            written=self._dispatcher.operands(*ops.written_values(func, tuple(args), dict(kwargs))),
        )
        op.sliced = self._sliced(found, op.written)
        state.set_inside(recorder.num_ops)
        return op

    def _forget_memory(self) -> int:
        """Forget what the present op has allocated and freed so far. The most chunks that this took at once."""
        recorder = self._recording.recorder
        assert recorder is not None
        events = recorder.events
        first = bisect_left(events, inside_op(recorder.num_ops), key=lambda event: event.position)
        events[first:], num_chunks = _divided(events[first:], self._manager.chunks_of)
        return num_chunks

    def _note_memory(self, num_chunks: int) -> None:
        """Note one allocation, freed within the present op: for the planner the memory in which the op's parts run."""
        manager, recorder = self._manager, self._recording.recorder
        assert recorder is not None
        position, address = inside_op(recorder.num_ops), _NOWHERE + manager.next_serial()
        nbytes = num_chunks * manager.chunk_nbytes
        recorder.events += [
            Event(address, nbytes, ALLOC, position, ROOM_ORDINAL),
            Event(address, 0, FREE, position, 0),
        ]


_NOWHERE = 1 << 62
"""From here on no address can be."""


def _divided(events: Sequence[Event], chunks_of: Callable[[int], int]) -> tuple[list[Event], int]:
    """An op's events without the allocations that were freed within; and the most chunks that these took at once."""
    born: dict[int, int] = {}
    change: dict[int, int] = {}  # chunks, by the place of an allocation, or of its free
    for index, event in enumerate(events):
        if event.kind == ALLOC:
            born[event.address] = index
        elif event.address in born:
            start = born.pop(event.address)
            change[start] = chunks_of(events[start].nbytes)
            change[index] = -change[start]
    most = max(itertools.accumulate(change[index] for index in sorted(change)), default=0)
    return [event for index, event in enumerate(events) if index not in change], most


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _are_apart(split: Split, tensors: Mapping[str, Tensor]) -> bool:
    """Whether what the op writes is no part of another operand, but for the same, and no element of it comes twice."""
    for name in split.written:
        mine = tensors[name]
        for other, tensor in tensors.items():
            if other == name or tensor.untyped_storage()._cdata != mine.untyped_storage()._cdata:
                continue
            if other not in split.operands or _geometry(tensor) != _geometry(mine):
                return False
        if pieces_of(mine.size(), mine.stride(), 0, 1) is None or 0 in mine.stride():
            return False
    return all(
        isinstance(cut, Blocks) or pieces_of(t.size(), t.stride(), 0, 1) is not None
        for name, cut in split.operands.items()
        if (t := tensors[name]) is not None
    )


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.dtype


def without_data(func: Any, given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[list[Any], Any]:
    """An op's results without data, an operand where a result is one, and how it returns them."""
    empty = {name: _on_meta(tensor) for name, tensor in tensors.items()}
    back = {id(meta): tensors[name] for name, meta in empty.items()}
    settings = {"device": "meta"} if any(a.name == "device" for a in func._schema.arguments) and not tensors else {}
    with warnings.catch_warnings(action="ignore"):  # it is not the program's call
        results, returned = tree_flatten(func(**as_lists(func, dict(given) | empty | settings)))
    storages = {meta.untyped_storage()._cdata for meta in empty.values()}
    whole: list[Any] = []
    for result in results:
        if not isinstance(result, Tensor) or id(result) in back:
            whole.append(back.get(id(result), result))
        elif result.untyped_storage()._cdata in storages or result.layout is not torch.strided:
            raise NotImplementedError(f"{func} returns a view of an operand")
        else:
            whole.append(result)
    return whole, returned


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
