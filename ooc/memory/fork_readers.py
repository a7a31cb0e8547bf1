"""Which slots of the store forked processes may still read, so that they are not written again.

A forked process lives as long as a pipe of ours is open in it or in its descendants, or its
process does (it may close files that it does not know).
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vmm.store import Slot

if TYPE_CHECKING:
    from ooc.memory.protocols import Store

PID = struct.Struct("=i")


class _Child:
    """A forked process that may still read what was in `offsets` of the file at its fork."""

    __slots__ = ("_pid_descriptor", "_pipe", "offsets")

    def __init__(self, pipe: int, offsets: tuple[int, ...]) -> None:
        self._pipe = pipe
        self._pid_descriptor: int | None = None
        self.offsets = offsets

    def is_gone(self) -> bool:
        """Whether neither it nor a descendant that has our pipe is alive. Never blocks."""
        while self._pipe >= 0:
            try:
                message = os.read(self._pipe, PID.size)
            except BlockingIOError:
                return False
            if message:
                with contextlib.suppress(OSError):  # gone already
                    self._pid_descriptor = os.pidfd_open(PID.unpack(message)[0])
            else:
                os.close(self._pipe)
                self._pipe = -1
        if self._pid_descriptor is None:
            return True
        return bool(select.select([self._pid_descriptor], [], [], 0)[0])

    def close(self) -> None:
        """Let go of what tells us whether it lives."""
        for descriptor in (self._pipe, self._pid_descriptor):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._pipe, self._pid_descriptor = -1, None


class ForkReaders:
    """Which slots of the store forked processes may still read. One thread at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._children: list[_Child] = []
        self._held: Counter[int] = Counter()  # by a slot's offset
        self._retired: dict[int, Slot] = {}  # freed by us, held by a child

    def __repr__(self) -> str:
        return f"<Children: {len(self._children)}, {len(self._held)} slots held, {len(self._retired)} retired>"

    @property
    def num_held(self) -> int:
        """Slots that a child may read."""
        return len(self._held)

    @property
    def num_retired(self) -> int:
        """Slots that only children use."""
        return len(self._retired)

    def hold(self, slot: Slot) -> bool:
        """Whether a child may read the slot, so that it must not be written."""
        return bool(self._held) and slot.offset in self._held

    def free(self, slot: Slot) -> None:
        """We use the slot no more. Its space is free when no child reads it any more."""
        if self.hold(slot):
            self._retired[slot.offset] = slot
        else:
            self._store.free(slot)

    def add(self, pipe: int, slots: Iterable[Slot]) -> None:
        """A process was forked (or is about to be) that may read these slots.

        Args:
            pipe: Reading end of a pipe whose writing end only that process and its descendants keep.
                Ours from now on.
            slots: What it may read.
        """
        os.set_blocking(pipe, False)
        child = _Child(pipe, tuple(slot.offset for slot in slots))
        self._children.append(child)
        self._held.update(child.offsets)

    def forget_gone(self) -> None:
        """Free what only processes held that have ended since."""
        for child in [c for c in self._children if c.is_gone()]:
            child.close()
            self._children.remove(child)
            for offset in child.offsets:
                self._held[offset] -= 1
                if self._held[offset] == 0:
                    del self._held[offset]
                    slot = self._retired.pop(offset, None)
                    if slot is not None:
                        self._store.free(slot)

    def close(self) -> None:
        """Watch no child any more; those alive keep the file. Idempotent."""
        for child in self._children:
            child.close()
        self._children.clear()
        self._held.clear()
