"""What a device wants to know of ops: that one is about to run, and on what memory."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ooc.books import VariableRecord
    from ooc.compiled import Compiled


class OpWatch(Protocol):
    """Told of each op before it runs. The CPU has none: there, what the host does is done."""

    def begins(self, func: Any, operands: Iterable[VariableRecord], written: Container[int]) -> None:
        """An op is about to run on demand; `written` are the addresses of operands that it changes."""

    def ended(self) -> None:
        """The op that ran on demand has been issued, and its duration is about to be taken."""

    def born(self, address: int, nbytes: int) -> None:
        """Memory was allocated that no plan had inside an op: whoever asked will write it."""

    def calls_of(self, compiled: Compiled) -> list[Any]:
        """Per op of a plan, what is to be called for it."""
