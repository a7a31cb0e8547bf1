"""Runs an op in parts where it does not fit the budget as a whole: the last resort before `BudgetTooSmall`.

Operands and results stay where they are, mostly in the store. For each part, slices of the operands are copied into
memory of the session's own, the op runs on the copies, and its results are written to their places. Which ops may be
cut, and how, is in `ooc.tracing.part_rules`; there each part's bits are the whole's. See ooc/DESIGN.md, "Ops in parts".

A result that is too large for the pool is born *away*: its record has a slot of the store and no chunks, and is filled
there. What an op writes in place is written back part by part, after the part has ended well.

No plan has such an op. In the recording it needs what it needs as a whole, which is more than the budget: so no planner
can make a legal plan for its sequence, and says which op it was, and what budget it takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ooc.dispatch.part_runs import Found, PartMemory, PartRefused, PartRun
from ooc.dispatch.refusals import Call, RefusedAllocations, RunInParts
from ooc.dispatch.signals import CriticalLock
from ooc.memory.no_room import NoRoom
from ooc.memory.pieces import pieces_of
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.recipes import below_everything
from ooc.tracing import op_semantics as ops
from ooc.tracing.part_probes import as_lists
from ooc.tracing.part_rules import Blocks, Split, is_view, split_of
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
        lock: CriticalLock,
        recording: StepRecording,
        refusals: RefusedAllocations,
        notes: OpNotes,
    ) -> None:
        self.memory = PartMemory(manager, dispatcher, lock, refusals)
        self._manager = manager
        self._allocator = allocator
        self._dispatcher = dispatcher
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
            op = self._begin(call)
            first_event = self._num_events()
        started = time.monotonic_ns()
        try:
            with below_everything():
                result = PartRun(self.memory, found).run()
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
            self._note_need(first_event, records, no_room, result)
            written, op.written = op.written, ()  # what is away is current there, and all else is noted
            self._notes.complete(op, result)
            op.written = written
            self._manager.counters.num_in_parts += 1
        return result

    def _find(self, call: Call) -> Found | None:
        func, args, kwargs = call
        if not self._manager.is_host or torch._C._len_torch_dispatch_stack() or not self.memory.slices.open():
            return None
        schema = getattr(func, "_schema", None)
        if schema is None or schema.name.partition("::")[0] != "aten":
            return None
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        lists = {a.name for a in schema.arguments if isinstance(a.type, torch.ListType)}
        for name, value in given.items():
            if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
                if name not in lists or len(value) != 1:
                    return None
                given[name] = value[0]
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        if not all(map(_is_plain, tensors.values())):
            return None
        if is_view(func):
            as_it_is = Split(unread=frozenset(given), is_view=True)
            return Found(func=func, args=args, kwargs=kwargs, given=given, whole=(), returned=None, split=as_it_is)
        with below_everything():
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

    def _num_events(self) -> int:
        recorder = self._recording.recorder
        return len(recorder.events) if recorder is not None else 0

    def _begin(self, call: Call) -> OpRecord:
        func, args, kwargs = call
        recorder, state = self._recording.recorder, self._allocator.state
        assert recorder is not None
        self._notes.absorb()
        state.set_inside(recorder.num_ops)
        if str(func) not in self._told:
            self._told.add(str(func))
            where = self._recording.call_sites.of_this_op()
            _log.warning(
                "%s%s does not fit the budget and runs in parts, through the store: slower, and not planned",
                func,
                f" ({where})" if where else "",
            )
        return OpRecord(
            func=func,
            where=self._recording.call_sites.of_this_op(),
            occurrences=self._dispatcher.occurrences(args, kwargs),
            written=self._dispatcher.operands(*ops.written_values(func, tuple(args), dict(kwargs))),
        )

    def _note_need(self, first_event: int, records: Sequence[VariableRecord], no_room: NoRoom, result: Any) -> None:
        """Note in the recording what the op needs as a whole: what a planner finds there exceeds the budget.

        The parts' own allocations are taken out. Operands and results are there. Where these fit together, and what did
        not was the op's own, so much more was allocated within it: for the planner a variable that lives in the op
        alone.
        """
        manager, recorder = self._manager, self._recording.recorder
        assert recorder is not None
        recorder.events[first_event:] = _lasting(recorder.events[first_event:])
        made = [manager.records.get(address) for address in self._dispatcher.operands(result)]
        there = {record.address: record.nbytes for record in (*records, *made) if record is not None}
        num_there, num_chunks = sum(map(manager.chunks_of, there.values())), manager.pool.num_chunks
        num_missing = 0
        if num_there <= num_chunks:
            num_missing = max(no_room.num_needed + no_room.num_pinned, num_chunks + 1) - num_there
        if num_missing > 0:
            position, address = inside_op(recorder.num_ops), _NOWHERE + manager.next_serial()
            nbytes = num_missing * manager.chunk_nbytes
            recorder.events += [Event(address, nbytes, ALLOC, position, 0), Event(address, 0, FREE, position, 0)]


_NOWHERE = 1 << 62
"""From here on no address can be."""


def _lasting(events: Sequence[Event]) -> list[Event]:
    """Without the allocations that were freed within."""
    born: dict[int, int] = {}
    gone: set[int] = set()
    for index, event in enumerate(events):
        if event.kind == ALLOC:
            born[event.address] = index
        elif event.address in born:
            gone |= {born.pop(event.address), index}
    return [event for index, event in enumerate(events) if index not in gone]


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
