"""The native log of ops that ran on demand, as the recorder reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class OpLog(Protocol):
    """Ops that ran on demand natively: native/op_log.h."""

    def __len__(self) -> int:
        """How many."""

    def detach(self) -> OpLog:
        """Take them as a log of their own, to which nothing is added."""

    def entries(self) -> list[tuple[Any, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool]]:
        """Of a detached log, oldest first: op, call site, operands (with repeats), written, results, ns, replayable."""

    def entry(self, place: int) -> tuple[Any, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool]:
        """Of a detached log, one op's."""

    def operands(self, start: int) -> tuple[list[Any], list[tuple[int, Sequence[int]]]]:
        """Of a detached log, those from one on, as `ooc.memory.step_uses.Operands`."""

    def signature(self, start: int) -> int:
        """Continue a hash of which ops there were."""

    @property
    def has_begun(self) -> bool:
        """Whether native code has seen the step's first op that touches a variable."""
