"""A session's memory on a CUDA device: chunks of the driver, pinned host memory, streams and events.

Runs over whatever bindings it is given. What torch's ops need is added by `ooc.testing.fake_device` (CPU tensors
in the fake's memory); over a real device, by torch's CUDA allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ooc.errors import SessionError
from ooc.units import format_nbytes
from vmm.cuda import CudaDriver
from vmm.device_file import DeviceFile
from vmm.device_space import DeviceSpace
from vmm.device_store import DeviceStore
from vmm.device_streams import DeviceStreams
from vmm.driver import MemoryFault
from vmm.host_blocks import HostBlocks

if TYPE_CHECKING:
    from ooc.memory.record import Runs, VariableRecord
    from ooc.memory.residency import ResidencyManager


_data_ptr: Any = torch.Tensor.data_ptr
"""As torch has it: a session replaces it by one that exports."""


class DeviceGuards:
    """The guards of a device, which has none: an evicted variable's addresses show other bytes, in debug mode none.

    A fault on a device cannot be served, so most of these methods do nothing.
    """

    num_served = 0
    num_calls = 0

    def __init__(self, space: DeviceSpace, *, debug: bool) -> None:
        self._space = space
        self._debug = debug

    def __repr__(self) -> str:
        return f"<DeviceGuards{', debug' if self._debug else ''}>"

    def open(self) -> None:
        """Does nothing: there is no fault handler to install."""

    def close(self) -> None:
        """Does nothing: there is no fault handler to remove."""

    def become_inherited(self) -> None:
        """Does nothing: a forked child has no CUDA, and the driver's calls raise there."""

    def hide(self, record: VariableRecord) -> None:
        """Hide the addresses of a record that was evicted on demand; in debug mode alone."""
        if self._debug:
            self._space.unmap(record.reservation)

    def show_file(self, record: VariableRecord) -> None:
        """Refused: a device cannot see a file."""
        raise MemoryFault(f"{record!r}: a device's addresses cannot show a file.")

    def leave(self, record: VariableRecord, segments: Any) -> Any:  # noqa: ARG002 - as `Guards` has it
        """Refused: what was given out stays where it is, since no write to it can be made to wait."""
        raise MemoryFault(f"{record!r}: memory of a device that was given out stays where it is.")

    def arrive(self, record: VariableRecord, runs: Runs, segments: Any) -> Any:  # noqa: ARG002 - as `Guards` has it
        """Refused, as `leave`."""
        return self.leave(record, segments)

    def guard_away(self, records: Iterable[VariableRecord]) -> None:
        """Hide the addresses of records that are away or loading; in debug mode alone."""
        for record in records:
            self.hide(record)

    def check_room(self, num_records: int) -> None:
        """Does nothing: there is no limit."""

    def lift(self, record: VariableRecord) -> bool:  # noqa: ARG002 - as `Guards` has it
        """Does nothing: mapping makes a range accessible. False: no touch was served meanwhile."""
        return False

    def was_served(self, record: VariableRecord) -> bool:  # noqa: ARG002 - as `Guards` has it
        """False: no touch is ever served."""
        return False

    def serve(self, is_on: bool) -> None:
        """Does nothing: no touch is ever served."""

    def served_records(self) -> list[VariableRecord]:
        """The empty list: no touch is ever served."""
        return []


class DeviceMemory:
    """The memory of a session on a device: chunks, evicted to pinned host memory and from there to a file.

    Args:
        num_chunks, chunk_nbytes: The device's memory.
        num_small_chunks: How many of these are for small blocks and not the pool's.
        bindings: `cuda.bindings.driver` or its like.
        current_stream: Handle of the stream on which the program's next op runs.
        host_budget_nbytes: Bytes of host memory to pin.
        file_directory: Where bytes are evicted to that find no room there; None: nowhere.
        staging_nbytes: The part of the host budget through which transfers to and from the file pass.
        arena_nbytes: Addresses to hold; None: the driver's choice.
        checkpoint: Called between slow calls; a signal's handler may raise there.
    """

    is_host = False
    allocator: Any
    space_type: type[DeviceSpace] = DeviceSpace
    """The class that maps variables; measurements of what standing aliases save put another one here."""

    def __init__(
        self,
        *,
        num_chunks: int,
        chunk_nbytes: int,
        bindings: Any,
        current_stream: Callable[[], int],
        host_budget_nbytes: int,
        file_directory: str | Path | None,
        staging_nbytes: int,
        arena_nbytes: int | None = None,
        num_small_chunks: int = 0,
        device_index: int = 0,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        with contextlib.ExitStack() as undo:
            self.driver = CudaDriver(
                num_chunks - num_small_chunks,
                chunk_nbytes,
                num_fixed_chunks=num_small_chunks,
                bindings=bindings,
                arena_nbytes=arena_nbytes,
                device_index=device_index,
            )
            undo.callback(self.driver.close)
            checkpoint()
            self.streams = DeviceStreams(self.driver.calls, current=current_stream)
            undo.callback(self.streams.close)
            num_staging = staging_nbytes if file_directory is not None else 0
            blocks = HostBlocks(
                self.driver.calls, budget_nbytes=host_budget_nbytes - num_staging, block_nbytes=chunk_nbytes
            )
            undo.callback(blocks.close)
            checkpoint()
            file = None
            if file_directory is not None:
                file = DeviceFile(self.streams, file_directory, staging_nbytes=num_staging)
                undo.callback(file.close)
            self.store = DeviceStore(self.streams, blocks, file=file)
            self.store.measure((self.driver.view_address, self.num_chunks * chunk_nbytes))
            self.space = self.space_type(self.driver, self.streams)
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<DeviceMemory {self.driver!r}, {self.store!r}>"

    @property
    def num_chunks(self) -> int:
        """Chunks of the pool."""
        return self.driver.num_chunks

    def make_guards(self, *, debug: bool) -> DeviceGuards:
        """Make guards that serve nothing; in debug mode a touch of an evicted variable faults."""
        return DeviceGuards(self.space, debug=debug)

    def host_touches(self, record: VariableRecord) -> None:
        """Does nothing: pointers to device memory are for device code, which is ordered by streams."""

    def split_budget(self, num_budget_chunks: int) -> tuple[int, int]:
        """As `Memory.split_budget`: all are the pool's; a subclass may keep some for small blocks."""
        if num_budget_chunks > self.driver.max_chunks:
            most, wanted = (n * self.driver.chunk_nbytes for n in (self.driver.max_chunks, num_budget_chunks))
            raise SessionError(
                f"a budget of {format_nbytes(wanted)}: the device's memory is {format_nbytes(most)} in all.\n"
                f"  Options: a budget of at most {format_nbytes(most)}, less what others use."
            )
        return num_budget_chunks, 0

    def resize(self, num_chunks: int, num_small_chunks: int = 0) -> None:  # noqa: ARG002 - a subclass has some
        """As `Memory.resize`. What goes is the driver's when this returns: no mapping of ours shows it any more."""
        if num_chunks < self.num_chunks:
            self.wait_for_device()
            self.space.vacate(num_chunks)
        self.driver.resize(num_chunks)

    def wait_for_device(self) -> None:
        """Let the host see the end of all work on the device, that of other libraries' streams, too."""
        self.store.wait_all()
        self.streams.drain()

    def forbids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """As `Memory.forbids`. No op may use the device: libraries keep workspaces there that no op names."""
        leaves = tree_leaves((args, kwargs))
        return any(
            (isinstance(leaf, torch.Tensor) and (leaf.is_cuda or self.driver.holds(_address(leaf))))
            or (isinstance(leaf, torch.device) and leaf.type == "cuda")
            for leaf in leaves
        )

    def detach_tensors(self, manager: ResidencyManager) -> None:
        """As `Memory.detach_tensors`: waits for all device work; subclasses detach what is still alive."""
        self.store.wait_all()
        for record in list(manager.records.values()):
            manager.settle(record)

    def leave_tensors(self, manager: ResidencyManager) -> None:
        """As `Memory.leave_tensors`: nothing can be. The device's memory goes with the session."""

    def close(self) -> None:
        """Wait for the device, then free everything. Idempotent."""
        self.store.close()
        self.driver.close()
        self.streams.close()


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's bytes begin; 0 where it has none of its own."""
    try:
        return int(_data_ptr(tensor))
    except (RuntimeError, NotImplementedError):
        return 0
