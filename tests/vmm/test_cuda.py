"""What is special to the CUDA driver: which calls it makes, retries, failures of undo and close, bad machines."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.vmm.memory_cases import CudaCase, shown, stamp
from vmm.cuda import CudaDriver
from vmm.cuda_calls import CudaCalls, CudaFault, load_bindings
from vmm.driver import Access, MemoryFault
from vmm.testing.fake_cuda import CUresult, FakeCuda, RuleBroken

CHUNK = CudaCase.chunk_nbytes


@pytest.fixture
def case() -> Iterator[CudaCase]:
    made = CudaCase()
    yield made
    made.close()


def mapping_calls(fake: FakeCuda, operation: Callable[[], object]) -> tuple[int, int, int]:
    """How many of cuMemUnmap, cuMemMap, cuMemSetAccess an operation makes; it makes no others."""
    before = fake.num_calls.copy()
    operation()
    made = fake.num_calls - before
    calls = made.pop("cuMemUnmap", 0), made.pop("cuMemMap", 0), made.pop("cuMemSetAccess", 0)
    assert not +made
    return calls


def test_one_call_for_each_contiguous_range(case: CudaCase) -> None:
    with case.make() as driver:
        fake = case.fake
        address = driver.reserve(8)
        assert mapping_calls(fake, lambda: driver.map(address, [(9, 2), (1, 1), (12, 3)])) == (0, 6, 1)
        assert mapping_calls(fake, lambda: driver.map(address, [(9, 2), (1, 1), (12, 3)])) == (0, 0, 0)
        assert mapping_calls(fake, lambda: driver.map(address, [(9, 1), (2, 3)])) == (1, 3, 1)
        assert mapping_calls(fake, lambda: driver.map(address, [(0, 1), (2, 1), (0, 1)])) == (
            2,
            2,
            1,
        )  # the middle stays
        assert mapping_calls(fake, lambda: driver.protect(address, 6, Access.NONE)) == (0, 0, 1)
        assert mapping_calls(fake, lambda: driver.protect(address, 6, Access.NONE)) == (0, 0, 0)
        assert mapping_calls(fake, lambda: driver.unmap(address, 8)) == (1, 0, 0)
        assert mapping_calls(fake, lambda: driver.unmap(address, 8)) == (0, 0, 0)
        assert mapping_calls(fake, lambda: driver.release(address, 8)) == (0, 0, 0)
        assert fake.num_calls["cuMemCreate"] == 16
    assert fake.num_calls["cuMemRelease"] == 16
    assert fake.left() == []


def test_access_is_set_where_it_differs(case: CudaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    with case.make() as driver:
        address = driver.reserve(8)
        driver.map(address, [(0, 8)])
        real = case.fake.cuMemSetAccess

        def noted(at: int, nbytes: int, *rest: Any) -> Any:
            ranges.append(((at - address) // CHUNK, nbytes // CHUNK))
            return real(at, nbytes, *rest)

        monkeypatch.setattr(case.fake, "cuMemSetAccess", noted)
        driver.map(address, [(0, 2), (9, 1), (3, 2), (10, 1), (6, 2)])  # places 2 and 5 change
        driver.protect(address + CHUNK, 2, Access.NONE)
        driver.protect(address, 6, Access.NONE)
        driver.protect(address, 8, Access.READ_WRITE)
    assert ranges == [(2, 4), (1, 2), (0, 6), (0, 6)]


def test_a_chunk_that_is_shown_already_may_be_in_use(case: CudaCase) -> None:
    with case.make() as driver:
        stream = driver.calls.create_stream()
        address = driver.reserve(3)
        driver.map(address, [(0, 3)])
        case.fake.launch(stream, int, writes=[(address, CHUNK)])
        driver.map(address, [(0, 1), (5, 2)])
        with pytest.raises(RuleBroken, match="has not observed the end of launch"):
            driver.map(address, [(4, 1)])
        with pytest.raises(RuleBroken, match=r"cuMemSetAccess.*has not observed the end of launch"):
            driver.protect(address, 1, Access.NONE)
        case.fake.cuStreamSynchronize(stream)
        driver.calls.destroy_stream(stream)


def test_not_ready_is_tried_again_within_a_bound(case: CudaCase) -> None:
    waits: list[float] = []
    with case.make(wait=waits.append, num_attempts=7) as driver:
        stamp(case, driver)
        address = driver.reserve(2)
        case.fake.fail(2, CUresult.CUDA_ERROR_NOT_READY, times=6)
        driver.map(address, [(3, 2)])
        assert shown(case, driver, address, 2) == [3, 4]
        assert driver.calls.num_retries == len(waits) == 6
        assert waits == sorted(waits)
        assert 0 < waits[0] < waits[-1] < 0.01
        case.fake.fail(1, CUresult.CUDA_ERROR_NOT_READY, times=7)
        with pytest.raises(CudaFault, match=r"NOT_READY.*after 7 attempts.*\n.*synchronise") as caught:
            driver.unmap(address, 2)
        assert (caught.value.call, caught.value.num_attempts) == ("cuMemUnmap", 7)
        assert shown(case, driver, address, 2) == [3, 4]
        driver.unmap(address, 2)


def test_when_the_undo_fails_too_the_books_still_say_what_is_shown(case: CudaCase) -> None:
    """For every call of a map over other chunks, from which on nothing works any more, until it does again."""
    for fail_call in itertools.count(1):
        with case.make() as driver:
            stamp(case, driver)
            address = driver.reserve(6)
            driver.map(address, [(0, 4)])
            driver.protect(address + CHUNK, 1, Access.NONE)
            case.fake.fail(fail_call, times=1000)
            try:
                driver.map(address, [(0, 1), (8, 2), (3, 1), (5, 1)])
            except MemoryFault as error:
                case.fake.fail(0)
                is_undone = "could not be undone" not in str(error)
                assert is_undone == (fail_call == 1)  # then nothing had been done
                places = shown(case, driver, address, 6)
                assert all(shows in (None, *allowed) for shows, allowed in zip(places, EITHER, strict=True))
            else:
                case.fake.fail(0)
                break
            driver.map(address, [(0, 1), (8, 2), (3, 1), (5, 1)])
            assert shown(case, driver, address, 6) == [0, 8, 9, 3, 5, None]
            driver.release(address, 6)
        assert case.fake.left() == []
    assert fail_call == 6  # one unmap, three maps, one set of access: the sixth is no call


EITHER: list[tuple[int, ...]] = [(0,), (8,), (2, 9), (3,), (5,), ()]
"""What the places may show, beside nothing, after a failed call whose undo failed."""


@pytest.mark.parametrize("times", [1, 3])
def test_close_gives_back_what_it_can_and_the_rest_when_called_again(case: CudaCase, times: int) -> None:
    for fail_call in itertools.count(1):
        driver = case.make(8, arena_nbytes=64 * CHUNK)
        driver.map(driver.reserve(4), [(0, 4)])
        driver.map(driver.reserve(4), [(1, 2), (1, 2)])
        driver.reserve(1)
        case.fake.fail(fail_call, times=times)
        with contextlib.suppress(MemoryFault):
            driver.close()
            assert not case.fake.has_failed
        assert bool(case.fake.left()) == case.fake.has_failed
        with pytest.raises(MemoryFault, match="closed"):
            driver.reserve(1)
        is_done = not case.fake.has_failed
        case.fake.fail(0)
        driver.close()
        assert case.fake.left() == []
        assert repr(driver) == "<CudaDriver closed>"
        calls = sum(case.fake.num_calls.values())
        driver.close()
        assert sum(case.fake.num_calls.values()) == calls
        if is_done:
            break
    assert fail_call == 2 + 8 + 1 + 1  # two unmaps, since the pool may grow in between; chunks; addresses


def test_close_is_quiet_when_the_driver_has_gone(case: CudaCase) -> None:
    driver = case.make(4)
    case.fake.fail(1, CUresult.CUDA_ERROR_DEINITIALIZED, times=100)
    driver.close()
    case.fake.fail(0)
    assert repr(driver) == "<CudaDriver closed>"


def test_a_driver_that_fails_in_the_making_says_what_it_could_not_give_back(case: CudaCase) -> None:
    case.fake.fail(10, times=2)  # the fourth cuMemCreate, and the first cuMemRelease
    with pytest.raises(CudaFault, match="chunk 3 of a pool of 16 chunks") as caught:
        case.make()
    assert "could not all be given back" in caught.value.__notes__[0]
    assert case.fake.left() == []  # closing has tried again


@pytest.mark.parametrize("result", ["OUT_OF_MEMORY", "INVALID_VALUE", "NOT_SUPPORTED"])
def test_fewer_addresses_are_taken_where_there_are_few(case: CudaCase, result: str) -> None:
    case.fake.fail(23, CUresult[f"CUDA_ERROR_{result}"], times=3)  # after 6 questions and 16 chunks
    with case.make() as driver:
        start, stop = driver.arena
        assert stop - start == 1 << 37
    case.fake.fail(23, CUresult.CUDA_ERROR_OUT_OF_MEMORY, times=16)  # from 1 TiB down to as much as the pool
    with pytest.raises(CudaFault, match=r"addresses \(16 chunks beside"):
        case.make()
    case.fake.fail(0)
    assert case.fake.left() == []


def make(**options: Any) -> CudaDriver:
    fake = FakeCuda(total_nbytes=8 * CHUNK, **options)
    try:
        return CudaDriver(4, CHUNK, bindings=fake)
    finally:
        assert fake.left() == []
        fake.close()


def test_a_device_without_virtual_memory_is_refused() -> None:
    with pytest.raises(MemoryFault, match=r"device 0 has no virtual memory management(.|\n)*Options"):
        make(has_vmm=False)


def test_a_granularity_that_does_not_divide_the_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"\({CHUNK} bytes\).*granularity, .*\({2 * CHUNK} bytes\)"):
        make(granularity=2 * CHUNK)


def test_chunks_of_several_granules() -> None:
    fake = FakeCuda(total_nbytes=64 << 20)
    with CudaDriver(4, 3 * CHUNK, bindings=fake) as driver:
        assert driver.granularity == CHUNK
        driver.map(driver.reserve(2), [(2, 2)])
        assert driver.calls.memory_info() == ((64 << 20) - 12 * CHUNK, 64 << 20)
    assert fake.left() == []
    fake.close()


def test_a_pool_larger_than_free_memory_is_refused_before_anything_is_taken() -> None:
    fake = FakeCuda(total_nbytes=8 * CHUNK)
    with CudaDriver(5, CHUNK, bindings=fake):
        created = fake.num_calls["cuMemCreate"]
        with pytest.raises(MemoryFault) as caught:
            CudaDriver(4, CHUNK, bindings=fake)
        for word in ("needed 8.0 MiB (", "free   6.0 MiB (", "total  16.0 MiB (", "a budget of at most 6MiB"):
            assert word in str(caught.value)
        assert fake.num_calls["cuMemCreate"] == created
    assert fake.left() == []
    fake.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_chunks": 0}, "num_chunks=0"),
        ({"chunk_nbytes": 0}, "chunk_nbytes=0"),
        ({"arena_nbytes": CHUNK - 1}, "less than one chunk"),
        ({"num_attempts": 0}, "num_attempts=0"),
    ],
)
def test_wrong_sizes_are_refused_without_a_call(arguments: dict[str, int], message: str) -> None:
    fake = FakeCuda()
    with pytest.raises(ValueError, match=message):
        CudaDriver(**{"num_chunks": 4, "chunk_nbytes": CHUNK, "bindings": fake, **arguments})  # type: ignore[arg-type]
    assert not fake.num_calls
    fake.close()


@pytest.mark.parametrize(
    ("call", "result", "words"),
    [
        (1, CUresult.CUDA_ERROR_NO_DEVICE, ["starting CUDA", "nvidia-smi", "device='cpu'"]),
        (2, CUresult.CUDA_ERROR_INVALID_DEVICE, ["device 0", "CUDA_VISIBLE_DEVICES"]),
        (5, CUresult.CUDA_ERROR_INVALID_CONTEXT, ["cuMemGetInfo", "torch.cuda.set_device"]),
        (9, CUresult.CUDA_ERROR_OUT_OF_MEMORY, ["chunk 2 of a pool of 16", "smaller budget"]),
        (9, CUresult.CUDA_ERROR_UNKNOWN, ["nvidia-uvm", "dmesg"]),
        (9, CUresult.CUDA_ERROR_INVALID_HANDLE, ["invalid handle", "dmesg"]),
    ],
)
def test_results_are_explained(case: CudaCase, call: int, result: CUresult, words: list[str]) -> None:
    case.fake.fail(call, result)
    with pytest.raises(CudaFault) as caught:
        case.make()
    assert (caught.value.result_name, caught.value.result_code) == (result.name, result.value)
    for word in (result.name, str(result.value), "Options", *words):
        assert word in str(caught.value)
    assert case.fake.left() == []


def test_a_machine_without_bindings_or_library_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(CudaFault, match=r"cuda-bindings cannot be imported(.|\n)*pip install"):
        load_bindings()

    class WithoutLibrary(FakeCuda):
        def cuInit(self, _: int) -> tuple[object, ...]:  # noqa: N802
            raise RuntimeError("libcuda.so not found")

    fake = WithoutLibrary()
    with pytest.raises(CudaFault, match=r"cuInit could not be called: libcuda.so(.|\n)*install the NVIDIA driver"):
        CudaDriver(4, CHUNK, bindings=fake)
    fake.close()
    with pytest.raises(CudaFault, match="newer cuda-bindings"):
        CudaCalls(object()).memory_info()


def test_files_cannot_be_mapped(case: CudaCase) -> None:
    with case.make() as driver:
        address = driver.reserve(1)
        for operation in (
            lambda: driver.map_file(address, 1, 0, 0, 4096),
            lambda: driver.note_file(address, 1, 0, 0, 4096),
            lambda: driver.note_guards(1),
        ):
            with pytest.raises(MemoryFault):
                operation()


def test_a_forked_child_is_refused_and_takes_nothing_from_its_parent(case: CudaCase) -> None:
    with case.make(4) as driver:
        stamp(case, driver)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                num_calls = sum(case.fake.num_calls.values())
                driver.close()
                assert sum(case.fake.num_calls.values()) == num_calls
                driver.reserve(1)
            except MemoryFault as error:
                code = 0 if "closed" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert shown(case, driver, driver.view_address, 4) == [0, 1, 2, 3]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                driver.reserve(1)
            except MemoryFault as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_page_out_and_in_on_streams(case: CudaCase) -> None:
    """Two variables share two chunks through standing aliases; the second needs the first away, and it comes back."""
    with case.make(2) as driver:
        calls, fake = driver.calls, case.fake
        compute, outward, inward = (calls.create_stream() for _ in range(3))
        computed, left, freed, loaded = (calls.create_event() for _ in range(4))
        nbytes = 2 * CHUNK
        host = int(calls.call("cuMemHostAlloc", nbytes, 0, what="pinned memory"))
        one, other = driver.reserve(2), driver.reserve(2)
        driver.map(one, [(0, 2)])
        driver.map(other, [(1, 1), (0, 1)])
        fake.launch(compute, lambda: case.poke(one, b"one....."), writes=[(one, nbytes)], name="produce")
        calls.record(computed, compute)
        calls.wait_event(outward, computed)
        calls.copy_to_host(host, driver.view_address, nbytes, outward)
        calls.record(left, outward)
        calls.wait_event(compute, left)
        fake.launch(compute, lambda: case.poke(other, b"other..."), writes=[(other, nbytes)], name="reuse")
        calls.record(freed, compute)
        calls.wait_event(inward, freed)
        calls.wait_event(inward, left)
        calls.copy_to_device(driver.view_address, host, nbytes, inward)
        calls.record(loaded, inward)
        calls.wait_event(compute, loaded)
        seen: list[bytes] = []
        fake.launch(compute, lambda: seen.append(case.peek(one)), reads=[(one, nbytes)], name="consume")
        calls.record(computed, compute)
        while not calls.is_done(computed):
            pass
        assert seen == [b"one....."]
        assert fake.races == ()
        driver.unmap(one, 2)
        driver.unmap(other, 2)
        calls.synchronize_event(loaded)
        calls.call("cuMemFreeHost", host, what="pinned memory")
        for event in (computed, left, freed, loaded):
            calls.destroy_event(event)
        for stream in (compute, outward, inward):
            calls.destroy_stream(stream)
    assert fake.left() == []


def test_a_thread_without_a_context_gets_that_of_the_pool(case: CudaCase) -> None:
    """A user's thread may read a tensor or free one; polling an event goes by another way than other calls."""
    done: list[object] = []
    with case.make() as driver:
        address = driver.reserve(2)
        event = driver.calls.create_event()

        def work(act: Callable[[], object]) -> None:
            assert int(case.fake.cuCtxGetCurrent()[1]) == 0
            done.append(act())

        for act in (lambda: driver.map(address, [(0, 2)]), lambda: driver.calls.is_done(event)):
            thread = threading.Thread(target=work, args=(act,))
            thread.start()
            thread.join()
        assert not case.faults(address) and not case.faults(address + CHUNK)
        driver.calls.destroy_event(event)
    assert done == [None, True]
