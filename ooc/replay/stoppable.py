"""Work inside a critical section that Ctrl-C may end all the same, since it touches nothing: planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


class Stopped(BaseException):
    """SIGINT arrived within `stoppable`. Its handler runs at the end of the critical section, as ever."""


class Stop:
    """Whether SIGINT may end what runs now. One for the process, as its signal handlers are."""

    is_allowed = False


def stoppable(function: Callable[[], _Result]) -> _Result:
    """Call a function that touches nothing, in a critical section, and let SIGINT end it. Raises `Stopped`."""
    try:
        Stop.is_allowed = True
        return function()
    finally:
        Stop.is_allowed = False
