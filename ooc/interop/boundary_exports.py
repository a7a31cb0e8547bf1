"""Exports that end when the next step begins: bare pointers, and the addresses of arrays that are gone.

Nobody can say how long a number is in use. `tensor.data_ptr()` gives one, and so does `tensor.numpy().ctypes.data`,
whose array is gone at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ooc.memory.record import VariableRecord

_MANY = 256
"""So many may be held before it is looked which of them have been freed: a program without steps goes on for ever."""


class BoundaryExports:
    """One export each of the variables whose addresses are known outside.

    Args:
        ended: Where exports go that have ended (`ResidencyManager.ended_exports`).
        is_alive: Whether a record is still one of a variable.
    """

    def __init__(self, ended: deque[VariableRecord], is_alive: Callable[[VariableRecord], bool]) -> None:
        self._ended = ended
        self._is_alive = is_alive
        self._held: dict[int, tuple[VariableRecord]] = {}  # by serial
        self._many = _MANY

    def __repr__(self) -> str:
        return f"<BoundaryExports of {len(self._held)} variables>"

    def has(self, record: VariableRecord) -> bool:
        """Whether it is exported here already."""
        held = self._held.get(record.serial)
        return held is not None and held[0] is record

    def hold(self, record: VariableRecord) -> None:
        """Take an export over until the boundary. Takes no lock: finalizers call it, on any thread."""
        mine = (record,)
        if self._held.setdefault(record.serial, mine) is not mine:
            self._ended.append(record)  # one is enough

    def forget_freed(self) -> None:
        """End those of variables that were freed, where there are many. The session's lock is held."""
        if len(self._held) <= self._many:
            return
        for serial, (record,) in list(self._held.items()):
            if not self._is_alive(record):
                self._ended.append(record)
                del self._held[serial]
        self._many = max(_MANY, 2 * len(self._held))

    def end(self) -> None:
        """The boundary: end all of them."""
        while self._held:
            self._ended.append(self._held.popitem()[1][0])
