"""How fast a store is: its rates, each way alone and both at once, measured by keeping it busy for a fixed time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import dataclass

from vmm.files import anonymous_memory
from vmm.transfers import Direction, Segments, TransferEngine

__all__ = ["PROBE_FILE_NBYTES", "StoreSpeed", "check_buffer", "measure"]

PROBE_FILE_NBYTES = 32 << 20
_PROBE_JOB_NBYTES = 1 << 20
_PROBE_PHASE_NS = 70_000_000
_PROBE_PHASE_NBYTES = 32 << 20
_PROBE_LONG_PHASE_NS = 400_000_000
"""A phase ends after the first time if so many bytes were moved by then, else when they are, or after the second. A
disk of 100 MB/s (a blkio control group's limit) seemed to write 31 MB/s and to read 145 in the first time: it works in
bursts. In 0.3 s both were 99 to 105; in 0.5 s a disk of 40 MB/s did 38 to 44."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpeed:
    """What a store was measured to do.

    Attributes:
        write_bytes_per_s: Writing alone.
        read_bytes_per_s: Reading alone.
        write_together_bytes_per_s: Writing while reading as fast as possible.
        read_together_bytes_per_s: Reading meanwhile.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    write_together_bytes_per_s: float
    read_together_bytes_per_s: float


def check_buffer(buffer: tuple[int, int] | None) -> None:
    """Raise ValueError for memory that is too small to measure with."""
    if buffer is not None and buffer[1] < _PROBE_JOB_NBYTES:
        raise ValueError(f"buffer of {buffer[1]} bytes: at least {_PROBE_JOB_NBYTES}")


def measure(
    engine: TransferEngine, descriptor: int, offset: int, buffer: tuple[int, int] | None, *, drop_cache: bool
) -> StoreSpeed:
    """Measure on `PROBE_FILE_NBYTES` of a file from `offset` on; as `vmm.store.FileStore.measure`."""
    with contextlib.ExitStack() as stack:
        address, nbytes = buffer or stack.enter_context(anonymous_memory(4 * _PROBE_JOB_NBYTES))
        _fill_with_noise(address, nbytes)
        jobs = [
            Segments([(address + start, _PROBE_JOB_NBYTES)])
            for start in range(0, nbytes - _PROBE_JOB_NBYTES + 1, _PROBE_JOB_NBYTES)
        ]
        probe = _Probe(engine, descriptor, offset, jobs, drop_cache=drop_cache)
        stack.callback(engine.wait_all)
        probe.run(("write",))  # fresh extents take longer to write the first time
        (write,) = probe.run(("write",))
        (read,) = probe.run(("read",))
        write_together, read_together = probe.run(("write", "read"))
    return StoreSpeed(
        write_bytes_per_s=write,
        read_bytes_per_s=read,
        write_together_bytes_per_s=write_together,
        read_together_bytes_per_s=read_together,
    )


class _Probe:
    """Keeps a store busy for a fixed time and counts what it did."""

    def __init__(
        self, engine: TransferEngine, descriptor: int, offset: int, jobs: Sequence[Segments], *, drop_cache: bool
    ) -> None:
        self._engine = engine
        self._descriptor = descriptor
        self._offset = offset
        self._jobs = jobs
        self._drop_cache = drop_cache
        self._num_submitted = 0

    def run(self, directions: tuple[Direction, ...]) -> list[float]:
        """Bytes per second of each direction, all of them busy at once."""
        before = [self._engine.statistics(direction).nbytes for direction in directions]
        start_ns = time.monotonic_ns()
        queues: list[list[int]] = [[] for _ in directions]
        while self._goes_on(time.monotonic_ns() - start_ns, directions, before):
            for direction, queue in zip(directions, queues, strict=True):
                while len(queue) < 8:
                    queue.append(self._submit(direction))
            for queue in queues:
                self._engine.wait(queue.pop(0))
        after = [self._engine.statistics(direction).nbytes for direction in directions]
        elapsed_s = (time.monotonic_ns() - start_ns) * 1e-9
        for queue in queues:
            for ticket in queue:
                self._engine.wait(ticket)
        return [(stop - start) / elapsed_s for start, stop in zip(before, after, strict=True)]

    def _goes_on(self, elapsed_ns: int, directions: tuple[Direction, ...], before: list[int]) -> bool:
        """Whether a phase has yet to move bytes in one of its directions, to tell its rate."""
        if elapsed_ns < _PROBE_PHASE_NS or elapsed_ns >= _PROBE_LONG_PHASE_NS:
            return elapsed_ns < _PROBE_PHASE_NS
        moved = (self._engine.statistics(way).nbytes - nbytes for way, nbytes in zip(directions, before, strict=True))
        return min(moved) < _PROBE_PHASE_NBYTES

    def _submit(self, direction: Direction) -> int:
        submit: Callable[..., int] = self._engine.submit_write if direction == "write" else self._engine.submit_read
        index = self._num_submitted
        self._num_submitted += 1
        place = self._offset + index * _PROBE_JOB_NBYTES % PROBE_FILE_NBYTES
        return submit(self._descriptor, place, self._jobs[index % len(self._jobs)], drop_cache=self._drop_cache)


def _fill_with_noise(address: int, nbytes: int) -> None:
    """Bytes that no device can compress; zeros measured twice the true rate on a virtual disk."""
    noise = os.urandom(_PROBE_JOB_NBYTES)
    for start in range(0, nbytes, _PROBE_JOB_NBYTES):
        memmove(address + start, noise, min(_PROBE_JOB_NBYTES, nbytes - start))
