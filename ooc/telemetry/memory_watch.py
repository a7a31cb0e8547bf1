"""Samples this process's memory as the kernel counts it, at most 0.3 % of the time."""

from __future__ import annotations

import time

from vmm.machine import ProcessMemory, process_memory

_SHORTEST_INTERVAL_S = 0.2
_COST_FRACTION = 0.003
"""Sampling the process's memory may take 0.3 % of the time: the kernel walks every page table for it."""


class MemoryWatch:
    """Peak memory of this process, from samples at step ends.

    Samples between ops miss nothing large: the pool is committed as a whole when a session opens,
    and what varies within an op lies in it.

    Attributes:
        pool_nbytes: The pool's size now.
        peak: The sample with the largest total, or None before the first.
        num_samples: Number of samples taken.
    """

    def __init__(self, pool_nbytes: int) -> None:
        self.pool_nbytes = pool_nbytes
        self._next_s = time.monotonic() + _SHORTEST_INTERVAL_S  # a report takes one, however short the session was
        self.peak: ProcessMemory | None = None
        self.num_samples = 0

    def __repr__(self) -> str:
        return f"<MemoryWatch {self.num_samples} samples, peak {self.peak.nbytes if self.peak else 0} bytes>"

    def sample_if_due(self) -> None:
        """Take a sample, unless the last one was too recent for what it cost."""
        if time.monotonic() >= self._next_s:
            self.sample()

    def sample(self) -> None:
        """Take a sample now; none where the kernel has no smaps_rollup."""
        started = time.monotonic()
        try:
            seen = process_memory(pool_nbytes=self.pool_nbytes)
        except OSError:
            self._next_s = float("inf")
            return
        if self.peak is None or seen.nbytes > self.peak.nbytes:
            self.peak = seen
        self.num_samples += 1
        now = time.monotonic()
        self._next_s = now + max(_SHORTEST_INTERVAL_S, (now - started) / _COST_FRACTION)
