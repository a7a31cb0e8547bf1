"""The device on which ops are run again: its tensors, its order of work, and how bytes are compared there.

On the host an op is done when it returns. On a device the watch is told of each op before it runs, re-runs included:
an op that is run again follows all compute work so far, on the stream on which it ran first, and what uses its results
follows it in turn. So a re-run needs no wait of its own but those for transfers, which are the executor's.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ooc.memory.counters import Counters
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.op_watch import OpWatch, Range
from ooc.replay.recipes import Recipe, below_everything, storage_at

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU = torch.device("cpu")
_data_ptr: Any = torch.Tensor.data_ptr
"""As torch has it: a session replaces it by one that exports."""


class RerunDevice:
    """Where the ops of one session are run again.

    [Note: a re-run's addresses on a device] On the host a re-run allocates what the plan keeps at the variable's own
    address, where the program's tensors look. On a device it must not: torch's CUDAPluggableAllocator notes each
    address that it has handed out, once, and forgets it when the first of two storages there is freed; freeing the
    second raises in a destructor. So a re-run has addresses of its own, mapped to the very chunks of the variable
    (`Bindings._map_scratch`), and what it writes there shows at the variable's address. Both are used by ops of one
    chain, never within one op.

    Args:
        watch: The device's; None: the host.
        threshold_nbytes: From which size on allocations are variables.
    """

    def __init__(self, watch: OpWatch | None, *, threshold_nbytes: int) -> None:
        self._watch = watch
        self._piece_nbytes = max(threshold_nbytes // 2, 1)
        self.torch_device = _CPU if watch is None else watch.device
        self.has_own_addresses = watch is not None
        """Whether re-runs allocate at addresses of their own."""

    def __repr__(self) -> str:
        return f"<RerunDevice {self.torch_device}>"

    def storage_at(self, address: int, nbytes: int) -> torch.UntypedStorage:
        """A storage over memory of the device that somebody else owns."""
        return storage_at(address, nbytes, self.torch_device)

    def begin_noting(self) -> Any:
        """A recipe of the next op is about to be made, which may copy operands. The stream on which the op runs."""
        if self._watch is None:
            return None
        self._watch.follow()
        return self._watch.stream()

    @contextlib.contextmanager
    def running(
        self, recipe: Recipe, *, reads: Sequence[Range], writes: Sequence[Range], births: Sequence[Range]
    ) -> Iterator[None]:
        """Within the block the recipe is run, in order behind all ops so far."""
        if self._watch is None:
            yield
            return
        with self._watch.on_stream(recipe.stream):
            self._watch.runs_again(f"{recipe.func}, run again", reads=reads, writes=writes, births=births)
            yield

    @contextlib.contextmanager
    def timed(self, counters: Counters) -> Iterator[None]:
        """Within the block ops are run again: what that takes is counted, on a device once it has ended there."""
        if self._watch is None:
            started = time.monotonic_ns()
            try:
                yield
            finally:
                counters.recompute_ns += time.monotonic_ns() - started
            return
        self.count(counters)
        with self._watch.timer.timing():
            yield

    def count(self, counters: Counters) -> None:
        """Count what has ended on the device by now."""
        if self._watch is not None:
            counters.recompute_ns += self._watch.timer.take_ns()

    def copy_bytes(self, source: Range, target: Range) -> None:
        """Copy bytes within the device, behind all ops so far."""
        if self._watch is not None:
            self._watch.runs_again("a copy for a trial", reads=[source], writes=[target])
        with below_everything():
            self._bytes_at(*target).copy_(self._bytes_at(*source))

    def are_same_bytes(self, one: Range, other: Range) -> bool:
        """Whether two ranges of memory hold the same bytes. The host waits for the answer."""
        if self._watch is not None:
            self._watch.runs_again("a comparison", reads=[one, other])
        with below_everything():
            return self._are_equal(self._bytes_at(*one), self._bytes_at(*other))

    def are_same(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether two tensors of one geometry hold the same bits. The host waits for the answer.

        A tensor with gaps that is no small one is never the same on a device: it could only be compared in a copy.
        """
        one, other = _bits(first), _bits(second)
        if self._watch is not None:
            one, other = _once(one), _once(other)
        if self._watch is None or one.numel() <= self._piece_nbytes:
            return bool(torch.equal(one, other))
        if not _is_dense(one):
            return False
        flat = one.as_strided((one.numel(),), (1,)), other.as_strided((other.numel(),), (1,))
        return self._are_equal(*flat)

    def note_look(self, ranges: Sequence[Range]) -> None:
        """The results of ops are about to be compared."""
        if self._watch is not None:
            self._watch.runs_again("a comparison", reads=ranges)

    def checksum(self, manager: ResidencyManager, record: VariableRecord, nbytes: int) -> int:
        """A checksum of a resident record's first bytes, for debug mode: on a device they are copied to the host."""
        if self._watch is None:
            return manager.checksum(record, nbytes)
        place = record.address, nbytes
        self._watch.runs_again("a checksum", reads=[place])
        with below_everything():
            on_host = self._bytes_at(*place).cpu()
            return zlib.crc32((ctypes.c_char * nbytes).from_address(_data_ptr(on_host)))

    def _bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        found: torch.Tensor = empty.set_(self.storage_at(address, nbytes))
        return found

    def _are_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Compare flat tensors. On a device in pieces: a comparison allocates a byte for each element."""
        if self._watch is None:
            return bool(torch.equal(one, other))
        n = self._piece_nbytes
        return all(torch.equal(one[i : i + n], other[i : i + n]) for i in range(0, one.numel(), n))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each element that it repeats (`expand`) once."""
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    return tensor.as_strided([size if stride or not size else 1 for size, stride in pairs], tensor.stride())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])
