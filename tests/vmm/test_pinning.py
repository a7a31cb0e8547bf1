"""Pinned memory: touched before it is registered, not inherited, given back; and the way without registration."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vmm.memory_cases import vm_flags
from vmm.cuda_calls import CudaCalls
from vmm.driver import MemoryFault
from vmm.host_blocks import HostBlocks
from vmm.pinning import Pinning
from vmm.syscalls import MADV_POPULATE_WRITE, Syscalls
from vmm.testing.fake_cuda import CUresult, FakeCuda

NBYTES = 1 << 20


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    made.close()


class CountedCalls(Syscalls):
    """What is touched, and what is mapped; some of it fails."""

    def __init__(self, *, populate: int = 0, num_made: int = 0) -> None:
        super().__init__()
        self.touched: list[tuple[int, int]] = []
        self.mapped: dict[int, int] = {}
        self._populate, self._num_made = populate, num_made

    def mmap(self, address: int, nbytes: int, prot: int, flags: int, descriptor: int, offset: int) -> int:
        found = super().mmap(address, nbytes, prot, flags, descriptor, offset)
        self.mapped[found] = nbytes
        return found

    def munmap(self, address: int, nbytes: int) -> None:
        assert self.mapped.pop(address) == nbytes
        super().munmap(address, nbytes)

    def madvise(self, address: int, nbytes: int, advice: int) -> None:
        if advice == MADV_POPULATE_WRITE:
            self.touched.append((address, nbytes))
            if self._populate and len(self.touched) > self._num_made:
                raise OSError(self._populate, "madvise: no")
        super().madvise(address, nbytes, advice)


def _num_pages_there(address: int, nbytes: int) -> int:
    """How many pages of this range have memory. Of ranges, not mappings: the kernel makes one of two side by side."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        entries = struct.unpack(f"={nbytes // mmap.PAGESIZE}Q", pagemap.read(nbytes // mmap.PAGESIZE * 8))
    return sum(entry >> 63 for entry in entries)


@pytest.mark.parametrize("populate", [0, errno.EINVAL])
def test_all_pages_are_there_before_the_driver_sees_them(fake: FakeCuda, populate: int) -> None:
    """Also on kernels that cannot be asked to make pages."""
    syscalls = CountedCalls(populate=populate)
    pinning = Pinning(CudaCalls(fake), syscalls=syscalls)
    num_there: list[int] = []
    register = fake.cuMemHostRegister

    def look(address: int, nbytes: int, flags: int) -> object:
        num_there.append(_num_pages_there(address, nbytes))
        return register(address, nbytes, flags)

    fake.cuMemHostRegister = look  # type: ignore[assignment]
    piece = pinning.take(NBYTES - 1)
    pinning.close()
    assert (piece.mapped_nbytes, num_there) == (NBYTES, [NBYTES // mmap.PAGESIZE])
    parts = sorted(syscalls.touched)
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(parts))
    assert (parts[0][0], sum(n for _, n in parts)) == (piece.address, NBYTES)
    assert "dc" in vm_flags(piece.address)  # MADV_DONTFORK
    ctypes.memset(piece.address, 1, NBYTES)
    pinning.give(piece)
    assert (syscalls.mapped, fake.left()) == ({}, [])


@pytest.mark.parametrize("num_made", [0, 1])
def test_pages_that_are_not_there_are_an_error(fake: FakeCuda, num_made: int) -> None:
    syscalls = CountedCalls(populate=errno.ENOMEM, num_made=num_made)
    pinning = Pinning(CudaCalls(fake), syscalls=syscalls)
    with pytest.raises(MemoryFault, match=r"pinning 1.0 MiB of host memory: (.|\n)*madvise: no"):
        pinning.take(NBYTES)
    pinning.close()
    assert (syscalls.mapped, fake.left()) == ({}, [])


def test_what_the_driver_refuses_is_unmapped(fake: FakeCuda) -> None:
    syscalls = CountedCalls()
    pinning = Pinning(CudaCalls(fake), syscalls=syscalls)
    fake.fail(1, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(MemoryFault, match="cuMemHostRegister answered CUDA_ERROR_OUT_OF_MEMORY"):
        pinning.take(NBYTES)
    assert (syscalls.mapped, fake.num_calls["cuMemHostAlloc"]) == ({}, 0)


def test_where_memory_cannot_be_registered_the_driver_allocates_it(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    fake.fail(1, CUresult.CUDA_ERROR_NOT_SUPPORTED)
    with caplog.at_level(logging.WARNING):
        blocks = HostBlocks(CudaCalls(fake), budget_nbytes=4 << 12, block_nbytes=1 << 12, piece_nbytes=2 << 12)
    assert "slower" in caplog.text
    assert (fake.num_calls["cuMemHostRegister"], fake.num_calls["cuMemHostAlloc"]) == (1, 2)
    blocks.close()
    assert fake.left() == []


def test_no_copy_crosses_from_one_piece_to_the_next(fake: FakeCuda) -> None:
    """Neighbouring mappings may touch, so the fake looks at registrations, not at addresses."""
    page = mmap.PAGESIZE
    blocks = HostBlocks(CudaCalls(fake), budget_nbytes=6 * page, block_nbytes=page, piece_nbytes=2 * page)
    runs = blocks.take(6)
    assert runs is not None
    segments = blocks.segments(runs, 6 * page)
    assert [nbytes for _, nbytes in segments] == [2 * page] * 3
    for address, nbytes in segments:
        fake.host_touch(address, nbytes, is_write=True)
    blocks.close()
