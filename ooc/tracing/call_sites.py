"""Call sites of ops in the user's program: the module, and the line that called the op.

An op that runs on demand looks up the Python stack once (some microseconds); ops of a planned step do not come by
here, and have the call site that was noted when their step was recorded. A backward op has no line of its own:
autograd numbers its nodes as the forward ops make them, so the node that runs says whose gradient it is.

    blocks.0.attention (model.py:41)                an op called in a module's forward
    backward of blocks.0.attention (model.py:41)    what autograd does for it
    train.py:30                                     an op outside all modules: a loss, an optimizer's update
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from types import CodeType, FrameType
from typing import TypedDict

import torch
from torch import nn
from torch.autograd import graph as autograd_graph

import scheduler
import vmm

_CALL_IMPL = nn.Module._call_impl.__code__
_RUN_BACKWARD = autograd_graph._engine_run_backward.__code__

_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN_MODELS = os.path.join(_OWN, "models", "")
_LIBRARIES = tuple(
    os.path.join(path, "") for path in (_OWN, *(os.path.dirname(m.__file__ or "") for m in (torch, vmm, scheduler)))
)


class Place(TypedDict):
    """Of an op, as `OpRecord` has it."""

    where: str
    node: int


_MAX_CODES = 10_000
"""Code objects remembered from one recording to the next; a program that makes new ones all the time has more."""

_NO_NODE = 1 << 63
"""From here on numbers are of nodes that no op has made: those that accumulate gradients."""

_OTHER, _USERS, _CALL, _BACKWARD = range(4)


_OF_BACKWARD = "backward"


def is_of_backward(place: str) -> bool:
    """Whether a text of `CallSites` tells of what autograd does."""
    return place.startswith(_OF_BACKWARD)


def may_be_one_place(one: str, other: str, *, is_sure: bool = False) -> bool:
    """Whether two texts of `CallSites` may tell of one op's place; with `is_sure`, both forward or backward will do.

    Of which forward op an op is the backward one is not known after ops that a plan has replayed.
    """
    are_backward = is_of_backward(one), is_of_backward(other)
    return one == other or all(are_backward) or (is_sure and not any(are_backward))


class CallSites:
    """Finds ops' call sites, and remembers which forward op made which autograd node.

    One recording's worth: `clear` it when the next begins.
    """

    def __init__(self) -> None:
        # By the code's identity: what Dynamo makes has constants that cannot be hashed. It lives on here.
        self._kinds: dict[int, tuple[int, CodeType]] = _known_kinds()
        self._lines: dict[tuple[int, int], str] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self._forward: dict[int, str] = {}
        self._paths: dict[int, tuple[weakref.ref[nn.Module], dict[int, str]]] = {}
        self.node = 0
        """Of the op that was asked about last: `OpRecord.node`."""

    def __repr__(self) -> str:
        return f"<CallSites of {len(self._forward)} autograd nodes, {len(self._lines)} lines>"

    def clear(self) -> None:
        """Forget nodes and modules, which may be others from now on."""
        self._forward.clear()
        self._paths.clear()
        if len(self._kinds) > _MAX_CODES:
            self._kinds = _known_kinds()
            self._lines.clear()
            self._texts.clear()

    def native_parts(self) -> tuple[object, ...]:
        """What native/call_sites.h needs to find the same, faster."""
        return self.of_this_op, self._kind, self._forward, torch._C._current_autograd_node

    def of_this_op(self) -> str:
        """The call site of the op that is being dispatched on this thread; empty without user code on the stack."""
        line, inner, outer, is_backward = self._walk(sys._getframe(1))
        path = self._path(inner.f_locals["self"], outer.f_locals["self"]) if inner and outer else ""
        key = path, line
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = f"{path} ({line})" if path and line else path or line
        node = torch._C._current_autograd_node()
        self.node = 0
        if node is None:
            # The op's own node, if it has one, is the youngest; the first op to come by made it.
            self.node = torch._C._autograd._get_sequence_nr()
            self._forward.setdefault(self.node - 1, text)
        elif is_backward:
            number = node._sequence_nr()
            if number < _NO_NODE:
                self.node = -1 - number
            forward = self._forward.get(number)
            return f"{_OF_BACKWARD} of {forward}" if forward else f"{_OF_BACKWARD} ({text})" if text else _OF_BACKWARD
        return text

    def place_of_this_op(self) -> Place:
        """The call site and the node of the op that is being dispatched, as `OpRecord` has them."""
        return {"where": self.of_this_op(), "node": self.node}

    def _walk(self, frame: FrameType | None) -> tuple[str, FrameType | None, FrameType | None, bool]:
        """The innermost line of user code, the innermost and outermost modules' calls; whether autograd called."""
        line, is_backward = "", False
        inner: FrameType | None = None
        outer: FrameType | None = None
        kinds = self._kinds
        while frame is not None:
            code = frame.f_code
            known = kinds.get(id(code))
            kind = known[0] if known is not None else self._kind(code)
            if kind == _USERS:
                line = line or self._line(frame)
            elif kind == _CALL:
                inner, outer = inner or frame, frame
            elif kind == _BACKWARD and not line and inner is None:
                is_backward = True
            frame = frame.f_back
        return line, inner, outer, is_backward

    def _kind(self, code: CodeType) -> int:
        known = self._kinds.get(id(code))
        if known is None:
            known = self._kinds[id(code)] = _USERS if _is_the_users(code.co_filename) else _OTHER, code
        return known[0]

    def _line(self, frame: FrameType) -> str:
        key = id(frame.f_code), frame.f_lasti
        text = self._lines.get(key)
        if text is None:
            text = self._lines[key] = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        return text

    def _path(self, inner: nn.Module, outer: nn.Module) -> str:
        """The name of `inner` in the model, which is the outermost call so far that has it as a part."""
        for model, paths in self._paths.values():
            if id(inner) in paths and model() is not None:
                return paths[id(inner)] or type(inner).__name__
        paths = {}
        with contextlib.suppress(Exception):  # a module may be anything; call sites are for people to read
            paths = {id(module): name for name, module in outer.named_modules()}
        paths.setdefault(id(inner), "")
        self._paths[id(outer)] = weakref.ref(outer), paths
        return paths[id(inner)] or type(inner).__name__


def _known_kinds() -> dict[int, tuple[int, CodeType]]:
    return {id(code): (kind, code) for code, kind in ((_CALL_IMPL, _CALL), (_RUN_BACKWARD, _BACKWARD))}


def users_stacklevel() -> int:
    """The `stacklevel` for a warning about the user's code: the nearest frame that is not ours or torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("ooc", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _is_the_users(file_name: str) -> bool:
    """Whether this is a file of user code: neither torch's, nor ours, nor the standard library's."""
    if file_name.startswith(_OWN_MODELS):
        return True
    if file_name.startswith((*_LIBRARIES, "<frozen ")):
        return False
    return not file_name.startswith(_STANDARD_LIBRARY) or any(name in file_name for name in _PACKAGES)


def _short(file_name: str) -> str:
    """A file's path relative to the entry of `sys.path` that it is imported from."""
    starts = (os.path.join(os.path.abspath(entry), "") for entry in sys.path)
    longest = max((start for start in starts if file_name.startswith(start)), key=len, default="")
    return file_name[len(longest) :]
