"""The POSIX driver's huge pages: from a tmpfs of our own, as the kernel's settings allow, or none."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator

import pytest

import vmm.huge_pages
from tests.vmm.memory_cases import PosixCase, shown, smaps_nbytes, stamp, vm_flags
from vmm import machine
from vmm.posix import PosixDriver, Syscalls

CHUNK = PosixCase.chunk_nbytes


@pytest.fixture
def case() -> Iterator[PosixCase]:
    """This driver alone."""
    made = PosixCase()
    yield made
    made.close()


def raiser(error: type[OSError] | OSError) -> Callable[..., int]:
    """A function that raises."""

    def fail(*_: object) -> int:
        raise error

    return fail


@pytest.mark.parametrize("from_namespace", [False, True])
@pytest.mark.parametrize("are_sampled", [False, True])
def test_huge_pages_whatever_the_setting_for_memfds(
    case: PosixCase, monkeypatch: pytest.MonkeyPatch, from_namespace: bool, are_sampled: bool
) -> None:
    """They are split, with all their bytes, where the kernel samples accesses."""
    monkeypatch.setattr(machine, "samples_accesses", lambda: are_sampled)
    if from_namespace:  # as for a user who may not mount
        monkeypatch.setattr(vmm.huge_pages, "_on_own_tmpfs", raiser(PermissionError))
    try:
        os.close(vmm.huge_pages.open_huge_file("probe"))
    except OSError as error:
        pytest.skip(f"no tmpfs of our own here: {error}")
    before = case.holdings()
    num_chunks = (5 << 20) // CHUNK  # two huge pages and a half
    with PosixDriver(num_chunks, CHUNK, syscalls=Syscalls()) as driver:
        assert not os.get_inheritable(driver._file.descriptor)
        assert os.fstat(driver._file.descriptor).st_blocks * 512 == 5 << 20  # no huge page past the end
        stamp(case, driver)
        assert shown(case, driver, driver.view_address, num_chunks) == list(range(num_chunks))
        assert smaps_nbytes(driver.view_address, "ShmemPmdMapped") == (0 if are_sampled else 4 << 20)
        address = driver.reserve(num_chunks)
        driver.map(address, [(0, num_chunks)])
        driver.map(address + CHUNK, [(2, 1)])
        for shown_at in driver.view_address, address, address + CHUNK, address + 2 * CHUNK:
            assert ("nh" in vm_flags(shown_at)) == are_sampled  # else the kernel would put them together again
    assert case.holdings() == before


@pytest.mark.parametrize("failure", [PermissionError(1, "fsopen: not permitted"), OSError(38, "fsopen: not there")])
def test_without_huge_pages_the_pool_is_a_memfd(
    case: PosixCase, monkeypatch: pytest.MonkeyPatch, failure: OSError
) -> None:
    monkeypatch.setattr(vmm.huge_pages, "_on_own_tmpfs", raiser(failure))
    monkeypatch.setattr(vmm.huge_pages.sys, "executable", "/bin/false")
    with PosixDriver(16, CHUNK, syscalls=Syscalls()) as driver:
        assert os.readlink(f"/proc/self/fd/{driver._file.descriptor}").startswith("/memfd:")
        stamp(case, driver)
        assert shown(case, driver, driver.view_address, 16) == list(range(16))


@pytest.mark.parametrize("huge_pages", [True, False])
def test_without_a_tmpfs_huge_pages_are_asked_for_where_the_kernel_allows(
    case: PosixCase, monkeypatch: pytest.MonkeyPatch, huge_pages: bool
) -> None:
    for setting in ("never", "advise", "unknown"):
        monkeypatch.setattr(machine, "shmem_huge_pages", lambda setting=setting: setting)
        advised: list[int] = []

        class Noting(Syscalls):
            def open_huge_file(self, name: str) -> int:
                raise OSError(errno.EPERM, f"no file {name}: injected")

            def madvise(self, address: int, nbytes: int, advice: int, advised: list[int] = advised) -> None:
                advised.append(advice)
                super().madvise(address, nbytes, advice)

        with PosixDriver(64, CHUNK, huge_pages=huge_pages, syscalls=Noting()) as driver:
            assert (mmap.MADV_HUGEPAGE in advised) == (huge_pages and setting == "advise")
            assert driver.view_address % (2 << 20) == 0
            assert os.fstat(driver._file.descriptor).st_blocks * 512 == 64 * CHUNK
            stamp(case, driver)
            assert shown(case, driver, driver.view_address, 64) == list(range(64))
