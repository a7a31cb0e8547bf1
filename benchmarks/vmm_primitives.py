"""What memory and disk primitives cost here: mappings, first touches, transfers each way.

Prints tables, and with --json writes one row per figure. Every transfer it times is read back and
compared. The figures in vmm/DESIGN.md come from here:

    python benchmarks/vmm_primitives.py [--store DIR] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from vmm import machine
from vmm.driver import Access
from vmm.files import default_directory, file_system_name, open_file
from vmm.posix import PosixDriver
from vmm.transfers import Segments, TransferEngine

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POOL_NBYTES = 256 * MIB
FILE_NBYTES = 512 * MIB

Sample = dict[tuple[str, str, str], list[float]]  # (variant, metric, unit) -> values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=None, help="directory on the disk to measure")
    parser.add_argument("--json", type=Path, default=None, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="one round and short phases: noisy")
    options = parser.parse_args()
    directory = options.store or default_directory()
    num_rounds, phase_s = (1, 0.05) if options.quick else (5, 0.2)
    mappings: Sample = {}
    transfers: Sample = {}
    for _ in range(num_rounds):  # interleaved, so that a slow minute hits every variant
        for chunk_nbytes, is_huge in itertools.product((64 * KIB, MIB, 2 * MIB), (False, True)):
            measure_mappings(mappings, chunk_nbytes, is_huge=is_huge)
        measure_transfers(transfers, directory, phase_s)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}")
    print(
        f"huge pages in shared memory: {machine.shmem_huge_pages()}; store: {directory} ({file_system_name(directory)})"
    )
    show("Mappings", mappings)
    show("Transfers", transfers)
    if options.json is not None:
        rows = [*rows_of("mappings", mappings), *rows_of("transfers", transfers)]
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure_mappings(sample: Sample, chunk_nbytes: int, *, is_huge: bool) -> None:
    """Map the pool's chunks in reverse order, one run each, and touch them."""
    variant = f"{chunk_nbytes // KIB} KiB chunks{', huge view' if is_huge else ''}"

    def note(metric: str, unit: str, value: float) -> None:
        sample.setdefault((variant, metric, unit), []).append(value)

    num_chunks = POOL_NBYTES // chunk_nbytes
    with PosixDriver(num_chunks, chunk_nbytes) as driver:
        if is_huge:
            make_view_huge(driver)
        ctypes.memset(driver.view_address, 1, POOL_NBYTES)
        address = driver.reserve(num_chunks)
        runs = [(chunk, 1) for chunk in reversed(range(num_chunks))]
        note("map, each run", "us", timed(lambda: driver.map(address, runs)) / num_chunks * 1e6)
        note("first touch", "GB/s", POOL_NBYTES / timed(lambda: ctypes.memset(address, 2, POOL_NBYTES)) / 1e9)
        note("touch again", "GB/s", POOL_NBYTES / timed(lambda: ctypes.memset(address, 3, POOL_NBYTES)) / 1e9)
        note("page tables", "KiB", page_table_nbytes() / KIB)
        protect = timed(lambda: driver.protect(address, num_chunks, Access.NONE))
        note("protect", "us/MiB", protect / POOL_NBYTES * MIB * 1e6)
        driver.protect(address, num_chunks, Access.READ_WRITE)
        note("unmap", "us/MiB", timed(lambda: driver.unmap(address, num_chunks)) / POOL_NBYTES * MIB * 1e6)
        driver.map(address, runs)
        assert ctypes.string_at(address, 1) == b"\3"


def measure_transfers(sample: Sample, directory: Path, phase_s: float) -> None:
    descriptor, is_direct = open_file(directory, direct=True)
    try:
        os.posix_fallocate(descriptor, 0, FILE_NBYTES)
        with PosixDriver(POOL_NBYTES // (64 * KIB), 64 * KIB) as driver:
            noise = os.urandom(MIB)  # what a device can compress is no measure
            for start in range(0, POOL_NBYTES, MIB):
                ctypes.memmove(driver.view_address + start, noise, MIB)
            with TransferEngine() as engine:  # the first write of a fresh extent is slower
                for start in range(0, FILE_NBYTES, POOL_NBYTES):
                    engine.wait(engine.submit_write(descriptor, start, [(driver.view_address, POOL_NBYTES)]))
            bench = TransferBench(sample, descriptor, driver.view_address, phase_s, drop_cache=not is_direct)
            for job_nbytes, num_threads in itertools.product((64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB), (1, 2, 4)):
                for directions in (("write",), ("read",), ("write", "read")):
                    bench.run(num_threads, job_nbytes, job_nbytes, directions)
            for directions in (("write",), ("read",)):
                bench.run(2, 4 * MIB, 64 * KIB, directions)
            assert ctypes.string_at(driver.view_address, POOL_NBYTES) == noise * (POOL_NBYTES // MIB)
    finally:
        os.close(descriptor)


class TransferBench:
    """Keeps an engine busy with jobs of one size for a fixed time."""

    def __init__(self, sample: Sample, descriptor: int, address: int, phase_s: float, *, drop_cache: bool) -> None:
        self._sample = sample
        self._descriptor = descriptor
        self._address = address
        self._phase_s = phase_s
        self._drop_cache = drop_cache

    def run(self, num_threads: int, job_nbytes: int, segment_nbytes: int, directions: Iterable[str]) -> None:
        directions = tuple(directions)
        jobs = [
            Segments(self._segments(start, job_nbytes, segment_nbytes)) for start in range(0, POOL_NBYTES, job_nbytes)
        ]
        num_submitted = 0
        with TransferEngine(num_writers=num_threads, num_readers=num_threads, piece_nbytes=job_nbytes) as engine:
            submits = {"write": engine.submit_write, "read": engine.submit_read}
            queues: dict[str, list[int]] = {direction: [] for direction in directions}
            cpu_s, start_s = cpu_time_s(), time.monotonic()
            while time.monotonic() - start_s < self._phase_s:
                for direction, queue in queues.items():
                    while len(queue) < max(8, 4 * num_threads):
                        place = num_submitted * job_nbytes % POOL_NBYTES  # each byte keeps to its place: see the assert
                        job = jobs[place // job_nbytes]
                        queue.append(submits[direction](self._descriptor, place, job, drop_cache=self._drop_cache))
                        num_submitted += 1
                for queue in queues.values():
                    engine.wait(queue.pop(0))
            engine.wait_all()
            elapsed_s, cpu_s = time.monotonic() - start_s, cpu_time_s() - cpu_s
            moved = {direction: engine.statistics(direction).nbytes for direction in ("write", "read")}
        variant = f"{job_nbytes // KIB} KiB x {num_threads}"
        if segment_nbytes != job_nbytes:
            variant += f", {segment_nbytes // KIB} KiB segments"
        together = " together" if len(directions) > 1 else ""
        for direction in directions:
            self._note(variant, f"{direction}{together}", "GB/s", moved[direction] / elapsed_s / 1e9)
        self._note(variant, f"cpu {'+'.join(directions)}", "s/GiB", cpu_s / (sum(moved.values()) / GIB))

    def _segments(self, start: int, job_nbytes: int, segment_nbytes: int) -> list[tuple[int, int]]:
        return [
            (self._address + start + offset, segment_nbytes)
            for offset in reversed(range(0, job_nbytes, segment_nbytes))
        ]

    def _note(self, variant: str, metric: str, unit: str, value: float) -> None:
        self._sample.setdefault((variant, metric, unit), []).append(value)


def make_view_huge(driver: PosixDriver) -> None:
    """Ask for huge pages behind the pool: drop the small pages and fault new ones in through the view."""
    driver._sys.madvise(driver.view_address, POOL_NBYTES, mmap.MADV_REMOVE)
    driver._sys.madvise(driver.view_address, POOL_NBYTES, mmap.MADV_HUGEPAGE)


def timed(operation: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    operation()
    return time.perf_counter() - start_s


def cpu_time_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def page_table_nbytes() -> int:
    return machine.process_memory().page_table_nbytes


def show(title: str, sample: Sample) -> None:
    metrics = list(dict.fromkeys((metric, unit) for _, metric, unit in sample))
    variants = list(dict.fromkeys(variant for variant, _, _ in sample))
    width = max(len(variant) for variant in variants)
    print(f"\n{title}: medians\n{'':{width}}" + "".join(f"  {f'{metric} {unit}':>20}" for metric, unit in metrics))
    for variant in variants:
        cells = [
            f"{statistics.median(sample[variant, metric, unit]):.3g}" if (variant, metric, unit) in sample else ""
            for metric, unit in metrics
        ]
        print(f"{variant:{width}}" + "".join(f"  {cell:>20}" for cell in cells))


def rows_of(scenario: str, sample: Sample) -> Iterable[dict[str, object]]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    for (variant, metric, unit), values in sample.items():
        ordered = sorted(values)
        yield {
            "scenario": scenario,
            "variant": variant,
            "metric": metric,
            "unit": unit,
            "value": statistics.median(ordered),
            "quantiles": [ordered[0], ordered[len(ordered) // 4], ordered[len(ordered) * 3 // 4], ordered[-1]],
            "n": len(ordered),
            "commit": commit,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "versions": {"python": platform.python_version()},
        }


if __name__ == "__main__":
    main()
