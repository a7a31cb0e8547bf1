"""Turns `torch.compile` off while a session is open: everything runs eagerly, and the user is told once.

Dynamo compiles nothing under a dispatch mode, but it would try frame by frame, our own files among them. So while a
session is open `torch.compile` returns its argument, as torch's own `disable=True` does, and what was compiled before
runs eagerly, by torch's stance "force_eager".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

__all__ = ["Uncompiled"]


class Uncompiled:
    """Replaces `torch.compile`, and sets the stance for code that was compiled before.

    Args:
        announce: Called on each use; warns on the first.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce = announce
        self._undo = ExitStack()

    def __repr__(self) -> str:
        return f"<Uncompiled, announced by {self._announce!r}>"

    def install(self) -> None:
        """Turn compilation off."""
        self._replace(torch, "compile", self._compile)
        # Without Dynamo imported, nothing was compiled before; importing it takes a second.
        eval_frame = sys.modules.get("torch._dynamo.eval_frame")
        if eval_frame is None:
            return
        try:
            stance = torch.compiler.set_stance("force_eager")
        except RuntimeError:  # the session is opened by compiled code: torch refuses a stance there
            return
        self._undo.callback(_give_back, stance, eval_frame)
        if hasattr(eval_frame, "_callback_from_stance"):  # torch's own; without it only the announcement is missing
            inner = eval_frame._callback_from_stance
            self._replace(eval_frame, "_callback_from_stance", lambda callback: self._before_compiled(inner, callback))

    def remove(self) -> None:
        """Turn compilation on again. Idempotent."""
        self._undo.close()

    def _compile(self, model: Any = None, **_: Any) -> Any:
        """Stands for `torch.compile`: returns `model`, or without one a decorator that returns its argument."""
        self._announce()
        return model if model is not None else _itself

    def _before_compiled(self, inner: Callable[[Any], Any], callback: Any) -> Any:
        """Called when torch asks which compiler to use: with one for compiled code, with none where it is disabled."""
        if callback is not None and callback is not False:
            self._announce()
        return inner(callback)

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        before = getattr(owner, name)
        self._undo.callback(_put_back, owner, name, ours, before)
        setattr(owner, name, ours)


def _itself(model: Any) -> Any:
    return model


def _put_back(owner: Any, name: str, ours: Any, before: Any) -> None:
    if getattr(owner, name) == ours:  # else other code has replaced ours, which from now on only passes calls on
        setattr(owner, name, before)


def _give_back(stance: Any, eval_frame: Any) -> None:
    if getattr(eval_frame, "_stance", stance.stance) is stance.stance:  # else the user has set another since
        with suppress(RuntimeError):  # the session is closed by compiled code: as when it was opened
            stance.__exit__(None, None, None)
