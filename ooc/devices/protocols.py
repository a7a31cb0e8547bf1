"""The interface between a session and the device that it runs on.

A `Device` opens a `Memory`: chunks, addresses, the store, and what else differs between devices. The code above knows
no more of a device than what is here.
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
    """The memory of one session: chunks, addresses, and the store behind them."""

    @property
    def allocator(self) -> AllocatorTable:
        """The table of torch's allocator."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the pool."""

    @property
    def driver(self) -> Driver:
        """Makes and maps chunks."""

    @property
    def space(self) -> Space:
        """Reserves addresses for variables and maps them."""

    @property
    def store(self) -> Store:
        """Where evicted bytes are stored."""

    @property
    def is_host(self) -> bool:
        """Whether ops run on the host.

        Then an op is done when it returns, and the kernel serves a stray touch of an evicted variable.
        """

    def make_guards(self, *, debug: bool) -> Any:
        """Make the guards of evicted variables' addresses."""

    def watch(self, manager: ResidencyManager) -> OpWatch | None:
        """Make the watch that is told of each op before it runs; None where nothing must be told."""

    def host_touches(self, record: VariableRecord) -> None:
        """Called before the host touches a variable's memory outside any op."""

    def split_budget(self, num_budget_chunks: int) -> tuple[int, int]:
        """How many of a budget's chunks are the pool's, and how many are for blocks below the threshold.

        Raises:
            SessionError: The budget can never be so large, or so small.
        """

    def resize(self, num_chunks: int, num_small_chunks: int = 0) -> None:
        """Give memory back, or take more, so that there are so many chunks (see `split_budget`).

        No variable is resident in a chunk that goes. 0 chunks: all memory is given back, and what blocks below the
        threshold hold is stored until there is memory again; nothing may use them meanwhile (`forbids`).

        Raises:
            MemoryFault: The memory is not there, or a call failed. `num_chunks` says what there is now.
        """

    def forbids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an op with these arguments must not run after `resize(0)`, even if they name no variable."""

    def detach_tensors(self, manager: ResidencyManager) -> None:
        """Detach the tensors that are alive when the session ends."""

    def leave_tensors(self, manager: ResidencyManager) -> None:
        """Let what is alive stay where it is, as far as it can be read there when the session's memory is gone."""

    def abandon_tensors(self, manager: ResidencyManager) -> None:
        """Let go of what is alive and was not detached: its addresses are nobody else's until it is freed."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class Device(Protocol):
    """A device on which sessions can be opened.

    Attributes:
        granule_nbytes: Chunks are multiples of this.
        threshold_nbytes: From which size on storages are variables, where the user does not say.
    """

    granule_nbytes: int
    threshold_nbytes: int

    def open(
        self,
        *,
        num_chunks: int,
        chunk_nbytes: int,
        store: str | Path | None,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> Memory:
        """Open memory of so many chunks that evicts to the directory `store`. The caller closes it.

        `checkpoint` is called between slow calls. If it raises (a signal's handler may), nothing stays taken.
        """
