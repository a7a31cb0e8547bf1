"""The fake's `perform` (a kernel that the caller runs itself), and addresses that somebody lends."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest

from vmm.cuda import CudaDriver
from vmm.syscalls import MAP_NORESERVE, Syscalls
from vmm.testing.fake_cuda import FakeCuda

CHUNK = 64 << 10


def _pinned(fake: FakeCuda, body: bytes) -> int:
    _, address = fake.cuMemHostAlloc(len(body), 0)
    ctypes.memmove(address, body, len(body))
    return int(address)


@pytest.mark.parametrize("seed", range(20))
def test_a_kernel_sees_what_it_waited_for_and_only_that(seed: int) -> None:
    fake = FakeCuda(granularity=CHUNK, total_nbytes=64 * CHUNK, seed=seed, eagerness=0.0)
    with CudaDriver(4, CHUNK, bindings=fake, arena_nbytes=8 * CHUNK) as driver:
        calls, view = driver.calls, driver.view_address
        compute, inward = calls.create_stream(), calls.create_stream()
        source = _pinned(fake, b"x" * CHUNK)
        awaited = calls.create_event()
        calls.copy_to_device(view, source, CHUNK, inward)
        calls.record(awaited, inward)
        calls.copy_to_device(view + CHUNK, source, CHUNK, inward)
        calls.wait_event(compute, awaited)
        fake.perform(compute, reads=[(view, CHUNK)])
        assert ctypes.string_at(view, CHUNK) == b"x" * CHUNK
        assert ctypes.string_at(view + CHUNK, CHUNK) == bytes(CHUNK)  # nobody has waited for it
        assert fake.races == ()
        fake.perform(compute, reads=[(view + CHUNK, CHUNK)], name="too early")
        assert [race.second.name for race in fake.races] == ["too early"]
        fake.cuCtxSynchronize()
        fake.cuMemFreeHost(source)
        for stream in (compute, inward):
            calls.destroy_stream(stream)
        calls.destroy_event(awaited)
    assert fake.left() == []
    fake.close()


def test_kernels_of_one_stream_run_in_order_and_others_stay() -> None:
    fake = FakeCuda(granularity=CHUNK, total_nbytes=64 * CHUNK, eagerness=0.0)
    with CudaDriver(4, CHUNK, bindings=fake, arena_nbytes=8 * CHUNK) as driver:
        first, second = driver.calls.create_stream(), driver.calls.create_stream()
        done: list[Any] = []
        fake.launch(first, lambda: done.append("first"))
        fake.launch(second, lambda: done.append("other"))
        fake.perform(first)
        assert done == ["first"]
        fake.cuCtxSynchronize()
        assert done == ["first", "other"]
        for stream in (first, second):
            driver.calls.destroy_stream(stream)
    fake.close()


def test_lent_addresses_are_used_and_given_back() -> None:
    syscalls = Syscalls()
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    nbytes = 64 * CHUNK
    start = syscalls.mmap(0, nbytes, 0, nothing, -1, 0)
    occupied = {start + 9 * CHUNK + 4096: 2 * CHUNK}  # touches three granules of 64 KiB, wherever `start` is
    try:
        for _ in range(3):
            fake = FakeCuda(
                granularity=CHUNK, total_nbytes=16 * CHUNK, arena=(start, start + nbytes), occupied=occupied
            )
            with CudaDriver(4, CHUNK, bindings=fake, arena_nbytes=24 * CHUNK) as driver:
                low, high = driver.view_address, driver.arena[1]
                assert start <= low and high <= start + nbytes
                assert all(high <= at or at + n <= low for at, n in occupied.items())
                address = driver.reserve(1)
                driver.map(address, [(2, 1)])
                ctypes.memset(address, 7, CHUNK)
                assert ctypes.string_at(driver.view_address + 2 * CHUNK, 1) == b"\7"
            assert fake.left() == []
            fake.close()
        fake = FakeCuda(granularity=CHUNK, total_nbytes=16 * CHUNK, arena=(start, start + nbytes), occupied=occupied)
        fake.cuInit(0)
        result, _ = fake.cuMemAddressReserve(nbytes, 0, 0, 0)
        assert result.name == "CUDA_ERROR_OUT_OF_MEMORY"
        fake.close()
    finally:
        syscalls.munmap(start, nbytes)
