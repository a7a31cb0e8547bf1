"""Calls a function once on each Python thread that is already running, at its next call or return.

Python lets a thread enter a dispatch mode only by code that it runs itself. A profile function is the one thing that
one thread can put upon another: the interpreter calls it at the next event there (`threading.setprofile_all_threads` of
Python 3.12 rests on the same function of CPython's).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Container
from typing import Any, NamedTuple

_PROFILE_FUNCTION = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class _Visit(NamedTuple):
    idents: Container[int]
    visit: Callable[[], bool]


_latest: _Visit | None = None
"""The visit that is under way. Threads that have yet to call or return make this one, and none before it."""


def visit_running_threads(idents: Container[int], visit: Callable[[], bool]) -> bool:
    """Have `visit` called on each of these threads when it next calls or returns; again later while it says False.

    It takes the place of an earlier visit that is still under way; so does `end_visit`, and lets go of both arguments.
    A profile function that one of the threads has of its own is replaced. Threads that compute in native code, or wait
    there, are not disturbed.

    Returns:
        False if this interpreter offers no way to do so.
    """
    global _latest
    if not hasattr(ctypes.pythonapi, "_PyEval_SetProfile") or threading.getprofile() is not None:
        return False
    interpreter = _function("PyInterpreterState_Get", ctypes.c_void_p)()
    following = _function("PyThreadState_Next", ctypes.c_void_p, ctypes.c_void_p)
    _latest = _Visit(idents, visit)
    address = ctypes.cast(_ON_EVENT, ctypes.c_void_p)
    own = _own_state()
    state = _function("PyInterpreterState_ThreadHead", ctypes.c_void_p, ctypes.c_void_p)(interpreter)
    while state:  # nobody starts or ends meanwhile: the interpreter's lock is ours
        if state != own:
            _set_profile(state, address)
        state = following(state)
    return True


def end_visit() -> None:
    """Threads that were not visited yet will not be."""
    global _latest
    _latest = None


def _on_event(_argument: int, _frame: int, _what: int, _result: int) -> int:
    latest = _latest
    if latest is None or threading.get_ident() not in latest.idents or latest.visit():
        _set_profile(_own_state(), None)
    return 0


_ON_EVENT = _PROFILE_FUNCTION(_on_event)
"""One for the process: a thread may come to its next event, and call this, long after the session."""


def _own_state() -> Any:
    return _function("PyThreadState_Get", ctypes.c_void_p)()


def _set_profile(state: Any, function: Any) -> None:
    _function("_PyEval_SetProfile", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
        state, function, None
    )


@functools.cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of CPython's, which is called with the interpreter's lock held."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
