"""Attributes of other people's modules and classes that a session replaces while it is open."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Replacements:
    """Replaces attributes, and puts back those that nobody has replaced since."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __repr__(self) -> str:
        return "<Replacements>"

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Set an attribute until `put_back`."""
        self._undo.callback(_put_back, owner, name, ours, getattr(owner, name))
        setattr(owner, name, ours)

    def put_back(self) -> None:
        """Undo all of it, last first. Idempotent."""
        self._undo.close()


def _put_back(owner: Any, name: str, ours: Any, before: Any) -> None:
    if getattr(owner, name) == ours:  # else other code has replaced ours, which from now on only passes calls on
        setattr(owner, name, before)
