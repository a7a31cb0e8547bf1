"""What a session stands on: the memory of the CPU, or of a device.

A `Device` opens a `Memory`: chunks, addresses, the store, and whatever else is special to it. Everything above
knows no more of a device than what is here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ooc.memory.protocols import Space, Store
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.op_watch import OpWatch
from vmm.driver import Driver
from vmm.torch_cpu import AllocatorTable


class Memory(Protocol):
    """The memory of one session."""

    @property
    def allocator(self) -> AllocatorTable:
        """torch's, as a table."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the pool."""

    @property
    def driver(self) -> Driver:
        """Chunks."""

    @property
    def space(self) -> Space:
        """Addresses."""

    @property
    def store(self) -> Store:
        """Where evicted bytes go."""

    @property
    def is_host(self) -> bool:
        """Whether ops run on the host.

        Then what the host has done is done, and its kernel serves a stray touch of what is away.
        """

    def make_guards(self, *, debug: bool) -> Any:
        """What the addresses of an away variable show."""

    def watch(self, manager: ResidencyManager) -> OpWatch | None:
        """Who is told of ops before they run, if somebody must be."""

    def host_touches(self, record: VariableRecord) -> None:
        """The host is about to touch a variable's memory by itself."""

    def check_resize(self, num_chunks: int) -> None:
        """Raise `SessionError` if the pool can never have so many chunks."""

    def resize(self, num_chunks: int) -> None:
        """Let the pool have so many chunks; none of those that go is mapped.

        Raises:
            MemoryFault: The memory is not there. Nothing has changed.
        """

    def detach_tensors(self, manager: ResidencyManager) -> None:
        """The session ends: what is alive goes on to live."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class Device(Protocol):
    """Opens memory for a session.

    Attributes:
        granule_nbytes: Chunks are multiples of this.
        threshold_nbytes: From which size on storages are variables, where the user does not say.
    """

    granule_nbytes: int
    threshold_nbytes: int

    def open(
        self, *, num_chunks: int, chunk_nbytes: int, store: str | Path | None, checkpoint: Callable[[], None]
    ) -> Memory:
        """Memory of so many chunks, evicting to the directory `store`. The caller closes it.

        `checkpoint` is called in the middle of what takes long; whatever it raises (a signal's handler may) leaves
        nothing taken.
        """
