"""Keeps slots of the store that forked processes may still read from being written or freed.

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


class _ForkReader:
    """A forked process that may still read what was in `offsets` of the file at its fork."""

    __slots__ = ("_pid_descriptor", "_pipe", "offsets")

    def __init__(self, pipe: int, offsets: tuple[int, ...]) -> None:
        self._pipe = pipe
        self._pid_descriptor: int | None = None
        self.offsets = offsets

    def is_gone(self) -> bool:
        """Whether the process and all descendants that have our pipe have ended. Never blocks."""
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
        """Close the descriptors that tell whether it is alive."""
        for descriptor in (self._pipe, self._pid_descriptor):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._pipe, self._pid_descriptor = -1, None


class ForkReaders:
    """The forked processes that may still read slots of the store, and which slots. One thread at a time.

    Attributes:
        held: How many of them may read a slot, by its offset.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers: list[_ForkReader] = []
        self.held: Counter[int] = Counter()
        self._retired: dict[int, Slot] = {}  # freed by us, still read by a forked process

    def __repr__(self) -> str:
        return f"<ForkReaders: {len(self._readers)}, {len(self.held)} slots held, {len(self._retired)} retired>"

    @property
    def num_held(self) -> int:
        """Slots that a forked process may read."""
        return len(self.held)

    @property
    def num_retired(self) -> int:
        """Slots that only forked processes use."""
        return len(self._retired)

    def hold(self, slot: Slot) -> bool:
        """Whether a forked process may read the slot, so that it must not be written."""
        return bool(self.held) and slot.offset in self.held

    def is_retired(self, slot: Slot) -> bool:
        """Whether the slot was freed, and is still there since a forked process may read it: nobody else uses it."""
        return self._retired.get(slot.offset) is slot

    def free(self, slot: Slot) -> None:
        """Free a slot: at once, or when the last forked process that may read it has ended."""
        if self.hold(slot):
            self._retired[slot.offset] = slot
        else:
            self._store.free(slot)

    def add(self, pipe: int, slots: Iterable[Slot]) -> None:
        """Note that a process was forked, or is about to be, that may read these slots.

        Args:
            pipe: Reading end of a pipe whose writing end only that process and its descendants keep.
                Ours from now on.
            slots: What it may read.
        """
        os.set_blocking(pipe, False)
        reader = _ForkReader(pipe, tuple(slot.offset for slot in slots))
        self._readers.append(reader)
        self.held.update(reader.offsets)

    def forget_gone(self) -> None:
        """Free the slots that only forked processes held which have ended since."""
        for reader in [r for r in self._readers if r.is_gone()]:
            reader.close()
            self._readers.remove(reader)
            for offset in reader.offsets:
                self.held[offset] -= 1
                if self.held[offset] == 0:
                    del self.held[offset]
                    slot = self._retired.pop(offset, None)
                    if slot is not None:
                        self._store.free(slot)

    def close(self) -> None:
        """Stop watching; the forked processes that are alive keep the file open. Idempotent."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()
        self.held.clear()
