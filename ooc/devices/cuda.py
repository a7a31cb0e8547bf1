"""A CUDA GPU as a session's device. It has met one: an H100 (benchmarks/README.md, "On a GPU")."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ooc.devices.cuda_memory import DeviceMemory
from ooc.devices.host_memory import host_memory_nbytes
from ooc.devices.torch_cuda import Refusals, TorchCuda, check_environment, replace_figures
from ooc.errors import DeviceUnavailable, SessionError
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.op_watch import Range
from ooc.units import format_exactly, format_nbytes
from vmm.cuda_calls import CudaCalls, CudaFault, load_bindings
from vmm.cuda_table import CudaTable, DriverPointers, cuda_table, driver_pointers
from vmm.device_store import DeviceSlot
from vmm.device_timer import DeviceTimer, OpTimer
from vmm.driver import MemoryFault
from vmm.files import default_directory
from vmm.machine import memory_room
from vmm.table import AllocatorTable

if TYPE_CHECKING:
    from ooc.replay.dispatcher import Dispatcher
    from ooc.replay.executable_plan import ExecutablePlan

_log = logging.getLogger(__name__)

_CHUNK_NBYTES = 2 << 20
"""The granularity of every device that is documented; the driver's own answer is checked against it."""
_SMALL_SHARE = 16
"""One part in so many of the budget is for blocks below the threshold. Not tuned."""
_STAGING_NBYTES = 64 << 20
_LEAST_HOST_NBYTES = 64 << 10
_HOST_SHARE = 2
"""By default 1/2 of the host's available memory is pinned: the program and the page cache need the rest."""


class CudaDevice:
    """A CUDA GPU as a `Device`.

    Args:
        index: Its number among the devices that CUDA sees.
        host_budget_nbytes: Host memory to pin; None: half of what is available, or of OOC_HOST_NBYTES.
        bindings: `cuda.bindings.driver` or its like; imported by default.
        torch_cuda: torch's CUDA half; replaced in tests.
        pointers: The driver's calls for the native table; the real ones by default.
    """

    granule_nbytes = _CHUNK_NBYTES
    threshold_nbytes = _CHUNK_NBYTES // 2
    memory_type: type[CudaMemory]

    def __init__(
        self,
        *,
        index: int = 0,
        host_budget_nbytes: int | None = None,
        bindings: Any = None,
        torch_cuda: Any = None,
        pointers: DriverPointers | None = None,
    ) -> None:
        self._index = index
        self._host_budget_nbytes = host_budget_nbytes
        self._bindings = bindings
        self._torch_cuda = torch_cuda if torch_cuda is not None else TorchCuda()
        self._pointers = pointers

    def __repr__(self) -> str:
        return f"<CudaDevice {self._index}>"

    def open(
        self,
        *,
        num_chunks: int,
        chunk_nbytes: int,
        store: str | Path | None,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> CudaMemory:
        """As `Device.open`. One chunk in sixteen is for small blocks, at least one.

        Raises:
            DeviceUnavailable: There is no such device, or torch cannot use it.
            Refused: A setting of torch's stands in the way.
            SessionError: CUDA was started before.
            vmm.driver.MemoryFault: The device's memory, or the memory to pin, is not there.
        """
        host_nbytes = self._host_nbytes()
        bindings, table = self.start()
        staging_nbytes = min(_STAGING_NBYTES, host_nbytes // 2)
        if shares_host_memory(CudaCalls(bindings), self._index):
            host_nbytes = self._without_host_tier(host_nbytes, staging_nbytes)
        return self.memory_type(
            table=table,
            num_chunks=num_chunks,
            chunk_nbytes=chunk_nbytes,
            num_small_chunks=max(num_chunks // _SMALL_SHARE, 1),
            device_index=self._index,
            bindings=bindings,
            current_stream=functools.partial(self._torch_cuda.current_stream, self._index),
            host_budget_nbytes=host_nbytes,
            file_directory=store or default_directory(),
            staging_nbytes=staging_nbytes,
            checkpoint=checkpoint,
        )

    def _host_nbytes(self) -> int:
        """Bytes of host memory to pin on a device with memory of its own."""
        host_nbytes = self._host_budget_nbytes
        if host_nbytes is None:
            host_nbytes = host_memory_nbytes(memory_room().available_nbytes) // _HOST_SHARE
        if host_nbytes < _LEAST_HOST_NBYTES:
            raise ValueError(
                f"host budget of {format_exactly(host_nbytes)}: at least {format_exactly(_LEAST_HOST_NBYTES)} are "
                "needed, through which what the host cannot hold passes on its way to the file"
            )
        return host_nbytes

    def _without_host_tier(self, host_nbytes: int, staging_nbytes: int) -> int:
        """Bytes of host memory to pin where device and host share it: only staging, unless the user asks for more."""
        if self._host_budget_nbytes is None:
            _log.info("device %d shares the host's memory: what is evicted goes to the file", self._index)
            return staging_nbytes
        _log.warning(
            "host_budget of %s: device %d shares the host's memory, so what is evicted there stays in the same memory. "
            "Options: no host_budget, so that it goes to the file.",
            format_exactly(host_nbytes),
            self._index,
        )
        return host_nbytes

    def start(self) -> tuple[Any, CudaTable]:
        """Start CUDA with the native table as torch's allocator. Returns the driver's bindings and the table.

        Raises:
            As `open`, but for memory.
        """
        bindings = self._find_driver()
        table = cuda_table()
        if not table.is_installed:
            table.install(self._pointers if self._pointers is not None else driver_pointers())
            self._torch_cuda.use_allocator(table.path)
            replace_figures(table)  # for as long as the process lives, as the allocator itself
            table.is_installed = True
        self._torch_cuda.start(self._index)
        return bindings, table

    def _find_driver(self) -> Any:
        """Return the driver's bindings, after checking everything that can be checked before CUDA starts."""
        try:
            bindings = self._bindings if self._bindings is not None else load_bindings()
            calls = CudaCalls(bindings)
            calls.call("cuInit", 0, what="starting CUDA")
            calls.call("cuDeviceGet", self._index, what=f"device {self._index}")
            version = int(calls.call("cuDriverGetVersion", what="the driver's version"))
        except CudaFault as fault:
            raise DeviceUnavailable(f"device='cuda': this machine cannot run it.\n{fault}") from fault
        check_environment(self._torch_cuda, driver_version=version, is_ours=cuda_table().is_installed)
        return bindings


def shares_host_memory(calls: CudaCalls, index: int) -> bool:
    """Whether the device shares the host's memory ([Note: unified memory] in `vmm.cuda_calls`)."""
    return calls.shares_host_memory(int(calls.call("cuDeviceGet", index, what=f"device {index}")))


class CudaMemory(DeviceMemory):
    """The memory of a session on a GPU: device memory behind torch's CUDA tensors."""

    allocator: AllocatorTable

    def __init__(self, *, table: CudaTable, num_chunks: int, num_small_chunks: int, **options: Any) -> None:
        if num_small_chunks >= num_chunks:
            raise ValueError(
                f"budget: {num_chunks} chunks, of which {num_small_chunks} are for small blocks; none is left.\n"
                "  Options: a larger budget."
            )
        super().__init__(num_chunks=num_chunks, num_small_chunks=num_small_chunks, **options)
        driver = self.driver
        self._small = driver.fixed_address
        self._stored_small: DeviceSlot | None = None
        """What small blocks hold, while their memory is given back."""
        self.device_index = options.get("device_index", 0)
        self._table = self.allocator = table
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(super().close)
            table.begin(driver.arena, (self._small, self._small + self.small_nbytes), self.device_index)
            table.reserved_nbytes = num_chunks * driver.chunk_nbytes
            refusals = Refusals()
            refusals.install()
            undo.callback(refusals.remove)
            # Else autograd runs each device's ops on a thread of its own, which our dispatch takes for a stranger's.
            threading = torch.autograd.set_multithreading_enabled(False)
            undo.callback(threading.__exit__, None, None, None)
            self._undo = undo.pop_all()

    @property
    def small_nbytes(self) -> int:
        """Bytes for blocks below the threshold."""
        return self.driver.num_fixed_chunks * self.driver.chunk_nbytes

    def split_budget(self, num_budget_chunks: int) -> tuple[int, int]:
        """As `Memory.split_budget`: small blocks get a sixteenth, or more if those that are alive need it."""
        super().split_budget(num_budget_chunks)
        chunk_nbytes = self.driver.chunk_nbytes
        num_used = -(-(self._table.small_used() - self._small) // chunk_nbytes)
        num_small = max(num_budget_chunks // _SMALL_SHARE, num_used, 1)
        if num_small >= num_budget_chunks:
            least = (num_small + 1) * chunk_nbytes
            raise SessionError(
                f"a budget of {format_nbytes(num_budget_chunks * chunk_nbytes)}: blocks below the threshold take "
                f"{format_nbytes(num_small * chunk_nbytes)}, and stay where they are.\n"
                f"  Options: a budget of at least {format_nbytes(least)}; session.yielded(), which stores them, too."
            )
        return num_budget_chunks - num_small, num_small

    def resize(self, num_chunks: int, num_small_chunks: int = 0) -> None:
        """As `Memory.resize`."""
        try:
            if num_chunks == 0:
                self._give_all_back()
            else:
                self._resize_both(num_chunks, num_small_chunks)
        finally:
            self._table.reserved_nbytes = self.num_chunks * self.driver.chunk_nbytes + self.small_nbytes

    def _resize_both(self, num_chunks: int, num_small: int) -> None:
        """Resize the pool and the part for small blocks; if the second of them fails, the first is undone."""
        self._restore_small(num_small)
        before = self.driver.num_fixed_chunks
        if num_small < before:  # what shrinks goes first, so that both together never exceed the larger budget
            self._resize_small(num_small)
            if self.driver.num_fixed_chunks > num_small:
                self._resize_small(before)
                raise MemoryFault(
                    f"blocks below the threshold need more than the {num_small} chunks that a budget of "
                    f"{num_chunks + num_small} chunks has for them: another thread has allocated some meanwhile.\n"
                    "  Options: once more; a larger budget."
                )
        try:
            super().resize(num_chunks)
        except MemoryFault:
            with contextlib.suppress(MemoryFault):
                self._resize_small(before)
            raise
        if num_small > self.driver.num_fixed_chunks:
            with contextlib.suppress(MemoryFault):  # then small blocks take chunks of the pool, as when theirs are full
                self._resize_small(num_small)

    def _resize_small(self, num_small: int) -> None:
        """Resize the part for small blocks."""
        chunk_nbytes, before = self.driver.chunk_nbytes, self.driver.num_fixed_chunks
        if num_small < before:
            stop = self._table.resize_small(self._small + num_small * chunk_nbytes)
            num_small = -(-(stop - self._small) // chunk_nbytes)  # on another thread some may have been allocated
            self._table.resize_small(self._small + num_small * chunk_nbytes)
        try:
            if num_small < before:
                self.wait_for_device()
            self.driver.resize_fixed(num_small)
        finally:
            self._table.resize_small(self._small + self.small_nbytes)

    def _give_all_back(self) -> None:
        """Store what small blocks hold, and give all memory of the device back."""
        num_small = self.driver.num_fixed_chunks
        self._table.close_small(True)
        try:
            self.wait_for_device()
            nbytes = self._table.small_used() - self._small
            if nbytes and self._stored_small is None:
                slot = self.store.allocate(nbytes)
                try:
                    self.store.write(slot, [(self._small, nbytes)]).wait()
                except BaseException:
                    self.store.free(slot)
                    raise
                self._stored_small = slot
            self.driver.resize_fixed(0)
            super().resize(0)
        except BaseException:
            self._restore_small(num_small)
            raise

    def _restore_small(self, num_small: int) -> None:
        """Take memory for small blocks again, and bring back what they held; they may be allocated again."""
        slot, chunk_nbytes = self._stored_small, self.driver.chunk_nbytes
        if slot is not None:
            self.driver.resize_fixed(max(num_small, -(-slot.nbytes // chunk_nbytes), self.driver.num_fixed_chunks))
            self.store.read(slot, [(self._small, slot.nbytes)]).wait()
            self._stored_small = None
            self.store.free(slot)
        elif self.driver.num_fixed_chunks == 0:
            self.driver.resize_fixed(num_small)
        self._table.resize_small(self._small + self.small_nbytes)
        self._table.close_small(False)

    def watch(self, manager: ResidencyManager) -> Any:  # noqa: ARG002 - as `Memory` has it
        """Make the watch that orders each op after the one before, on whatever stream it runs."""
        return CudaOps(self)

    def detach_tensors(self, manager: ResidencyManager) -> None:
        """Detach what is still alive: it stays at its address, with memory of its own, until it is freed.

        Raises:
            SessionError: The device has no room for all variables. Those that it names are lost.
        """
        super().detach_tensors(manager)
        lost = self._lost_small()
        records = list(manager.records.values())
        chunk_nbytes = self.driver.chunk_nbytes
        for record in records:
            num_chunks = record.reservation.num_chunks
            # Else it was freed a moment ago: it goes back with the other chunks.
            if record.state is State.RESIDENT and self._table.outlives(record.address, num_chunks * chunk_nbytes):
                self.driver.disown(record.address, num_chunks)
        if self._table.end() and not lost:
            self.driver.disown(self._small, self.driver.num_fixed_chunks)
        self.driver.give_chunks_back()
        missing = [r for r in records if r.state is not State.RESIDENT and not self._bring_back(r)]
        manager.records.clear()
        if missing or lost:
            total = sum(record.nbytes for record in missing) + lost
            raise SessionError(
                f"the session has ended, and {len(missing)} of its variables ({format_nbytes(total)}"
                f"{', all blocks below the threshold among them' if lost else ''}) do not fit into "
                "the device's memory: they are lost, and must not be touched.\n"
                "  Options: save or drop them before the session ends; move them to the CPU."
            )

    def abandon_tensors(self, manager: ResidencyManager) -> None:
        """As `Memory.abandon_tensors`: where anything is alive, the arena's addresses are kept for ever."""
        manager.records.clear()
        if self._table.end() + self._table.abandon():
            self.driver.keeps_addresses = True

    def close(self) -> None:
        """As `DeviceMemory.close`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._table.end()
        self._table.reserved_nbytes = 0
        self._undo.close()

    def _lost_small(self) -> int:
        """When the session ends while its memory is lent: bytes of small blocks for which there is no memory."""
        if self._stored_small is None:
            return 0
        nbytes = self._stored_small.nbytes
        try:
            self._restore_small(1)
        except (CudaFault, MemoryFault, OSError) as fault:
            _log.error("what small blocks held cannot be brought back: %s", fault)
            return nbytes
        return 0

    def _bring_back(self, record: VariableRecord) -> bool:
        address, num_chunks = record.address, record.reservation.num_chunks
        if record.state is State.DISCARDED:  # and could not be made again when its plan was left
            _log.error("a variable of %s was discarded, and is lost", format_exactly(record.nbytes))
            return False
        try:
            self.driver.attach_new(address, num_chunks)
        except CudaFault as fault:
            _log.error("a variable of %s cannot be brought back: %s", format_exactly(record.nbytes), fault)
            return False
        nbytes = num_chunks * self.driver.chunk_nbytes
        slot: Any = record.slot
        self.store.read(slot, [(address, record.nbytes)]).wait()
        if not self._table.outlives(address, nbytes):  # freed a moment ago
            self.driver.calls.call("cuMemUnmap", address, nbytes, what="a variable that was freed meanwhile")
        return True


CudaDevice.memory_type = CudaMemory


class CudaOps:
    """Orders ops that run on several streams: each op's stream waits for the stream of the op before."""

    def __init__(self, memory: CudaMemory) -> None:
        self.device = torch.device("cuda", memory.device_index)
        self.timer = DeviceTimer(memory.streams)
        self.lets_native = True
        self._streams = memory.streams
        self._op_timer = OpTimer(memory.streams)
        self._dispatcher: Dispatcher | None = None

    def begins(self, func: Any, operands: Iterable[VariableRecord], written: Container[int]) -> int | None:  # noqa: ARG002
        """As `OpWatch.begins`."""
        self._streams.follow()
        return self._op_timer.begin()

    def ended(self, begun: int | None, tell: Callable[[int], object] | None) -> None:
        """As `OpWatch.ended`."""
        self._op_timer.end(begun, tell)

    def settle(self) -> None:
        """As `OpWatch.settle`."""
        self._op_timer.settle()

    def born(self, address: int, nbytes: int) -> None:  # noqa: ARG002
        """As `OpWatch.born`. The op that allocates has been ordered, or the next op will be after it.

        Its stream may wait now for what was evicted to make room: that is no part of the op's time.
        """
        self._op_timer.begin_again()
        if self._dispatcher is not None:
            self._dispatcher.begin_op_again()

    def attach(self, dispatcher: Dispatcher) -> None:
        """As `OpWatch.attach`: ops that run natively are put in order, and call Python only on another stream."""
        self._dispatcher = dispatcher
        dispatcher.follow_stream(str(self.device), self._streams.num_moves_address, self.follow)

    def calls_of(self, executable: ExecutablePlan) -> list[Any]:
        """As `OpWatch.calls_of`: the plan's own, as on the host."""
        return executable.calls

    def follow(self) -> None:
        """As `OpWatch.follow`."""
        self._streams.follow()

    def stream(self) -> torch.cuda.Stream:
        """As `OpWatch.stream`. A library's workspace belongs to a stream: on another, a re-run would take a new one."""
        return torch.cuda.current_stream(self.device)

    def on_stream(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        """As `OpWatch.on_stream`."""
        found: contextlib.AbstractContextManager[Any] = torch.cuda.stream(stream)
        return found

    def runs_again(
        self,
        name: str,  # noqa: ARG002
        *,
        reads: Sequence[Range] = (),  # noqa: ARG002
        writes: Sequence[Range] = (),  # noqa: ARG002
        births: Sequence[Range] = (),  # noqa: ARG002
    ) -> None:
        """As `OpWatch.runs_again`."""
        self._streams.follow()
