"""What is special to the POSIX driver: the kernel's own view of its mappings, signals, forks, limits."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vmm.memory_cases import PosixCase, shown, smaps_nbytes, stamp, vm_flags
from vmm import machine
from vmm.driver import Access, MapCountExceeded, MemoryFault
from vmm.machine import MemoryRoom
from vmm.posix import PosixDriver, Syscalls
from vmm.sizes import format_nbytes

CHUNK = PosixCase.chunk_nbytes
PAGE = mmap.PAGESIZE


class RecordingSyscalls(Syscalls):
    """Notes each call's name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in {"mmap", "madvise", "mprotect", "munmap", "fallocate"}:
            self.calls.append(name)
        return super().__getattribute__(name)


@pytest.fixture
def case() -> Iterator[PosixCase]:
    """This driver alone."""
    made = PosixCase()
    yield made
    made.close()


def num_kernel_mappings(driver: PosixDriver) -> int:
    """Mappings that the kernel has in the arena."""
    first, last = driver.arena
    num = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(word, 16) for word in line.split()[0].split("-"))
        num += start < last and stop > first
    return num


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    prelude = (
        "import ctypes, os\nfrom vmm.posix import PosixDriver\nfrom vmm.driver import Access\n"
        f"driver = PosixDriver(4, {CHUNK})\naddress = driver.reserve(4)\n"
    )
    command = [sys.executable, "-c", prelude + script]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)


@pytest.mark.parametrize(
    "script",
    [
        "",
        "driver.map(address, [(0, 4)]); driver.unmap(address, 4)",
        "driver.map(address, [(0, 4)]); driver.protect(address, 4, Access.NONE)",
        "driver.map(address, [(0, 4)]); driver.release(address, 4)",
        "driver.map(address, [(0, 4)]); driver.close()",
    ],
    ids=["reserved", "unmapped", "protected", "released", "closed"],
)
def test_a_touch_of_what_is_not_there_is_a_segmentation_fault(script: str) -> None:
    done = run_python(f"{script}\nprint('before', flush=True)\nctypes.string_at(address, 1)\nprint('after')")
    assert done.stdout == "before\n"
    assert done.returncode == -signal.SIGSEGV


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["map", "unmap", "protect", "unprotect"]),
            st.integers(0, 15),
            st.integers(1, 8),
            st.integers(0, 15),
        ),
        max_size=30,
    )
)
def test_the_driver_counts_mappings_as_the_kernel_does(operations: list[tuple[str, int, int, int]]) -> None:
    with PosixDriver(16, CHUNK, arena_nbytes=1 << 30) as driver:
        address = driver.reserve(16)
        for name, place, count, first in operations:
            count = min(count, 16 - place)
            at = address + place * CHUNK
            if name == "map":
                driver.map(at, [(min(first, 16 - count), count)])
            elif name == "unmap":
                driver.unmap(at, count)
            elif not any(p is None for p in shown_pieces(driver, place, count)):
                driver.protect(at, count, Access.NONE if name == "protect" else Access.READ_WRITE)
        assert driver.num_mappings == num_kernel_mappings(driver) + 3


def shown_pieces(driver: PosixDriver, place: int, count: int) -> list[object]:
    return [piece.value for piece in driver._mappings._layout.pieces(place, place + count)]


@pytest.mark.parametrize("are_sampled", [False, True])
def test_neighbouring_runs_are_one_mapping_and_one_call(monkeypatch: pytest.MonkeyPatch, are_sampled: bool) -> None:
    monkeypatch.setattr(machine, "samples_accesses", lambda: are_sampled)
    calls = RecordingSyscalls()
    with PosixDriver(16, CHUNK, syscalls=calls) as driver:
        advices = ["madvise", "madvise"] if driver._file.is_split else ["madvise"]
        address = driver.reserve(16)
        calls.calls.clear()
        driver.map(address, [(0, 4), (4, 4), (8, 8)])
        assert calls.calls == ["mmap", *advices]
        assert num_kernel_mappings(driver) == 2  # the reservation and the rest of the arena
        calls.calls.clear()
        driver.map(address, [(3, 1), (2, 1), (1, 1)])
        assert calls.calls == ["mmap", "mmap", "mmap", *advices]
        assert num_kernel_mappings(driver) == 5


def test_reserving_makes_no_system_call() -> None:
    calls = RecordingSyscalls()
    with PosixDriver(16, CHUNK, syscalls=calls) as driver:
        calls.calls.clear()
        for _ in range(100):
            driver.reserve(3)
        driver.release(driver.reserve(5), 5)
        assert calls.calls == []
        assert num_kernel_mappings(driver) == 1


def test_map_count_is_refused_before_the_kernel_refuses_it(case: PosixCase) -> None:
    gc.collect()  # what earlier tests have left
    limit = machine.map_count() + 512 + 40
    with case.make(64, max_map_count=limit) as driver:
        stamp(case, driver)
        address = driver.reserve(64)
        reversed_runs = [(chunk, 1) for chunk in reversed(range(64))]
        with pytest.raises(MapCountExceeded) as caught:
            driver.map(address, reversed_runs)
        message = str(caught.value)
        for word in (str(limit), format_nbytes(CHUNK), "vm.max_map_count", "larger chunks", "sysctl"):
            assert word in message
        assert shown(case, driver, address, 64) == [None] * 64
        driver.map(address, [(32, 32), (0, 32)])  # fewer runs fit
        assert shown(case, driver, address, 2) == [32, 33]
        num_mapped = 0
        while True:  # one by one it stops too, before the kernel does
            try:
                driver.map(address + num_mapped * CHUNK, [(63 - num_mapped, 1)])
            except MapCountExceeded:
                break
            num_mapped += 1
        assert 0 < num_mapped < 64
        assert machine.map_count() <= limit - 512 + 3


def test_counting_is_rare() -> None:
    """Maps that replace each other add nothing, so the process's mappings are counted once."""
    counts = 0
    original = machine.map_count

    def counting() -> int:
        nonlocal counts
        counts += 1
        return original()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "map_count", counting)
        with PosixDriver(16, CHUNK) as driver:
            address = driver.reserve(8)
            for step in range(500):
                driver.map(address, [(step % 8, 4), (8, 4)])
    assert counts == 1


@pytest.mark.parametrize("granularity_factor", [1, 4])
def test_chunks_are_multiples_of_the_page(granularity_factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "page_nbytes", lambda: PAGE * granularity_factor)  # 16 KiB pages exist on boards
    with pytest.raises(ValueError, match=f"multiple of the page, {PAGE * granularity_factor} bytes"):
        PosixDriver(4, PAGE * granularity_factor + PAGE // 2)
    with PosixDriver(4, PAGE * granularity_factor) as driver:
        driver.map(driver.reserve(2), [(1, 2)])
    for num_chunks, chunk_nbytes in ((0, CHUNK), (-1, CHUNK), (4, 0), (4, -CHUNK)):
        with pytest.raises(ValueError, match="must be"):
            PosixDriver(num_chunks, chunk_nbytes)


def test_memory_is_committed_when_made() -> None:
    with PosixDriver(2048, CHUNK) as driver:
        status = os.fstat(driver._file.descriptor)
        assert status.st_size == status.st_blocks * 512 == 2048 * CHUNK
        descriptor = driver._file.descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_pool_larger_than_the_machine_is_refused_with_the_numbers() -> None:
    class NoMemory(Syscalls):
        """If the check were missing, the kernel would kill other processes."""

        def fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
            raise AssertionError(f"allocates {nbytes} bytes at {offset} of file {descriptor}")

    total = machine.meminfo_nbytes()["MemTotal"]
    num_chunks = 4 * total // CHUNK
    with pytest.raises(MemoryFault, match="does not fit") as caught:
        PosixDriver(num_chunks, CHUNK, syscalls=NoMemory())
    text = str(caught.value)
    assert str(num_chunks * CHUNK) in text  # to the byte, and readable
    assert f"a pool of {format_nbytes(num_chunks * CHUNK)} (" in text
    assert str(total) in text
    assert re.search(r"Options: a budget of at most \d+MiB;", text)


def test_a_pool_larger_than_the_control_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    room = MemoryRoom(available_nbytes=3 * CHUNK, explanation="control group /x: 196608 bytes available")
    monkeypatch.setattr(machine, "memory_room", lambda: room)
    with pytest.raises(MemoryFault, match="control group /x"):
        PosixDriver(4, CHUNK)
    PosixDriver(3, CHUNK).close()


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with a limit of 64 MiB beneath this process's own."""
    found = machine._cgroup_directories(Path("/"))
    if found is None:
        pytest.skip("no memory control groups here")
    version, leaf, _ = found
    group = leaf / f"ooc-vmm-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        limit = group / ("memory.limit_in_bytes" if version == 1 else "memory.max")
        if not limit.exists():
            pytest.skip("the memory controller is not enabled for child groups")
        limit.write_text(str(64 << 20))
        yield group
    finally:
        for _ in range(6000):  # until the kernel has seen the last process off
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.01)


@pytest.mark.cgroup
def test_in_a_control_group_too_small_the_pool_is_refused_rather_than_the_process_killed(small_group: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "from vmm.driver import MemoryFault\nfrom vmm.machine import process_memory\n"
        "from vmm.posix import PosixDriver\n"
        "before = process_memory()\nsmall = PosixDriver(512, 65536)\nafter = process_memory()\n"
        "print(after.source, after.nbytes - before.nbytes >= 30 << 20)\n"
        "try:\n    PosixDriver(1024, 65536)\nexcept MemoryFault as error:\n    print(sys.argv[1] in str(error))\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script, str(small_group)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert (done.returncode, done.stdout) == (0, "cgroup True\nTrue\n"), done.stderr


def test_a_smaller_arena_is_taken_where_addresses_are_few() -> None:
    class FewAddresses(Syscalls):
        """Boards with 39-bit addresses hold 512 GiB at most."""

        def mmap(self, address: int, nbytes: int, prot: int, flags: int, descriptor: int, offset: int) -> int:
            if nbytes > 1 << 38:
                raise OSError(errno.ENOMEM, "injected: too many addresses")
            return super().mmap(address, nbytes, prot, flags, descriptor, offset)

    with PosixDriver(16, CHUNK, syscalls=FewAddresses()) as driver:
        start, stop = driver.arena
        assert 1 << 36 <= stop - start <= 1 << 38
        with pytest.raises(MemoryFault, match="no such range free") as caught:
            driver.reserve((1 << 39) // CHUNK)
        assert "arena_nbytes" in str(caught.value)
    with pytest.raises(MemoryFault, match="cannot hold"):
        PosixDriver(16, CHUNK, arena_nbytes=1 << 39, syscalls=FewAddresses())


def test_an_address_space_limit_is_named() -> None:
    done = run_python(
        "import resource\nfrom vmm.driver import MemoryFault\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({1 << 31}, {1 << 31}))\n"
        "small = PosixDriver(16, 65536)\nprint(small.arena[1] - small.arena[0])\n"
        "try:\n    PosixDriver(16384, 65536)\nexcept MemoryFault as error:\n    print('ulimit' in str(error))\n"
        if resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY
        else "raise SystemExit('RLIMIT_AS is already lowered')"
    )
    # The first driver of the script holds 16 TiB, so nothing more fits under the limit.
    assert "MemoryFault" in done.stderr


def test_an_interrupted_commit_goes_on() -> None:
    """A handler that returns while fallocate runs must not lose what is allocated (EINTR undoes one step)."""
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        with PosixDriver(4096, CHUNK) as driver:
            assert os.fstat(driver._file.descriptor).st_blocks * 512 == 4096 * CHUNK
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_forked_child_sees_nothing_of_the_pool(case: PosixCase) -> None:
    with case.make(8) as driver:
        address = driver.reserve(4)
        driver.map(address, [(0, 4)])
        case.poke(address, b"parents.")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                late = mmap.mmap(-1, 64 << 20)  # the child's own memory must not land on the pool's addresses
                late.write(b"x" * (64 << 20))
                faults = case.faults(address) and case.faults(driver.view_address)
                refused = False
                try:
                    driver.map(address, [(0, 4)])
                except MemoryFault as error:
                    refused = "forked" in str(error)
                driver.close()
                code = 0 if faults and refused else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert case.peek(address) == b"parents."


def test_without_the_hook_a_child_still_does_not_inherit(case: PosixCase) -> None:
    """A fork from C runs no Python hook; the kernel leaves the mapped ranges out by itself."""
    with case.make(8) as driver:
        address = driver.reserve(4)
        driver.map(address, [(0, 4)])
        flags = vm_flags(address)
        assert "dc" in flags  # MADV_DONTFORK
        assert "dc" in vm_flags(driver.view_address)


def test_what_is_put_back_after_a_failure_is_not_inherited_either(case: PosixCase) -> None:
    with case.make(8) as driver:
        address = driver.reserve(4)
        driver.map(address, [(0, 4)])
        case.failing.arm(2)
        with pytest.raises(MemoryFault, match="injected"):
            driver.map(address, [(4, 4)])
        assert "dc" in vm_flags(address)


def test_sharing_with_children_is_possible(case: PosixCase) -> None:
    with case.make(8, dontfork=False) as driver:
        address = driver.reserve(4)
        driver.map(address, [(0, 4)])
        case.poke(address, b"parents.")
        child = os.fork()
        if child == 0:
            os._exit(0 if case.peek(address) == b"parents." else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert "dc" not in vm_flags(address)


def test_mapped_chunks_come_with_their_page_tables(case: PosixCase) -> None:
    """A first touch costs nothing: RSS, which counts page table entries, has the range at once."""
    with PosixDriver(8, CHUNK) as driver:
        address = driver.reserve(4)
        driver.map(address, [(2, 2), (0, 1)])
        assert smaps_nbytes(address) == 2 * CHUNK
        assert smaps_nbytes(address + 2 * CHUNK) == CHUNK
        assert not case.faults(address)


def test_an_undo_that_fails_says_so(case: PosixCase) -> None:
    class Broken(Syscalls):
        """After a while every mmap fails."""

        is_broken = False

        def mmap(self, address: int, nbytes: int, prot: int, flags: int, descriptor: int, offset: int) -> int:
            if self.is_broken:
                raise OSError(errno.ENOMEM, "injected")
            return super().mmap(address, nbytes, prot, flags, descriptor, offset)

    calls = Broken()
    with PosixDriver(8, CHUNK, syscalls=calls) as driver:
        address = driver.reserve(4)
        driver.map(address, [(0, 4)])
        calls.is_broken = True
        with pytest.raises(MemoryFault, match="what it shows is unknown"):
            driver.map(address, [(4, 4)])
        calls.is_broken = False
        driver.map(address, [(4, 4)])
        stamp(case, driver)
        assert shown(case, driver, address, 4) == [4, 5, 6, 7]


@pytest.fixture
def lent() -> Iterator[tuple[int, int]]:
    """An arena that the test holds: 64 chunks of addresses mapped to nothing."""
    calls = Syscalls()
    nbytes = 64 * CHUNK
    address = calls.mmap(0, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    yield address, address + nbytes
    calls.munmap(address, nbytes)


def test_a_lent_arena_is_given_back_empty(case: PosixCase, lent: tuple[int, int]) -> None:
    with case.make(8, arena=lent) as driver:
        assert driver.arena == lent
        stamp(case, driver)
        one, other, third = driver.reserve(8), driver.reserve(4), driver.reserve(2)
        assert lent[0] <= one < other < third < lent[1]
        driver.map(one, [(0, 8)])
        driver.map(other, [(4, 4)])
        driver.map(third, [(1, 2)])
        driver.disown(other, 4)
        assert shown(case, driver, one, 8) == list(range(8))
        driver_view = driver.view_address
    assert case.faults(driver_view)
    assert all(case.faults(address) for address in (one, one + 7 * CHUNK, third))
    assert case.peek(other) == (4).to_bytes(8, "little")  # whose owner keeps it
    Syscalls().mmap(other, 4 * CHUNK, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, 0)
    with case.make(8, arena=lent) as driver, pytest.raises(ValueError, match="not a reservation"):
        driver.disown(other, 4)


def test_what_is_occupied_in_a_lent_arena_is_not_handed_out(case: PosixCase, lent: tuple[int, int]) -> None:
    start = lent[0]
    occupied = [(start + CHUNK // 2, CHUNK), (start + 3 * CHUNK, 1), (start + 5 * CHUNK, 59 * CHUNK)]
    with case.make(8, arena=lent, occupied=occupied) as driver:
        found = {driver.reserve(1), driver.reserve(1)}
        assert found == {start + 2 * CHUNK, start + 4 * CHUNK}
        with pytest.raises(MemoryFault, match="no such range free"):
            driver.reserve(1)


def test_a_lent_arena_is_empty_in_a_forked_child(case: PosixCase, lent: tuple[int, int]) -> None:
    with case.make(8, arena=lent) as driver:
        address = driver.reserve(4)
        driver.map(address, [(0, 4)])
        child = os.fork()
        if child == 0:
            late = mmap.mmap(-1, 8 << 20)
            late.write(b"x" * (8 << 20))
            os._exit(0 if case.faults(address) and case.faults(driver.view_address) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
