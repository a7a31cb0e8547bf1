"""Guest threads: Python threads beside the session's, whose ops must be seen. See ooc/DESIGN.md, "Guest threads".

Dispatch modes are per thread. So while a session is open, threads that Python starts enter a mode that gives their ops
to `ooc.dispatch.guest_ops`, and executors' threads, also those that were there before, do so for each task. A thread
that outlives its session keeps the mode: it passes everything on, to the next session if there is one.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ooc.dispatch.guest_ops import as_guest

Dispatch = Callable[[Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]], Any]

_OUR_THREADS = "ooc-"
"""Our own threads' names begin so. They run no ops."""


class _GuestMode(TorchDispatchMode):
    """Through which ops of guest threads go. One for all threads and sessions; with no session it passes everything on.

    It is pushed and popped without `__enter__`, which keeps notes for one thread only.
    """

    dispatch: Dispatch | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        dispatch = self.dispatch
        if dispatch is None:
            return func(*args, **(kwargs or {}))
        return dispatch(func, types, args, kwargs or {})


_MODE = _GuestMode()


class GuestThreads:
    """Lets threads of Python's enter the guest mode while a session is open.

    Args:
        dispatch: Runs a guest's op (`OpRunner.dispatch_guest`).
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._thread = threading.get_ident()
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __repr__(self) -> str:
        return f"<GuestThreads {'open' if self._replaced else 'closed'}>"

    def open(self) -> None:
        """Threads that start from now on are guests."""
        _MODE.dispatch = self._dispatch
        self._replace(threading.Thread, "_bootstrap_inner")
        self._replace(concurrent.futures.thread._WorkItem, "run")

    def close(self) -> None:
        """Put back what was replaced. Threads that are guests go on, and nobody looks at their ops. Idempotent."""
        for owner, name, ours, before in self._replaced:
            if owner.__dict__.get(name) is ours:  # else somebody has replaced ours, which from now on only passes on
                setattr(owner, name, before)
        self._replaced.clear()
        if _MODE.dispatch == self._dispatch:
            _MODE.dispatch = None

    def _replace(self, owner: Any, name: str) -> None:
        before = owner.__dict__[name]

        @functools.wraps(before)
        def ours(this: Any, *args: Any, **kwargs: Any) -> Any:
            with self._guest(getattr(this, "name", "")):
                return before(this, *args, **kwargs)

        self._replaced.append((owner, name, ours, before))
        setattr(owner, name, ours)

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
