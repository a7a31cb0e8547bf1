"""A fake CUDA device for tests: torch's CPU tensors live in the device memory of a fake CUDA driver.

Every op of torch runs on the host, at once. Before it runs, the fake is told of it as a kernel on the compute stream,
with what it reads and writes. The fake then completes exactly the work that streams and events order before the
kernel. Work that the executor forgot to wait for is still late, at random, and shows as wrong bytes and as a race in
the fake's report.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ooc.devices.cuda_memory import DeviceMemory
from ooc.devices.detach import abandon_tensors, become_ordinary
from ooc.memory.record import State, VariableRecord
from ooc.memory.residency import ResidencyManager
from vmm.device_streams import DeviceStreams
from vmm.device_timer import DeviceTimer
from vmm.testing.fake_cuda import FakeCuda
from vmm.torch_cpu import GRANULE_NBYTES, cpu_allocator

if TYPE_CHECKING:
    from ooc.replay.dispatcher import Dispatcher
    from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.op_watch import Range
from ooc.replay.plan_variables import PlanVariable


class FakeCudaDevice:
    """A `Device` that opens a fake driver for each session; the last one remains available to tests.

    Args:
        seed, eagerness: Determine the fake's order of execution.
        host_budget: Bytes of pinned host memory.
        staging: Bytes of it for transfers to and from the file.
        spare: Bytes of device memory beside the first budget's, for a larger one.
        uses_file: Whether there is a file behind the host memory.
        prepare: Called with each fake before it is used.

    Attributes:
        fake: The fake driver of the last session.
        memory: The memory of the last session.
    """

    granule_nbytes = GRANULE_NBYTES
    threshold_nbytes = GRANULE_NBYTES
    memory_type: type[FakeDeviceMemory]

    def __init__(
        self,
        *,
        seed: int = 0,
        eagerness: float = 0.3,
        host_budget: int = 64 << 20,
        staging: int = 1 << 20,
        spare: int = 0,
        uses_file: bool = False,
        prepare: Callable[[FakeCuda], object] = lambda _: None,
    ) -> None:
        self._seed = seed
        self._eagerness = eagerness
        self._host_budget_nbytes = host_budget
        self._staging_nbytes = staging
        self._spare_nbytes = spare
        self._uses_file = uses_file
        self._prepare = prepare
        self.fake: FakeCuda
        self.memory: FakeDeviceMemory

    def __repr__(self) -> str:
        return f"<FakeCudaDevice seed={self._seed}>"

    def open(
        self,
        *,
        num_chunks: int,
        chunk_nbytes: int,
        store: str | Path | None,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> FakeDeviceMemory:
        """As `Device.open`; the device has exactly the pool's memory, and what is spare."""
        allocator = cpu_allocator()
        self.fake = FakeCuda(
            total_nbytes=num_chunks * chunk_nbytes + self._spare_nbytes,
            granularity=GRANULE_NBYTES,
            seed=self._seed,
            eagerness=self._eagerness,
            arena=allocator.arena,
            occupied=allocator.detached,
        )
        self._prepare(self.fake)
        try:
            self.memory = self.memory_type(
                self.fake,
                num_chunks=num_chunks,
                chunk_nbytes=chunk_nbytes,
                host_budget_nbytes=self._host_budget_nbytes,
                file_directory=(store or _file_directory()) if self._uses_file else None,
                staging_nbytes=self._staging_nbytes,
                checkpoint=checkpoint,
            )
        except BaseException:
            self.fake.close()
            raise
        return self.memory


class FakeKernels:
    """The part of a memory over the fake that turns ops into kernels, on the program's streams."""

    fake: FakeCuda
    streams: DeviceStreams
    stream = 0
    """The stream on which the program's next op runs."""

    def watch(self, manager: ResidencyManager) -> FakeOps:
        """Make the watch that tells the fake of every op."""
        return FakeOps(self, manager)

    def new_stream(self) -> int:
        """Make another stream on which the program can run ops."""
        return self.streams.calls.create_stream()

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Run the ops of the block on this stream, as under `torch.cuda.stream`."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def kernel(self, name: str, *, reads: Any = (), writes: Any = ()) -> None:
        """Tell the fake of a kernel, so that it completes what must come before. The host runs the op right after."""
        self.fake.perform(self.streams.follow(), reads=reads, writes=writes, name=name)

    def host_touches(self, record: VariableRecord) -> None:
        """Wait for the stream, as the copy would by which a host reads device memory."""
        if record.state is State.RESIDENT:
            self.kernel("the host's look", reads=[(record.address, record.nbytes)])


class FakeDeviceMemory(FakeKernels, DeviceMemory):
    """The fake's device memory, at addresses that torch's CPU allocator may hand out."""

    def __init__(self, fake: FakeCuda, *, num_chunks: int, chunk_nbytes: int, **options: Any) -> None:
        self.fake = fake
        self.allocator = cpu_allocator()
        self._streams_of_program: list[int] = []
        arena_nbytes = max(1 << 36, 8 * num_chunks * chunk_nbytes)
        super().__init__(
            num_chunks=num_chunks,
            chunk_nbytes=chunk_nbytes,
            bindings=fake,
            current_stream=lambda: self.stream,
            arena_nbytes=arena_nbytes,
            **options,
        )

    def new_stream(self) -> int:
        """As `FakeKernels.new_stream`; freed with the memory."""
        self._streams_of_program.append(super().new_stream())
        return self._streams_of_program[-1]

    def detach_tensors(self, manager: ResidencyManager) -> None:
        """Detach what is still alive: it becomes ordinary memory at its address, as on the CPU."""
        super().detach_tensors(manager)
        kept = [(record.address, self._content(manager, record)) for record in manager.records.values()]
        self.store.close()
        self.driver.close()
        for address, content in kept:
            fill = functools.partial(_write, content)
            become_ordinary(self.allocator, address, len(content), fill)
        manager.records.clear()

    def abandon_tensors(self, manager: ResidencyManager) -> None:
        """As `Memory.abandon_tensors`."""
        abandon_tensors(manager, self.allocator)

    def close(self) -> None:
        """As `DeviceMemory.close`; also frees what the fake holds of this machine."""
        try:
            super().close()
            while self._streams_of_program:
                self.streams.calls.destroy_stream(self._streams_of_program.pop())
        finally:
            self.fake.close()  # the arena is of torch's allocator: whatever went wrong, nothing may remain mapped there

    def _content(self, manager: ResidencyManager, record: VariableRecord) -> bytes:
        if record.state is State.RESIDENT:
            parts = manager.segments(record.runs, record.nbytes)
        else:
            slot: Any = record.slot
            if slot.in_file is not None:
                return self.store.file_bytes(slot)[: record.nbytes]
            parts = list(self.store.host_segments(slot))
        # A slot may have room for more.
        return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in parts)[: record.nbytes]


FakeCudaDevice.memory_type = FakeDeviceMemory


class FakeOps:
    """Tells the fake of ops. Each allocation is a kernel of its own, since it may reuse what its op has freed."""

    device = torch.device("cpu")
    lets_native = False
    """The fake is told of each op."""

    def __init__(self, memory: FakeKernels, manager: ResidencyManager) -> None:
        self._memory = memory
        self._manager = manager
        self.timer = DeviceTimer(memory.streams)

    def begins(self, func: Any, operands: Iterable[VariableRecord], written: Container[int]) -> None:
        """As `OpWatch.begins`."""
        reads: list[tuple[int, int]] = []
        writes: list[tuple[int, int]] = []
        for record in operands:
            (writes if record.address in written else reads).append((record.address, record.nbytes))
        self._memory.kernel(str(func), reads=reads, writes=writes)

    def ended(self, begun: int | None, tell: Callable[[int], object] | None) -> None:
        """As `OpWatch.ended`. Does nothing: the host has run the op already, and its own time is the op's."""

    def settle(self) -> None:
        """As `OpWatch.settle`: the times are known."""

    def born(self, address: int, nbytes: int) -> None:
        """As `OpWatch.born`."""
        self._memory.kernel("an allocation", writes=[(address, nbytes)])

    def attach(self, dispatcher: Dispatcher) -> None:
        """As `OpWatch.attach`. Does nothing: the fake is told of each op, and torch knows nothing of its streams."""

    def calls_of(self, executable: ExecutablePlan) -> list[Any]:
        """As `OpWatch.calls_of`."""
        return [functools.partial(self._replay, executable, index) for index in range(executable.num_ops)]

    def _replay(self, executable: ExecutablePlan, index: int, /, *args: Any, **kwargs: Any) -> Any:
        name = str(executable.funcs[index])
        reads: list[tuple[int, int]] = []
        writes: list[tuple[int, int]] = []
        born: list[PlanVariable] = []
        for use in executable.trace.ops[index].uses:
            variable = executable.variables[use.variable]
            if not use.reads:
                born.append(variable)
            elif variable.record is not None and executable.variable_alive[variable.index]:
                (writes if use.writes else reads).append(_range_of(variable))
        self._memory.kernel(name, reads=reads, writes=writes)
        for variable in born:
            if variable.record is not None and variable.record.state is State.RESIDENT:
                self._memory.kernel(f"{name}, what it allocates", writes=[_range_of(variable)])
        func = executable.funcs[index]
        return getattr(func, "_op", func)(*args, **kwargs)

    def follow(self) -> None:
        """As `OpWatch.follow`."""
        self._memory.streams.follow()

    def stream(self) -> int:
        """As `OpWatch.stream`."""
        return self._memory.stream

    def on_stream(self, stream: int) -> contextlib.AbstractContextManager[None]:
        """As `OpWatch.on_stream`."""
        return self._memory.on_stream(stream)

    def runs_again(
        self, name: str, *, reads: Sequence[Range] = (), writes: Sequence[Range] = (), births: Sequence[Range] = ()
    ) -> None:
        """As `OpWatch.runs_again`."""
        self._memory.kernel(name, reads=reads, writes=writes)
        for born in births:
            self._memory.kernel(f"{name}, what it allocates", writes=[born])


def _write(content: bytes, address: int) -> None:
    ctypes.memmove(address, content, len(content))


def _range_of(variable: PlanVariable) -> tuple[int, int]:
    assert variable.record is not None
    return variable.record.address, variable.record.nbytes


def _file_directory() -> Path:
    from vmm.files import default_directory

    return default_directory()
