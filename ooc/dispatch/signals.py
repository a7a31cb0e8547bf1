"""Defers signal handlers while a session changes its state: Ctrl-C arrives between ops, never inside one.

Python runs a signal's handler on the main thread between any two bytecodes. A `KeyboardInterrupt`
raised inside the residency manager or the executor would leave them half done. So while a session
is open, every Python handler is reached through a gate: inside a critical section (an op under the
dispatch mode, an allocation, a step boundary) the signal is noted, and native code raises it again
as soon as the section ends. Then the handler runs in the user's code, as it would without a
session. A section that waits for a disk is not interrupted, but SIGQUIT and SIGTERM, which have no
Python handler by default, still end the process. Planning, which can take seconds, is abandoned on
a Ctrl-C: it has changed nothing (`stoppable`).

Critical sections keep out `RecursionError` and the garbage collector, whose finalizers may use tensors, too
(native/undisturbed.h). While garbage is collected handlers wait, too: Python swallows what they raise in a finalizer.

Not covered: exceptions set from other threads (`PyThreadState_SetAsyncExc`), and modules that took
a reference to `signal.signal` before the session was opened and install a handler during it.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

from ooc.replay.dispatcher import Dispatcher
from ooc.replay.stoppable import Stop, Stopped

PythonHandler = Callable[[int, FrameType | None], Any]
Handler = PythonHandler | int | signal.Handlers | None


class HeldSignals:
    """Defers Python's signal handlers while a session opens or closes, when no dispatcher counts critical sections.

    A signal is noted, and its handler runs at the next `checkpoint`, or after `release`. Off the main thread, where
    handlers never run, it does nothing.

    Attributes:
        handlers: The deferred Python handlers, by signal.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, PythonHandler] = {}
        self._waiting: list[int] = []

    def __repr__(self) -> str:
        return f"<HeldSignals {len(self.handlers)} held, {len(self._waiting)} waiting>"

    def hold(self) -> None:
        """Defer handlers from now on. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._arrived:
                self.handlers[number] = handler
                signal.signal(number, self._arrived)

    def checkpoint(self) -> None:
        """Run the handlers of signals that have arrived. Called where they may raise: everything is undone then."""
        while self._waiting:
            number = self._waiting.pop(0)
            self.handlers[number](number, sys._getframe())

    def release(self) -> None:
        """Restore the handlers that no one has replaced meanwhile, and raise noted signals again. Idempotent."""
        handlers, self.handlers = self.handlers, {}
        for number, handler in handlers.items():
            if signal.getsignal(number) == self._arrived:
                signal.signal(number, handler)
        waiting, self._waiting = self._waiting, []
        for number in waiting:
            signal.raise_signal(number)

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        self._waiting.append(number)


class CriticalLock:
    """The session's lock. While the main thread holds it, signal handlers are deferred; while any does, finalizers."""

    __slots__ = ("_acquire", "_enter_section", "_exit_section", "_hold_garbage", "_release", "acquire", "release")

    def __init__(self, dispatcher: Dispatcher) -> None:
        lock = dispatcher.new_lock()
        self._acquire = self.acquire = lock.acquire
        self._release = self.release = lock.release
        self._enter_section = dispatcher.enter_section
        self._exit_section = dispatcher.exit_section
        self._hold_garbage = dispatcher.hold_garbage

    def __enter__(self) -> None:
        has_section = self._enter_section()  # first, so that no handler runs with the lock held
        self._acquire()
        if not has_section:
            self._hold_garbage()

    def __exit__(self, *_: object) -> None:
        self._release()
        self._exit_section()


class SignalGate:
    """The gate between signals and their Python handlers, from `install` to `remove`.

    `signal.signal` and `signal.getsignal` are replaced meanwhile, so that handlers installed during
    the session go through the gate, too, and callers see the user's handler, not the gate.

    Args:
        dispatcher: The native dispatcher, which counts critical sections.
        is_open: Whether the session is still open.
        closing: Functions that must not be interrupted at their first bytecode, since they are how
            the session is closed.
    """

    def __init__(
        self, dispatcher: Dispatcher, *, is_open: Callable[[], bool], closing: tuple[CodeType, ...] = ()
    ) -> None:
        self._dispatcher = dispatcher
        self._is_open = is_open
        self._closing = closing
        self._handlers: dict[int, PythonHandler] = {}
        self._is_installed = False
        # As typeshed has them they could not be put back; whoever replaced them before us had types of its own.
        self._set: Callable[..., Any] = signal.signal
        self._get: Callable[..., Any] = signal.getsignal

    def __repr__(self) -> str:
        return f"<SignalGate {'installed' if self._is_installed else 'removed'}, {len(self._handlers)} handlers>"

    def install(self, handlers: Mapping[int, PythonHandler]) -> None:
        """Put the gate in front of these handlers, which were deferred so far (`HeldSignals`).

        On another thread than the main one it does nothing. Python handlers never run on such a thread, so its sections
        need no protection.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._set, self._get = signal.signal, signal.getsignal
        self._is_installed = True
        gc.callbacks.insert(0, self._dispatcher.collection_begins)
        gc.callbacks.append(self._dispatcher.collection_ends)
        for number, handler in handlers.items():
            self._handlers[number] = handler
            self._set(number, self._arrived)
        signal.signal = self._signal
        signal.getsignal = self._getsignal

    def remove(self) -> None:
        """Remove the gate; handlers that were installed meanwhile become the process's own. Idempotent."""
        if not self._is_installed:
            return
        self._is_installed = False
        for callback in self._dispatcher.collection_begins, self._dispatcher.collection_ends:
            if callback in gc.callbacks:  # a test may have put the list back
                gc.callbacks.remove(callback)
        self._dispatcher.collection_ends("stop", {})  # a finalizer may have called
        # Code that has replaced these functions after us calls ours, which from now on only pass on.
        if signal.signal == self._signal:
            signal.signal = self._set
        if signal.getsignal == self._getsignal:
            signal.getsignal = self._get
        with contextlib.suppress(ValueError):  # not on the main thread: the gate remains, and lets all pass
            for number, handler in list(self._handlers.items()):
                if self._get(number) == self._arrived:
                    self._set(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        """The gate itself: the handler that the interpreter calls for every signal."""
        is_closing = frame is not None and any(frame.f_code is code for code in self._closing) and self._is_open()
        if self._dispatcher.postpone(number, is_closing):
            if number == signal.SIGINT and Stop.is_allowed:
                Stop.is_allowed = False  # first: what is raised may arrive in the `finally` that would do it
                raise Stopped
            return
        self._handlers[number](number, frame)

    def _signal(self, signalnum: int, handler: Handler) -> Handler:
        """`signal.signal` while the session is open."""
        if not self._is_installed:
            passed_on: Handler = self._set(signalnum, handler)
            return passed_on
        if not callable(handler) or isinstance(handler, signal.Handlers):
            previous: Handler = self._set(signalnum, handler)
            return self._handlers.pop(signalnum, previous) if previous == self._arrived else previous
        before = self._handlers.get(signalnum)
        previous = self._set(signalnum, self._arrived)
        self._handlers[signalnum] = handler
        return before if previous == self._arrived else previous

    def _getsignal(self, signalnum: int) -> Handler:
        """`signal.getsignal` while the session is open."""
        handler: Handler = self._get(signalnum)
        return self._handlers.get(signalnum, handler) if handler == self._arrived else handler
