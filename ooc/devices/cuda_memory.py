"""A session's memory on a CUDA device: chunks of the driver, pinned host memory, streams and events.

Runs over whatever bindings it is given. What torch's ops need is added by `ooc.testing.fake_device` (CPU tensors
in the fake's memory); over a real device, by torch's CUDA allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ooc.errors import SessionError
from ooc.units import format_nbytes
from vmm.cuda import CudaDriver
from vmm.device_file import DeviceFile
from vmm.device_space import DeviceSpace
from vmm.device_store import DeviceStore
from vmm.device_streams import DeviceStreams
from vmm.host_blocks import HostBlocks

if TYPE_CHECKING:
    from ooc.memory.record import VariableRecord
    from ooc.memory.residency import ResidencyManager


class DeviceGuards:
    """What away variables show on a device: other variables' bytes, or in debug mode nothing.

    No fault of a device can be served, so there is nothing to guard, count or lift.
    """

    num_served = 0
    num_calls = 0

    def __init__(self, space: DeviceSpace, *, debug: bool) -> None:
        self._space = space
        self._debug = debug

    def __repr__(self) -> str:
        return f"<DeviceGuards{', debug' if self._debug else ''}>"

    def open(self) -> None:
        """Nothing to install."""

    def close(self) -> None:
        """Nothing to take away."""

    def become_inherited(self) -> None:
        """CUDA does not survive a fork: the driver's calls raise."""

    def hide(self, record: VariableRecord) -> None:
        """An on-demand record went away."""
        if self._debug:
            self._space.unmap(record.reservation)

    def guard_away(self, records: Iterable[VariableRecord]) -> None:
        """Records are away, or on their way in, while their addresses show other bytes."""
        for record in records:
            self.hide(record)

    def check_room(self, num_records: int) -> None:
        """There is no limit."""

    def lift(self, record: VariableRecord) -> bool:  # noqa: ARG002 - as `Guards` has it
        """Mapping makes a range accessible. Whether a touch was served meanwhile: never."""
        return False

    def was_served(self, record: VariableRecord) -> bool:  # noqa: ARG002 - as `Guards` has it
        """Never."""
        return False

    def serve(self, is_on: bool) -> None:
        """Nothing is ever served."""

    def served_records(self) -> list[VariableRecord]:
        """None."""
        return []


class DeviceMemory:
    """Chunks on a device, evicted to pinned host memory and from there to a file.

    Args:
        num_chunks, chunk_nbytes: The device's memory.
        num_small_chunks: Of these, the last ones of the view, which are not the pool's.
        bindings: `cuda.bindings.driver` or its like.
        current_stream: Handle of the stream on which the program's next op runs.
        host_budget_nbytes: Bytes of host memory to pin.
        file_directory: Where evicted bytes go that find no room there; None: nowhere.
        staging_nbytes: Of the host budget, what transfers to and from the file pass through.
        arena_nbytes: Addresses to hold; None: the driver's choice.
        checkpoint: Called between what takes long: a signal's handler may raise there.
    """

    is_host = False
    allocator: Any
    space_type: type[DeviceSpace] = DeviceSpace
    """What maps variables; another one in measurements of what standing aliases save."""

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
        self.num_chunks = num_chunks - num_small_chunks
        with contextlib.ExitStack() as undo:
            self.driver = CudaDriver(
                num_chunks, chunk_nbytes, bindings=bindings, arena_nbytes=arena_nbytes, device_index=device_index
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
            self.store.measure((self.driver.view_address, num_chunks * chunk_nbytes))
            self.space = self.space_type(self.driver, self.streams)
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<DeviceMemory {self.driver!r}, {self.store!r}>"

    def make_guards(self, *, debug: bool) -> DeviceGuards:
        """Nothing is served; in debug mode a touch of what is away faults."""
        return DeviceGuards(self.space, debug=debug)

    def host_touches(self, record: VariableRecord) -> None:
        """Pointers to device memory are for device code, which orders itself by streams."""

    def check_resize(self, num_chunks: int) -> None:
        """Refused: so far a device's pool keeps its size."""
        raise SessionError(
            f"a budget of {format_nbytes(num_chunks * self.driver.chunk_nbytes)} from now on: that of a session on a "
            "GPU is fixed so far.\n  Options: close the session and open another."
        )

    def resize(self, num_chunks: int) -> None:
        """As `check_resize`."""
        self.check_resize(num_chunks)

    def detach_tensors(self, manager: ResidencyManager) -> None:
        """Let all device work end; what lives on is the subclass's business."""
        self.store.wait_all()
        for record in list(manager.records.values()):
            manager.settle(record)

    def close(self) -> None:
        """Wait for the device, then give everything back. Idempotent."""
        self.store.close()
        self.driver.close()
        self.streams.close()
