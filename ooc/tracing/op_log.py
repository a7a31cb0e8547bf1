"""The native log of ops that ran on demand, as the recorder reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Entry = tuple[Any, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool, int]
"""Op, call site, operands (with repeats), written, results, nanoseconds, replayable, node: as `OpRecord` has them."""


class OpLog(Protocol):
    """Ops that ran on demand natively: native/op_log.h."""

    def __len__(self) -> int:
        """How many."""

    def detach(self) -> OpLog:
        """Take them as a log of their own, to which nothing is added."""

    def settle(self) -> None:
        """Give each op its time on the device; waits for the last of them. `entries` and `entry` do so, too."""

    def entries(self) -> list[Entry]:
        """Of a detached log, oldest first."""

    def entry(self, place: int) -> Entry:
        """Of a detached log, one op's."""

    def operands(self, start: int) -> tuple[list[Any], list[tuple[int, Sequence[int]]]]:
        """Of a detached log, those from one on, as `ooc.memory.step_uses.Operands`."""

    def signature(self, start: int) -> int:
        """Continue a hash of which ops there were."""

    def take_events(self) -> list[tuple[int, int, int, int, int]]:
        """Allocations and frees that native code has noted, as `vmm.table.Event`; there are none then."""

    @property
    def has_begun(self) -> bool:
        """Whether native code has seen the step's first op that touches a variable."""
