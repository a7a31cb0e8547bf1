"""Calls a function once on each Python thread that is already running, at its next call or return.

Python lets a thread enter a dispatch mode only by code that it runs itself. A profile function is the one thing that
one thread can put upon another: the interpreter calls it at the next event there (`threading.setprofile_all_threads` of
Python 3.12 rests on the same function of CPython's).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Container
from typing import Any

_PROFILE_FUNCTION = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_kept: list[Any] = []
"""A thread may come to its next event long after the session: what it will call then must exist for ever."""


def visit_running_threads(idents: Container[int], visit: Callable[[], bool]) -> bool:
    """Have `visit` called on each of these threads when it next calls or returns; again later while it says False.

    A profile function that one of them has of its own is replaced. Threads that compute in native code, or wait there,
    are not disturbed.

    Returns:
        False if this interpreter offers no way to do so.
    """
    python = ctypes.pythonapi
    if not hasattr(python, "_PyEval_SetProfile") or threading.getprofile() is not None:
        return False
    states = ctypes.c_void_p
    first, following, current, interpreter = (
        _function(name, states, arguments)
        for name, arguments in (
            ("PyInterpreterState_ThreadHead", [states]),
            ("PyThreadState_Next", [states]),
            ("PyThreadState_Get", []),
            ("PyInterpreterState_Get", []),
        )
    )
    set_profile = _function("_PyEval_SetProfile", ctypes.c_int, [states, states, states])

    def on_event(_argument: int, _frame: int, _what: int, _result: int) -> int:
        if threading.get_ident() not in idents or visit():
            set_profile(current(), None, None)
        return 0

    function = _PROFILE_FUNCTION(on_event)
    _kept.append(function)
    address = ctypes.cast(function, ctypes.c_void_p)
    own, state = current(), first(interpreter())
    while state:  # nobody starts or ends meanwhile: the interpreter's lock is ours
        if state != own:
            set_profile(state, address, None)
        state = following(state)
    return True


def _function(name: str, result: Any, arguments: list[Any]) -> Any:
    """A function of CPython's, which is called with the interpreter's lock held."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
