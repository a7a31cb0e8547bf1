"""The CPU as a session's device: its chunks are a memfd, and they are evicted to a file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ooc.devices.detach import abandon_tensors, detach_tensors, leave_tensors
from ooc.devices.protocols import Device
from ooc.errors import SessionError
from ooc.memory.guards import Guards
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.units import format_nbytes, parse_nbytes
from vmm.addresses import AddressSpace
from vmm.machine import meminfo_nbytes
from vmm.posix import PosixDriver
from vmm.store import FileStore
from vmm.torch_cpu import GRANULE_NBYTES, cpu_allocator


class CpuMemory:
    """The memory of a session on the CPU: chunks in a memfd, a store in a file, ops that run on the host."""

    is_host = True

    def __init__(
        self,
        *,
        num_chunks: int,
        chunk_nbytes: int,
        store: str | Path | None,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        with contextlib.ExitStack() as undo:
            self.store = FileStore(store)
            undo.callback(self.store.close)
            self.allocator = cpu_allocator()
            self.driver = PosixDriver(
                num_chunks,
                chunk_nbytes,
                max_chunks=meminfo_nbytes()["MemTotal"] // chunk_nbytes,
                arena=self.allocator.arena,
                occupied=tuple(self.allocator.detached.items()),
                checkpoint=checkpoint,
            )
            undo.callback(self.driver.close)
            self.space = AddressSpace(self.driver)
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<CpuMemory {self.driver!r}>"

    @property
    def num_chunks(self) -> int:
        """Chunks of the pool."""
        return self.driver.num_chunks

    def make_guards(self, *, debug: bool) -> Guards:
        """Make guards that serve stray touches from the store's file."""
        return Guards(space=self.space, store=self.store, debug=debug)

    def watch(self, manager: ResidencyManager) -> None:
        """None: an op on the host is done when it returns, so nothing must be told of it."""

    def host_touches(self, record: VariableRecord) -> None:
        """Does nothing: no work is under way that the host could overtake."""

    def split_budget(self, num_budget_chunks: int) -> tuple[int, int]:
        """As `Memory.split_budget`: all are the pool's."""
        if num_budget_chunks > self.driver.max_chunks:
            most, wanted = (n * self.driver.chunk_nbytes for n in (self.driver.max_chunks, num_budget_chunks))
            raise SessionError(
                f"a budget of {format_nbytes(wanted)}: this session's pool can have at most {format_nbytes(most)}, the "
                "memory of the machine, or as many addresses as there were when it was opened.\n"
                f"  Options: a budget of at most {format_nbytes(most)}; no limit on address space (ulimit -v)."
            )
        return num_budget_chunks, 0

    def resize(self, num_chunks: int, num_small_chunks: int = 0) -> None:  # noqa: ARG002 - as `Memory` has it
        """As `Memory.resize`."""
        self.space.vacate(num_chunks)
        self.driver.resize(num_chunks)

    def forbids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG002 - as `Memory` has it
        """As `Memory.forbids`: blocks below the threshold are torch's own, and stay."""
        return False

    def detach_tensors(self, manager: ResidencyManager) -> None:
        """Detach what is still alive: it becomes ordinary memory at its address."""
        detach_tensors(manager, self.driver, self.store, self.allocator)

    def leave_tensors(self, manager: ResidencyManager) -> None:
        """As `Memory.leave_tensors`."""
        leave_tensors(manager, self.driver)

    def abandon_tensors(self, manager: ResidencyManager) -> None:
        """As `Memory.abandon_tensors`."""
        abandon_tensors(manager, self.allocator)

    def close(self) -> None:
        """Free the file and the pool. Idempotent."""
        self.store.close()
        self.driver.close()


class CpuDevice:
    """The CPU as a `Device`."""

    granule_nbytes = GRANULE_NBYTES
    threshold_nbytes = GRANULE_NBYTES

    def __repr__(self) -> str:
        return "<CpuDevice>"

    def open(
        self,
        *,
        num_chunks: int,
        chunk_nbytes: int,
        store: str | Path | None,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> CpuMemory:
        """As `Device.open`."""
        return CpuMemory(num_chunks=num_chunks, chunk_nbytes=chunk_nbytes, store=store, checkpoint=checkpoint)


def find_device(device: str | Device, *, host_budget: int | str | None = None) -> Device:
    """Return the device of this name, or the one given.

    Args:
        device: "cpu", "cuda", "cuda:1", or a `Device`.
        host_budget: Bytes of host memory to pin; for "cuda" alone.

    Raises:
        ValueError: There is no such device, or no such choice for it.
    """
    if isinstance(device, str) and (found := re.fullmatch(r"cuda(?::(\d+))?", device)):
        from ooc.devices.cuda import CudaDevice

        host_nbytes = parse_nbytes(host_budget) if host_budget is not None else None
        return CudaDevice(index=int(found[1] or 0), host_budget_nbytes=host_nbytes)
    if host_budget is not None:
        raise ValueError(
            f"host_budget={host_budget!r}: only for device='cuda', whose evicted bytes go to host memory; this is "
            f"device={device!r}. Options: device='cuda'; no host_budget."
        )
    if not isinstance(device, str):
        return device
    if device == "cpu":
        return CpuDevice()
    raise ValueError(f"device={device!r}: there is no such device. Options: device='cpu'; device='cuda'.")
