"""Notes in a profile on which line of the user's program runs.

`torch.profiler` records functions by the line of their `def`, a script's top level without any, and does not see
operators (`x * 2`) at all. So while a recording is under way, each line of the user's own functions is noted as a span
of its own, which the reader takes as the line of the function around it (`with_lines`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch

from ooc.fragmentation.frames import is_users_file

PREFIX = "ooc: line "
MAX_NOTES = 1_000_000
"""A loop in Python that makes nothing would fill the recording: each note takes 0.2 KiB."""


class LineNotes:
    """Notes the lines that the calling thread executes, from `start()` to `stop()`.

    It takes the place of a trace function (`sys.settrace`); where there is one (a debugger, a coverage tool), it does
    nothing, and lines stay unknown.
    """

    def __init__(self) -> None:
        self._open: list[tuple[FrameType, Any]] = []
        self._is_users: dict[CodeType, bool] = {}
        self._num_notes = 0
        self._is_on = False

    def start(self) -> None:
        """Begin, with the lines that are under way already. To be called when the profiler runs."""
        if sys.gettrace() is not None:
            return
        self._is_on = True
        around: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            around.append(frame)
            frame = frame.f_back
        for frame in reversed(around):
            if self._is_one(frame.f_code):
                frame.f_trace = self._follow
                self._note(frame)
        sys.settrace(self._enter)

    def stop(self) -> None:
        """End all notes. To be called before the profiler stops, on the thread that began. Idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        if sys.gettrace() == self._enter:
            sys.settrace(None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_trace == self._follow:
                frame.f_trace = None
            frame = frame.f_back
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)

    def _is_one(self, code: CodeType) -> bool:
        known = self._is_users.get(code)
        if known is None:
            known = self._is_users[code] = is_users_file(code.co_filename, code.co_name)
        return known

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
        """A function is called, or a generator goes on: `sys.settrace`'s own callback."""
        return self._follow if self._is_one(frame.f_code) else None

    def _follow(self, frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        """A line begins, or the function ends: the callback of one frame."""
        if not self._is_on:
            return None
        if event in ("line", "return"):
            # An exception may have ended frames within without a word.
            while any(other is frame for other, _ in self._open):
                self._open.pop()[1].__exit__(None, None, None)
        if event == "line" and self._num_notes < MAX_NOTES:
            self._note(frame)
        return self._follow

    def _note(self, frame: FrameType) -> None:
        self._num_notes += 1
        note = torch._C._profiler._RecordFunctionFast(f"{PREFIX}{frame.f_lineno} of {frame.f_code.co_name}")
        note.__enter__()
        self._open.append((frame, note))


def with_lines(names: Iterable[str]) -> tuple[str, ...]:
    """A stack of a profiler's names, innermost first, with each noted line given to the function around it."""
    found: list[str] = []
    line = inside = ""
    for name in names:
        if name.startswith(PREFIX):
            if not line:
                line, _, inside = name.removeprefix(PREFIX).partition(" of ")
            continue
        file, opening, rest = name.rpartition("(")
        number, closing, function = rest.partition("): ")
        if line and opening and closing and number.isdecimal():
            if function.rpartition(".")[2] == inside:
                name = f"{file}({line}): {function}"
            line = ""
        found.append(name)
    return tuple(found)
