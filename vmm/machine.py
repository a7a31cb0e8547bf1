"""What this machine and this process have: memory, its limits, mappings, pages, file systems.

Everything is read from /proc and /sys. `root` stands for the directory that holds them, so that
a test can show another machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from vmm.sizes import format_exactly

__all__ = [
    "CgroupMemory",
    "MachineFacts",
    "MemoryRoom",
    "ProcessMemory",
    "cgroup_memory",
    "machine_facts",
    "map_count",
    "max_map_count",
    "meminfo_nbytes",
    "memory_room",
    "page_nbytes",
    "process_memory",
    "samples_accesses",
    "shmem_huge_pages",
]

_ROOT = Path("/")
_UNLIMITED_NBYTES = 1 << 60
"""cgroup v1 has no word for "no limit"; it shows a number close to 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMemory:
    """The memory control group that would stop this process first.

    Attributes:
        version: 1 or 2.
        directory: Where its files are.
        limit_nbytes: Its limit, or None without one.
        usage_nbytes: What is charged to it now, page cache included.
        reclaimable_nbytes: The part of the charge that is page cache of files.
        num_processes: Processes in this very group, or None if unknown.
    """

    version: int
    directory: str
    limit_nbytes: int | None
    usage_nbytes: int
    reclaimable_nbytes: int
    num_processes: int | None

    @property
    def available_nbytes(self) -> int | None:
        """What can still be charged before the kernel starts to kill; None without a limit."""
        if self.limit_nbytes is None:
            return None
        return max(0, self.limit_nbytes - self.usage_nbytes + self.reclaimable_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """How much memory a process takes, each page once however often it is mapped.

    Attributes:
        nbytes: The total, page tables not included where `source` is "pss".
        source: "cgroup": the charge, less page cache, of a limited control group that holds this
            process alone. "pss": the sum over its pages of size / number of mappings.
        anonymous_nbytes: Private memory.
        shared_nbytes: Shared memory: the pools.
        file_nbytes: Mapped files, such as libraries; shared ones in part.
        page_table_nbytes: Page tables: 8 bytes for each 4 KiB page of each alias.
    """

    nbytes: int
    source: Literal["cgroup", "pss"]
    anonymous_nbytes: int
    shared_nbytes: int
    file_nbytes: int
    page_table_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What `ooc doctor` says of the machine.

    Attributes:
        page_nbytes: Size of a page.
        max_map_count: The kernel's limit on mappings of one process.
        map_count: Mappings that this process has now.
        total_nbytes: Memory of the machine.
        available_nbytes: What the machine could still give.
        swap_nbytes: Free swap space.
        cgroup: The memory control group with the tightest limit; None without control groups.
        shmem_huge_pages: The kernel's setting for huge pages in shared memory ("advise"); "unknown"
            where it has none.
        samples_accesses: See `samples_accesses`.
        num_cores: Processors that this process may run on.
    """

    page_nbytes: int
    max_map_count: int
    map_count: int
    total_nbytes: int
    available_nbytes: int
    swap_nbytes: int
    cgroup: CgroupMemory | None
    shmem_huge_pages: str
    samples_accesses: bool
    num_cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRoom:
    """How much more memory this process may take, and what the tighter limit is.

    Attributes:
        available_nbytes: The smaller of what the machine and the control group have left.
        explanation: Both numbers in words, for messages.
    """

    available_nbytes: int
    explanation: str


def page_nbytes() -> int:
    """Size of a page: the granularity of mappings."""
    return os.sysconf("SC_PAGESIZE")


def max_map_count(root: Path = _ROOT) -> int:
    """The kernel's limit on mappings of one process (vm.max_map_count)."""
    return int((root / "proc/sys/vm/max_map_count").read_text())


def map_count(root: Path = _ROOT) -> int:
    """Mappings that this process has now. Takes about 0.5 us for each of them."""
    with (root / "proc/self/maps").open("rb") as lines:
        return sum(1 for _ in lines)


def meminfo_nbytes(root: Path = _ROOT) -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    found = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words:
            found[key] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def memory_room(root: Path = _ROOT) -> MemoryRoom:
    """What this process may still take without the kernel killing somebody."""
    meminfo = meminfo_nbytes(root)
    machine = meminfo["MemAvailable"] + meminfo.get("SwapFree", 0)
    explanation = f"machine: {format_exactly(machine)} available of {format_exactly(meminfo['MemTotal'])}"
    cgroup = cgroup_memory(root)
    if cgroup is None or cgroup.available_nbytes is None:
        return MemoryRoom(available_nbytes=machine, explanation=explanation)
    explanation += (
        f"; control group {cgroup.directory}: {format_exactly(cgroup.available_nbytes)} available, limit "
        f"{format_exactly(cgroup.limit_nbytes or 0)}, in use {format_exactly(cgroup.usage_nbytes)}, of it page cache "
        f"{format_exactly(cgroup.reclaimable_nbytes)}"
    )
    return MemoryRoom(available_nbytes=min(machine, cgroup.available_nbytes), explanation=explanation)


def cgroup_memory(root: Path = _ROOT) -> CgroupMemory | None:
    """The control group whose memory limit is the tightest, from this process's own one upwards.

    Returns the process's own group if none of them has a limit, None if there are no memory
    control groups here.
    """
    leaf_and_top = _cgroup_directories(root)
    if leaf_and_top is None:
        return None
    version, leaf, top = leaf_and_top
    groups = []
    directory = leaf
    while True:
        group = _read_cgroup(version, directory)
        if group is not None:
            groups.append(group)
        if directory == top or directory == directory.parent:
            break
        directory = directory.parent
    limited = [group for group in groups if group.available_nbytes is not None]
    if limited:
        return min(limited, key=lambda group: group.available_nbytes or 0)
    return groups[0] if groups else None


def process_memory(*, pool_nbytes: int = 0, root: Path = _ROOT) -> ProcessMemory:
    """Measure this process. Takes about 1 ms and 0.02 ms per MiB mapped.

    Resident set size is of no use here: it counts a chunk once for every alias.

    Args:
        pool_nbytes: Size of this process's pools. Their memory is committed, but "pss" sees only
            what was touched; with this it is counted whole.
        root: Where /proc is.
    """
    pss = _read_kib_table(root / "proc/self/smaps_rollup")
    status = _read_kib_table(root / "proc/self/status")
    anonymous, file = pss.get("Pss_Anon", 0), pss.get("Pss_File", 0)
    shared = max(pss.get("Pss_Shmem", 0), pool_nbytes)
    group = _own_limited_cgroup(root)
    return ProcessMemory(
        nbytes=anonymous + shared + file if group is None else group.usage_nbytes - group.reclaimable_nbytes,
        source="pss" if group is None else "cgroup",
        anonymous_nbytes=anonymous,
        shared_nbytes=shared,
        file_nbytes=file,
        page_table_nbytes=status.get("VmPTE", 0),
    )


def shmem_huge_pages(root: Path = _ROOT) -> str:
    """The kernel's setting for huge pages in shared memory, or "unknown"."""
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


def samples_accesses(root: Path = _ROOT) -> bool:
    """Whether the kernel samples accesses to memory (DAMON), as far as its threads, `kdamond.N`, can be seen.

    A thread that was found is looked at first the next time: of a thousand processes each is a file to be opened.
    """
    processes = str(root / "proc")
    known = _sampling_threads.get(processes)
    if known is not None and _is_sampling(known):
        return True
    for number in os.listdir(processes):
        path = f"{processes}/{number}/comm"
        if number.isdigit() and _is_sampling(path):
            _sampling_threads[processes] = path
            return True
    return False


_sampling_threads: dict[str, str] = {}


def _is_sampling(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(7) == b"kdamond"
    except OSError:
        return False  # a process that ended meanwhile


def machine_facts(root: Path = _ROOT) -> MachineFacts:
    """Everything about the machine that decides what we can do on it."""
    meminfo = meminfo_nbytes(root)
    return MachineFacts(
        page_nbytes=page_nbytes(),
        max_map_count=max_map_count(root),
        map_count=map_count(root),
        total_nbytes=meminfo["MemTotal"],
        available_nbytes=meminfo["MemAvailable"],
        swap_nbytes=meminfo.get("SwapFree", 0),
        cgroup=cgroup_memory(root),
        shmem_huge_pages=shmem_huge_pages(root),
        samples_accesses=samples_accesses(root),
        num_cores=len(os.sched_getaffinity(0)),
    )


def _own_limited_cgroup(root: Path) -> CgroupMemory | None:
    """This process's own control group if it has a limit and holds nobody else."""
    found = _cgroup_directories(root)
    if found is None:
        return None
    version, leaf, _ = found
    group = _read_cgroup(version, leaf)
    if group is None or group.limit_nbytes is None or group.num_processes != 1:
        return None
    return None if any(entry.is_dir() for entry in leaf.iterdir()) else group


def _read_kib_table(path: Path) -> dict[str, int]:
    """Lines such as `Pss:  487 kB`, in bytes; other lines are left out."""
    found = {}
    for line in path.read_text().splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[key] = int(words[0]) * 1024
    return found


def _cgroup_directories(root: Path) -> tuple[int, Path, Path] | None:
    """Version, this process's directory, and the mount point of the memory controller's hierarchy."""
    paths: dict[int, str] = {}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        identity, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[1] = path
        elif identity == "0" and not controllers:
            paths[2] = path
    for version in (1, 2):  # where v1 holds the memory controller, v2 does not
        if version not in paths:
            continue
        for line in mounts:
            fields, _, tail = line.partition(" - ")
            kind, _, options = tail.partition(" ")
            is_memory = "memory" in options.split(" ")[-1].split(",") if version == 1 else True
            if kind != ("cgroup" if version == 1 else "cgroup2") or not is_memory:
                continue
            mounted, point = fields.split()[3:5]
            top = root / point.lstrip("/")
            leaf = _below(top, mounted, paths[version])
            if version == 1 or (leaf / "memory.current").exists():
                return version, leaf, top
    return None


def _below(top: Path, mounted: str, path: str) -> Path:
    """The group's directory; in a container the mount may show only a part of the hierarchy."""
    try:
        relative = PurePosixPath(path).relative_to(mounted)
    except ValueError:
        return top
    leaf = top / relative
    return leaf if leaf.is_dir() else top


def _read_cgroup(version: int, directory: Path) -> CgroupMemory | None:
    limit_name, usage_name = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    )
    prefix = "total_" if version == 1 else ""
    try:
        limit_text = (directory / limit_name).read_text().strip()
        usage_nbytes = int((directory / usage_name).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # v2's root has none of these files
        return None
    limit = None if limit_text == "max" else int(limit_text)
    if limit is not None and limit >= _UNLIMITED_NBYTES:
        limit = None
    try:
        num_processes = len((directory / "cgroup.procs").read_text().split())
    except OSError:
        num_processes = None
    return CgroupMemory(
        version=version,
        directory=str(directory),
        limit_nbytes=limit,
        usage_nbytes=usage_nbytes,
        reclaimable_nbytes=int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0)),
        num_processes=num_processes,
    )
