"""Which threads of the fake have a context: the one that made the fake, and those that ask for it."""

from __future__ import annotations

import threading
from typing import Final, Protocol

__all__ = ["CONTEXT", "Contexts", "ThreadContexts"]

CONTEXT: Final = 0xC0
"""Handle of the device's only context."""


class Contexts(Protocol):
    """The calling thread's current context; 0: none, as on every thread that a program starts."""

    def current(self) -> int:
        """Its handle."""

    def make_current(self, context: int) -> None:
        """From now on, on this thread."""


class ThreadContexts:
    """Begins with the context current on the thread that makes this, as `torch.cuda.set_device` leaves it."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self.make_current(CONTEXT)

    def current(self) -> int:
        """As `Contexts.current`."""
        return int(getattr(self._thread, "context", 0))

    def make_current(self, context: int) -> None:
        """As `Contexts.make_current`."""
        self._thread.context = context
