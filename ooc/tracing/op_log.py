"""The native log of ops that ran on demand, as the recorder reads it."""

from __future__ import annotations

from typing import Any, Protocol


class OpLog(Protocol):
    """Ops that ran on demand natively, since it was made or last taken: native/op_log.h."""

    def __len__(self) -> int:
        """How many."""

    def take(self) -> list[tuple[Any, str, list[int], list[int], list[int], int, bool]]:
        """Take them, oldest first: op, call site, operands with repeats, those written, results, ns, replayable."""

    def signature(self, start: int) -> int:
        """Continue a hash of which ops there were."""

    @property
    def has_begun(self) -> bool:
        """Whether native code has seen the step's first op that touches a variable."""
