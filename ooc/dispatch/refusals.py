"""Allocations that were refused, until the op that made them raises the error that explains it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ooc.dispatch.expected_need import ExpectedNeed, expected_need
from ooc.dispatch.out_of_memory import budget_too_small
from ooc.errors import BudgetTooSmall, OocError
from ooc.memory.no_room import NoRoom
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.executor import Executor
from ooc.tracing.op_semantics import written_arguments
from ooc.tracing.recording import StepRecording
from scheduler.trace import Trace

Call = tuple[Any, Sequence[Any], Mapping[str, Any]]
"""An op, its arguments and its keyword arguments."""


class RefusedAllocations:
    """Remembers the allocation that was refused in the present op, and makes the error of it.

    Attributes:
        pending: Refused in the present op; at most one. Native code looks at it.
        earlier_traces: Of earlier steps, the latest first.
    """

    def __init__(
        self,
        *,
        manager: ResidencyManager,
        executor: Executor,
        dispatcher: Dispatcher,
        recording: StepRecording,
        threshold_nbytes: int,
    ) -> None:
        self._manager = manager
        self._executor = executor
        self._dispatcher = dispatcher
        self._recording = recording
        self._threshold_nbytes = threshold_nbytes
        self._largest_refused_nbytes = self._num_refused = 0
        self._last_refused = ""
        self._last: tuple[str, int] = ("", 0)  # the message of the last error, and how many ops there were then
        self.pending: list[BaseException] = []
        self.earlier_traces: Callable[[], Iterable[Trace]] = lambda: ()

    def __repr__(self) -> str:
        return f"<RefusedAllocations, {len(self.pending)} pending>"

    def document(self) -> dict[str, Any]:
        """How many ops have raised `BudgetTooSmall`, what they need at most, and the last of them."""
        return {
            "num": self._num_refused,
            "needed_nbytes": self._largest_refused_nbytes,
            "last": self._last_refused,
        }

    def note(self, error: BaseException, nbytes: int) -> None:
        """Note why an allocation of `nbytes` was refused."""
        self.pending[:] = [error if not isinstance(error, NoRoom) else _Failure(error, nbytes)]

    def error(
        self, call: Call, records: list[VariableRecord], *, in_parts: bool = False
    ) -> BaseException | RunInParts | None:
        """The error for an op that raised because an allocation was refused; None if it raised for another reason.

        With `in_parts` it may be a `RunInParts` instead, for an op that may run again: it has written nothing yet.
        """
        pending = self.pending.pop() if self.pending else None
        if isinstance(pending, _Failure):
            if in_parts and _has_written_nothing(call[0]):
                return RunInParts(records, pending.no_room, pending.nbytes)
            return self.too_small(call, records, pending.no_room, pending.nbytes)
        return pending

    def is_no_room(self, error: BaseException) -> bool:
        """Whether this is why an allocation was refused for want of room, as `note` was told."""
        return isinstance(error, _Failure)

    def explain(self, error: BaseException | None) -> None:
        """Add the message of a refusal in the last op to an error that has lost it on its way through TorchScript."""
        message, position = self._last
        was_last = position <= self._position() <= position + 1  # that op counts, or does not
        if message and was_last and isinstance(error, RuntimeError) and _LOST_IN_TORCHSCRIPT.search(str(error)):
            error.add_note(f"ooc.errors.BudgetTooSmall: {message}")

    def _position(self) -> int:
        recorder = self._recording.recorder
        return recorder.num_ops if recorder is not None else self._dispatcher.cursor

    def _expect(
        self, failed: str, needed_nbytes: int, operands: Sequence[int], results: Sequence[int]
    ) -> ExpectedNeed | None:
        recorder = self._recording.recorder
        if recorder is None:
            return None
        is_going_back = torch._C._current_autograd_node() is not None
        return expected_need(
            recorder.build(self._manager.records).trace,
            failed,
            needed_nbytes,
            operands,
            results,
            self.earlier_traces(),
            may_go_back=torch.is_grad_enabled() and not is_going_back,
            is_going_back=is_going_back,
        )

    def too_small(self, call: Call, records: list[VariableRecord], no_room: NoRoom, nbytes: int) -> BudgetTooSmall:
        """The error for an op whose operands, or an allocation of `nbytes`, do not fit the budget."""
        func, args, kwargs = call
        active, cursor = self._executor.active, self._dispatcher.cursor
        is_planned = active is not None and cursor < active.num_ops and active.funcs[cursor] is func
        error = budget_too_small(
            func=func,
            args=args,
            kwargs=kwargs,
            operands=records,
            no_room=no_room,
            new_nbytes=nbytes,
            manager=self._manager,
            earlier_ops=self._recording.recorder.ops if self._recording.recorder is not None else (),
            address_of=self._dispatcher.address,
            threshold_nbytes=self._threshold_nbytes,
            place=active.trace.ops[cursor].where
            if active is not None and is_planned
            else self._recording.call_sites.of_this_op(),
            earlier_needed_nbytes=self._largest_refused_nbytes,
            expect=self._expect,
        )
        self._largest_refused_nbytes = error.largest_needed_nbytes
        self._num_refused += 1
        self._last_refused = f"{error.op_name}, {error.where}" if error.where else error.op_name
        self._last = str(error), self._position()
        self.pending.clear()  # to find the sizes of results, it may have run the op once more
        return error


_LOST_IN_TORCHSCRIPT = re.compile(r"TorchScript interpreter(.*\n)*RuntimeError: \s*$")
"""Its interpreter makes an error of its own out of one of Python's, and leaves its type and its message out."""

_ALLOCATE_FIRST = frozenset({"aten::native_batch_norm"})
"""Ops that write operands, and allocate all that is large before that."""


def _has_written_nothing(func: Any) -> bool:
    """Whether an op that was refused memory has left its operands as they were."""
    schema = getattr(func, "_schema", None)
    return schema is not None and (written_arguments(func) == () or schema.name in _ALLOCATE_FIRST)


class RunInParts(OocError):
    """An op was refused memory that may run in parts (`ooc.dispatch.ops_in_parts`); never raised."""

    def __init__(self, records: list[VariableRecord], no_room: NoRoom, nbytes: int) -> None:
        super().__init__(str(no_room))
        self.records = records
        self.no_room = no_room
        self.nbytes = nbytes


class _Failure(OocError):
    """A refused allocation; becomes a `BudgetTooSmall` where the op is known."""

    def __init__(self, no_room: NoRoom, nbytes: int) -> None:
        super().__init__(str(no_room))
        self.no_room = no_room
        self.nbytes = nbytes
