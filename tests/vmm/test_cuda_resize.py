"""A CUDA pool that gets smaller and larger while it is in use: the driver's memory, addresses, and failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.vmm.memory_cases import CudaCase, shown, stamp
from vmm.cuda import CudaDriver
from vmm.driver import MemoryFault
from vmm.testing.fake_cuda import FakeCuda

CHUNK = CudaCase.chunk_nbytes
NUM_CHUNKS = 32
"""Of the device."""


@pytest.fixture
def case() -> Iterator[CudaCase]:
    made = CudaCase()
    yield made
    assert made.fake.left() == []
    made.close()


def num_free(fake: FakeCuda) -> int:
    _, free, _ = fake.cuMemGetInfo()
    return int(free) // CHUNK


def test_what_goes_is_the_drivers_and_what_stays_keeps_address_and_bytes(case: CudaCase) -> None:
    with case.make(8, num_fixed_chunks=2) as driver:
        stamp(case, driver)
        case.poke(driver.fixed_address, b"fixed---")
        address = driver.reserve(2)
        driver.map(address, [(1, 2)])
        for num_chunks, num_fixed in ((3, 2), (24, 1), (4, 6), (30, 2)):
            driver.resize_fixed(min(num_fixed, driver.num_fixed_chunks))
            driver.resize(num_chunks)
            driver.resize_fixed(num_fixed)
            assert (driver.num_chunks, driver.num_fixed_chunks) == (num_chunks, num_fixed)
            assert num_free(case.fake) == NUM_CHUNKS - num_chunks - num_fixed
            assert shown(case, driver, address, 2) == [1, 2]
            assert shown(case, driver, driver.view_address, 3) == [0, 1, 2]
            assert case.peek(driver.fixed_address, 8) == b"fixed---"
            stamp(case, driver)
            more = driver.reserve(1)
            driver.map(more, [(num_chunks - 1, 1)])
            assert shown(case, driver, more, 1) == [num_chunks - 1]
            driver.release(more, 1)
        driver.unmap(address, 2)
        driver.resize(0)
        driver.resize_fixed(0)
        assert num_free(case.fake) == NUM_CHUNKS
        driver.resize(5)
        driver.map(address, [(3, 2)])
        driver.release(address, 2)


def test_what_may_not_be(case: CudaCase) -> None:
    with case.make(8) as driver:
        address = driver.reserve(2)
        driver.map(address, [(5, 2)])
        for num_chunks, message in ((-1, "0 to 32"), (33, "0 to 32"), (6, "chunk 6 is mapped")):
            with pytest.raises(ValueError, match=message):
                driver.resize(num_chunks)
        with CudaDriver(10, CHUNK, bindings=case.fake), pytest.raises(MemoryFault, match="does not fit device"):
            driver.resize(23)
        assert driver.num_chunks == 8
        driver.resize(7)


def test_memory_that_is_the_hosts_is_counted_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's free memory has no page cache in it; what the host has available does, less what it keeps."""
    memory = {"MemTotal": 64 * CHUNK, "MemAvailable": 20 * CHUNK}
    monkeypatch.setattr("vmm.machine.meminfo_nbytes", lambda: memory)
    for is_integrated, free, fits, too_many in ((True, 0, 16, 17), (True, 64, 16, 17), (False, 10, 10, 11)):
        fake = FakeCuda(total_nbytes=64 * CHUNK, granularity=CHUNK, is_integrated=is_integrated)
        told = (fake.CUresult.CUDA_SUCCESS, free * CHUNK, 64 * CHUNK)
        fake.cuMemGetInfo = lambda told=told: told  # type: ignore[method-assign]
        try:
            CudaDriver(fits, CHUNK, bindings=fake).close()
            with pytest.raises(MemoryFault, match="does not fit device") as caught:
                CudaDriver(too_many, CHUNK, bindings=fake)
            assert ("its memory is the host's" in str(caught.value)) is is_integrated
            assert f"at most {fits * CHUNK >> 20}MiB" in str(caught.value)
        finally:
            fake.close()


@pytest.mark.parametrize(("before", "after"), [(8, 3), (3, 8), (6, 0)])
@pytest.mark.parametrize("times", [1, 2])
def test_every_call_that_fails(case: CudaCase, before: int, after: int, times: int) -> None:
    """As it was, or (where the way back fails, too) as many chunks as it says; another call goes on from there."""
    for fail_call in range(1, 100):
        with case.make(before, num_fixed_chunks=1) as driver:
            stamp(case, driver)
            case.fake.fail(fail_call, times=times)
            with contextlib.suppress(MemoryFault):
                driver.resize(after)
            is_reached = case.fake.has_failed
            case.fake.fail(0)
            if times == 1:
                assert driver.num_chunks in {before, after}
            assert shown(case, driver, driver.view_address, min(driver.num_chunks, before)) == list(
                range(min(driver.num_chunks, before))
            )
            driver.resize(after)
            assert num_free(case.fake) == NUM_CHUNKS - after - 1
            driver.resize(before)
            stamp(case, driver)
            assert shown(case, driver, driver.view_address, before) == list(range(before))
        if not is_reached:
            break
    assert fail_call > 5
