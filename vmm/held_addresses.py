"""The addresses that a POSIX driver holds: one range for the view of its pool and, after it, for its arena."""

from __future__ import annotations

from dataclasses import dataclass

from vmm.driver import MemoryFault
from vmm.pool_file import HUGE_PAGE_NBYTES, NOTHING, PROT_NONE
from vmm.sizes import format_nbytes
from vmm.syscalls import Syscalls

__all__ = ["HeldAddresses", "hold_addresses"]

_MAX_ARENA_NBYTES = 16 << 40
_ALIGNMENT = HUGE_PAGE_NBYTES  # so that a reservation can be backed by a huge page where the kernel has them


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAddresses:
    """A range that is mapped to nothing, and what lies where in it. Whoever asked for it unmaps it.

    Attributes:
        address, nbytes: All of it.
        view_address: Where the view begins; it has room for `max_chunks` chunks.
        max_chunks: As many as were asked for, or only those that there are, where addresses are few.
        arena_start, arena_stop: `[start, stop)` of the arena: whole chunks, here or in the arena that was lent.
    """

    address: int
    nbytes: int
    view_address: int
    max_chunks: int
    arena_start: int
    arena_stop: int


def hold_addresses(
    num_chunks: int,
    max_chunks: int,
    chunk_nbytes: int,
    *,
    arena_nbytes: int | None,
    lent_arena: tuple[int, int] | None,
    syscalls: Syscalls,
) -> HeldAddresses:
    """Take addresses from the machine: as many as it gives, where `arena_nbytes` does not say how many.

    Args:
        num_chunks, max_chunks: Chunks that there are, and as many as there may ever be.
        chunk_nbytes: Size of one.
        arena_nbytes: As `vmm.posix.PosixDriver`.
        lent_arena: The arena `[start, stop)`, where it is somebody else's.
        syscalls: What makes the system calls.

    Raises:
        ValueError: `arena_nbytes` is less than one chunk.
        MemoryFault: The machine gives too few. Nothing is held.
    """
    smallest = num_chunks * chunk_nbytes
    view_nbytes = _round_up(max_chunks * chunk_nbytes)
    if lent_arena is not None:
        arena_nbytes = chunk_nbytes  # ours is not used
    wanted = arena_nbytes if arena_nbytes is not None else max(_MAX_ARENA_NBYTES, smallest)
    if wanted < chunk_nbytes:
        raise ValueError(f"arena_nbytes={arena_nbytes}: less than one chunk, {chunk_nbytes} bytes")
    while True:
        nbytes = view_nbytes + wanted + _ALIGNMENT
        try:
            address = syscalls.mmap(0, nbytes, PROT_NONE, NOTHING, -1, 0)
            break
        except OSError as error:
            if arena_nbytes is None and wanted // 2 >= smallest:
                wanted //= 2
                continue
            if max_chunks > num_chunks:  # a pool that cannot grow does as well
                max_chunks = num_chunks
                view_nbytes = _round_up(smallest)
                continue
            raise MemoryFault(
                f"cannot hold {format_nbytes(nbytes)} of addresses ({format_nbytes(view_nbytes)} for the pool, "
                f"{format_nbytes(wanted)} for reservations): {error}.\n"
                "  Options: no limit on address space (ulimit -v); a smaller arena_nbytes; a smaller budget."
            ) from error
    view_address = _round_up(address)
    arena_start = view_address + view_nbytes
    if lent_arena is not None:
        arena_start, wanted = lent_arena[0], lent_arena[1] - lent_arena[0]
    return HeldAddresses(
        address=address,
        nbytes=nbytes,
        view_address=view_address,
        max_chunks=max_chunks,
        arena_start=arena_start,
        arena_stop=arena_start + wanted // chunk_nbytes * chunk_nbytes,
    )


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
