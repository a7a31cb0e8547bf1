"""What a session stands on: the memory of the CPU, or of a device.

A `Device` opens a `Memory`: chunks, addresses, the store, and whatever else is special to it. The
session, the books and the executor know no more of a device than what is here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ooc.errors import SessionError
from ooc.forks import Forks
from ooc.guards import Guards
from ooc.units import format_nbytes, parse_nbytes
from vmm.addresses import AddressSpace, Reservation
from vmm.driver import Driver
from vmm.machine import meminfo_nbytes
from vmm.posix import PosixDriver
from vmm.store import FileStore, StoreSpeed
from vmm.torch_cpu import GRANULE_NBYTES, AllocatorTable, cpu_allocator
from vmm.transfers import Direction, TransferRecord, TransferStatistics

if TYPE_CHECKING:
    from ooc.books import Books, VariableRecord
    from ooc.op_watch import OpWatch
    from ooc.session import Session


class Space(Protocol):
    """Reservations and what they show: `vmm.addresses.AddressSpace`, or a device's `vmm.device_space.DeviceSpace`."""

    @property
    def driver(self) -> Driver:
        """What it maps with."""

    @property
    def num_remapped_chunks(self) -> int:
        """Places, so far, that were changed from one chunk to another."""

    def reserve(self, nbytes: int) -> Reservation:
        """Addresses for so many bytes, mapped to nothing."""

    def release(self, reservation: Reservation) -> None:
        """Give the addresses back."""

    def map(self, reservation: Reservation, runs: Sequence[tuple[int, int]]) -> int:
        """Let a reservation show these chunks."""

    def unmap(self, reservation: Reservation) -> None:
        """Let it show nothing."""

    def note_unused(self, reservation: Reservation, event: Any) -> None:
        """Nothing uses what it shows after `event`, until it is mapped again."""


class Store(Protocol):
    """Where evicted bytes live: `vmm.store.FileStore`, or a device's `vmm.device_store.DeviceStore`.

    Slots are the store's own kind; transfers have `done`, `order` (ops come after it) and `wait` (the host does).
    """

    @property
    def directory(self) -> Path | None:
        """Where its file is, if it has one."""

    def allocate(self, nbytes: int) -> Any:
        """A slot. Raises `StoreFull`."""

    def free(self, slot: Any) -> None:
        """Give a slot back; transfers may be under way."""

    def reserve(self, nbytes: int) -> None:
        """Make sure that so many more bytes can be allocated. Raises `StoreFull`."""

    def segments(self, segments: Sequence[tuple[int, int]]) -> Any:
        """Memory made ready for many transfers."""

    def write(self, slot: Any, segments: Any, after: Sequence[Any] = ()) -> Any:
        """Begin to copy memory to a slot."""

    def read(self, slot: Any, segments: Any, after: Sequence[Any] = ()) -> Any:
        """Begin to copy a slot to memory, after its last write and the transfers `after`."""

    def wait_all(self) -> None:
        """Let the host wait until no transfer is under way."""

    def statistics(self, direction: Direction) -> TransferStatistics:
        """Totals of one direction."""

    def take_records(self) -> tuple[TransferRecord, ...]:
        """Times of single transfers, where they are known."""

    def measure(self, buffer: tuple[int, int] | None = None) -> StoreSpeed:
        """Its rates, each way alone and both at once."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


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

    def make_forks(self, session: Session) -> Forks:
        """What a fork does to the session."""

    def watch(self, books: Books) -> OpWatch | None:
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

    def release_survivors(self, books: Books) -> None:
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

    def open(self, *, num_chunks: int, chunk_nbytes: int, store: str | Path | None) -> Memory:
        """Memory of so many chunks, evicting to the directory `store`. The caller closes it."""


class CpuMemory:
    """The CPU's memory: a memfd, a file, ops that run on the host."""

    is_host = True

    def __init__(self, *, num_chunks: int, chunk_nbytes: int, store: str | Path | None) -> None:
        self.store = FileStore(store)
        try:
            self.allocator = cpu_allocator()
            self.driver = PosixDriver(
                num_chunks,
                chunk_nbytes,
                max_chunks=meminfo_nbytes()["MemTotal"] // chunk_nbytes,
                arena=self.allocator.arena,
                occupied=tuple(self.allocator.survivors.items()),
            )
        except BaseException:
            self.store.close()
            raise
        self.space = AddressSpace(self.driver)

    def __repr__(self) -> str:
        return f"<CpuMemory {self.driver!r}>"

    @property
    def num_chunks(self) -> int:
        """Chunks of the pool."""
        return self.driver.num_chunks

    def make_guards(self, *, debug: bool) -> Guards:
        """Stray touches are served from the store's file."""
        return Guards(space=self.space, store=self.store, debug=debug)

    def make_forks(self, session: Session) -> Forks:
        """Children see the bytes as at the fork."""
        return Forks(session)

    def watch(self, books: Books) -> None:
        """Nobody: what the host has done is done."""

    def host_touches(self, record: VariableRecord) -> None:
        """Nothing is under way that it could touch too early."""

    def check_resize(self, num_chunks: int) -> None:
        """As `Memory.check_resize`."""
        if num_chunks > self.driver.max_chunks:
            most, wanted = (n * self.driver.chunk_nbytes for n in (self.driver.max_chunks, num_chunks))
            raise SessionError(
                f"a budget of {format_nbytes(wanted)}: this session's pool can have at most {format_nbytes(most)}, the "
                "memory of the machine, or as many addresses as there were when it was opened.\n"
                f"  Options: a budget of at most {format_nbytes(most)}; no limit on address space (ulimit -v)."
            )

    def resize(self, num_chunks: int) -> None:
        """As `Memory.resize`."""
        self.driver.resize(num_chunks)

    def release_survivors(self, books: Books) -> None:
        """Survivors become ordinary memory at their addresses."""
        from ooc.survivors import release_survivors

        release_survivors(books, self.driver, self.allocator)

    def close(self) -> None:
        """Give the file and the pool back. Idempotent."""
        self.store.close()
        self.driver.close()


class CpuDevice:
    """The CPU."""

    granule_nbytes = GRANULE_NBYTES
    threshold_nbytes = GRANULE_NBYTES

    def __repr__(self) -> str:
        return "<CpuDevice>"

    def open(self, *, num_chunks: int, chunk_nbytes: int, store: str | Path | None) -> CpuMemory:
        """As `Device.open`."""
        return CpuMemory(num_chunks=num_chunks, chunk_nbytes=chunk_nbytes, store=store)


def find_device(device: str | Device, *, host_budget: int | str | None = None) -> Device:
    """The device of this name, or the one given.

    Args:
        device: "cpu", "cuda", "cuda:1", or a `Device`.
        host_budget: Bytes of host memory to pin; for "cuda" alone.

    Raises:
        ValueError: There is no such device, or no such choice for it.
    """
    if isinstance(device, str) and (found := re.fullmatch(r"cuda(?::(\d+))?", device)):
        from ooc.cuda_device import CudaDevice

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
