"""What a device wants to know of ops: that one is about to run, and on what memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vmm.nvtx_ranges import marked

if TYPE_CHECKING:
    from ooc.memory.record import VariableRecord
    from ooc.replay.executable_plan import ExecutablePlan


class OpWatch(Protocol):
    """Told of each op before it runs. The CPU has none: there, what the host does is done."""

    def begins(self, func: Any, operands: Iterable[VariableRecord], written: Container[int]) -> None:
        """An op is about to run on demand; `written` are the addresses of operands that it changes."""

    def ended(self) -> None:
        """The op that ran on demand has been issued, and its duration is about to be taken."""

    def born(self, address: int, nbytes: int) -> None:
        """Memory was allocated that no plan had inside an op: whoever asked will write it."""

    def calls_of(self, executable: ExecutablePlan) -> list[Any]:
        """Per op of a plan, what is to be called for it."""


def named_calls(funcs: Sequence[Any], calls: Sequence[Any]) -> list[Any]:
    """What is called for each op of a plan, each as a range under its op's name; what is one already stays."""
    return [
        call if getattr(call, "func", None) is _call_named else functools.partial(_call_named, str(func), call)
        for func, call in zip(funcs, calls, strict=True)
    ]


def _call_named(name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with marked(name):
        return call(*args, **kwargs)
