"""Protocol of a device's hooks around ops: which op is about to run, and on what memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vmm.device_timer import DeviceTimer
from vmm.nvtx_ranges import marked

if TYPE_CHECKING:
    from ooc.memory.record import VariableRecord
    from ooc.replay.dispatcher import Dispatcher
    from ooc.replay.executable_plan import ExecutablePlan


Range = tuple[int, int]
"""Address and bytes."""


class OpWatch(Protocol):
    """Hooks that a device has called around each op. The CPU has none: there, what the host has run has happened.

    Attributes:
        device: Where tensors over the device's memory lie, as torch has it.
        timer: Times what the device computes.
        lets_native: Whether native code may run ops on demand, of which this is not told, but of what they allocate.
    """

    device: torch.device
    timer: DeviceTimer
    lets_native: bool

    def begins(self, func: Any, operands: Iterable[VariableRecord], written: Container[int]) -> int | None:
        """An op is about to run on demand; `written` are the addresses of operands that it changes.

        What `ended` takes.
        """

    def ended(self, begun: int | None, tell: Callable[[int], object] | None) -> None:
        """The op that ran on demand has been issued, or, without `tell`, has failed.

        `tell` gets its time on the device in nanoseconds, when `settle` is called, if that is known.
        """

    def settle(self) -> None:
        """Tell how long the ops so far took. The host waits for the last of them."""

    def born(self, address: int, nbytes: int) -> None:
        """Memory was allocated that no plan has, inside an op or between two; its first use will be a write."""

    def attach(self, dispatcher: Dispatcher) -> None:
        """Have what must be seen of planned ops looked at by native code, where it can."""

    def calls_of(self, executable: ExecutablePlan) -> list[Any]:
        """Per op of a plan, the function to call for it."""

    def follow(self) -> None:
        """What the host issues next on its current stream comes after all ops so far."""

    def stream(self) -> Any:
        """The stream on which the next op runs; `on_stream` takes it."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Within the block ops run on this stream."""

    def runs_again(
        self, name: str, *, reads: Sequence[Range] = (), writes: Sequence[Range] = (), births: Sequence[Range] = ()
    ) -> None:
        """An op is about to be run again, or something that a re-run needs; what it reads, changes and allocates."""


def named_calls(funcs: Sequence[Any], calls: Sequence[Any]) -> list[Any]:
    """The functions to call for a plan's ops, each wrapped in a profiler range of its op's name (once)."""
    return [
        call if getattr(call, "func", None) is _call_named else functools.partial(_call_named, str(func), call)
        for func, call in zip(funcs, calls, strict=True)
    ]


def _call_named(name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with marked(name):
        return call(*args, **kwargs)
