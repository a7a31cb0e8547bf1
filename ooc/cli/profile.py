"""`ooc profile`: measures this machine and writes its profile (about two seconds)."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from ooc.units import MIB
from scheduler.profiles import Profile
from vmm.machine import meminfo_nbytes
from vmm.store import FileStore

_REPEATS = 5
_MATRIX_SIDE = 768
_WALK_NBYTES = 32 * MIB
_NUM_TINY_OPS = 2000
_LATENCY_NS = 50_000
"""Latency of a transfer: the planners' default. Measuring the store has several in flight, which hides it."""


def measure_profile(name: str, *, store: str | None = None) -> Profile:
    """Measure arithmetic, memory, the cost of an op and the store.

    Args:
        name: What to call the profile.
        store: Directory of the store, as for `Session`.

    Raises:
        vmm.store.StoreError: The store cannot be opened or measured.
    """
    with FileStore(store) as opened:
        speed = opened.measure()
    matrix = torch.rand(_MATRIX_SIDE, _MATRIX_SIDE)
    product_s = _median_s(lambda: torch.mm(matrix, matrix))
    source = torch.rand(_WALK_NBYTES // 4)
    target = torch.empty_like(source)
    walk_s = _median_s(lambda: torch.add(source, 1.0, out=target))
    tiny = torch.zeros(1)

    def tiny_ops() -> None:
        for _ in range(_NUM_TINY_OPS):
            tiny.add_(1)

    overhead_s = _median_s(tiny_ops) / _NUM_TINY_OPS
    return Profile(
        name=name,
        description=f"{platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, CPU kernels",
        source=f"Measured by 'ooc profile' with torch {torch.__version__}: a float32 matrix product of side "
        f"{_MATRIX_SIDE}, an addition over {_WALK_NBYTES // MIB} MiB, {_NUM_TINY_OPS} in-place additions of one "
        f"element, and the store both ways. Latency of a transfer: assumed. Energy: not measured.",
        memory_nbytes=meminfo_nbytes()["MemTotal"],
        flops_per_s=2 * _MATRIX_SIDE**3 / product_s,
        memory_bytes_per_s=2 * _WALK_NBYTES / walk_s,
        op_overhead_ns=round(overhead_s * 1e9),
        load_bytes_per_s=speed.read_bytes_per_s,
        evict_bytes_per_s=speed.write_bytes_per_s,
        shared_bytes_per_s=speed.read_together_bytes_per_s + speed.write_together_bytes_per_s,
        load_latency_ns=_LATENCY_NS,
        evict_latency_ns=_LATENCY_NS,
        energy=None,
    )


def _median_s(work: Callable[[], object]) -> float:
    work()
    samples = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
