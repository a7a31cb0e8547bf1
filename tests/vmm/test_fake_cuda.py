"""The fake CUDA driver: its rules, its late and disordered work, and its names."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vmm.fake_cases import GRANULE, OK, Mapped, access, properties, value
from vmm.syscalls import MAP_NORESERVE, Syscalls
from vmm.testing.fake_cuda import CUresult, FakeCuda, RuleBroken, names
from vmm.testing.fake_cuda.contexts import CONTEXT

INVALID = CUresult.CUDA_ERROR_INVALID_VALUE

REFUSED: dict[str, Callable[[FakeCuda, Mapped], tuple[Any, ...]]] = {
    "create a part of a granule": lambda f, _: f.cuMemCreate(GRANULE // 2, properties(), 0),
    "create with flags": lambda f, _: f.cuMemCreate(GRANULE, properties(), 1),
    "create of no kind": lambda f, _: f.cuMemCreate(GRANULE, names.CUmemAllocationProp(), 0),
    "reserve a part of a granule": lambda f, _: f.cuMemAddressReserve(GRANULE + 4096, 0, 0, 0),
    "reserve at an odd alignment": lambda f, _: f.cuMemAddressReserve(GRANULE, 3 * GRANULE, 0, 0),
    "map from an offset": lambda f, m: f.cuMemMap(m.at(4), GRANULE, GRANULE, m.handles[0], 0),
    "map a part of a handle": lambda f, m: f.cuMemMap(m.at(4), GRANULE // 2, 0, m.handles[0], 0),
    "map more than a handle": lambda f, m: f.cuMemMap(m.at(4), 2 * GRANULE, 0, m.handles[0], 0),
    "map between granules": lambda f, m: f.cuMemMap(m.at(4.5), GRANULE, 0, m.handles[0], 0),
    "map over a mapping": lambda f, m: f.cuMemMap(m.at(3), GRANULE, 0, m.handles[0], 0),
    "map outside a reservation": lambda f, m: f.cuMemMap(m.at(8), GRANULE, 0, m.handles[0], 0),
    "map no handle": lambda f, m: f.cuMemMap(m.at(4), GRANULE, 0, 77, 0),
    "unmap a part of a mapping": lambda f, m: f.cuMemUnmap(m.at(0), GRANULE // 2),
    "unmap over a hole": lambda f, m: f.cuMemUnmap(m.at(0), 5 * GRANULE),
    "unmap nothing": lambda f, m: f.cuMemUnmap(m.at(5), GRANULE),
    "access over a hole": lambda f, m: f.cuMemSetAccess(m.at(0), 5 * GRANULE, access(), 1),
    "access to a part of a mapping": lambda f, m: f.cuMemSetAccess(m.at(0.5), GRANULE, access(), 1),
    "access for no location": lambda f, m: f.cuMemSetAccess(m.at(0), GRANULE, [names.CUmemAccessDesc()], 1),
    "access with a wrong count": lambda f, m: f.cuMemSetAccess(m.at(0), GRANULE, access(), 2),
    "free mapped addresses": lambda f, m: f.cuMemAddressFree(m.address, 8 * GRANULE),
    "free a part of the addresses": lambda f, m: f.cuMemAddressFree(m.address, 4 * GRANULE),
    "free addresses from within": lambda f, m: f.cuMemAddressFree(m.at(4), 4 * GRANULE),
    "free host memory that is not": lambda f, _: f.cuMemFreeHost(4096),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_driver_refuses_is_refused_and_changes_nothing(fake: FakeCuda, name: str) -> None:
    mapped = Mapped(fake)
    before = fake.left()
    assert REFUSED[name](fake, mapped)[0] == INVALID
    assert fake.left() == before
    assert fake.cuMemUnmap(mapped.address, 4 * GRANULE) == (OK,)
    for handle in mapped.handles:
        assert fake.cuMemRelease(handle) == (OK,)
    assert fake.cuMemAddressFree(mapped.address, 8 * GRANULE) == (OK,)
    assert fake.left() == []


def test_memory_is_free_when_released_and_unmapped(fake: FakeCuda) -> None:
    mapped = Mapped(fake)
    assert fake.cuMemGetInfo() == (OK, 28 * GRANULE, 32 * GRANULE)
    fake.cuMemRelease(mapped.handles[0])
    assert fake.cuMemGetInfo()[1] == 28 * GRANULE
    fake.cuMemUnmap(mapped.at(0), GRANULE)
    assert fake.cuMemGetInfo()[1] == 29 * GRANULE
    with pytest.raises(RuleBroken, match="released before"):
        fake.cuMemRelease(mapped.handles[0])
    assert fake.cuMemCreate(30 * GRANULE, properties(), 0) == (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)


def test_nothing_works_before_init() -> None:
    fake = FakeCuda()
    assert fake.cuMemCreate(GRANULE, properties(), 0) == (CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
    assert fake.cuMemGetInfo() == (CUresult.CUDA_ERROR_NOT_INITIALIZED, None, None)
    fake.close()


def test_handles_are_no_numbers(fake: FakeCuda) -> None:
    """As with the real bindings, whoever forgets `int()` finds out."""
    handle = fake.cuMemCreate(GRANULE, properties(), 0)[1]
    with pytest.raises(TypeError):
        handle + 1
    assert int(handle) > 0


def test_access_comes_before_touch(fake: FakeCuda) -> None:
    mapped = Mapped(fake)
    fake.cuMemMap(mapped.at(4), GRANULE, 0, mapped.handles[0], 0)
    with pytest.raises(RuleBroken, match="cuMemSetAccess comes before the touch"):
        fake.launch(0, int, reads=[(mapped.at(4), 8)])
    with pytest.raises(RuleBroken, match="nothing is mapped there"):
        fake.launch(0, int, reads=[(mapped.at(3), 8), (mapped.at(6), 8)])
    fake.cuMemSetAccess(mapped.at(4), GRANULE, access(1), 1)
    fake.launch(0, int, reads=[(mapped.at(4.99), 8)])
    with pytest.raises(RuleBroken, match="PROT_READ "):
        fake.cuMemsetD8Async(mapped.at(4), 0, 8, 0)
    fake.cuMemsetD8Async(mapped.at(0), 7, 4 * GRANULE, 0)
    fake.cuCtxSynchronize()
    assert ctypes.string_at(mapped.at(4), GRANULE) == bytes([7]) * GRANULE  # the alias of the first


def test_copies_need_pinned_memory(fake: FakeCuda) -> None:
    mapped = Mapped(fake)
    buffer = ctypes.create_string_buffer(64)
    at = ctypes.addressof(buffer)
    with pytest.raises(RuleBroken, match="not pinned"):
        fake.cuMemcpyDtoHAsync(at, mapped.address, 64, 0)
    assert fake.cuMemHostRegister(at, 64, 0) == (OK,)
    assert fake.cuMemHostRegister(at + 32, 64, 0) == (CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
    fake.cuMemsetD8Async(mapped.address, 3, 64, 0)
    fake.cuMemcpyDtoHAsync(at, mapped.address, 64, 0)
    with pytest.raises(RuleBroken, match="is given back before copy from device"):
        fake.cuMemHostUnregister(at)
    fake.cuStreamSynchronize(0)
    assert fake.cuMemHostUnregister(at) == (OK,)
    assert fake.cuMemHostUnregister(at) == (CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)
    assert buffer.raw == bytes([3]) * 64


def test_the_kth_call_fails_without_effect(fake: FakeCuda) -> None:
    fake.fail(2, CUresult.CUDA_ERROR_NOT_READY, times=2)
    answers = [fake.cuMemCreate(GRANULE, properties(), 0)[0] for _ in range(4)]
    assert answers == [OK, CUresult.CUDA_ERROR_NOT_READY, CUresult.CUDA_ERROR_NOT_READY, OK]
    assert fake.has_failed
    assert len(fake.left()) == 2


def test_streams_and_events_that_are_gone_are_refused(fake: FakeCuda) -> None:
    stream, event = value(fake.cuStreamCreate(1)), value(fake.cuEventCreate(2))
    ran: list[int] = []
    fake.launch(stream, lambda: ran.append(1))
    fake.cuEventRecord(event, stream)
    assert (fake.cuStreamDestroy(stream), fake.cuEventDestroy(event)) == ((OK,), (OK,))
    gone = (CUresult.CUDA_ERROR_INVALID_HANDLE,)
    assert fake.cuStreamSynchronize(stream) == fake.cuEventRecord(event, 0) == fake.cuStreamDestroy(0) == gone
    fake.cuCtxSynchronize()
    assert ran == [1]  # what was queued is done all the same


def orders(eagerness: float, *, with_events: bool) -> set[str]:
    """In which orders four launches on two streams ran, over many seeds."""
    seen: set[str] = set()
    for seed in range(60):
        fake = FakeCuda(seed=seed, eagerness=eagerness)
        one, other, event = value(fake.cuStreamCreate(1)), value(fake.cuStreamCreate(1)), value(fake.cuEventCreate(2))
        ran: list[str] = []
        for name, stream in (("a", one), ("b", one), ("x", other), ("y", other)):
            fake.launch(stream, functools.partial(ran.append, name))
            if name == "b" and with_events:
                fake.cuEventRecord(event, one)
                fake.cuStreamWaitEvent(other, event, 0)
        fake.cuCtxSynchronize()
        seen.add("".join(ran))
        fake.close()
    return seen


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_work_runs_in_every_order_that_streams_and_events_allow(eagerness: float) -> None:
    assert orders(eagerness, with_events=False) == {"abxy", "axby", "axyb", "xaby", "xayb", "xyab"}
    assert orders(eagerness, with_events=True) == {"abxy"}


def test_work_is_late() -> None:
    fake = FakeCuda(eagerness=0)
    ran: list[int] = []
    event = value(fake.cuEventCreate(2))
    for number in range(3):
        fake.launch(0, functools.partial(ran.append, number))
    fake.cuEventRecord(event, 0)
    assert ran == []
    polls = 1
    while fake.cuEventQuery(event)[0] == CUresult.CUDA_ERROR_NOT_READY:
        polls += 1
    assert (ran, polls) == ([0, 1, 2], 4)
    fake.close()


def test_polling_observes(fake: FakeCuda) -> None:
    mapped = Mapped(fake)
    for place in range(2):
        stream, event = value(fake.cuStreamCreate(1)), value(fake.cuEventCreate(2))
        fake.launch(stream, int, writes=[(mapped.at(place), 8)])
        fake.cuEventRecord(event, stream)
        with pytest.raises(RuleBroken, match="has not observed"):
            fake.cuMemUnmap(mapped.at(place), GRANULE)
        poll = functools.partial(fake.cuStreamQuery, stream) if place else functools.partial(fake.cuEventQuery, event)
        while poll() != (OK,):
            pass
        assert fake.cuMemUnmap(mapped.at(place), GRANULE) == (OK,)


def test_an_event_that_was_never_recorded_holds_up_nothing(fake: FakeCuda) -> None:
    event = value(fake.cuEventCreate(2))
    fake.cuStreamWaitEvent(0, event, 0)
    assert fake.cuEventQuery(event) == fake.cuEventSynchronize(event) == fake.cuStreamQuery(0) == (OK,)


def test_a_wait_is_for_the_last_record_before_it() -> None:
    fake = FakeCuda(eagerness=0)
    one, other = value(fake.cuStreamCreate(1)), value(fake.cuStreamCreate(1))
    event = value(fake.cuEventCreate(2))
    fake.cuEventRecord(event, one)
    fake.cuStreamWaitEvent(other, event, 0)
    ran: list[str] = []
    fake.launch(one, lambda: ran.append("late"))
    fake.cuEventRecord(event, one)
    fake.launch(other, lambda: ran.append("early"))
    for _ in range(40):
        if fake.cuStreamQuery(other) == (OK,):
            break
    assert "early" in ran
    fake.close()


def test_blocking_streams_meet_the_default_stream() -> None:
    for flags, num_races in ((0, 0), (1, 2)):
        fake = FakeCuda()
        fake.cuInit(0)
        mapped = Mapped(fake)
        stream = value(fake.cuStreamCreate(flags))
        for at in (0, stream, 0):
            fake.launch(at, int, writes=[(mapped.address, 8)])
        assert len(fake.races) == num_races
        fake.close()


def test_blocking_streams_and_the_default_stream_run_in_turn() -> None:
    for seed in range(30):
        fake = FakeCuda(seed=seed, eagerness=0)
        one, other = value(fake.cuStreamCreate(0)), value(fake.cuStreamCreate(0))
        ran: list[str] = []
        for name, stream in (("a", one), ("b", other), ("D", 0), ("x", one), ("y", other), ("E", 0)):
            fake.launch(stream, functools.partial(ran.append, name))
        fake.cuCtxSynchronize()
        assert "".join(ran) in ("abDxyE", "baDxyE", "abDyxE", "baDyxE")
        fake.close()


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_new_thread_has_no_context_until_it_sets_one(fake: FakeCuda) -> None:
    """As `cuCtxGetCurrent` finds it in autograd's thread of a device; what needs a context answers so."""
    found: list[Any] = []

    def look() -> None:
        found.extend([value(fake.cuCtxGetCurrent()), fake.cuEventCreate(0), fake.cuMemGetInfo()])
        found.extend([fake.cuCtxSetCurrent(CONTEXT + 1), fake.cuCtxSetCurrent(CONTEXT), fake.cuEventCreate(0)[0]])

    in_thread(look)
    lacking = CUresult.CUDA_ERROR_INVALID_CONTEXT
    assert found == [0, (lacking, None), (lacking, None, None), (lacking,), (OK,), OK]
    assert value(fake.cuCtxGetCurrent()) == CONTEXT


def test_what_one_thread_observed_another_must_be_told(fake: FakeCuda) -> None:
    mapped = Mapped(fake)
    fake.launch(0, int, writes=[(mapped.address, 8)])
    clocks: list[dict[int, int]] = []

    def observe() -> None:
        assert fake.cuStreamSynchronize(0) == (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        fake.cuCtxSetCurrent(CONTEXT)
        assert fake.cuStreamSynchronize(0) == (OK,)
        clocks.append(fake.host_signal())

    in_thread(observe)
    with pytest.raises(RuleBroken, match="has not observed the end of launch"):
        fake.cuMemUnmap(mapped.address, GRANULE)
    fake.host_wait(clocks[0])
    assert fake.cuMemUnmap(mapped.address, GRANULE) == (OK,)


@pytest.fixture
def arena() -> Iterator[tuple[int, int]]:
    """Addresses mapped to nothing, for fakes that are lent them."""
    start = _SYSCALLS.mmap(0, 64 * GRANULE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    yield start, start + 64 * GRANULE
    _SYSCALLS.munmap(start, 64 * GRANULE)


_SYSCALLS = Syscalls()


def _shown(start: int, stop: int) -> list[tuple[int, int, str]]:
    """What the kernel shows in a range, as `(start, stop, permissions)`; holes are not in it."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions = line.split()[:2]
        first, last = (int(it, 16) for it in place.split("-"))
        if first < stop and last > start:
            found.append((max(first, start), min(last, stop), permissions))
    return found


def _in_child(check: Callable[[], bool]) -> bool:
    """Whether something holds in a forked child."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def test_a_lent_arena_has_neither_memory_nor_holes_in_a_forked_child(arena: tuple[int, int]) -> None:
    """In a hole, code that the child compiles could land, and be overwritten by the child's own fake."""
    with contextlib.closing(FakeCuda(total_nbytes=32 * GRANULE, arena=arena)) as fake:
        fake.cuInit(0)
        mapped = Mapped(fake)
        ctypes.memset(mapped.at(0), 7, GRANULE)

        def is_empty() -> bool:
            shown = _shown(*arena)
            return all(it[2] == "---p" for it in shown) and sum(it[1] - it[0] for it in shown) == 64 * GRANULE

        def leaves_the_childs_own_alone() -> bool:
            own = FakeCuda(total_nbytes=32 * GRANULE, arena=arena)
            own.cuInit(0)
            address = Mapped(own).address
            fake.close()
            ctypes.memset(address, 9, GRANULE)
            return address == mapped.address and ctypes.string_at(address, 1) == b"\x09"

        assert _in_child(is_empty)
        assert _in_child(leaves_the_childs_own_alone)
        assert ctypes.string_at(mapped.at(0), 1) == b"\x07"


def test_names_and_numbers_are_those_of_the_real_bindings() -> None:
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed here")
    for name in names.__all__:
        ours, theirs = getattr(names, name), getattr(real, name, None)
        if isinstance(ours, type) and issubclass(ours, int):
            assert theirs is not None
            assert {it.name: it.value for it in ours} == {it.name: int(getattr(theirs, it.name)) for it in ours}
    for name in dir(FakeCuda):
        if name.startswith("cu") and callable(getattr(FakeCuda, name)):
            assert callable(getattr(real, name, None)), name
