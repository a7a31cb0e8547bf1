"""Attributes of other people's modules and classes that a session replaces while it is open."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

_ABSENT = object()
_OWN_PACKAGES = ("ooc", "torch")
"""Whose modules reach what is replaced through its owner, or are to have it as it was."""

_passed_by = set(sys.stdlib_module_names) - {"builtins", "__main__"}
"""Names of modules that are not looked at: the standard library's, which import none of it, and those of these packages
as they are seen. There are thousands, and each opening and closing passes by."""

_Names = tuple[tuple[str, str], ...]

_without: dict[_Names, dict[int, int]] = {}
"""By what is replaced and a module's namespace, its names when none was bound to it: it is not looked at again."""


class Replacements:
    """Replaces attributes, and puts back those that nobody has replaced since."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._pairs: list[tuple[Any, Any]] = []  # what was there, and ours
        self._names: _Names = ()  # of what is replaced: owners and attributes
        self._is_in_modules = False

    def __repr__(self) -> str:
        return "<Replacements>"

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Set an attribute until `put_back`."""
        before = getattr(owner, name)
        self._pairs.append((before, ours))
        self._names += ((getattr(owner, "__name__", ""), name),)
        self._undo.callback(_put_back, owner, name, ours, vars(owner).get(name, _ABSENT))
        setattr(owner, name, ours)

    def replace_in_modules(self) -> None:
        """Also replace what the program's modules have imported by name (`from torch import tensor`)."""
        self._is_in_modules = True
        _rebind(self._pairs, self._names)

    def put_back(self) -> None:
        """Undo all of it, last first, and in modules that have imported ours since. Idempotent."""
        self._undo.close()
        if self._is_in_modules:
            _rebind([(ours, before) for before, ours in self._pairs], self._names)
            self._is_in_modules = False
        self._pairs.clear()
        self._names = ()


def _put_back(owner: Any, name: str, ours: Any, before: Any) -> None:
    if vars(owner).get(name) != ours:
        return  # other code has replaced ours, which from now on only passes calls on
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _rebind(pairs: list[tuple[Any, Any]], replaced: _Names) -> None:
    """Let names of modules that are bound to the first of a pair be bound to the second."""
    wanted = {id(old): new for old, new in pairs}
    without = _without.setdefault(replaced, {})
    for module_name, module in list(sys.modules.items()):
        if module_name in _passed_by:
            continue
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or without.get(id(names)) == len(names) or _is_passed_by(module_name):
            continue
        found = [(name, wanted[id(value)]) for name, value in list(names.items()) if id(value) in wanted]
        names.update(found)
        if found:
            without.pop(id(names), None)
        else:
            without[id(names)] = len(names)


def _is_passed_by(module_name: str) -> bool:
    package = module_name.partition(".")[0]
    if package in _OWN_PACKAGES or package in _passed_by:
        _passed_by.add(module_name)
        return True
    return False
