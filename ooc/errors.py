"""What can go wrong at run time, each with its numbers as attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from ooc.units import MIB, format_nbytes

_NUM_OPERANDS_SHOWN = 12


class OocError(RuntimeError):
    """Base of our own run-time errors."""


class BudgetTooSmall(OocError, torch.OutOfMemoryError):  # to mypy all of torch is Any
    """One op needs more memory at once than the budget has. Also a `torch.OutOfMemoryError`.

    Attributes:
        op_index: Position of the op in the step, or None outside a step.
        op_name, where: The op, and its place: module and line.
        needed_nbytes: What the op needs at once, in whole chunks: the smallest budget that gets
            past this op as far as can be told (its temporaries after the point of failure are
            not known, and a later op may need more).
        budget_nbytes: The pool's size.
        operands: `(label, nbytes)` of what must be in memory together.
        largest_needed_nbytes: The largest need refused so far in this session, this one included.
        expected_nbytes: What the rest of the step is guessed to need at once; 0: nobody can say.

    With `is_at_least` the op has temporaries, and may need more than it had asked for when it failed.

    Where the op is within a module's call, that guess is worked out when somebody first asks for it or for the message:
    `look_ahead` then finds that call in the traceback, and runs it to its end on tensors without data.
    """

    def __init__(
        self,
        *,
        op_index: int | None,
        op_name: str,
        where: str,
        needed_nbytes: int,
        budget_nbytes: int,
        operands: Sequence[tuple[str, int]] = (),
        earlier_needed_nbytes: int = 0,
        expected_nbytes: int = 0,
        expected_for: str = "",
        advice: str = "",
        is_at_least: bool = False,
        look_ahead: Callable[[TracebackType], tuple[int, str] | None] | None = None,
    ) -> None:
        self.op_index = op_index
        self.op_name = op_name
        self.where = where
        self.needed_nbytes = needed_nbytes
        self.budget_nbytes = budget_nbytes
        self.operands = tuple(operands)
        self.largest_needed_nbytes = max(needed_nbytes, earlier_needed_nbytes)
        self._look_ahead = look_ahead
        self._expected = (expected_nbytes, expected_for)
        place = f"{op_name}, {where}" if where else op_name
        self._head = f"op {op_index} ({place})" if op_index is not None else place
        self._advice = advice
        self._is_at_least = is_at_least
        super().__init__(self._text())

    @property
    def expected_nbytes(self) -> int:
        """What the rest of the step is guessed to need at once; 0: nobody can say."""
        self._look()
        return self._expected[0]

    def __str__(self) -> str:
        self._look()
        return self._text()

    def _look(self) -> None:
        """Look ahead, once it has been raised."""
        if self._look_ahead is None or self.__traceback__ is None:
            return
        look_ahead, self._look_ahead = self._look_ahead, None
        found = look_ahead(self.__traceback__)
        if found is not None and found[0] > self._expected[0]:
            self._expected = found

    def _text(self) -> str:
        expected_nbytes, expected_for = self._expected
        more = ""
        if expected_nbytes > self.largest_needed_nbytes:
            more = f" About {math.ceil(expected_nbytes / MIB)}MiB for {expected_for}.\n"
        shown = [f"{label} {format_nbytes(nbytes)}" for label, nbytes in self.operands[:_NUM_OPERANDS_SHOWN]]
        if len(self.operands) > len(shown):
            shown.append(f"and {len(self.operands) - len(shown)} more")
        listed = ", ".join(shown)
        needed, budget = format_nbytes(self.needed_nbytes), format_nbytes(self.budget_nbytes)
        if needed == budget and self.needed_nbytes > self.budget_nbytes:  # the same to a tenth
            needed = f"{needed} ({format_nbytes(self.needed_nbytes - self.budget_nbytes)} more than there is)"
        reach = "for the largest need seen so far"
        if self.largest_needed_nbytes == self.needed_nbytes:
            reach = "for this op as far as it came: it has temporaries" if self._is_at_least else "for this op"
        return (
            f"{self._head} needs {needed} at once; the budget is {budget}.\n"
            + (f"  in memory together: {listed}\n" if listed else "")
            + f"  Options: budget >= {math.ceil(self.largest_needed_nbytes / MIB)}MiB ({reach}; a later one may need "
            "more); a smaller batch (operands grow with it).\n"
            + (f" {more}" if more else "")
            + (f"  {self._advice}\n" if self._advice else "")
            + "  To know the smallest budget at once: ooc fit SCRIPT ARGS (runs a few steps in what memory there "
            "is); ooc fit --fake SCRIPT ARGS (without the memory, and without what ops take for themselves)."
        )


class StoreFailed(OocError, OSError):
    """A transfer to or from the store failed in mid-step.

    The step is void; variables that were in memory still are, and the session goes on from them.
    A variable whose bytes could not be read back is named in the message.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class InconsistentRecord(OocError):
    """Our own bug: a variable's record was told of something that cannot have happened in its state.

    Attributes:
        record: The record in words.
        state: The state it was in.
        transition: What it was told.
    """

    def __init__(self, *, record: str, state: str, transition: str) -> None:
        super().__init__(
            f"{transition!r} cannot follow state {state!r} of {record}.\n  This is a bug in ooc, not in the program: "
            "please report it with this message. Variables may be lost; results from here on cannot be trusted."
        )
        self.record = record
        self.state = state
        self.transition = transition


class HiddenWrite(OocError):
    """Debug mode found a variable changed that nothing was seen to write."""


class RerunDiffers(OocError):
    """Debug mode found that an op which was run again made other bytes than the first time."""


class RerunLost(OocError):
    """What a plan had discarded could not be made again. The step is void."""


class SessionError(OocError):
    """A session used out of turn: closed, nested in another, or after a fork."""


class DeviceUnavailable(SessionError):
    """A session was asked for on a device that it cannot run on. The message says what is missing."""


class Refused(OocError):
    """Something that would train wrongly under a session, refused by name."""
