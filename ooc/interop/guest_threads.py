"""Guest threads: Python threads beside the session's, whose ops must be seen. See ooc/DESIGN.md, "Guest threads".

Dispatch modes are per thread. So while a session is open, threads that Python starts enter a mode that gives their ops
to `ooc.dispatch.guest_ops`, and executors' threads, also those that were there before, do so for each task. Other
threads that are older than the session enter it at their next call, and leave it at their first call after the session.
A younger thread that outlives its session keeps the mode: it passes everything on, to the next session if there is one.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ooc.dispatch.extension import leave_unnoticed
from ooc.dispatch.guest_ops import as_guest, become_guest, cease_to_be_guest
from ooc.interop.older_threads import end_visit, visit_running_threads
from ooc.interop.replacements import Replacements
from ooc.tracing.call_sites import users_stacklevel
from ooc.tracing.composites import comes_whole, take_apart

Dispatch = Callable[[Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]], Any]

_OUR_THREADS = "ooc-"
"""Our own threads' names begin so. They run no ops."""


class GuestMode(TorchDispatchMode):
    """Through which ops of guest threads go. One for all threads and sessions; with no session it passes everything on.

    It is pushed and popped without `__enter__`, which keeps notes for one thread only.
    """

    dispatch: Dispatch | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        dispatch = self.dispatch
        if dispatch is None:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if comes_whole(func, args, kwargs):
            return take_apart(func, args, kwargs, mode=self, outside=None)
        return dispatch(func, types, args, kwargs)


_MODE = GuestMode()


class _Here(threading.local):
    is_adopted = False


_here = _Here()
"""`_here.is_adopted`: whether the thread entered the mode in the midst of its run, and not around all of it."""


class GuestThreads:
    """Lets threads of Python's enter the guest mode while a session is open.

    Args:
        dispatch: Runs a guest's op (`OpRunner.dispatch_guest`).
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._thread = threading.get_ident()
        self._replacements = Replacements()
        self._adopted: set[int] = set()  # older threads that have become guests, by ident

    def __repr__(self) -> str:
        return f"<GuestThreads {'open' if _MODE.dispatch == self._dispatch else 'closed'}>"

    def open(self) -> None:
        """Threads that start from now on are guests, and older ones from their next call on."""
        leave_unnoticed(GuestMode)
        _MODE.dispatch = self._dispatch
        self._replace(threading.Thread, "_bootstrap_inner")
        self._replace(concurrent.futures.thread._WorkItem, "run")
        older = {thread.ident or 0: thread.name for thread in threading.enumerate() if self._may_be_guest(thread)}
        if older and not visit_running_threads(older, self._adopt):
            warnings.warn(
                f"threads that are older than the session are not seen by it ({', '.join(older.values())}): this "
                "Python cannot reach them, or threading.setprofile is set. Within planned steps they may see other "
                "bytes in the session's tensors, and what they write may be lost. Options: open the session first; "
                "threading.setprofile(None) before it is opened; no use of its tensors on these threads.",
                RuntimeWarning,
                stacklevel=users_stacklevel(),
            )

    def close(self) -> None:
        """Put back what was replaced. Threads that are guests go on, and nobody looks at their ops. Idempotent."""
        self._replacements.put_back()
        if _MODE.dispatch == self._dispatch:
            _MODE.dispatch = None
            end_visit()
        if self._adopted:
            visit_running_threads(frozenset(self._adopted), _release)
            self._adopted.clear()

    def _may_be_guest(self, thread: threading.Thread) -> bool:
        """Whether it is a thread of the program's that Python started. (Others have no use for a Python mode.)"""
        is_other = thread.ident is not None and thread.ident != self._thread
        return is_other and not isinstance(thread, threading._DummyThread) and not thread.name.startswith(_OUR_THREADS)

    def _adopt(self) -> bool:
        """Make the calling thread, older than the session, a guest. False: not at this place in its program."""
        if _MODE.dispatch != self._dispatch:
            return True  # the session is over
        modes = _get_current_dispatch_mode_stack()
        if modes and _MODE not in modes:  # when it leaves its own mode, it would leave ours instead
            return False
        if not modes:
            _push_mode(_MODE)
            become_guest()
            _here.is_adopted = True
        if _here.is_adopted:
            self._adopted.add(threading.get_ident())
        return True

    def _replace(self, owner: Any, name: str) -> None:
        before = owner.__dict__[name]

        @functools.wraps(before)
        def ours(this: Any, *args: Any, **kwargs: Any) -> Any:
            with self._guest(getattr(this, "name", "")):
                return before(this, *args, **kwargs)

        self._replacements.replace(owner, name, ours)

    @contextlib.contextmanager
    def _guest(self, name: str) -> Iterator[None]:
        is_one = (
            _MODE.dispatch == self._dispatch
            and threading.get_ident() != self._thread
            and not name.startswith(_OUR_THREADS)
            and _MODE not in _get_current_dispatch_mode_stack()
        )
        if not is_one:
            yield
            return
        _push_mode(_MODE)
        try:
            with as_guest():
                yield
        finally:
            modes = _get_current_dispatch_mode_stack()
            if modes and modes[-1] is _MODE:
                _pop_mode()


def _release() -> bool:
    """The calling thread is no longer a guest. False: not at this place in its program."""
    modes = _get_current_dispatch_mode_stack()
    if _MODE.dispatch is not None or _MODE not in modes or not _here.is_adopted:
        return True  # it is the next session's, or has come to its end
    if modes[-1] is not _MODE:
        return False
    _pop_mode()
    cease_to_be_guest()
    _here.is_adopted = False
    return True
