"""What the rest of vmm asks of a kind of memory: the `Driver` protocol.

A driver owns the physical memory of one pool, cut into chunks of one size, and a large range of
virtual addresses. Any chunk may be mapped at any number of addresses at once (an *alias*): that
is what makes paging free in steady state (DESIGN.md section 5). A driver has no opinions about
which chunk is free or what a variable is; `ChunkPool` and `AddressSpace` keep those books.

Drivers: `vmm.posix.PosixDriver` (a file in memory), `vmm.cuda.CudaDriver` (device memory; so far over a fake).
Every driver passes the same test suite.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from vmm.syscalls import MmapCall


class Access(enum.Enum):
    """What a touch of a mapped range does."""

    NONE = "none"
    """Faults."""
    READ_WRITE = "read_write"
    """Reaches the mapped chunks."""


class MemoryFault(RuntimeError):
    """A driver call failed. The message holds the call, its arguments, the cause and remedies."""


class MapCountExceeded(MemoryFault):
    """The process would need more memory mappings than the kernel allows (vm.max_map_count)."""


Still = Callable[[Sequence[MmapCall]], object]
"""Makes these calls, in order, while nobody can write to the range: see `vmm.faults.FaultTable.move`."""


@runtime_checkable
class Driver(Protocol):
    """Physical chunks, virtual ranges, and mappings from the second to the first.

    All calls are made by one thread at a time (the caller holds a lock). Addresses are plain
    integers; a range is whole chunks of one reservation. A call that raises has changed nothing:
    wrong arguments raise ValueError, all else MemoryFault. Nothing here waits for device work:
    callers order their maps and unmaps after the last use of what they replace.
    """

    @property
    def chunk_nbytes(self) -> int:
        """Size of one chunk: a multiple of the driver's granularity."""

    @property
    def num_chunks(self) -> int:
        """Chunks that exist. Their memory is committed: touching one cannot fail for lack of it."""

    @property
    def remap_ns(self) -> int | None:
        """What mapping one chunk elsewhere costs the host, in nanoseconds; None: the time of its bytes' page tables."""

    @property
    def view_address(self) -> int:
        """Start of the linear view, where chunk `c` is always visible at `c * chunk_nbytes`.

        Transfers go through it, so that they do not depend on how a variable is mapped.
        """

    @property
    def arena(self) -> tuple[int, int]:
        """`[start, stop)` of the addresses that `reserve` hands out."""

    def reserve(self, num_chunks: int) -> int:
        """A fresh range of addresses, mapped to nothing (a touch faults). Returns its address."""

    def reserve_shown(self, first_chunk: int, num_chunks: int) -> int | None:
        """A fresh range of addresses that shows these neighbouring chunks, where that takes less than `map`.

        Returns its address; None: there is no such range now, or never. What a touch of it finds between its release
        and its next reservation is not told: it may show chunks all the time.
        """

    def release(self, address: int, num_chunks: int) -> None:
        """Give a reserved range back, whatever is mapped there. The chunks are not affected."""

    def map(self, address: int, runs: Sequence[tuple[int, int]], *, still: Still | None = None) -> None:
        """Map runs `(first chunk, count)`, one after the other, at `address`, read-write.

        Replaces what was mapped there; other mappings of the chunks stay. One call for a whole
        contiguous range, so that a driver pays only once for what it does per range (access
        rights on CUDA, keeping the range from forked children on POSIX). The page tables of the
        range are made at once, so that the first touch costs nothing. `still`, if given, makes the calls.
        """

    def unmap(self, address: int, num_chunks: int) -> None:
        """Map nothing at the range: a touch faults. The range stays reserved."""

    def map_file(
        self,
        address: int,
        num_chunks: int,
        descriptor: int,
        offset: int,
        nbytes: int,
        *,
        still: Still | None = None,
    ) -> None:
        """Map a part of a file at the start of the range, read-write and shared; nothing behind it."""

    def note_file(self, address: int, num_chunks: int, descriptor: int, offset: int, nbytes: int) -> None:
        """Note that somebody else has done what `map_file` does."""

    def note_guards(self, num_added: int, *, cuts: bool = True) -> None:
        """Note that somebody else protects parts of mappings (more, or fewer than before)."""

    def protect(self, address: int, num_chunks: int, access: Access) -> None:
        """Change what a touch of a mapped range does, keeping the mapping."""

    def close(self) -> None:
        """Release everything. Idempotent."""
