"""The `TorchDispatchMode` through which a session sees every op."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class SessionMode(TorchDispatchMode):
    """A dispatch mode whose `__torch_dispatch__` is the native dispatcher, set per instance.

    Args:
        dispatcher: A native `Dispatcher`; this mode is its only user.
    """

    def __init__(self, dispatcher: Any) -> None:  # native, and given an attribute that its protocol does not have
        super().__init__()
        dispatcher.__self__ = self
        self.__torch_dispatch__ = dispatcher

    @property
    def is_on(self) -> bool:
        """Whether it is on this thread's stack of modes now."""
        return self in _get_current_dispatch_mode_stack()

    def leave_in_child(self) -> None:
        """Pop it from the stack of modes in a forked child; under another mode it remains and passes every op on."""
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self:
            self.__exit__(None, None, None)
