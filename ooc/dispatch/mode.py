"""The `TorchDispatchMode` through which a session sees every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ooc.dispatch.extension import boxed_ops, leave_unnoticed


class SessionMode(TorchDispatchMode):
    """A dispatch mode whose `__torch_dispatch__` is the native dispatcher, set per instance.

    Args:
        dispatcher: A native `Dispatcher`; this mode is its only user.

    Attributes:
        sees_compiled_regions: Whether each compiled graph reaches the mode as one op (`ooc.interop.compilation`).
            Until then nothing is compiled under it: torch asks `ignore_compile_internals`.
        note_region: Told the name and size of each compiled graph after its first run.
    """

    sees_compiled_regions = False

    def __init__(self, dispatcher: Any) -> None:  # native, and given an attribute that its protocol does not have
        super().__init__()
        self._dispatcher = dispatcher
        leave_unnoticed(SessionMode)
        self.note_region: Callable[[str, int], None] = lambda _name, _nbytes: None
        dispatcher.__self__ = self
        self.__torch_dispatch__ = dispatcher

    def __enter__(self) -> Self:
        boxed = boxed_ops()
        if boxed is not None:
            boxed.attach(self._dispatcher)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        boxed = boxed_ops()
        if boxed is not None:
            boxed.detach(self._dispatcher)

    @property
    def is_on(self) -> bool:
        """Whether it is on this thread's stack of modes now."""
        return self in _get_current_dispatch_mode_stack()

    def leave_in_child(self) -> None:
        """Pop it from the stack of modes in a forked child; under another mode it remains and passes every op on."""
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self:
            self.__exit__(None, None, None)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether Dynamo may compile under this mode."""
        return cls.sees_compiled_regions


def is_tracing() -> bool:
    """Whether torch traces on this thread with tensors of its own: fake ones, proxies, functional ones.

    Such a mode is below all others, however late it was entered, and its tensors want it: an op on them goes on to it.
    """
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL))
