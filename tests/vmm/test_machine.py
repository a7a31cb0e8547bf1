"""Facts of a machine, read from the kernel's files: of made-up machines, and of this one against other sources."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
from pathlib import Path

import psutil
import pytest

from vmm import files, machine
from vmm.posix import PosixDriver

GIB, MIB = 1 << 30, 1 << 20
UNLIMITED_V1 = 9223372036854771712


class FakeMachine:
    """A directory that holds /proc and /sys of another machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal: {8 * MIB} kB\nMemAvailable: {5 * MIB} kB\nSwapFree: {MIB} kB\nHugePages_Total: 3\n",
        )

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def v2(self, path: str, *, mounted: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{path}\n")
        self.write(
            "proc/self/mountinfo", f"29 23 0:26 {mounted} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
        )

    def v1(self, path: str, *, mounted: str = "/") -> None:
        self.write("proc/self/cgroup", f"5:cpu:/x\n4:memory:{path}\n0::/\n")
        self.write(
            "proc/self/mountinfo",
            "30 29 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            f"34 29 0:31 {mounted} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
            "35 29 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        )

    def group(
        self, directory: str, version: int, limit: str, usage: int, *, cache: int = 0, procs: str = "1\n"
    ) -> None:
        prefix = f"sys/fs/cgroup/{directory}"
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        total = "" if version == 2 else "total_"
        self.write(f"{prefix}/{names[0]}", f"{limit}\n")
        self.write(f"{prefix}/{names[1]}", f"{usage}\n")
        self.write(f"{prefix}/memory.stat", f"anon 1\n{total}inactive_file {cache}\n{total}active_file {cache}\n")
        self.write(f"{prefix}/cgroup.procs", procs)


@pytest.fixture
def fake(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_without_control_groups(fake: FakeMachine) -> None:
    assert machine.cgroup_memory(fake.root) is None
    room = machine.memory_room(fake.root)
    assert room.available_nbytes == 6 * GIB  # available and free swap
    assert str(8 * GIB) in room.explanation


def test_v2_limit_and_cache_that_can_be_dropped(fake: FakeMachine) -> None:
    fake.v2("/user/job")
    fake.group("user", 2, "max", 3 * GIB)
    fake.group("user/job", 2, str(2 * GIB), GIB, cache=100 * MIB)
    group = machine.cgroup_memory(fake.root)
    assert group is not None
    assert (group.version, group.limit_nbytes, group.usage_nbytes) == (2, 2 * GIB, GIB)
    assert group.available_nbytes == GIB + 200 * MIB
    room = machine.memory_room(fake.root)
    assert room.available_nbytes == GIB + 200 * MIB
    for number in (2 * GIB, GIB, 200 * MIB):
        assert str(number) in room.explanation


def test_v2_the_tightest_of_all_levels_counts(fake: FakeMachine) -> None:
    fake.v2("/user/job/step")
    fake.group("user", 2, str(3 * GIB), 2 * GIB + 512 * MIB)
    fake.group("user/job", 2, "max", 2 * GIB)
    fake.group("user/job/step", 2, str(4 * GIB), GIB)
    group = machine.cgroup_memory(fake.root)
    assert group is not None
    assert group.directory.endswith("/user")
    assert group.available_nbytes == 512 * MIB


def test_v1(fake: FakeMachine) -> None:
    fake.v1("/box/job")
    fake.group("memory", 1, str(UNLIMITED_V1), 5 * GIB)
    fake.group("memory/box", 1, str(UNLIMITED_V1), 4 * GIB)
    fake.group("memory/box/job", 1, str(GIB), 600 * MIB, cache=50 * MIB)
    group = machine.cgroup_memory(fake.root)
    assert group is not None
    assert (group.version, group.available_nbytes) == (1, 524 * MIB)
    fake.group("memory/box/job", 1, str(UNLIMITED_V1), 600 * MIB)
    unlimited = machine.cgroup_memory(fake.root)
    assert unlimited is not None
    assert (unlimited.limit_nbytes, unlimited.available_nbytes) == (None, None)
    assert unlimited.directory.endswith("/box/job")
    assert machine.memory_room(fake.root).available_nbytes == 6 * GIB


@pytest.mark.parametrize("mounted", ["/docker/abc", "/"])
def test_in_a_container_the_mount_may_show_a_part(fake: FakeMachine, mounted: str) -> None:
    fake.v2("/docker/abc", mounted=mounted)
    fake.group("", 2, str(GIB), 900 * MIB)
    group = machine.cgroup_memory(fake.root)
    assert group is not None
    assert group.available_nbytes == 124 * MIB


def test_an_overfull_group_has_no_room(fake: FakeMachine) -> None:
    fake.v2("/a")
    fake.group("a", 2, str(GIB), 2 * GIB)
    assert machine.memory_room(fake.root).available_nbytes == 0


def process_files(fake: FakeMachine) -> None:
    fake.write(
        "proc/self/smaps_rollup",
        "5500-7fff ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPss: 70 kB\n"
        "Pss_Anon: 40 kB\nPss_File: 10 kB\nPss_Shmem: 20 kB\n",
    )
    fake.write("proc/self/status", "Name:\tpython\nVmPTE:\t   8 kB\nThreads:\t4\n")


def test_process_memory_by_pss(fake: FakeMachine) -> None:
    process_files(fake)
    fake.v2("/a")
    fake.group("a", 2, "max", 5 * GIB)
    found = machine.process_memory(root=fake.root)
    assert (found.nbytes, found.source, found.page_table_nbytes) == (70 * 1024, "pss", 8 * 1024)
    assert machine.process_memory(pool_nbytes=MIB, root=fake.root).nbytes == 50 * 1024 + MIB
    assert machine.process_memory(pool_nbytes=1, root=fake.root).nbytes == 70 * 1024


def test_process_memory_by_control_group(fake: FakeMachine) -> None:
    process_files(fake)
    fake.v2("/a")
    fake.group("a", 2, str(GIB), 700 * MIB, cache=50 * MIB)
    found = machine.process_memory(pool_nbytes=GIB, root=fake.root)
    assert (found.nbytes, found.source) == (600 * MIB, "cgroup")
    fake.group("a", 2, str(GIB), 700 * MIB, procs="1\n2\n")
    assert machine.process_memory(root=fake.root).source == "pss"
    fake.group("a", 2, str(GIB), 700 * MIB)
    fake.group("a/child", 2, "max", MIB)
    assert machine.process_memory(root=fake.root).source == "pss"


def test_shmem_setting(fake: FakeMachine) -> None:
    assert machine.shmem_huge_pages(fake.root) == "unknown"
    fake.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n")
    assert machine.shmem_huge_pages(fake.root) == "advise"


def test_sampling_of_accesses(fake: FakeMachine) -> None:
    fake.write("proc/1/comm", "init\n")
    fake.write("proc/77/stat", "a process without a name\n")
    assert not machine.samples_accesses(fake.root)
    fake.write("proc/78/comm", "kdamond.0\n")
    assert machine.samples_accesses(fake.root)
    assert machine.samples_accesses(fake.root)
    fake.write("proc/78/comm", "another\n")
    assert not machine.samples_accesses(fake.root)


def test_this_machine_agrees_with_other_sources() -> None:
    facts = machine.machine_facts()
    assert facts.page_nbytes == mmap.PAGESIZE == resource.getpagesize()
    assert facts.total_nbytes == psutil.virtual_memory().total
    assert facts.num_cores == len(os.sched_getaffinity(0))
    assert 10 < facts.map_count < facts.max_map_count
    assert 0 < facts.available_nbytes <= facts.total_nbytes


@pytest.mark.parametrize("huge_pages", [False, True])
def test_aliases_are_counted_once(huge_pages: bool) -> None:
    """A pool mapped five times over: RSS grows by five pools, the measure by one."""
    chunk, num_chunks = 65536, 512
    pool = chunk * num_chunks
    gc.collect()  # what earlier tests have left
    before, rss_before = machine.process_memory(), psutil.Process().memory_info().rss
    with PosixDriver(num_chunks, chunk, huge_pages=huge_pages) as driver:
        for _ in range(5):
            address = driver.reserve(num_chunks)
            driver.map(address, [(0, num_chunks)])
        after, rss_after = machine.process_memory(), psutil.Process().memory_info().rss
    assert rss_after - rss_before >= 4 * pool  # less what the rest of the process has given back
    assert after.shared_nbytes - before.shared_nbytes == pytest.approx(pool, rel=0.02)
    if after.source == "pss":  # of which the libraries' part falls when another process maps them, too
        assert after.nbytes == after.anonymous_nbytes + after.shared_nbytes + after.file_nbytes
    if not huge_pages:  # which need hardly any
        assert after.page_table_nbytes - before.page_table_nbytes >= 5 * pool // mmap.PAGESIZE * 8
    assert machine.process_memory(pool_nbytes=pool).shared_nbytes >= pool


def test_private_memory_is_counted() -> None:
    gc.collect()
    before = machine.process_memory()
    # Fresh pages: malloc may have so much of its own at hand.
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as data:
        data.write(b"x" * len(data))
        after = machine.process_memory()
    assert after.anonymous_nbytes - before.anonymous_nbytes >= 30 * MIB


def test_a_directory(tmp_path: Path) -> None:
    facts = files.directory_facts(tmp_path)
    assert facts.free_nbytes > 0
    assert facts.file_system == psutil_file_system(tmp_path)
    assert facts.is_in_memory == (facts.file_system in {"tmpfs", "ramfs"})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(files.StoreUnavailable, match="does not exist"):
        files.directory_facts(tmp_path / "missing")


def test_statfs_and_the_mount_table_agree() -> None:
    for directory in ("/proc", "/dev/shm", "/", "/var/tmp"):
        if Path(directory).is_dir():
            assert files.is_in_memory(directory) == (files.file_system_name(directory) in {"tmpfs", "ramfs"})
    with pytest.raises(FileNotFoundError):
        files.is_in_memory("/no/such/place")
    assert ctypes.sizeof(ctypes.c_long) == 8  # what `is_in_memory` reads of struct statfs


def psutil_file_system(path: Path) -> str:
    best = max(
        (p for p in psutil.disk_partitions(all=True) if path.is_relative_to(p.mountpoint)),
        key=lambda p: len(p.mountpoint),
    )
    return str(best.fstype)
